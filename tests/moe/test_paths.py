"""Paths of the products by name: Triton (interpreted on a CPU), and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from ._eager import Problem
from .test_grouped_linear import assert_close_to_eager

SHAPES = (
    Problem(33, rank=5, bias=True, peft=True),
    Problem(15, gates=True, bias=True, grouped_in=True, routing="sentinels"),
    Problem(40, experts=3, rank=20, gates=True, k=70, n=130, routing="gap"),
    Problem(21, rank=None, grouped_out=True, routing="one"),
    Problem(20, top_k=1, grouped_in=True, grouped_out=True, rank=3),
)


WIDTHS = [
    (problem, dtype)
    for number, problem in enumerate(SHAPES)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if dtype == torch.float32 or number < 2
]


@pytest.mark.parametrize(("problem", "dtype"), WIDTHS, ids=str)
def test_triton(run, device, problem, dtype):
    """The interpreter truncates where it stores bfloat16, xa and y: twice rounding's error each."""
    truncates = device.type == "cpu" and dtype == torch.bfloat16
    problem = dataclasses.replace(problem, dtype=dtype)
    assert_close_to_eager(problem, run, device, "triton", factor=3.5 if truncates else 1.5)


def test_the_compiled_path_is_for_4_bit_experts(moe, opt, dispatch, monkeypatch, device):
    """On any device: over dense weights the error names what to use instead."""
    problem = Problem(4)
    leaves, order = problem.inputs(device), moe.expert_sort(problem.ids(device), problem.experts)
    said = r'is for 4-bit experts: .* use "auto" or "triton"'
    with pytest.raises(ValueError, match=said):
        moe.grouped_lora_linear(leaves["x"], leaves["weight"], order, backend="compiled")
    with pytest.raises(ValueError, match=said):
        opt.explain("grouped_lora_linear", device=device, backend="compiled")
    path = dispatch.experts_path.__wrapped__
    pick = functools.partial(path, device, torch.bfloat16, "compiled")
    monkeypatch.setattr(dispatch, "is_hopper", lambda _: False)
    with pytest.raises(ValueError, match=r"needs a device of capability 9\.0 and Triton"):
        pick()
    monkeypatch.setattr(dispatch, "is_hopper", lambda _: True)
    assert pick().name == "compiled"
    with pytest.raises(ValueError, match=said):
        pick(dense=True)
