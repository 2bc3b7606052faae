"""normalize on every path: rounded once in any range, one answer per matrix, a clean frame."""

import pytest
import torch

from .._compare import assert_all_same_bits, assert_same_bits
from ..conftest import module_fixture
from ._products import (
    DTYPES,
    PATTERNS,
    PREFACTOR,
    assert_rounded_once,
    draw,
    exact_norms,
    framed,
    laid_out,
)

pytestmark = pytest.mark.gpu

norm_factors = module_fixture("kernels.products.normalize", "norm_factors")
reference_crop = module_fixture("reference.orthogonalize", "crop")


def assert_factors(norm_factors, x: torch.Tensor, patterns: tuple[str, ...], **options) -> None:
    """Factors and their roots, of x in any layout."""
    expected = 1 / (PREFACTOR * torch.linalg.matrix_norm(x.double()))
    for view in (x, *(laid_out(x, pattern) for pattern in patterns)):
        factors, roots = norm_factors(view, PREFACTOR, **options)
        assert factors.dtype == roots.dtype == torch.float32
        assert torch.allclose(factors.double(), expected, rtol=2e-7, atol=0), x.shape
        assert torch.allclose(roots.double(), expected.sqrt(), rtol=2e-7, atol=0), x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((3, 1, 1), (5, 130, 130), (2, 1025, 63), (0, 4, 4)), ids=str)
def test_factors_and_roots(norm_factors, device, shape, dtype):
    x = draw(*shape, dtype=torch.float32, device=device).to(dtype)
    if len(x):
        x[0, 0, 0] = 3.0
    assert_factors(norm_factors, x, ("transposed", "shifted"))


def test_zero_inf_and_nan(norm_factors, device):
    x = draw(4, 20, 30, dtype=torch.float32, device=device)
    x[0] = 0
    x[1, 3, 4] = torch.inf
    x[2, 5, 6] = torch.nan
    for values in norm_factors(x):
        assert values[0] == 0
        assert values[1:3].isnan().all() and values[3].isfinite()
    tiny = norm_factors(torch.full((1, 2, 2), 1e-42, device=device))[1]
    assert tiny.item() == pytest.approx((2e-42) ** -0.5, rel=1e-2)


SYMMETRIC_SIDES = (1, 64, 128, 129, 132, 260, 515, 1025)


def draw_symmetric(batch: int, side: int, dtype: torch.dtype, device) -> torch.Tensor:
    x = draw(batch, side, side, dtype=torch.float32, device=device)
    return (x.triu() + x.triu(1).mT).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_symmetric_matrices(norm_factors, device, dtype):
    for side in SYMMETRIC_SIDES:
        x = draw_symmetric(3, side, dtype, device)
        assert_factors(norm_factors, x, ("transposed", "padded", "shifted"), symmetric=True)
        alone = norm_factors(x[1:2], PREFACTOR, symmetric=True)
        assert_same_bits(alone[0], norm_factors(x, PREFACTOR, symmetric=True)[0][1:2])


