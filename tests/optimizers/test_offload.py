"""CPU offload: no bit of a run changes, state travels batch by batch, and everything else works."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits, assert_same_tensors
from ._steps import marked, parameters, train
from .test_state import MAKERS, SHAPES, state_tensors, through_memory

KEPT = {"step", "second_momentum_buffer"}


def travelling(optimizer):
    return [tensor for key, tensor in state_tensors(optimizer) if key not in KEPT]


def assert_same_values(one, other) -> None:
    for mine, theirs in zip(one.param_groups, other.param_groups, strict=True):
        assert_all_same_bits(mine["params"], theirs["params"])
    one, other = one.state_dict()["state"], other.state_dict()["state"]
    assert one.keys() == other.keys()
    for index, state in one.items():
        assert_same_tensors(state, other[index])


@pytest.mark.sees_defect("turned on before the first step it starts only after it")
@MAKERS
def test_it_starts_at_once_and_frees_the_device_state(opt, device, make) -> None:
    """Motif's starts after the next step. Small state stays; twice on is once on."""
    optimizer = make(opt, parameters(SHAPES, device=device))
    optimizer.fit_state()
    old = [weakref.ref(tensor) for tensor in travelling(optimizer)]
    optimizer.turn_on_cpu_offload()
    assert old and all(ref() is None for ref in old)
    held = travelling(optimizer)
    for tensor in held:
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        assert tensor.is_pinned() == (device.type == "cuda")
    for key, tensor in state_tensors(optimizer):
        assert key not in KEPT or tensor.device == device
    optimizer.turn_on_cpu_offload()
    assert all(a is b for a, b in zip(held, travelling(optimizer), strict=True))
    copied = travelling(copy.deepcopy(optimizer))
    assert all(tensor.is_pinned() == (device.type == "cuda") for tensor in copied)
    optimizer.turn_off_cpu_offload()
    now = travelling(optimizer)
    assert all(tensor.device == device for tensor in now)
    optimizer.turn_off_cpu_offload()
    assert all(a is b for a, b in zip(now, travelling(optimizer), strict=True))


@pytest.mark.sees_defect(
    "all state is moved before and after a step, and nothing else runs meanwhile"
)
def test_batches_arrive_ahead_of_their_use_and_leave_behind_it(
    opt, submodule, device, watch
) -> None:
    """Motif moves all state before and after a step. At most three batches are there."""
    module = submodule("optimizers.state.in_host_memory")
    params = parameters([(4, n) for n in range(4, 11)] + [(5,), (6,)], device=device)
    optimizer = opt.Muon(marked(params, 7))
    optimizer.turn_on_cpu_offload()
    index, numbers = {param: number for number, param in enumerate(params)}, itertools.count()

    def copied(_, part, *, to_host):
        return ("out" if to_host else "in", index[part.param])

    events = watch(module.Part, "copy", copied)
    computed = lambda *_, **__: ("compute", next(numbers))  # noqa: E731
    watch(submodule("optimizers.step"), "momentum", computed, events)
    train(optimizer, params, 1)
    assert next(numbers) == 7  # batches, of a matrix each
    for number in range(7):
        here = events.index(("compute", number))
        assert events.index(("in", number)) < here < events.index(("out", number))
        if number < 6:
            assert events.index(("in", number + 1)) < here, "the next batch is on its way"
        present = {n for kind, n in events[:here] if kind == "in"}
        present -= {n for kind, n in events[:here] if kind == "out"}
        assert len(present & set(range(7))) <= module.SLOTS
    assert events.count(("in", 7)) == events.count(("out", 7)) == 2  # exp_avg, exp_avg_sq


@pytest.mark.sees_defect("state cannot be saved or loaded while it is offloaded")
@MAKERS
def test_state_dicts_while_it_is_on(opt, device, make) -> None:
    """Motif refuses both; here they are served from the host, exactly."""
    params = parameters(SHAPES, device=device)
    optimizer = make(opt, params)
    optimizer.turn_on_cpu_offload()
    train(optimizer, params, 3)
    saved, others = through_memory(optimizer.state_dict()), []
    for offload in (False, True):
        twins = [nn.Parameter(param.detach().clone()) for param in params]
        other = make(opt, twins, lr=0.5)
        if offload:
            other.turn_on_cpu_offload()
        other.load_state_dict(saved)
        assert other.offloaded == offload
        for tensor in travelling(other):
            assert tensor.device == (torch.device("cpu") if offload else device)
        assert_same_values(other, optimizer)
        train(other, twins, 2, seed=50)
        others.append(other)
    train(optimizer, params, 2, seed=50)
    for other in others:
        assert_same_values(other, optimizer)


