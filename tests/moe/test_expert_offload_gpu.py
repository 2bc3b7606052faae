"""ExpertOffload on a GPU: memory is freed, copies run beside the products, nothing waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .._compare import assert_same_bits

pytestmark = pytest.mark.gpu

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 6, 32, 1024, 768, 4, 2048


class Model(nn.Module):
    """Residual layers of 4-bit experts; only the input is trained."""

    def __init__(self, opt, device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.opt = nn.ModuleList(), opt
        for _ in range(LAYERS):
            layer = nn.Module()
            for name, shape in (
                ("gate_up_proj", (EXPERTS, 2 * INTERMEDIATE, HIDDEN)),
                ("down_proj", (EXPERTS, HIDDEN, INTERMEDIATE)),
            ):
                weight = torch.randn(shape, device=device) * 0.02
                layer.add_module(name, opt.moe.QuantizedExperts.from_weight(weight))
            self.layers.append(layer)
        logits = torch.randn(TOKENS, EXPERTS, device=device)
        self.gates, self.ids = logits.softmax(-1).topk(TOP_K, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout = self.opt.moe.ExpertsLayout()
        for layer in self.layers:
            x = x + self.opt.moe.experts_forward(
                x, self.ids, self.gates, layer.gate_up_proj, layer.down_proj, layout=layout
            )
        return x


@pytest.fixture(scope="module")
def model(opt, device):
    return Model(opt, device)


@pytest.fixture
def offload(opt, model):
    offload = opt.moe.ExpertOffload(model)
    yield offload
    offload.turn_off()


def step(model: Model, device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = model(x)
    out.backward(out.detach())
    return out.detach(), x.grad


def layer_bytes(model: Model) -> int:
    return sum(p.nbytes for p in model.layers[0].parameters())


def peak(run) -> int:
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_two_layers_are_on_the_device(opt, model, device) -> None:
    step(model, device)  # what a first step leaves for good is not the layers'
    torch.cuda.synchronize()
    before, whole = torch.cuda.memory_allocated(), peak(lambda: step(model, device))
    offload = opt.moe.ExpertOffload(model)
    try:
        freed = (LAYERS - 2) * layer_bytes(model)
        slack = 1 << 20
        assert torch.cuda.memory_allocated() <= before - freed + slack
        assert peak(lambda: step(model, device)) <= whole - freed + slack
    finally:
        offload.turn_off()
    assert torch.cuda.memory_allocated() <= before + slack


def test_same_bits_however_far_the_host_runs_ahead(model, device, offload) -> None:
    """The device is held up, so that a copy that did not wait would be far ahead of its use."""
    offload.turn_off()
    expected = step(model, device)
    offload.turn_on()
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        for found, right in zip(step(model, device), expected, strict=True):
            assert_same_bits(found, right)


def test_nothing_waits_for_the_device(model, device, offload) -> None:
    step(model, device)
    x = torch.zeros(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones_like(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.alone
def test_copies_run_beside_the_products(model, device, offload) -> None:
    step(model, device)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step(model, device)
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            (copies if "HtoD" in event.name else kernels).append(span)
    large = [(start, end) for start, end in copies if end - start > 100]  # microseconds
    assert len(large) == 2 * (LAYERS - 2)
    beside = sum(any(a < end and start < b for a, b in kernels) for start, end in large)
    assert beside == len(large)


def test_a_capture_is_refused(model, device, offload) -> None:
    step(model, device)
    x = torch.zeros(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(x)


def test_a_model_that_the_device_never_holds_whole(opt, model, device) -> None:
    """Built in host memory, offloaded to the device, its dense part moved there afterwards."""
    expected = step(model, device)
    host = Model(opt, "cpu")
    host.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r'pass device="cuda"'):
        opt.moe.ExpertOffload(host)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.moe.ExpertOffload(host, device="cuda")
    host.to(device)
    host.gates, host.ids = model.gates, model.ids
    slack = 1 << 20
    assert torch.cuda.max_memory_allocated() - before <= 2 * layer_bytes(model) + slack
    assert all(p.device.type == "cpu" and p.is_pinned() for p in host.parameters())
    for found, right in zip(step(host, device), expected, strict=True):
        assert_same_bits(found, right)
