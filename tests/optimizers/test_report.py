"""The summary of routes."""

import re

import pytest
import torch

from ._steps import CLASSES, both, marked, new_gradients, parameters
from .test_numbers import NoHostReads

NUMBER = r"\d[\d.e+-]*"


@pytest.mark.sees_defect("logs of single routes, no summary")
def test_report_names_every_parameter_its_route_and_its_work(opt, submodule, device) -> None:
    """The method, the iterate dtype and the operations are those of `choose`; batches are numbered
    over all groups.
    """
    names = ["experts.w", "qkv", "twin", "table", "bias"]
    params = parameters([(3, 8, 20), (24, 8), (8, 8), (7, 3), (5,), (8, 8)], device=device)
    options = {"expert_keys": ["experts"], "split_sizes": {"qkv": (16, 8)}, "ns_steps": 4}
    optimizer = opt.Muon(
        [
            {"params": params[:3], "names": names[:3], "use_muon": True, **options},
            {"params": params[3:5], "use_muon": False},
            {"params": params[5:], "use_muon": True, "ns_steps": 4},
        ]
    )
    work = {(8, 20): 3, (16, 8): 1, (8, 8): 1}
    texts, cost = {}, {}
    choose = submodule("orthogonalize.choose")
    for shape, count in work.items():
        choice = choose.choose(*shape, dtype=torch.float32, device=device, steps=4)
        cost[shape] = choose.flop(
            choice.method, *shape, steps=4, restarts=choice.restarts, symmetric=False
        )
        dtype = str(choice.dtype).removeprefix("torch.")
        texts[shape] = f"{choice.method} in {dtype}, {count * cost[shape]:.3g} FLOP"
    total = 3 * cost[8, 20] + cost[16, 8] + 3 * cost[8, 8]
    lines = optimizer.report(verbose=True).splitlines()
    assert [line.split(" | ")[0] for line in lines[:-1]] == [
        f"group 0, parameter 'experts.w' (3, 8, 20): muon, 3 x (8, 20) in batch 0, {texts[8, 20]}",
        f"group 0, parameter 'qkv' (24, 8): muon, 1 x (16, 8) in batch 1, {texts[16, 8]}; "
        f"1 x (8, 8) in batch 2, {texts[8, 8]}",
        f"group 0, parameter 'twin' (8, 8): muon, 1 x (8, 8) in batch 2, {texts[8, 8]}",
        "group 1, parameter 0 (7, 3): adamw",
        "group 1, parameter 1 (5,): adamw",
        f"group 2, parameter 0 (8, 8): muon, 1 x (8, 8) in batch 3, {texts[8, 8]}",
    ]
    assert lines[-1].startswith(
        f"4 parameters by muon in 4 batches, {total:.3g} FLOP per step with dense products; "
        "2 by adamw; "
    )


@CLASSES
def test_steps_and_reports_never_wait_for_the_device(opt, device, name) -> None:
    """No .item(), no bool(tensor), also of a Tensor lr; a report changes nothing.

    Before the first step, after it, and after the groups changed.
    """
    params = parameters([(6, 4), (0, 5), (3, 8), (5,), (6, 4), (4,)], device=device)
    optimizer = both(opt, name, params)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.02, device=device)
    with NoHostReads():
        first = optimizer.report(verbose=True)
        optimizer.step()
        second = optimizer.report(verbose=True)
        for seed in range(2):
            new_gradients(params, seed=seed)
            optimizer.step()
        assert optimizer.report(verbose=True) == second
    with pytest.raises(AssertionError, match="reads a tensor on the host"), NoHostReads():
        params[0].sum().item()
    assert re.sub(r"\d+ bytes of state", "0 bytes of state", second) == first
    assert "parameter 1 (0, 5): muon, nothing to orthogonalize" in first
    optimizer.param_groups[0]["method"] = "newton_schulz"
    optimizer.param_groups[0]["dtype"] = torch.float64
    assert "newton_schulz in float64" in optimizer.report(verbose=True)
    optimizer.param_groups[0]["method"] = "svd"  # refused as by a step
    with pytest.raises(ValueError, match="group 0: method must be one of"):
        optimizer.report()


def test_names_the_dtype_of_the_directions_not_of_the_parameter(opt) -> None:
    """A bfloat16 buffer gives float32 directions, whatever the parameter is."""
    param = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    assert "in float64" in opt.Muon([param]).report(verbose=True)
    assert "in float32" in opt.Muon([param], momentum_dtype=torch.bfloat16).report(verbose=True)


