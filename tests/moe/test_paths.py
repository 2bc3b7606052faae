"""Every path of the products on the same problems: Triton (interpreted on a CPU) and grouped_mm."""

from __future__ import annotations

import dataclasses

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


ALIGNED = (
    Problem(33, rank=4, bias=True, peft=True),
    Problem(29, gates=True, bias=True, grouped_in=True, routing="sentinels", rank=5),
    Problem(21, rank=None, grouped_out=True, routing="one"),
    Problem(0, gates=True),
)


@pytest.mark.parametrize("problem", ALIGNED, ids=str)
def test_grouped_mm(run, device, problem):
    """bfloat16, the dtype that grouped_mm takes on CUDA; any rank (4 raises in torch itself)."""
    problem = dataclasses.replace(problem, dtype=torch.bfloat16)
    assert_close_to_eager(problem, run, device, "grouped_mm", factor=2.0)


def test_what_grouped_mm_cannot_take_is_refused(run, device):
    for problem in (
        Problem(4, k=20, dtype=torch.bfloat16),
        Problem(4, n=12, dtype=torch.bfloat16),
        Problem(4, dtype=torch.float64, lora_dtype=torch.float64),
    ):
        leaves, ids = problem.inputs(device), problem.ids(device)
        with pytest.raises(ValueError, match="grouped_mm"):
            run(problem, leaves, ids, None, "grouped_mm")