@pytest.mark.sees_defect("state made after the registration is never offloaded")
def test_state_made_later_is_offloaded_too(opt, device) -> None:
    params = parameters([(6, 4), (5,), (6, 4)], device=device)
    optimizer = opt.Muon([{"params": params[:1], "use_muon": True}])
    optimizer.turn_on_cpu_offload()
    optimizer.add_param_group({"params": params[1:2], "use_muon": False})
    twin = nn.Parameter(params[0].detach().clone())
    optimizer.param_groups[0]["params"][0] = twin
    train(optimizer, [twin, *params[1:]], 2)
    assert {p for p in optimizer.state if isinstance(p, torch.Tensor)} == {twin, params[1]}
    plain = parameters([(6, 4), (5,), (6, 4)], device=device)
    other = opt.Muon(marked(plain[:2], 1))
    train(other, plain, 2)
    assert_same_values(optimizer, other)
    assert all(t.is_pinned() == (device.type == "cuda") for t in travelling(optimizer))


@pytest.mark.gpu
def test_device_memory_is_freed(opt, submodule, device, monkeypatch) -> None:
    """Between steps only slots and small state stay; a step adds nothing to the plain peak."""
    limit = 32 << 20  # 256 MiB by default, of which three would hold most of this small state
    for module in ("optimizers.plan", "optimizers.state.in_host_memory"):
        monkeypatch.setattr(submodule(module), "BATCH_BYTES", limit)
    shapes = [(1024, 1024)] * 160 + [(1 << 20,)] * 16  # 640 MiB of momentum, 128 MiB of moments
    peaks, states = [], []
    gc.collect()  # nothing of the tests before is freed while this one counts bytes
    for offload in (False, True):
        params = [nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        optimizer = opt.Muon(marked(params, 160), none_grad=False)
        if offload:
            optimizer.turn_on_cpu_offload()
            optimizer.fit_state()
            assert torch.cuda.memory_allocated(device) - before < 1 << 20
        assert torch.cuda.memory_allocated(device) - before < 1 << 20
        optimizer.fit_state()
        for param in params:
            param.grad = torch.zeros_like(param)
        with_gradients = torch.cuda.memory_allocated(device)
        optimizer.step()
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
        states.append(torch.cuda.memory_allocated(device) - with_gradients)
        peaks.append(torch.cuda.max_memory_allocated(device) - with_gradients)
        if offload:
            optimizer.turn_off_cpu_offload()
            now = torch.cuda.memory_allocated(device) - with_gradients
            assert now >= 768 << 20
        del optimizer, params
    assert states[1] <= 3 * limit + (1 << 20)
    # Without offload the state was allocated before `with_gradients`, with it the slots are after.
    assert peaks[1] <= peaks[0] + 3 * limit + (1 << 20)


@pytest.mark.gpu
def test_transfers_run_beside_the_step(opt, submodule, device, monkeypatch) -> None:
    """Copies are on streams of their own: a trace has them while kernels of the step run."""
    monkeypatch.setattr(submodule("optimizers.plan"), "BATCH_BYTES", 64 << 20)
    params = [nn.Parameter(torch.randn(2048, 2048, device=device)) for _ in range(24)]
    optimizer = opt.Muon(params, none_grad=False)
    optimizer.turn_on_cpu_offload()
    for param in params:
        param.grad = torch.randn_like(param)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    spans = {"copy": [], "kernel": []}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = "copy" if event.name.startswith("Memcpy") else "kernel"
            spans[kind].append((event.time_range.start, event.time_range.end))
    for direction in ("HtoD", "DtoH"):
        assert any(direction in event.name for event in profile.events())
    beside = sum(
        any(start < end2 and start2 < end for start2, end2 in spans["kernel"])
        for start, end in spans["copy"]
    )
    assert beside >= len(spans["copy"]) // 2


@pytest.mark.gpu
def test_a_capture_with_offload_is_refused(opt, device) -> None:
    params = parameters([(64, 64)], device=device)
    optimizer = opt.Muon(params, none_grad=False)
    optimizer.turn_on_cpu_offload()
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph; call turn_off"),
        torch.cuda.graph(graph),
    ):
        optimizer.step()
