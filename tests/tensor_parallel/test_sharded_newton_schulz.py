"""Newton-Schulz on sharded rows against `orthogonalize` on all of them, and its sums by Triton."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from .._compare import assert_error_at_most, assert_same_numbers, relative_error
from ..conftest import module_fixture
from ..distributed._ranks import on_ranks

METHODS = ("auto", "polar_express", "gram_newton_schulz", "newton_schulz", "gram_polynomial")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCHEDULES = ("rs_ag", "gram_ar", "auto")
# Square, tall with columns that four ranks do not divide, wide, fewer rows than ranks.
SHAPES = ((96, 96), (130, 50), (50, 130), (3, 16))


def sizes_of(m: int, world: int) -> list[int]:
    return [len(part) for part in torch.arange(m).tensor_split(world)]


def matrix(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(m)
    return torch.randn(m, n, generator=made, dtype=dtype) / torch.arange(1, n + 1)


def _distances(opt, dtype: torch.dtype) -> dict[str, float]:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = {}
    for (m, n), method in itertools.product(SHAPES, METHODS):
        x, sizes = matrix(m, n, dtype), sizes_of(m, world)
        kept = x.clone()
        expected = opt.orthogonalize(x, method, dtype=dtype).split(sizes)[rank]
        for schedule in SCHEDULES:
            got = opt.tensor_parallel.sharded_newton_schulz(
                x.split(sizes)[rank], None, schedule, method=method, rows=sizes
            )
            assert got.shape == expected.shape and got.dtype == dtype and got.is_contiguous()
            if expected.numel():
                found[f"{m}x{n}/{method}/{schedule}"] = relative_error(got, expected)
        assert torch.equal(x, kept)
    return found


@pytest.mark.parametrize(
    ("world", "dtype", "budget"),
    # Five steps amplify the rounding of directions that are small in the matrix.
    [(2, torch.float64, 1e-11), (4, torch.float64, 1e-11), (2, torch.float32, 1e-3)],
)
def test_equals_the_whole_matrix(ranks, world: int, dtype, budget: float) -> None:
    for found in ranks(world).run(_distances, dtype):
        wrong = {case: error for case, error in found.items() if not error < budget}
        assert len(found) >= 45 and not wrong


@on_ranks(2)
def test_zeros_nan_empty_and_refused(opt) -> None:
    sharded, rank = opt.tensor_parallel.sharded_newton_schulz, distributed.get_rank()
    for schedule in ("rs_ag", "gram_ar"):
        for method in ("gram_polynomial", "polar_express"):
            options = {"schedule": schedule, "method": method}
            assert not sharded(torch.zeros(8, 6), **options).any()
            small = sharded(torch.full((8, 6), 1e-42), **options)
            assert_error_at_most(small, sharded(torch.ones(8, 6), **options), 1e-2)
            x = torch.randn(8, 6)
            if rank == 0:
                x[0, 0] = torch.nan  # which makes the rows of every rank NaN
            assert sharded(x, **options).isnan().all()
            # Fewer rows here than there, and none.
            for sizes in ([3, 5], [0, 7]):
                x = matrix(sum(sizes), 4, torch.float64)
                found = sharded(x.split(sizes)[rank], rows=sizes, **options)
                expected = opt.orthogonalize(x, method).split(sizes)[rank]
                torch.testing.assert_close(found, expected)
    assert sharded(torch.zeros(0, 6)).shape == (0, 6)
    with pytest.raises(ValueError, match="schedule must be one of"):
        sharded(torch.zeros(4, 4), schedule="ring")
    with pytest.raises(ValueError, match="rows must have one entry per rank"):
        sharded(torch.zeros(4, 4), rows=[4])
    with pytest.raises(TypeError, match="rows must be a sequence of integers or None, got 4"):
        sharded(torch.zeros(4, 4), rows=4)
    with pytest.raises(ValueError, match="rows of one matrix"):
        sharded(torch.zeros(2, 4, 4))
    with pytest.raises(TypeError, match="floating-point"):
        sharded(torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="is unknown"):
        sharded(torch.zeros(4, 4), method="svd")


@on_ranks(4)
def test_rows_that_differ_are_agreed_on(opt) -> None:
    """Ranks learn of rows that differ: 3 + 3 + 3 + 1 of 8 columns are tall, 4 * 1 would be wide."""
    sharded, rank = opt.tensor_parallel.sharded_newton_schulz, distributed.get_rank()
    sizes = (3, 3, 3, 1)
    x = matrix(sum(sizes), 8, torch.float64)
    found = sharded(x.split(sizes)[rank])
    torch.testing.assert_close(found, sharded(x.split(sizes)[rank], rows=sizes), rtol=0, atol=0)
    torch.testing.assert_close(found, opt.orthogonalize(x).split(sizes)[rank])
    with pytest.raises(ValueError, match=r"one number of columns.*\[8, 8, 8, 9\]"):
        sharded(torch.zeros(3, 9 if rank == 3 else 8))


def test_rows_are_not_asked_for_in_a_capture(newton_schulz, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, two = SimpleNamespace(shape=(4, 8), is_cuda=True), newton_schulz.Collectives("0", 0, 2)
    with pytest.raises(ValueError, match="pass rows"):
        newton_schulz._checked_rows(None, x, two)
    assert newton_schulz._checked_rows([4, 3], x, two) == [4, 3]


@on_ranks(1)
def test_one_rank_is_the_owner(opt) -> None:
    x = matrix(40, 30, torch.float32)
    assert torch.equal(opt.tensor_parallel.sharded_newton_schulz(x), opt.orthogonalize(x))


@pytest.fixture
def by_threads(opt, harness):
    """The benchmark's ranks that are threads, over the loaded package."""
    built = SimpleNamespace(package=opt)
    return lambda *arguments: harness.tensor_parallel.sharded_by_threads(built, *arguments)