def fields(line: str) -> dict[str, str]:
    """The second half of a line by the words around its numbers."""
    return {re.sub(NUMBER, "N", part): part for part in line.split(" | ")[1].split(", ")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_report_says_who_computes_with_what_and_at_which_cost(
    opt, submodule, device, dtype
) -> None:
    params = parameters([(8, 16), (40,)], dtype=dtype, device=device)
    optimizer = opt.Muon(marked(params, 1))
    optimizer.step()
    first, second, last = optimizer.report(verbose=True).splitlines()
    small, wide = dtype.itemsize, max(dtype.itemsize, 4)
    path = "reference" if dtype == torch.float64 else "compiled"
    halves = submodule("orthogonalize.products").runs_symmetric
    by_halves = halves(8, submodule("orthogonalize.arguments").dtype_for(dtype, device), device)
    products = "symmetric_matmul" if by_halves else "torch's products"
    state = 8 * 16 * wide
    moved = 8 * 16 * (3 * small + 4 * wide)
    flop = float(re.search(r"([\d.e+-]+) FLOP", first)[1])
    predicted = 1e3 * (flop / 790e12 + moved / 4.3e12)
    assert first.split(" | ")[1].startswith(
        f"owner this process, kernels momentum {path}, apply_update {path}, {products}, "
        f"{state} bytes of state, {moved} bytes moved, "
    )
    found = float(fields(first)["N ms predicted"].split()[0])
    assert found == pytest.approx(predicted, rel=0.02)
    moved = 40 * (3 * small + 4 * wide)
    assert second.split(" | ")[1] == (
        f"owner this process, kernels adamw {path}, {2 * 40 * wide + 4} bytes of state, "
        f"{moved} bytes moved, {1e3 * moved / 4.3e12:.3g} ms predicted"
    )
    assert "for an H200 at 790 TFLOP/s and 4.3 TB/s" in last
    assert "measured" not in first + second + last
    optimizer.turn_on_cpu_offload()
    assert f"{state} bytes of state in host memory" in optimizer.report(verbose=True)


@CLASSES
def test_measured_times(opt, device, name) -> None:
    """Shares of the batches' times, which add up; nothing waits for the device while measuring."""
    params = parameters([(64, 64), (64, 64), (32, 64), (300,), (100,)], device=device)
    groups = marked(params, 3)
    optimizer = getattr(opt, name)([{**g, "lr": 0.1, "none_grad": False} for g in groups])
    optimizer.measure_steps()
    assert "measured" not in optimizer.report(verbose=True)
    with NoHostReads():
        for _ in range(3):
            optimizer.step()
        optimizer.report()
    if device.type == "cuda":
        torch.cuda.synchronize()
    *lines, last = optimizer.report(verbose=True).splitlines()
    times = [float(fields(line)["N ms measured"].split()[0]) for line in lines]
    assert all(time > 0 for time in times)
    assert times[0] == times[1]  # two equal matrices of a batch
    assert times[3] == pytest.approx(3 * times[4], rel=0.02)
    total = float(re.search(rf"({NUMBER}) ms measured in the last finished step", last)[1])
    assert sum(times) == pytest.approx(total, rel=0.02)
    optimizer.measure_steps(False)
    optimizer.step()
    assert "measured" not in optimizer.report(verbose=True)


def test_a_step_is_timed_by_the_clock(opt, submodule, monkeypatch) -> None:
    """Half a second in the iteration of one batch is that batch's."""
    module = submodule("optimizers.step")
    clock = iter(range(1000))
    timing = submodule("optimizers.report")
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    params = parameters([(4, 4), (4, 6)])
    optimizer = opt.Muon(params)
    optimizer.measure_steps()
    orthogonalize = module.orthogonalize

    def slow(x, **options):
        if x.shape[-1] == 6:
            next(clock)
            next(clock)
        return orthogonalize(x, **options)

    monkeypatch.setattr(module, "orthogonalize", slow)
    optimizer.step()
    lines = optimizer.report(verbose=True).splitlines()
    times = [float(fields(line)["N ms measured"].split()[0]) for line in lines[:2]]
    assert times == [1000.0, 3000.0]


def test_the_table_has_a_line_per_shape(opt, device) -> None:
    """Aligned; the state in MB and the times are those of all parameters of the shape."""
    params = parameters([(8, 16), (8, 16), (16, 8), (40,)], device=device)
    optimizer = opt.Muon(marked(params, 3))
    optimizer.measure_steps()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    head, *rows, last = optimizer.report().splitlines()
    assert head.split("  ")[0] == "route"
    assert head.endswith("measured ms")
    assert {len(row) for row in rows} == {len(head)}
    cells = [re.split("  +", row) for row in rows]
    assert [row[:3] for row in cells] == [
        ["muon", "(8, 16)", "2"],
        ["muon", "(16, 8)", "1"],
        ["adamw", "(40,)", "1"],
    ]
    assert cells[0][3].startswith("1 x (8, 16) gram_newton_schulz in ")
    assert [float(row[-3]) for row in cells[:2]] == pytest.approx([1.02e-3, 5.12e-4])
    assert last == optimizer.report(verbose=True).splitlines()[-1]
