"""matmul_add: exact where sums are, any layout, one rounding, named errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import assert_error_at_most, assert_same_bits
from ._products import DTYPES, PATTERNS, Dense, exact_dense, laid_out


@pytest.fixture(scope="session")
def module(submodule):
    """The module kernels.matmul_add of the loaded package."""
    return submodule("kernels.products.matmul_add")


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """-0 and +0 are the same number, wherever they lie."""
    contiguous = actual.clone(memory_format=torch.contiguous_format)
    assert_same_bits(contiguous + 0.0, expected + 0.0)


PROBLEMS = (
    Dense((), 1, 1, 1),
    Dense((), 5, 3, 7),
    Dense((3,), 64, 32, 40),
    Dense((2,), 65, 33, 129, alpha=0.5),
    Dense((2,), 96, 40, 8, alpha=-2.0, beta=4.0),
    Dense((2, 3), 17, 31, 5, beta=-0.5, scaled=True),
    Dense((1,), 8, 2048, 16, alpha=0.125, scaled=True),
    Dense((3,), 33, 0, 4, beta=2.0),
    Dense((3,), 33, 0, 4),
)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_exact(module, device, problem, dtype):
    arguments = problem.operands(dtype, device)
    same(module.matmul_add(**arguments), exact_dense(arguments, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out", PATTERNS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_layout(module, device, pattern, out, dtype):
    """Operands in one layout, out in another."""
    arguments = Dense((2, 2), 44, 21, 36, alpha=2.0, beta=0.5).operands(dtype, device)
    expected = exact_dense(arguments, dtype)
    for name in "ABC":
        arguments[name] = laid_out(arguments[name], pattern)
    target = laid_out(torch.full_like(expected, torch.nan), out)
    assert module.matmul_add(**arguments, out=target) is target
    same(target, expected)


@pytest.mark.parametrize("shape", [(0, 4, 3, 2), (2, 0, 3, 4), (2, 3, 0, 0), (2, 4, 3, 0)], ids=str)
def test_empty(module, device, shape):
    batch, m, k, n = shape
    A, B = (torch.zeros(batch, *side, device=device) for side in ((m, k), (k, n)))
    assert module.matmul_add(A, B).shape == (batch, m, n)


def test_scalars_are_applied_before_the_rounding(module, device):
    """1 - 1 + 2^-12: a product rounded to float16 on its own would lose the rest."""
    A = torch.tensor([[1.0, 2.0**-6]], dtype=torch.float16, device=device)
    C = torch.ones(1, 1, dtype=torch.float16, device=device)
    expected = torch.full((1, 1), 2.0**-12, dtype=torch.float16, device=device)
    assert_same_bits(module.matmul_add(A, A.mT, C=C, beta=-1.0), expected)
    scale = torch.tensor(4.0, device=device)
    assert_same_bits(module.matmul_add(A, A.mT, C=C, beta=-1.0, scale=scale), 4 * expected)


def test_c_is_not_read_without_beta(module, device):
    A = torch.ones(3, 4, dtype=torch.float16, device=device)
    C = torch.full((3, 3), torch.nan, dtype=torch.float16, device=device)
    assert_same_bits(module.matmul_add(A, A.mT, C=C), torch.full_like(C, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ("contiguous", "transposed", "shifted"))
def test_c_may_be_out(module, device, pattern, dtype):
    arguments = Dense((2,), 130, 20, 70, beta=0.5).operands(dtype, device)
    expected = exact_dense(arguments, dtype)
    arguments["C"] = laid_out(arguments["C"], pattern)
    module.matmul_add(**arguments, out=arguments["C"])
    same(arguments["C"], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_on_gaussian_operands(module, device, dtype):
    """At most 1.02 times torch's product of the same dtype."""
    A, B, C = (
        torch.randn(2, *s, device=device).to(dtype) for s in ((96, 320), (320, 192), (96, 192))
    )
    expected = -0.5 * (A.double() @ B.double()) + 0.25 * C.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    library = torch.baddbmm(C, A, B, beta=0.25, alpha=-0.5)
    actual = module.matmul_add(A, B, alpha=-0.5, C=C, beta=0.25)
    torch.set_float32_matmul_precision(before)
    error = ((library.double() - expected).norm() / expected.norm()).item()
    assert_error_at_most(actual, expected, 1.02 * error)


