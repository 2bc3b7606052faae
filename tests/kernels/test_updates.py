"""Updates on every path: averages at any weight, random rounding, kept residuals, rescaled rows."""

import itertools
import math

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits
from ..conftest import module_fixture
from ._tensors import DTYPES, LAYOUTS, NARROW, assert_same, copies, draw
from .test_step_ops import AdamW, ApplyUpdate, draw_lists, stacked

rounding = module_fixture("reference.rounding")
rescaling = module_fixture("kernels.step.scale_rows")


@pytest.fixture(scope="module")
def op(submodule):
    return ApplyUpdate(submodule)


@pytest.fixture(scope="module")
def run(op):
    """`run(params, updates, **options)` with defaults; factors 0.1, 0.2, ... unless given."""
    return lambda *lists, **options: op.call(*lists, **{**op.options, **options})


MATRICES = ((20, 17), (17, 20), (3, 65, 64), (2, 130, 258), (1, 9), (2, 3, 64, 96), (0, 4, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variance_reduction(op, run, device, dtype, layout):
    """Only the sums depend on their order: at most 258 + 130 float32 roundings on either side.

    A 16-bit parameter may round to the other neighbour then.
    """
    neighbour = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    updates = draw(MATRICES, dtype, seed=1, layout=layout, device=device)
    for keep_rows, place, variant in itertools.product((True, False), (list, stacked), op.variants):
        params = draw(MATRICES, DTYPES, seed=0, layout=layout, device=device)
        shapes = [(*s[:-1], 1) if keep_rows else (*s[:-2], 1, s[-1]) for s in MATRICES]
        second = draw(shapes, torch.float32, seed=2, positive=True, device=device)
        options = {"beta2": 0.9, "lr": 1.0, **variant}
        expected, moments = [copies(params), copies(updates)], copies(second)
        op.expect(expected, **op.on_cpu(options), second_moments=moments)
        run(params, place(updates), second_moments=second, **options)
        for ours, theirs in zip((*params, *second), (*expected[0], *moments), strict=True):
            assert_error_at_most(ours.cpu(), theirs, 400 * 2.0**-24 + neighbour[ours.dtype])


def test_variance_reduction_repeats_in_any_company(run, device):
    updates = draw([(6, 70, 90)], torch.float16, seed=1, device=device)[0]
    params = draw([(6, 70, 90)], torch.float32, seed=0, device=device)[0]
    second = draw([(6, 1, 90)], torch.float32, seed=2, positive=True, device=device)[0]
    options = {"factors": [0.5], "beta2": 0.95}
    together, separate, listed = (params.clone() for _ in range(3))
    run([together], [updates], second_moments=[second.clone()], **options)
    for k in range(6):
        one = slice(k, k + 1)
        run([separate[one]], [updates[one]], second_moments=[second[one].clone()], **options)
    options["factors"] = [0.5] * 6
    run(list(listed), list(updates), second_moments=list(second.clone()), **options)
    assert_same([separate, listed], [together, together])


@pytest.mark.sees_defect(
    "a NaN second moment counts as the smallest",
    "second[i] < apply_update::kSmallest ? apply_update::kSmallest : second[i];",
    "second[i] > apply_update::kSmallest ? second[i] : apply_update::kSmallest;",
)
@pytest.mark.parametrize("kept", ((3, 12, 1), (3, 1, 9)), ids=str)
def test_a_nan_second_moment_stays_and_spreads_over_its_matrix(run, device, kept):
    """A moment that overflowed must show, not count as the smallest one."""
    params = draw([(3, 12, 9)], torch.float32, seed=0, device=device)
    second = draw([kept], torch.float32, seed=2, positive=True, device=device)
    second[0][1].view(-1)[4] = float("nan")
    updates = draw([(3, 12, 9)], torch.float32, seed=1, device=device)
    run(params, updates, second_moments=second, beta2=0.9)
    assert params[0][1].isnan().all() and params[0][[0, 2]].isfinite().all()
    expected = torch.zeros(kept, dtype=torch.bool)
    expected[1].view(-1)[4] = True
    assert torch.equal(second[0].isnan().cpu(), expected)


@pytest.mark.sees_defect(
    "mean squares are rounded to float32",
    "const double square = means[i] *",
    "const double square = static_cast<float>(means[i]) *",
)
def test_mean_squares_are_added_in_double_precision(run, device):
    """From moments of 0 with beta2 = 0 the new ones are the mean squares, exact on a CPU."""
    shape = (512, 2, 33)
    updates = draw([shape], torch.float32, seed=1, device=device)
    params, second = torch.zeros(shape, device=device), torch.zeros(512, 2, 1, device=device)
    options = {"lr": 1.0, "factors": [1.0], "weight_decay": 0.0}
    run([params], updates, second_moments=[second], beta2=0.0, **options)
    update = updates[0].cpu()
    squares = update.double().square().sum(-1, keepdim=True)
    moments = (squares / 33).float()
    scale = moments.double().sqrt().float().double().reciprocal().float()  # each rounded once
    scaled = (squares * scale.double().square()).sum(-2, keepdim=True)
    ratio = (squares.sum(-2, keepdim=True).sqrt() / scaled.sqrt()).float()
    expected = -(update * (scale * ratio))
    if device.type == "cpu":
        assert_same([second, params], [moments, expected])
    else:  # it adds float32 in a tree: at most 33 + 2 roundings
        assert_error_at_most(second.cpu(), moments, 35 * 2.0**-24)
        assert_error_at_most(params.cpu(), expected, 70 * 2.0**-24)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.5, 0.9999), (0.95, 0.999)], ids=str)