@pytest.mark.parametrize("schedule", ["rs_ag", "gram_ar"])
@pytest.mark.parametrize("world", [2, 8])
def test_float16_is_as_near_to_float64_as_the_owners(
    opt, by_threads, harness, monkeypatch, schedule: str, world: int
) -> None:
    """With the partial Gram matrices of float16 added in float32.

    A square matrix is iterated on the owner's side: by X^T X its result would be sqrt(2) times the
    owner's distance from float64 away.
    """
    settled = ("gram_polynomial", torch.float16)
    monkeypatch.setattr(harness.tensor_parallel, "iteration_of", lambda *_: settled)
    gaussian = torch.randn(384, 384, generator=torch.Generator().manual_seed(0))
    for x in (matrix(256, 256, torch.float32), gaussian):
        exact = opt.orthogonalize(x.double(), "gram_polynomial")
        owner = opt.orthogonalize(x, "gram_polynomial", dtype=torch.float16)
        owners = relative_error(owner, exact)
        result, _ = by_threads(x, world, schedule)
        assert relative_error(result, exact) <= 1.25 * owners + 1e-4
        if x is gaussian:
            assert relative_error(result, owner) <= 1.15 * owners


@pytest.mark.parametrize("by_triton", [False, True])
def test_the_diagonal_of_a_square_is_rounded_once(
    newton_schulz, device, monkeypatch, by_triton: bool
) -> None:
    """Of M of the size of I, alpha M M and delta I nearly cancel: two roundings err by four."""
    monkeypatch.setattr(newton_schulz, "_by_triton", lambda _: by_triton)
    made = torch.Generator().manual_seed(0)
    M = torch.randn(128, 128, generator=made) / 64
    M = (M + M.mT + torch.diag(1.9 + 0.1 * torch.rand(128, generator=made))).half().to(device)
    step = newton_schulz.Square(0, 0.8260958358, -0.263842373, -2.367149489)
    exact = step.alpha * M.double() @ M.double() + step.beta * M.double()
    exact += step.delta * torch.eye(128, dtype=torch.float64, device=device)
    rank = SimpleNamespace(rank=1, world=2, gathered=lambda _: M)
    rows = newton_schulz._RowBlocks(rank).square(M[None, 64:], M[None, 64:], step)[0]
    factors = {"alpha": step.alpha, "beta": step.beta, "delta": step.delta}
    whole = newton_schulz.square(M[None], M[None], **factors)[0]
    unit = torch.finfo(torch.float16).eps / 2
    for found, first in ((rows, 64), (whole, 0)):
        assert ((found.double() - exact[first:]).abs() <= 4 * unit).all()
        diagonal, wanted = found.diagonal(first).double(), exact[first:].diagonal(first)
        assert ((diagonal - wanted).abs() <= 1.01 * unit * wanted.abs() + 1e-6).all()


HOSTILE = (0.0, -0.0, 1e-42, -3e-39, 7e-8, 6.1e-5, 2049.0, 1e30, -1e150)


