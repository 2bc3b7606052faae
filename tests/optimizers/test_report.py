"""The summary of routes (M27)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ._steps import both, parameters
from .test_numbers import NoHostReads


def test_report_names_every_parameter_its_route_and_its_work(opt, submodule, device) -> None:
    """The method, the iterate dtype and the operations are those of `choose`."""
    names = ["experts.w", "qkv", "twin", "table", "bias"]
    params = parameters([(3, 8, 20), (24, 8), (8, 8), (7, 3), (5,)], device=device)
    options = {"expert_keys": ["experts"], "split_sizes": {"qkv": (16, 8)}, "ns_steps": 4}
    optimizer = opt.Muon(
        [
            {"params": params[:3], "names": names[:3], "use_muon": True, **options},
            {"params": params[3:], "use_muon": False},
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
    total = 3 * cost[8, 20] + cost[16, 8] + 2 * cost[8, 8]
    assert optimizer.report().splitlines() == [
        f"group 0, parameter 'experts.w' (3, 8, 20): muon, 3 x (8, 20) in batch 0, {texts[8, 20]}",
        f"group 0, parameter 'qkv' (24, 8): muon, 1 x (16, 8) in batch 1, {texts[16, 8]}; "
        f"1 x (8, 8) in batch 2, {texts[8, 8]}",
        f"group 0, parameter 'twin' (8, 8): muon, 1 x (8, 8) in batch 2, {texts[8, 8]}",
        "group 1, parameter 0 (7, 3): adamw",
        "group 1, parameter 1 (5,): adamw",
        f"3 parameters by muon in 3 batches, {total:.3g} FLOP per step with dense products; "
        "2 by adamw",
    ]


@pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])
def test_report_changes_nothing_and_never_waits_for_the_device(opt, device, name) -> None:
    """Before the first step, after it, and after the groups changed."""
    params = parameters([(6, 4), (0, 5), (5,), (6, 4)], device=device)
    optimizer = both(opt, params)[name]()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.02, device=device)
    with NoHostReads():
        first = optimizer.report()
        optimizer.step()
        assert optimizer.report() == first
    assert "parameter 1 (0, 5): muon, nothing to orthogonalize" in first
    optimizer.param_groups[0]["method"] = "newton_schulz"
    optimizer.param_groups[0]["dtype"] = torch.float64
    assert "newton_schulz in float64" in optimizer.report()


def test_batches_are_numbered_over_all_groups(opt, device) -> None:
    groups = [{"params": parameters([(4, 4)], device=device), "use_muon": True} for _ in range(2)]
    lines = opt.Muon(groups).report().splitlines()
    assert ["in batch 0," in lines[0], "in batch 1," in lines[1]] == [True, True]


def test_report_refuses_what_a_step_refuses(opt, device) -> None:
    optimizer = opt.Muon([nn.Parameter(torch.ones(4, 4, device=device))])
    optimizer.param_groups[0]["method"] = "svd"
    with pytest.raises(ValueError, match="group 0: method must be one of"):
        optimizer.report()


def test_names_the_dtype_of_the_directions_not_of_the_parameter(opt) -> None:
    """A bfloat16 buffer gives float32 directions, whatever the parameter is."""
    param = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    assert "in float64" in opt.Muon([param]).report()
    assert "in float32" in opt.Muon([param], momentum_dtype=torch.bfloat16).report()