@pytest.mark.parametrize("place", ((0, 0), (3, 3), (7, 130), (0, 514), (514, 514)), ids=str)
def test_every_element_of_the_upper_triangle_counts(norm_factors, device, place):
    x = torch.zeros(1, 515, 515, dtype=torch.float16, device=device)
    x[0, place[0], place[1]] = x[0, place[1], place[0]] = 2.0
    expected = 0.5 if place[0] == place[1] else 0.125**0.5
    assert norm_factors(x, symmetric=True)[0].item() == pytest.approx(expected, rel=1e-6)
    x[0, place[0], place[1]] = x[0, place[1], place[0]] = torch.nan
    assert norm_factors(x, symmetric=True)[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_below_the_diagonal_goes_unread(norm_factors, device, dtype):
    x = draw_symmetric(2, 1024, dtype, device)
    expected = norm_factors(x, symmetric=True)
    x.masked_fill_(torch.ones(1024, 1024, device=device).tril(-1).bool(), torch.nan)
    assert_all_same_bits(norm_factors(x, symmetric=True), expected)


def test_opcheck(ops, device):
    x = torch.randn(3, 8, 12, device=device)
    arguments = (x, *torch.empty(2, 3, device=device), 1.5)
    torch.library.opcheck(ops.norm_factors, arguments)
    torch.library.opcheck(ops.norm_factors, (x[:, :, :8], *arguments[1:], True))
    out = torch.empty(4, 16, 16, device=device)
    torch.library.opcheck(ops.normalize.default, ([x[:1], x[1:]], out, 1.5))


@pytest.fixture(scope="session")
def normalize(ops):
    """`normalize(pieces, dtype, more)`: the compiled op into a frame of NaN."""

    def call(pieces, dtype=torch.float16, more=(0, 0, 0)) -> torch.Tensor:
        pieces = [pieces] if isinstance(pieces, torch.Tensor) else pieces
        out = framed(pieces, dtype, more)
        ops.normalize(pieces, out, PREFACTOR)
        return out

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_finite_range(normalize, device, dtype):
    """Squares that leave float32, norms beyond its largest number, subnormal numbers."""
    x = draw(6, 20, 40, dtype=torch.float32, device=device).clamp(-3, 3)
    x[0] *= 1e-45
    x[1] *= 1e38
    x[2] *= 1e-20
    x[3] *= 1e20
    x[4] = 0
    x[4, 19, 39] = 1e-45
    x[5] = 3.4e38
    assert (x[0] != 0).any()
    assert_rounded_once(normalize(x, dtype), x)


def test_nothing_to_read(normalize, device):
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x = torch.empty(shape, device=device)
        out = normalize(x, torch.float16, (2, 5, 9))
        assert (out == 0).all()
        assert normalize(x, torch.float16).numel() == 0


SIDES = (1, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257)


@pytest.mark.parametrize("rows", SIDES)
def test_odd_sizes(normalize, device, rows):
    for k, cols in enumerate(SIDES):
        source, target = DTYPES[k % 3], DTYPES[(k + rows) % 3]
        x = draw(3, rows, cols, dtype=source, device=device, seed=k)
        out = normalize(x, target, (k % 4, 65 * (k % 3), 65 * (k % 5)))
        assert_rounded_once(out[:3, :rows, :cols], x)
        out[:3, :rows, :cols] = 0
        assert (out == 0).all()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_layouts_give_the_same_bits(normalize, device, source, pattern):
    for rows, cols in ((257, 129), (128, 256), (8, 1000), (1000, 8), (1, 4097), (4097, 1)):
        x = draw(2, rows, cols, dtype=source, device=device)
        expected = normalize(x, torch.float32)
        assert_same_bits(normalize(laid_out(x, pattern), torch.float32), expected)


@pytest.mark.parametrize("shape", ((2048, 2048), (4096, 14336), (4097, 1023)), ids=str)
def test_big_matrices(normalize, device, shape):
    x = draw(1, *shape, dtype=torch.float32, device=device)
    out = normalize(x)
    assert_rounded_once(out, x)
    for pattern in ("transposed", "shifted"):
        assert_same_bits(normalize(laid_out(x, pattern)), out)
    assert_same_bits(normalize(x), out)


def test_more_pieces_than_a_launch_takes(normalize, device):
    x = draw(200, 20, 44, dtype=torch.float32, device=device)
    pieces = [m for k in range(200) for m in (x[k : k + 1], x[:0])]
    out = normalize(pieces, torch.float16, (3, 0, 4))
    assert_same_bits(out[:200, :, :44], normalize(x))
    assert (out[200:] == 0).all() and (out[:, :, 44:] == 0).all()


def test_batches_beyond_two_to_the_31_elements(normalize, device):
    x = torch.ones(520, 2048, 2048, dtype=torch.bfloat16, device=device)
    last = draw(1, 2048, 2048, dtype=torch.bfloat16, device=device)
    x[-1:] = last
    assert x[:-1].numel() > 2**31
    out = normalize(x)
    assert_same_bits(out[-1:], normalize(last))
    one = normalize(x[:1])
    for first in range(0, 519, 40):
        assert (out[first : first + 40][: 519 - first] == one).all()


def test_strides_beyond_two_to_the_31_elements(normalize, device):
    stride = 2**25
    buffer = torch.zeros(69 * stride + 1024, dtype=torch.float16, device=device)
    x = draw(1, 70, 40, dtype=torch.float16, device=device)
    expected = normalize(x)
    view = buffer.as_strided((1, 70, 40), (0, stride, 1)).copy_(x)
    assert 69 * stride > 2**31
    assert_same_bits(normalize(view), expected)
    columns = buffer.as_strided((1, 40, 70), (0, 1, stride), 128).copy_(x.mT)
    assert_same_bits(normalize(columns.mT), expected)
    odd = buffer.as_strided((1, 70, 40), (0, stride, 3), 515).copy_(x)
    assert_same_bits(normalize(odd), expected)


def test_a_matrix_beyond_two_to_the_31_elements(normalize, device):
    rows, cols = 2**16 + 8, 2**15 + 8
    x = torch.zeros(1, rows, cols, dtype=torch.float16, device=device)
    corner = draw(1, 64, 64, dtype=torch.float16, device=device)
    x[:, -64:, -64:] = corner
    assert x.numel() > 2**31
    out = normalize(x)
    assert_rounded_once(out[:, -64:, -64:], corner)
    assert (out[:, :-64] == 0).all() and (out[:, :, :-64] == 0).all()


def test_any_finite_range_in_a_large_matrix(normalize, device):
    """Norms above float32's largest number, and squares far below its smallest."""
    for value in (3.4e38, 1e-45):
        x = torch.full((1, 2048, 2048), value, device=device)
        for dtype in DTYPES:
            torch.testing.assert_close(
                normalize(x, dtype).double(), exact_norms(x), rtol=torch.finfo(dtype).eps, atol=0
            )


def test_back_to_back_calls_do_not_meet(normalize, device):
    """Launches start early; neither the next call's sums nor its input may suffer."""
    x = draw(4, 512, 2048, dtype=torch.float32, device=device)
    expected = normalize(x)
    source, outs = torch.empty_like(x), []
    for k in range(50):
        source.copy_(x * 2.0**k)
        outs.append(normalize(source))
        source.fill_(torch.nan)
    for out in outs:
        assert_same_bits(out, expected)


@pytest.mark.parametrize("count", [0, 1, 5000, 1_000_003])
def test_zeros_for_later_calls(ops, device, count):
    x = draw(2, 33, 40, dtype=torch.float32, device=device)
    memory = torch.full((count + 8,), 7, device=device, dtype=torch.int32)
    ops.normalize([x], torch.empty_like(x), PREFACTOR, memory[3 : 3 + count])
    assert (memory[3 : 3 + count] == 0).all()
    assert (memory[:3] == 7).all() and (memory[3 + count :] == 7).all()


def test_calls_on_several_streams_at_once(normalize, device):
    """None has the device to itself, so its blocks need not all run at the same time."""
    x = draw(12, 1024, 2048, dtype=torch.float32, device=device)
    large = draw(1, 4096, 6144, dtype=torch.float32, device=device)
    expected = [normalize(x), normalize(large)]
    streams, results = [torch.cuda.Stream(device) for _ in range(4)], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(4):
                results.append([normalize(x), normalize(large)])
    torch.cuda.synchronize(device)
    for pair in results:
        assert_all_same_bits(pair, expected)


def test_slices_of_an_iteration_are_normalized_by_the_op(submodule, device, monkeypatch):
    """The compiled op and torch's passes agree to the rounding of both."""
    batch = submodule("orthogonalize.slices")
    x = draw(5, 100, 203, dtype=torch.float32, device=device)
    pieces = [x[:2], laid_out(x[2:], "transposed")]
    calls = []
    ops = batch.ops

    class Counting:
        def normalize(self, *arguments):
            calls.append(arguments)
            return ops.normalize(*arguments)

    shape = batch.Slice(8, 104, 208)
    with monkeypatch.context() as patch:
        patch.setattr(batch, "ops", Counting())
        ours = batch.normalized(pieces, shape, torch.float16, PREFACTOR)
    assert len(calls) == 1
    assert_rounded_once(ours[:5, :100, :203], x)
    monkeypatch.setattr(batch, "runs_compiled", lambda *_: False)
    theirs = batch.normalized(pieces, shape, torch.float16, PREFACTOR)
    torch.testing.assert_close(ours, theirs, rtol=2.0**-9, atol=2.0**-24)
    assert (ours[5:] == 0).all() and (ours[:, 100:] == 0).all() and (ours[:, :, 203:] == 0).all()


# crop: every element once, nothing beside it, for any alignment of out's rows.
CROPPED = ((1, 1), (3, 7), (5, 8), (2, 9), (7, 63), (4, 257), (3, 1030), (2, 4099))


@pytest.fixture
def crop_ops(submodule, device):
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("machine code from compute capability 8.0 on")
    return submodule("_ops").ops


def numbered(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    """(3, R, C) of different values, more rows and columns than those."""
    shape = (3, rows + 2, -(-cols // 8) * 8)
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=device) % 2039 + 1).half().reshape(shape)


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("shape", CROPPED, ids=str)
def test_crop_at_every_alignment(crop_ops, submodule, reference_crop, device, shape, start) -> None:
    x, (r, c) = numbered(*shape, device), shape
    memory = torch.zeros(3 * (r * c + 5) + 32, device=device, dtype=torch.float16)
    out = memory.as_strided((3, r, c), (r * c + 5, c, 1), start)
    expected = memory.clone()
    expected.as_strided(out.shape, out.stride(), start).copy_(reference_crop(x, r, c))
    assert submodule("kernels.products.normalize").crop_serves(x, out)
    crop_ops.crop(x, out)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_crop_into_rows_that_lie_apart(crop_ops, device, dtype) -> None:
    x = numbered(20, 100, device).view(dtype)
    memory = torch.zeros(3, 21, 131, device=device, dtype=dtype)
    out = memory[:, :20, 3:102]
    crop_ops.crop(x, out)
    assert torch.equal(out.view(torch.int16), x[:, :20, :99].view(torch.int16))
    memory[:, :20, 3:102] = 0
    assert (memory == 0).all()


def test_who_is_served_by_crop(submodule, device) -> None:
    serves, x = submodule("kernels.products.normalize").crop_serves, numbered(20, 100, device)
    out = torch.empty(3, 20, 99, device=device, dtype=torch.float16)
    assert serves(x, out)
    assert not serves(x.float(), out.float())
    assert not serves(x, out.float())
    assert not serves(x, out.mT)
    assert not serves(x[:, :, :96], out[:, :, :90])
    assert not serves(x.cpu(), out.cpu())


def test_opcheck_of_crop(crop_ops, device) -> None:
    x = numbered(20, 100, device)
    out = torch.empty(3, 20, 99, device=device, dtype=torch.float16)
    torch.library.opcheck(
        crop_ops.crop.default, (x, out), test_utils=("test_schema", "test_faketensor")
    )