def test_nan_stays_in_its_row_and_matrix(module, device):
    A = torch.ones(3, 70, 8, dtype=torch.float16, device=device)
    A[1, 5, 2] = torch.nan
    out = module.matmul_add(A, torch.ones(3, 8, 40, dtype=torch.float16, device=device))
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[1, 5] = True
    assert torch.equal(out.isnan(), bad)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_problem(module, device, data):
    sides = st.integers(1, 150)
    problem = Dense(
        tuple(data.draw(st.lists(st.integers(1, 3), max_size=2))),
        *(data.draw(sides) for _ in range(3)),
        alpha=data.draw(st.sampled_from((1.0, -0.5, 8.0))),
        beta=data.draw(st.sampled_from((0.0, 1.0, -4.0))),
        scaled=data.draw(st.booleans()),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    arguments = problem.operands(dtype, device, seed=data.draw(st.integers(0, 2**31)))
    expected = exact_dense(arguments, dtype)
    for name in "ABC":
        if arguments[name] is not None:
            arguments[name] = laid_out(arguments[name], data.draw(st.sampled_from(PATTERNS)))
    same(module.matmul_add(**arguments), expected)


def halves(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD = {
    "A must have float16, bfloat16 or float32, got torch.float64": (
        TypeError,
        {"A": halves(3, 4, dtype=torch.float64)},
    ),
    "B must be a dense tensor, got NoneType": (TypeError, {"B": None}),
    "B must have A's dtype torch.float16": (TypeError, {"B": halves(4, 5, dtype=torch.bfloat16)}),
    "equal leading dimensions, got shapes (3, 4) and (2, 4, 5)": (
        ValueError,
        {"B": halves(2, 4, 5)},
    ),
    "A and B must agree in k, got shapes (3, 4) and (5, 4)": (ValueError, {"B": halves(5, 4)}),
    "C must have shape (3, 5), got (5, 3)": (ValueError, {"C": halves(5, 3), "beta": 1.0}),
    "beta=2.0 scales C, which is None": (ValueError, {"beta": 2.0}),
    "alpha must be a number, got torch.float32": (TypeError, {"alpha": torch.tensor(1.0)}),
    "scale must be a float32 tensor, got float": (TypeError, {"scale": 1.0}),
    "out must have shape (3, 5), got (3, 4)": (ValueError, {"out": halves(3, 4)}),
    "tile='128x128' is unknown; name auto or one of sm90_": (ValueError, {"tile": "128x128"}),
    "tile='sm90_128x256' needs a device of capability 9.0, got cpu": (
        ValueError,
        {"tile": "sm90_128x256"},
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(module, message):
    error, changed = BAD[message]
    with pytest.raises(error) as caught:
        module.matmul_add(**{"A": halves(3, 4), "B": halves(4, 5), **changed})
    assert message in str(caught.value)


@pytest.mark.parametrize("name", "AB")
def test_out_must_not_overlap_an_operand(module, device, name):
    buffer = torch.zeros(32, dtype=torch.float16, device=device)
    arguments = {key: torch.zeros(4, 4, dtype=torch.float16, device=device) for key in "AB"}
    arguments[name] = buffer[:16].view(4, 4)
    with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
        module.matmul_add(**arguments, out=buffer[8:24].view(4, 4))


@pytest.mark.parametrize("added", (False, True))
def test_opcheck(module, ops, device, added):
    A, B = torch.randn(2, 20, 24, device=device), torch.randn(2, 24, 16, device=device)
    C = torch.zeros(2, 20, 16, device=device) if added else None
    out = torch.zeros(2, 20, 16, device=device)
    scale = torch.ones(2, device=device)
    arguments = (A, B, C, out, 1.0, 0.5 if added else 0.0, scale)
    torch.library.opcheck(ops.matmul_add_auto.default, arguments)


def test_compiles_without_a_graph_break(module, device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return module.matmul_add(A * 1, B, C=A @ B, beta=1.0) + 1

    for m, k, n in ((8, 16, 4), (12, 20, 8)):
        arguments = Dense((2,), m, k, n).operands(torch.float32, device)
        A, B = arguments["A"], arguments["B"]
        assert_same_bits(step(A, B), 2 * (A @ B) + 1)


def test_explain_names_the_path(opt, module):
    assert opt.explain("matmul_add", device="cpu").startswith("torch: baddbmm; no kernel for cpu")


def test_half_precision_is_taken_with_strides_for_tma(module, dispatch, monkeypatch):
    monkeypatch.setattr(dispatch, "runs_compiled", lambda op, device: True)
    x = torch.zeros(2, 16, 16, dtype=torch.float16)
    assert module._takes_compiled(x, x, None, x)
    assert module._takes_compiled(x, x.mT, x, x)
    assert not module._takes_compiled(x.float(), x.float(), None, x.float())


@pytest.mark.parametrize("name", ("a", "b", "c", "out"))
def test_strides_that_tma_cannot_take_go_to_torch(module, dispatch, monkeypatch, name):
    """Also float32, and C and out that are contiguous along different dimensions."""
    monkeypatch.setattr(dispatch, "runs_compiled", lambda op, device: True)
    good = dict.fromkeys(("a", "b", "c", "out"), torch.zeros(2, 16, 16, dtype=torch.float16))
    assert module._takes_compiled(**good)
    buffer = torch.zeros(2, 16, 48, dtype=torch.float16)
    rows_of_72_bytes = buffer.as_strided((2, 16, 16), (576, 36, 1))
    for bad in (buffer[..., 1:17], buffer[..., ::3], rows_of_72_bytes):
        assert not module._takes_compiled(**{**good, name: bad})
    assert not module._takes_compiled(**{**good, name: buffer[:1, :, :16].expand(2, -1, -1)})
    if name in ("c", "out"):
        assert not module._takes_compiled(**{**good, name: good[name].clone().mT})
    single = {key: x.float() for key, x in good.items()}
    assert not module._takes_compiled(**single)
