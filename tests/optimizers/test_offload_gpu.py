"""CPU offload on a GPU: memory is freed, transfers run beside the step, a capture is refused."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from ._steps import marked, parameters

pytestmark = pytest.mark.gpu


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