def test_bias_correction_at_any_step(submodule, device, betas):
    """First steps and the largest step that float32 counts exactly."""
    lists = draw_lists([(9,)] * 5, device)
    lists[4] = [torch.tensor(float(step), device=device) for step in (0, 1, 2, 999, 2**24 - 2)]
    AdamW(submodule).check(lists, betas=betas)


# A quotient below is off by four roundings of 2^-24: beta or 1 - beta, the change, its product and
# the sum; no change of numbers of one sign, weighted with at most 1/2, exceeds the result.
ROUNDINGS = 4 * 2.0**-24
BETAS = [0.0, 1e-12, 1e-3, 0.05, 0.3, 0.499, 0.5, 0.501, 0.7, 0.95, 0.999, 1 - 1e-7]
# Values and gradients of one sign over 60 binary orders, in all pairs: (G, G) each.
SCALES = torch.logspace(-9, 9, 37, dtype=torch.float64).float()
OLD, GIVEN = SCALES.repeat(37, 1), SCALES.repeat(37, 1).T.contiguous()


def adamw_averages(kernels, old, given, betas, device):
    """exp_avg and exp_avg_sq after a step on gradient `given` from `old` and `old` squared."""
    lists = [[x.clone().to(device)] for x in (old, given, old, old * old)]
    step = torch.ones((), device=device)
    options = {"lr": 0.0, "eps": 1.0, "weight_decay": 0.0}
    kernels.adamw(*lists, [step], betas=betas, **options)
    return lists[2][0].cpu(), lists[3][0].cpu()


def exact(old, given, beta):
    return beta * old.double() + (1 - beta) * given.double()


def assert_averages(found, old, given, beta):
    expected = exact(old, given, beta)
    assert ((found.double() - expected).abs() <= ROUNDINGS * expected).all()


@pytest.mark.parametrize("kind", ["number", "tensor", "float64"])
@pytest.mark.parametrize("beta", BETAS)
def test_adamw_keeps_small_values(kernels, device, beta, kind):
    """Of a beta in a tensor 1 - beta is that of the float32 number; float64 is the reference's."""
    dtype = torch.float64 if kind == "float64" else torch.float32
    old, given = OLD.to(dtype), GIVEN.to(dtype)
    if kind == "tensor":
        beta = torch.tensor(beta, dtype=torch.float32).item()
    passed = torch.tensor(beta, device=device) if kind == "tensor" else beta
    first, second = adamw_averages(kernels, old, given, (passed, passed), device)
    assert_averages(first, old, given, beta)
    assert_averages(second, old * old, given * given, beta)
    if beta == 0:
        torch.testing.assert_close((first, second), (given, given * given), rtol=0, atol=0)


