"""`scaled_matmul`: any number of dimensions, kinds of scales, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most

EIGHT = torch.float8_e4m3fn
ONE = torch.tensor(1.0)


def operands(lead: tuple[int, ...], *, rowwise: bool, device: torch.device):
    """a, b, their scales, and the product in float64."""
    made = torch.Generator().manual_seed(len(lead))
    a = torch.randn(*lead, 32, generator=made).to(EIGHT)
    b = torch.randn(16, 32, generator=made).to(EIGHT).t()
    a_scale, b_scale = torch.rand(*lead, 1, generator=made), torch.rand(1, 16, generator=made)
    if not rowwise:
        a_scale, b_scale = torch.tensor(0.75), b_scale[:, :1]
    exact = (a.double() * a_scale) @ (b.double() * b_scale)
    return [x.to(device) for x in (a, b, a_scale, b_scale)], exact


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("lead", [(8,), (4, 6), (2, 3, 4), (1,), (2, 0, 3)])
def test_equals_float64(opt, device, lead, rowwise) -> None:
    arguments, exact = operands(lead, rowwise=rowwise, device=device)
    found = opt.tensor_parallel.scaled_matmul(*arguments)
    assert found.dtype == torch.bfloat16
    assert_error_at_most(found.cpu(), exact, 2 * torch.finfo(torch.bfloat16).eps)


def test_traces_into_one_graph(opt, device) -> None:
    arguments, _ = operands((4, 6), rowwise=True, device=device)
    compiled = torch.compile(opt.tensor_parallel.scaled_matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), opt.tensor_parallel.scaled_matmul(*arguments))


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_one_column_on_a_cpu(opt, rows, rowwise) -> None:
    a, b = torch.ones(rows, 32).to(EIGHT), torch.ones(1, 32).to(EIGHT).t()
    a_scale = torch.arange(1.0, rows + 1).view(rows, 1) if rowwise else torch.tensor(2.0)
    b_scale = torch.full((1, 1), 0.5) if rowwise else torch.tensor(0.5)
    found = opt.tensor_parallel.scaled_matmul(a, b, a_scale, b_scale)
    assert torch.equal(found.float(), 16 * a_scale.expand(rows, 1))


A, B = torch.zeros(4, 32, dtype=EIGHT), torch.zeros(16, 32, dtype=EIGHT).t()
REFUSED = [
    (TypeError, "a must be a float8", (A.float(), B, ONE, ONE)),
    (TypeError, "b_scale must be a float32", (A, B, ONE, ONE.double())),
    (ValueError, "b must be \\(K, N\\)", (A, B[None], ONE, ONE)),
    (ValueError, "at least 2 dimensions", (A[0], B, ONE, ONE)),
    (ValueError, "contiguous columns", (A, B.contiguous(), ONE, ONE)),
    (ValueError, "b_scale must be rowwise", (A, B, torch.ones(4, 1), torch.ones(1, 4))),
    (ValueError, "both are tensorwise or both", (A, B, torch.ones(4, 1), ONE)),
    (ValueError, "both are tensorwise or both", (A, B, ONE, torch.ones(1, 16))),
    (ValueError, "a_scale must be", (A.view(2, 2, 32), B, torch.ones(4, 1), torch.ones(1, 16))),
    (ValueError, "a_scale must be", (A, B, torch.ones(1, 4), torch.ones(1, 16))),
    (ValueError, "b_scale must be rowwise", (A, B, torch.ones(4, 1), torch.ones(4, 4))),
    (TypeError, "a_scale must be a float32", (A, B, 1.0, ONE)),
    (ValueError, "as many rows as a has columns", (A[:, :16], B, ONE, ONE)),
]


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSED)
def test_refuses(opt, error, text, arguments) -> None:
    with pytest.raises(error, match=text):
        opt.tensor_parallel.scaled_matmul(*arguments)
