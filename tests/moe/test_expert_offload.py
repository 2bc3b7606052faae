"""ExpertOffload: the same bits from host memory, two layers at a time, in the order of use."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .._compare import (
    assert_all_same_bits,
    assert_same_bits,
    assert_same_tensors,
    fail_at,
    no_waits,
)
from ._eager import pack

LAYERS, GPU_LAYERS = 5, 6
SMALL, LARGE = (4, 64, 32, 2, 6), (32, 1024, 768, 4, 2048)  # experts, sizes, top k, tokens


class Model(nn.Module):
    """Residual layers of packed experts, with LoRA unless they are large."""

    def __init__(self, opt, device, layers: int = LAYERS, large: bool = False, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routes = []
        self.layers = nn.ModuleList()
        number, hidden, inner, top_k, tokens = LARGE if large else SMALL
        for _ in range(layers):
            experts = opt.moe.Experts(number, hidden, inner, device=device)
            if not large:
                experts.add_adapter(r=4, alpha=8)
            for name, parameter in experts.expert_lora.named_parameters():
                if "lora_B" in name:  # zero at first
                    nn.init.normal_(parameter, std=0.1)
            pack(opt.moe, experts, **options)
            self.layers.append(experts)
            ids = torch.randn(tokens, number).topk(top_k, -1).indices
            self.routes.append((ids.to(device), torch.rand(tokens, top_k).to(device)))
        self.to(device)

    def forward(self, x: torch.Tensor, *, recompute: bool = False, reentrant: bool = False):
        for layer, route in zip(self.layers, self.routes, strict=True):
            if recompute:
                x = x + checkpoint(layer, x, *route, use_reentrant=reentrant)
            else:
                x = x + layer(x, *route)
        return x


@pytest.fixture
def x(device) -> torch.Tensor:
    _, hidden, _, _, tokens = SMALL
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(2)).to(device)


def step(model: nn.Module, x: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x, **options)
    out.square().sum().backward()
    found = {"out": out.detach(), "x": x.grad}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def model(opt, device):
    return Model(opt, device)


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": True}, {"recompute": True, "reentrant": True}],
    ids=["plain", "checkpoint", "reentrant"],
)
def test_training_is_the_same_to_the_bit(opt, device, x, model, options):
    """Every layer gets its own experts, forward, recomputed and backward, in every step."""
    expected = step(model, x, **options)
    assert len(expected) == 2 + 4 * LAYERS
    offload = opt.moe.ExpertOffload(model)
    for _ in range(3):
        assert_same_tensors(step(model, x, **options), expected)
        assert len(offload.resident) == 2


def test_training_fetches_ahead_and_no_more_than_needed(opt, device, x, model):
    """A step fetches all layers but two, forward and backward; after one step none is late."""
    offload = opt.moe.ExpertOffload(model)
    step(model, x)
    assert offload.waits == 1  # the very first layer
    assert set(offload.resident) == {"layers.0", "layers.1"}  # where the next step begins
    for _ in range(2):
        before, late = offload.transfers, offload.waits
        step(model, x)
        assert offload.transfers - before == 2 * (LAYERS - 2)
        assert offload.waits == late


def test_evaluation_starts_again_at_the_first_layer(opt, device, x, model):
    offload = opt.moe.ExpertOffload(model)
    with torch.no_grad():
        model(x)
        model(x)  # learns what follows the last layer
        before, late = offload.transfers, offload.waits
        model(x)
        model(x)
    assert offload.transfers - before == 2 * LAYERS and offload.waits == late


def test_a_wrong_guess_costs_a_copy_alone(opt, device, x, model):
    """Layers in another order, some twice, some left out."""
    order = [3, 1, 1, 4, 0, 3, 2, 4, 0]

    def run() -> torch.Tensor:
        y = x
        for index in order:
            y = y + model.layers[index](y, *model.routes[index])
        return y

    expected = run()
    opt.moe.ExpertOffload(model)
    assert_same_bits(run(), expected)
    assert_same_bits(run(), expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_what_fits_is_fetched_once(opt, device, x, layers):
    model = Model(opt, device, layers)
    expected = step(model, x)
    offload = opt.moe.ExpertOffload(model)
    for _ in range(2):
        assert_same_tensors(step(model, x), expected)
    assert offload.transfers == layers


def test_on_and_off_at_any_time(opt, device, x, model):
    expected = step(model, x)
    offload = opt.moe.ExpertOffload(model)
    for switch in (offload.turn_off, offload.turn_on, offload.turn_on, offload.turn_off):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        switch()
        out.square().sum().backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same_tensors(found | {"x": leaf.grad, "out": out.detach()}, expected)
    assert not offload.is_on and offload.resident == ()
    assert {p.device.type for p in model.parameters()} == {torch.device(device).type}


@pytest.mark.parametrize(
    "options", ({}, {"nested": True}, {"quant_type": "mxfp4"}, {"quant_type": "fp8"}), ids=str
)
def test_state_dicts_travel_while_it_is_on(opt, device, x, options):
    """Saved as without it, and what is loaded is used at once, on the device as well."""
    model, other = (Model(opt, device, 3, **options) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dtype == torch.uint8 and parameter.numel() > 512:
                parameter.copy_(parameter.flip(0))
    expected = step(other, x)
    plain = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    offload = opt.moe.ExpertOffload(model)
    assert_same_tensors({n: v.cpu() for n, v in model.state_dict().items()}, plain)
    assert model.layers[0].down_proj.packed.device.type == "cpu"
    step(model, x)
    model.load_state_dict(other.state_dict())
    assert_same_tensors(step(model, x), expected)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert_same_tensors(step(model, x), expected)
    host = {m.packed.untyped_storage().data_ptr() for m in offload._where}
    assert len(host) == 3  # still one piece of host memory per layer


def test_the_model_can_be_moved_around_it(opt, device, model):
    opt.moe.ExpertOffload(model)
    place = model.layers[0].gate_up_proj.packed.data_ptr()
    model.to(device).to(torch.float64).to(torch.float32)
    assert model.layers[0].gate_up_proj.packed.data_ptr() == place
    assert model.layers[0].gate_up_proj.absmax.dtype == torch.float32
    assert model.layers[0].gate_up_proj.device.type == torch.device(device).type


def test_a_compiled_model_fetches_outside_of_its_graphs(opt, device, x, model):
    """Which slot holds a layer changes from call to call, and no trace may depend on it."""
    from torch._dynamo.utils import counters

    expected = step(model, x)
    offload = opt.moe.ExpertOffload(model)
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    counters.clear()
    for _ in range(3):
        before = offload.transfers
        assert_same_tensors(step(model, x), expected)
        assert offload.transfers > before
    assert "RLock" not in str(counters["graph_break"])


def test_errors_say_what_to_do(opt, device, model):
    start = opt.moe.ExpertOffload
    meta = nn.Sequential(opt.moe.QuantizedExperts((2, 4, 64), device="meta"))
    offload = start(model)
    for error, words, call in (
        (
            TypeError,
            "model must be a torch.nn.Module, got str",
            lambda: start("Qwen/Qwen3-30B-A3B"),
        ),
        (ValueError, "no QuantizedExperts to offload; load it", lambda: start(nn.Linear(2, 2))),
        (ValueError, "meta device", lambda: start(meta)),
        (ValueError, "offloaded already; turn the other one off", lambda: start(model)),
        (RuntimeError, "turn_off", lambda: copy.deepcopy(model)),
        (RuntimeError, "save its state_dict", lambda: pickle.dumps(model)),
    ):
        with pytest.raises(error, match=words):
            call()
    offload.turn_off()
    copy.deepcopy(model)


@pytest.mark.parametrize("allocation", range(1, LAYERS + 3))
def test_memory_that_runs_out_leaves_the_model_as_it_was(
    opt, device, x, model, monkeypatch, allocation
):
    """In host memory for any of the layers, or on the device for either slot."""
    expected = step(model, x)
    short = torch.OutOfMemoryError("out of memory")
    with monkeypatch.context() as patch:
        made = fail_at(patch, torch, "empty", allocation, short)
        with pytest.raises(torch.OutOfMemoryError):
            opt.moe.ExpertOffload(model)
    assert len(made) == allocation
    assert {p.device.type for p in model.parameters()} == {torch.device(device).type}
    assert_same_tensors(step(model, x), expected)
    opt.moe.ExpertOffload(model)
    assert_same_tensors(step(model, x), expected)


@pytest.mark.parametrize("failing", [1, 2, 2 * LAYERS])
def test_a_device_without_room_keeps_them_in_host_memory(
    opt, device, x, model, monkeypatch, failing
):
    expected = step(model, x)
    offload = opt.moe.ExpertOffload(model)
    short = torch.OutOfMemoryError("out of memory")
    with monkeypatch.context() as patch:
        fail_at(patch, opt.moe.QuantizedExperts, "to", failing, short)
        with pytest.raises(torch.OutOfMemoryError):
            offload.turn_off()
    assert offload.is_on
    assert {m.packed.device.type for m in offload._where} == {"cpu"}
    assert_same_tensors(step(model, x), expected)
    assert len({m.packed.untyped_storage().data_ptr() for m in offload._where}) == LAYERS
    offload.turn_off()
    assert not offload.is_on
    assert_same_tensors(step(model, x), expected)


def test_experts_in_host_memory_beside_a_gpu_need_a_device(opt, monkeypatch):
    """Without one the products would run on the CPU, or fail on activations of the GPU."""
    model = Model(opt, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r'pass device="cuda" for products on the GPU'):
        opt.moe.ExpertOffload(model)
    assert opt.moe.ExpertOffload(model, device="cpu").is_on


@pytest.fixture(scope="module")
def model_gpu(opt, device):
    return Model(opt, device, GPU_LAYERS, large=True)


@pytest.fixture
def offload(opt, model_gpu):
    offload = opt.moe.ExpertOffload(model_gpu)
    yield offload
    offload.turn_off()


def large_batch(device) -> torch.Tensor:
    torch.manual_seed(1)
    _, hidden, _, _, tokens = LARGE
    return torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)


def step_gpu(model_gpu: Model, device) -> tuple[torch.Tensor, torch.Tensor]:
    x = large_batch(device)
    out = model_gpu(x)
    out.backward(out.detach())
    return out.detach(), x.grad


def layer_bytes(model_gpu: Model) -> int:
    return sum(p.nbytes for p in model_gpu.layers[0].parameters())


def peak(run) -> int:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
def test_two_layers_are_on_the_device(opt, model_gpu, device) -> None:
    step_gpu(model_gpu, device)  # what a first step leaves for good is not the layers'
    torch.cuda.synchronize()
    before, whole = torch.cuda.memory_allocated(), peak(lambda: step_gpu(model_gpu, device))
    offload = opt.moe.ExpertOffload(model_gpu)
    try:
        freed = (GPU_LAYERS - 2) * layer_bytes(model_gpu)
        slack = 1 << 20
        assert torch.cuda.memory_allocated() <= before - freed + slack
        assert peak(lambda: step_gpu(model_gpu, device)) <= whole - freed + slack
    finally:
        offload.turn_off()
    assert torch.cuda.memory_allocated() <= before + slack


@pytest.mark.gpu
def test_same_bits_however_far_the_host_runs_ahead(model_gpu, device, offload) -> None:
    """The device is held up, so that a copy that did not wait would be far ahead of its use."""
    offload.turn_off()
    expected = step_gpu(model_gpu, device)
    offload.turn_on()
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        assert_all_same_bits(step_gpu(model_gpu, device), expected)


@pytest.mark.gpu
def test_nothing_waits_for_the_device(model_gpu, device, offload) -> None:
    step_gpu(model_gpu, device)
    x = large_batch(device)
    grad = torch.ones_like(x)
    with no_waits():
        model_gpu(x).backward(grad)


@pytest.mark.gpu
@pytest.mark.alone
def test_copies_run_beside_the_products(model_gpu, device, offload) -> None:
    step_gpu(model_gpu, device)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step_gpu(model_gpu, device)
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            (copies if "HtoD" in event.name else kernels).append(span)
    large = [(start, end) for start, end in copies if end - start > 100]  # microseconds
    assert len(large) == 2 * (GPU_LAYERS - 2)
    beside = sum(any(a < end and start < b for a, b in kernels) for start, end in large)
    assert beside == len(large)


@pytest.mark.gpu
def test_a_capture_is_refused(model_gpu, device, offload) -> None:
    step_gpu(model_gpu, device)
    x = large_batch(device)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model_gpu(x)


@pytest.mark.gpu
def test_a_model_that_the_device_never_holds_whole(opt, model_gpu, device) -> None:
    """Built in host memory, offloaded to the device, its dense part moved there afterwards."""
    expected = step_gpu(model_gpu, device)
    host = Model(opt, "cpu", GPU_LAYERS, large=True)
    host.load_state_dict(model_gpu.state_dict())
    with pytest.raises(ValueError, match=r'pass device="cuda"'):
        opt.moe.ExpertOffload(host)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.moe.ExpertOffload(host, device="cuda")
    host.to(device)
    host.routes = model_gpu.routes
    slack = 1 << 20
    assert torch.cuda.max_memory_allocated() - before <= 2 * layer_bytes(model_gpu) + slack
    assert all(p.device.type == "cpu" and p.is_pinned() for p in host.parameters())
    assert_all_same_bits(step_gpu(host, device), expected)