@pytest.mark.parametrize("by_triton", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_no_pass_saved_changes_a_bit(
    newton_schulz, device, monkeypatch, source, dtype, by_triton: bool
) -> None:
    """A product written in another dtype is rounded as one that is converted afterwards."""
    monkeypatch.setattr(newton_schulz, "_by_triton", lambda _: by_triton)
    x = torch.randn(24, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = torch.float64 if torch.float64 in (source, dtype) else torch.float32
    for hostile in ((), HOSTILE[:2], HOSTILE[:-2], HOSTILE, (torch.nan,), (torch.inf,)):
        x[0, : len(hostile)] = torch.tensor(hostile, dtype=torch.float64)
        given = x.to(device, source)
        given = given.t() if len(hostile) % 2 else given
        # A power of two: the root of the total has one value, in whatever order it was added.
        total = SimpleNamespace(total=lambda value: (value * 0 + 1) * 2.0**20)
        root = (newton_schulz.START_NORM / total.total(given.double().norm()).sqrt()).sqrt()
        expected = (given.to(wide) * root.to(wide)).mul_(root.to(wide)).to(dtype)
        assert_same_numbers(newton_schulz.normalized(given, dtype, total), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bounded_gram_has_the_bits_of_a_division(newton_schulz, device, dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    rows = torch.randn(9, 24, generator=torch.Generator().manual_seed(0)).to(device, wide)
    for hostile in ((), HOSTILE[:-1], (torch.nan,)):
        rows[0, : len(hostile)] = torch.tensor(hostile, dtype=wide)
        # A power of two, as above, or NaN.
        ranks = SimpleNamespace(reduced_rows=lambda _: rows)
        ranks.total = lambda value: (value * 0 + 1) * 2.0**20
        bound = ranks.total(rows.double().norm()).sqrt().clamp_min(1.0).mul(1.01).to(wide)
        x = torch.zeros(1, 9, 24, dtype=dtype, device=device)
        found, factor = newton_schulz._RowBlocks(ranks).bounded_gram(x, 1.01)
        assert_same_numbers(found[0], (rows / bound).to(dtype))
        assert_same_numbers(factor, bound.rsqrt())


def test_timed_share_is_that_of_the_first_rank(opt, by_threads, harness, newton_schulz) -> None:
    """What `Alone` computes for the clock has the bits of what its rank computed among others."""
    x, entry = matrix(128, 128, torch.float32), harness.tensor_parallel
    result, noted = by_threads(x, 8)
    alone = entry.Alone(8, noted)
    for _ in range(2):  # it begins anew each time
        decided = "gram_polynomial", 5, "auto", torch.float32, alone
        share = newton_schulz.of_rows(x[:16], [16] * 8, *decided)
        assert torch.equal(share, result[:16])


def test_schedule_by_the_model(newton_schulz) -> None:
    faster = newton_schulz.faster
    half = torch.float16
    assert faster("gram_polynomial", 8192, 8192, 8, half) == "rs_ag"
    assert faster("gram_polynomial", 65536, 1024, 8, half) == "gram_ar"
    assert faster("gram_newton_schulz", 16384, 2048, 8, half) == "gram_ar"
    # One all-reduce costs a gather and a scatter; every square a gather more. X turns twice.
    for schedule, pieces in (("gram_ar", 6), ("rs_ag", 16)):
        fixed = newton_schulz.predicted_s(schedule, "gram_polynomial", 1, 1, 8, half)
        assert fixed == pytest.approx(pieces * newton_schulz.LATENCY, rel=1e-3)


squares_triton = module_fixture("tensor_parallel.squares_triton")
FACTORS = {"alpha": 0.8260958358, "beta": -0.263842373, "delta": -2.367149489}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (5, 15), (7, 33), (16, 128), (37, 8296)])
def test_diagonal_is_that_of_float64_rounded_once(squares_triton, device, dtype, rows, n) -> None:
    """On every rank's diagonal, of more columns than a block has, and nowhere else."""
    made = torch.Generator().manual_seed(n)
    unit = torch.finfo(dtype).eps / 2
    if device.type == "cpu" and dtype == torch.bfloat16:
        unit *= 2  # the interpreter truncates
    world = n // rows
    for rank in sorted({0, world // 2, world - 1}):
        # As in an iteration: squares of rows add up to about -delta / alpha.
        M = (torch.randn(rows, n, generator=made) * (3 / n) ** 0.5).to(dtype).to(device)
        C = torch.randn(rows, n, generator=made).to(dtype).to(device)
        out = torch.full_like(C, 3.0)
        added, written = (x.diagonal(offset=rank * rows) for x in (C, out))
        squares_triton.square_diagonal(M, added, written, **FACTORS)
        exact = FACTORS["alpha"] * M.double().square().sum(1) + FACTORS["delta"]
        exact += FACTORS["beta"] * added.double()
        assert ((written.double() - exact).abs() <= 1.01 * unit * exact.abs() + 1e-6).all()
        written.fill_(3.0)
        assert (out == 3.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 5), (7, 8195)])
@pytest.mark.parametrize("turned", [False, True])
def test_sum_is_that_of_float64(squares_triton, device, dtype, shape, turned) -> None:
    made = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=made).to(dtype).to(device)
    x = x.t() if turned else x
    found = squares_triton.sum_of_squares(x)
    assert found.shape == () and found.dtype == torch.float64
    torch.testing.assert_close(found, x.double().square().sum(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [1e-42, 1e30, torch.nan, torch.inf])
def test_sum_has_the_range_of_float64(squares_triton, device, value: float) -> None:
    x = torch.full((3, 50), value, device=device)
    expected = x.double().square().sum()
    torch.testing.assert_close(squares_triton.sum_of_squares(x), expected, equal_nan=True)
