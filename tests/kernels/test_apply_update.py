"""apply_update on every path: bit for bit the reference, whatever the list; its roundings."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import assert_error_at_most
from ._tensors import DTYPES, LAYOUTS, NARROW, SHAPES, assert_same, copies, draw

MODES = ("nearest", "stochastic", "residual")


@pytest.fixture(scope="module")
def kernels(submodule):
    return submodule("kernels")


@pytest.fixture(scope="module")
def module(submodule):
    return submodule("kernels.step.apply_update")


@pytest.fixture(scope="module")
def run(kernels):
    """`run(params, updates, **options)` with defaults; factors 0.1, 0.2, ... unless given."""

    def call(params, updates, **options):
        factors = [0.1 * (k + 1) for k in range(len(params))]
        options = {"lr": 0.02, "factors": factors, "weight_decay": 0.1, **options}
        kernels.apply_update(params, updates, **options)

    return call


@pytest.fixture(scope="module")
def expect(module):
    """The reference on CPU copies: (params, residuals, second moments) afterwards."""

    def call(params, updates, residuals=None, second_moments=None, rounding=None, **options):
        params, updates = copies(params), copies(updates)
        residuals = None if residuals is None else copies(residuals)
        second_moments = None if second_moments is None else copies(second_moments)
        if rounding is not None:
            rounding = module.StochasticRounding(
                rounding.seed, rounding.step.cpu(), rounding.parameter, rounding.offset
            )
        options = {
            "lr": 0.02,
            "factors": [0.1 * (k + 1) for k in range(len(params))],
            "weight_decay": 0.1,
            "shaped_decay": False,
            "cautious": False,
            "beta2": None,
            **options,
        }
        module._reference(
            params,
            updates,
            residuals=residuals,
            second_moments=second_moments,
            rounding=rounding,
            **options,
        )
        return params, residuals, second_moments

    return call


def rounding_options(kernels, mode, params, *, layout="plain", step=7):
    """Keyword arguments of a mode; offsets odd, even and beyond 2^33."""
    if mode == "stochastic":
        step = torch.tensor(step, device=params[0].device)
        offsets = [(2**33 + 13 if k % 3 == 2 else 5 * k) for k in range(len(params))]
        return {
            "rounding": kernels.StochasticRounding(
                0x1234_5678_9ABC_DEF0, step, list(range(len(params))), offsets
            )
        }
    if mode == "residual":
        generator = torch.Generator().manual_seed(9)
        drawn = [
            torch.randint(-4000, 4000, p.shape, generator=generator, dtype=torch.int16)
            if p.dtype in NARROW
            else None
            for p in params
        ]
        return {
            "residuals": [
                None if x is None else LAYOUTS[layout](x.to(params[0].device)) for x in drawn
            ]
        }
    return {}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_same_bits_as_the_reference(run, expect, kernels, device, dtypes, layout, mode):
    for cautious, shaped in itertools.product((False, True), (False, True)):
        params = draw(SHAPES, dtypes[0], seed=0, layout=layout, device=device)
        updates = draw(SHAPES, dtypes[1], seed=1, layout=layout, device=device)
        options = {"cautious": cautious, "shaped_decay": shaped}
        options |= rounding_options(kernels, mode, params, layout=layout)
        expected = expect(params, updates, **options)
        run(params, updates, **options)
        assert_same(params, expected[0])
        if mode == "residual":
            assert_same(options["residuals"], expected[1])


@pytest.mark.parametrize("mode", MODES)
def test_one_list_of_every_dtype_and_layout(run, expect, kernels, device, mode):
    shapes, layouts = SHAPES * 5, itertools.cycle(LAYOUTS)
    params = [LAYOUTS[next(layouts)](x) for x in draw(shapes, DTYPES, seed=0, device=device)]
    next(layouts)
    mixed = (*DTYPES, torch.float16)
    updates = [LAYOUTS[next(layouts)](x) for x in draw(shapes, mixed, seed=1, device=device)]
    options = rounding_options(kernels, mode, params)
    expected = expect(params, updates, **options)
    run(params, updates, **options)
    assert_same(params, expected[0])


def test_four_hundred_tensors(run, expect, device):
    shapes = [((k * 7919) % 3000 + 1,) for k in range(400)] + [(0,)] * 7
    params = draw(shapes, DTYPES, seed=0, device=device)
    updates = draw(shapes, torch.float16, seed=1, device=device)
    expected = expect(params, updates)
    run(params, updates)
    assert_same(params, expected[0])


def test_number_and_tensor_scalars_give_the_same_bits(run, device):
    params = draw(SHAPES, DTYPES, seed=0, device=device)
    updates = draw(SHAPES, torch.float16, seed=1, device=device)
    first, second, third = (copies(params, device) for _ in range(3))
    run(first, updates, lr=0.023, weight_decay=0.17)
    scalars = [torch.tensor(value) for value in (0.023, 0.17)]
    run(second, updates, lr=scalars[0], weight_decay=scalars[1])
    lr, decay = (x.double().to(device) for x in scalars)
    run(third, updates, lr=lr, weight_decay=decay)
    assert_same(second, first)
    assert_same(third, first)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("mode", MODES)
def test_nan_and_inf_propagate(run, expect, kernels, device, mode, bad):
    params = draw([(300, 5), (7,), (64,)], DTYPES, seed=0, device=device)
    updates = draw([(300, 5), (7,), (64,)], torch.float32, seed=1, device=device)
    for update in updates:
        update.view(-1)[3] = bad
    options = {"cautious": True, **rounding_options(kernels, mode, params)}
    expected = expect(params, updates, **options)
    run(params, updates, **options)
    assert_same(params, expected[0])
    assert all((~p.isfinite()).sum() == 1 for p in params)


MATRICES = ((20, 17), (17, 20), (3, 65, 64), (2, 130, 258), (1, 9), (2, 3, 64, 96), (0, 4, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variance_reduction(run, expect, device, dtype, layout):
    """Only the sums depend on their order: at most 258 + 130 float32 roundings on either side."""
    params = draw(MATRICES, torch.float32, seed=0, layout=layout, device=device)
    updates = draw(MATRICES, dtype, seed=1, layout=layout, device=device)
    for keep_rows in (True, False):
        shapes = [(*s[:-1], 1) if keep_rows else (*s[:-2], 1, s[-1]) for s in MATRICES]
        second = draw(shapes, torch.float32, seed=2, positive=True, device=device)
        moments = {"second_moments": second, "beta2": 0.9}
        expected = expect(params, updates, **moments)
        run(params, updates, **moments)
        for ours, theirs in zip(params, expected[0], strict=True):
            assert_error_at_most(ours.cpu(), theirs, 400 * 2.0**-24)
        for ours, theirs in zip(second, expected[2], strict=True):
            assert_error_at_most(ours.cpu(), theirs, 400 * 2.0**-24)


def test_variance_reduction_repeats_in_any_company(run, device):
    """A matrix gets the same bits alone, in a batch and among other entries."""
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
    """On a CPU the norm behind the scales is exact to float32's last bit, as in float64.

    From moments of 0 and with beta2 = 0 the new moments are the mean squares themselves.
    """
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


def test_zero_updates_with_second_moments_only_decay(run, device):
    params = draw([(8, 12)], torch.float32, seed=0, device=device)
    expected = params[0] - params[0] * torch.tensor(0.02).mul(0.1).to(device)
    moments = {"second_moments": [torch.zeros(1, 12, device=device)], "beta2": 0.9}
    run(params, [torch.zeros(8, 12, device=device)], **moments)
    assert_same(params, [expected])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_list(run, expect, kernels, device, data):
    count = data.draw(st.integers(1, 12))
    shapes = [tuple(data.draw(st.lists(st.integers(0, 40), max_size=3))) for _ in range(count)]
    layout = st.sampled_from(sorted(LAYOUTS))
    params = draw(shapes, DTYPES, seed=count, layout=data.draw(layout), device=device)
    updates = draw(shapes, DTYPES[::-1], seed=1, layout=data.draw(layout), device=device)
    options = rounding_options(kernels, data.draw(st.sampled_from(MODES)), params)
    options["lr"] = data.draw(st.floats(0, 1))
    expected = expect(params, updates, **options)
    run(params, updates, **options)
    assert_same(params, expected[0])


def test_float64_takes_the_reference(run, device):
    params = draw([(9, 4)], torch.float64, seed=0, device=device)
    updates = draw([(9, 4)], torch.float64, seed=1, device=device)
    expected = params[0] * (1 - 0.02 * 0.1) - 0.02 * 0.1 * updates[0]
    run(params, updates)
    torch.testing.assert_close(params[0], expected, rtol=1e-14, atol=1e-16)


def test_empty_list(kernels):
    kernels.apply_update([], [], lr=1.0, factors=[], weight_decay=0.0)
    with pytest.raises(ValueError, match="params is empty, but updates has 1"):
        kernels.apply_update([], [torch.zeros(1)], lr=1.0, factors=[], weight_decay=0.0)


def arguments(device):
    params = [torch.ones(6, 4, device=device), torch.ones(6, 4, device=device).bfloat16()]
    return {
        "params": params,
        "updates": [torch.ones(6, 4, device=device) for _ in range(2)],
        "lr": 0.1,
        "factors": [1.0, 1.0],
        "weight_decay": 0.0,
    }


def int16(*shape):
    return torch.zeros(shape, dtype=torch.int16)


BREAKS = {
    "updates": (
        lambda a, d: a["updates"].pop(),
        ValueError,
        "updates has 1 entries and params has 2",
    ),
    "factors": (lambda a, d: a["factors"].pop(), ValueError, "factors has 1 entries for 2"),
    "shape": (
        lambda a, d: a["updates"].__setitem__(1, torch.ones(4, 6, device=d)),
        ValueError,
        r"updates\[1\] has shape \(4, 6\)",
    ),
    "dtype": (
        lambda a, d: a["updates"].__setitem__(1, torch.ones(6, 4, device=d).long()),
        TypeError,
        r"updates\[1\] must be one of",
    ),
    "lr": (
        lambda a, d: a.update(lr=torch.ones(2, device=d)),
        ValueError,
        r"lr must be a number or a tensor of one element, got shape \(2,\)",
    ),
    "beta2": (
        lambda a, d: a.update(second_moments=[torch.ones(6, 1, device=d)] * 2),
        ValueError,
        "second_moments needs beta2",
    ),
    "moments": (
        lambda a, d: a.update(second_moments=[torch.ones(6, 2, device=d)] * 2, beta2=0.9),
        ValueError,
        r"second_moments\[0\] must be \(..., m, 1\) or \(..., 1, n\)",
    ),
    "residual dtype": (
        lambda a, d: a.update(residuals=[None, torch.zeros(6, 4, device=d)]),
        TypeError,
        r"residuals\[1\] must be int16, got torch.float32",
    ),
    "residual missing": (
        lambda a, d: a.update(residuals=[None, None]),
        ValueError,
        r"residuals\[1\] is None, but its parameter is torch.bfloat16",
    ),
    "residual of float32": (
        lambda a, d: a.update(residuals=[int16(6, 4).to(d), int16(6, 4).to(d)]),
        ValueError,
        r"residuals\[0\] must be None: a torch.float32 parameter loses nothing",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_errors_say_what_and_write_nothing(kernels, device, case):
    edit, error, message = BREAKS[case]
    given_arguments = arguments(device)
    params = list(given_arguments["params"])
    edit(given_arguments, device)
    with pytest.raises(error, match=message):
        kernels.apply_update(**given_arguments)
    assert all((p == 1).all() for p in params)


def test_errors_of_rounding(kernels, device):
    def broken(**changes):
        options = {"seed": 0, "step": torch.zeros((), device=device)}
        options |= {"parameter": [0, 1], "offset": [0, 0], **changes}
        return kernels.StochasticRounding(**options)

    for rounding, error, message in (
        (broken(parameter=[0]), ValueError, "rounding.parameter has 1 entries for 2"),
        (broken(offset=[0]), ValueError, "rounding.offset has 1 entries for 2"),
        (broken(step=torch.zeros((), dtype=torch.int32)), TypeError, "rounding.step must be"),
        (broken(step=torch.zeros(2, device=device)), ValueError, "must have one element"),
    ):
        with pytest.raises(error, match=message):
            kernels.apply_update(**arguments(device), rounding=rounding)
    both = [None, int16(6, 4).to(device)]
    with pytest.raises(ValueError, match="residuals or rounding, not both"):
        kernels.apply_update(**arguments(device), residuals=both, rounding=broken())


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(ops, device, mode):
    params = [torch.ones(6, 4, device=device), torch.ones(3, 2, device=device).bfloat16()]
    updates = [torch.ones_like(p, dtype=torch.float16) for p in params]
    residuals = [int16(0).to(device), int16(3, 2).to(device)] if mode == "residual" else []
    step = torch.ones((), device=device) if mode == "stochastic" else None
    second = [torch.ones(6, 1, device=device), torch.ones(1, 2, device=device)]
    ids = [0, 1] if mode == "stochastic" else []
    scalars = (0.0, torch.ones((), device=device), [1.0, 1.0], 0.1, None, False, True)
    tail = (second, 0.9, residuals, 3, step, ids, ids)
    torch.library.opcheck(ops.apply_update.default, (params, updates, *scalars, *tail))


def test_compiles_without_a_graph_break(kernels, device):
    params = [torch.ones(6, 4, device=device)]

    def step(params, lr):
        updates = [torch.full_like(p, 2.0) for p in params]
        kernels.apply_update(params, updates, lr=lr, factors=[0.5], weight_decay=0.0)
        return params[0] + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert (compiled(params, torch.full((), 0.25, device=device)) == 1.75).all()


def test_meta_and_explain(opt, kernels):
    kernels.apply_update(**arguments("meta"))
    assert opt.explain("apply_update", device="xpu").startswith("reference: the loaded variant")