def test_an_average_of_equal_numbers_is_that_number(kernels, device):
    """beta + (1 - beta) of rounded betas is not 1: beta v + (1 - beta) v would drift by it."""
    for beta in BETAS:
        first, second = adamw_averages(kernels, GIVEN, GIVEN, (beta, beta), device)
        torch.testing.assert_close((first, second), (GIVEN, GIVEN * GIVEN), rtol=0, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mu", BETAS)
def test_momentum_keeps_small_values(kernels, device, mu, nesterov):
    """The buffer is an average of gradients, the direction one of the buffer and the gradient."""
    buffer, out = OLD.clone().to(device), torch.empty_like(OLD, device=device)
    options = {"mu": mu, "nesterov": nesterov, "form": "ema"}
    kernels.momentum([GIVEN.to(device)], [buffer], [out], **options)
    assert_averages(buffer.cpu(), OLD, GIVEN, mu)
    if nesterov:
        assert_averages(out.cpu(), buffer.cpu(), GIVEN, mu)
    else:
        torch.testing.assert_close(out, buffer, rtol=0, atol=0)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("beta2", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_moments_keep_small_values(kernels, device, beta2, axis, dtype):
    """Rows (columns) of one nonzero element x: their mean square is x^2 / 2, rounded twice."""
    old, given = (SCALES.repeat(37), SCALES.repeat_interleave(37))
    updates = torch.stack((given, torch.zeros_like(given)), dim=-1)  # (G G, 2)
    second = old[:, None].clone()  # (G G, 1)
    if axis == -2:
        updates, second = updates.mT.contiguous(), second.mT.contiguous()
    updates, second = updates.to(device, dtype), second.to(device, dtype)
    options = {"lr": 0.0, "factors": [1.0], "weight_decay": 0.0, "beta2": beta2}
    params = [torch.zeros_like(updates)]
    kernels.apply_update(params, [updates], second_moments=[second], **options)
    expected = exact(old, given.double().square() / 2, beta2)
    found = second.flatten().cpu().double()
    assert ((found - expected).abs() <= (ROUNDINGS + 2 * 2.0**-24) * expected).all()


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PHILOX = {  # counter and key, and the words they give
    ((0,) * 4, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ((2**32 - 1,) * 4, 2**64 - 1): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    (PI, 0x299F31D0_A4093822): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}


@pytest.mark.parametrize(("counter", "key"), PHILOX)
def test_philox_is_random123s(rounding, counter, key):
    words = rounding.philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(word.item() for word in words) == PHILOX[counter, key]


def rounded(kernels, x, dtype, *, seed=0, step=0, parameter=0, offset=0):
    """Stochastic rounding of x alone: p = 0, u = -x, rate 1."""
    param = torch.zeros(x.shape, dtype=dtype, device=x.device)
    key = kernels.StochasticRounding(
        seed, torch.tensor(step, device=x.device), [parameter], [offset]
    )
    kernels.apply_update([param], [-x], lr=1.0, factors=[1.0], weight_decay=0.0, rounding=key)
    return param


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_result_is_a_neighbour_and_exact_values_stay(kernels, device, dtype):
    x = draw([(20000,)], torch.float32, seed=0, device=device)[0]
    x = x * torch.exp2(torch.arange(20000, device=device) % 34 - 26.0)
    result = rounded(kernels, x, dtype)
    nearest = x.to(dtype)
    steps = result.abs().view(torch.int16).int() - nearest.abs().view(torch.int16).int()
    assert steps.abs().max() == 1
    assert_same([rounded(kernels, nearest.float(), dtype).abs()], [nearest.abs()])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("value", [0.3, -0.7001, 1.0 + 2**-12, 1.5e-5, 65000.7])
def test_mean_is_the_value(kernels, device, dtype, value):
    """100 steps of 10,000 elements: within 5 standard deviations of the mean of a million draws."""
    x = torch.full((10000,), value, device=device)
    total, squares = 0.0, 0.0
    for step in range(100):
        error = rounded(kernels, x, dtype, step=step).double() - x.double()
        total += error.sum().item()
        squares += error.square().sum().item()
    deviation = math.sqrt(max(squares / 1e6 - (total / 1e6) ** 2, 0.0))
    assert deviation > 0
    assert abs(total / 1e6) <= 5 * deviation / 1e3


def test_bfloat16_residual_is_exact(rounding):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200000,), generator=generator)
    bits[:4] = torch.tensor([0, 0x00018000, 0x3F808000, 0x3F818000])  # zero, ties
    x = bits.int().view(torch.float32)
    x = x[x.isfinite()]
    param, residual = rounding.split(x, torch.bfloat16)
    assert_same([rounding.join(param, residual)], [x])
    error = (param.double() - x.double()).abs()
    assert ((error <= (x.bfloat16().double() - x.double()).abs()) | param.isinf()).all()


def test_float16_residual_is_exact_from_two_to_the_minus_17(rounding):
    generator = torch.Generator().manual_seed(0)
    exponent = torch.randint(-40, 15, (200000,), generator=generator)
    x = torch.exp2(exponent.float()) * (1 + torch.rand(200000, generator=generator))
    x[:4096] = (torch.arange(4096) + 0.5) * 2.0**-24  # ties between small float16 numbers
    x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    param, residual = rounding.split(x, torch.float16)
    back = rounding.join(param, residual)
    exact = x.abs() >= 2.0**-17
    assert_same([back[exact]], [x[exact]])
    assert (back - x).abs().max() <= 2.0**-41
    assert (param.double() - x.double()).abs().max() <= 16  # half of the spacing at 2^15


STACKS = [(1, 1, 1), (3, 5, 7), (2, 8, 64), (2, 3, 2056), (1, 130, 1030), (4, 1, 3), (2, 600, 2)]
# float32: norms and products are rounded once each; 16 bits: their own rounding besides.
BUDGETS = {torch.float32: 5e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float64: 5e-15}


def drawn(shape, dtype, device, seed: int = 0) -> torch.Tensor:
    """Rows of sizes from 1 down to 1e-3."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * torch.logspace(0, -3, shape[1])[:, None]).to(device, dtype)


def rows_of_norm_one(x: torch.Tensor) -> torch.Tensor:
    usual = x.double().norm(dim=(1, 2), keepdim=True) / math.sqrt(x.shape[1])
    return x.double() / x.double().norm(dim=-1, keepdim=True).maximum(1e-6 * usual)


def of_a_polar_factors_norm(x: torch.Tensor) -> torch.Tensor:
    target = math.sqrt(min(x.shape[1:]))
    return x.double() * target / x.double().norm(dim=(1, 2), keepdim=True)


FORMULAS = {"equilibrate_rows": rows_of_norm_one, "renormalize": of_a_polar_factors_norm}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("shape", STACKS, ids=str)
def test_the_formula(rescaling, device, shape, dtype, name) -> None:
    x = drawn(shape, dtype, device)
    expected = FORMULAS[name](x)
    getattr(rescaling, name)(x)
    assert_error_at_most(x, expected, BUDGETS[dtype])


@pytest.mark.parametrize("name", FORMULAS)
def test_memory_around_stays_as_it_was(rescaling, device, name) -> None:
    """A batch that starts on no boundary of 16 bytes, between other numbers."""
    memory = drawn((1, 1, 500), torch.float32, device).flatten()
    before = memory.clone()
    x = memory[3 : 3 + 2 * 10 * 12].view(2, 10, 12)
    expected = FORMULAS[name](x)
    getattr(rescaling, name)(x)
    assert_error_at_most(x, expected, 5e-7)
    assert_same_bits(memory[:3], before[:3])
    assert_same_bits(memory[243:], before[243:])


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_rows_of_rounding_noise_grow_no_further_than_a_millionth(rescaling, device, dtype) -> None:
    x = drawn((2, 40, 30), torch.float64, device) * 100
    x[0, 20:23] *= 1e-5
    x[1, 3] *= 1e-8
    x = x.to(dtype)
    expected = rows_of_norm_one(x)
    rescaling.equilibrate_rows(x)
    assert_error_at_most(x, expected, BUDGETS[dtype])
    norms = x.double().norm(dim=-1)
    assert (norms[1, 3] < 0.1) and (norms[1, 4:] > 0.99).all() and (norms[0, :20] > 0.99).all()


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_zeros_nan_and_inf(rescaling, device, name, dtype) -> None:
    x = drawn((6, 6, 10), torch.float32, device).to(dtype)
    x[0, 2], x[1] = 0.0, 0.0
    x[2, 1, 3], x[3, 4, 0], x[4, 5, 9], x[4, 0] = torch.nan, torch.inf, -torch.inf, 0.0
    getattr(rescaling, name)(x)
    assert (x[0, 2] == 0).all() and (x[1] == 0).all() and x[[0, 5]].isfinite().all()
    assert x[2:5].isnan().all()


@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_whose_factor_no_float32_holds(rescaling, device, name) -> None:
    """Subnormal numbers grow by the largest float32, zeros stay."""
    x = torch.zeros(1, 3, 4, device=device)
    x[0, 0, 1] = 2.0**-149
    getattr(rescaling, name)(x)
    assert x[0, 0, 1] > 0 and x.isfinite().all() and x.count_nonzero() == 1


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_to_scale(rescaling, device, shape) -> None:
    x = torch.empty(shape, device=device)
    rescaling.equilibrate_rows(x)
    rescaling.renormalize(x)


@pytest.mark.gpu
def test_the_op_is_registered_as_it_works(submodule, device) -> None:
    ops = submodule("_ops").ops
    x = drawn((2, 3, 8), torch.float32, device)
    for to_norm_one in (False, True):
        torch.library.opcheck(ops.scale_rows, (x, torch.ones(2, device=device), to_norm_one))
