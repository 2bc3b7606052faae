"""adamw on every path: bit for bit the reference, whatever the list, and torch's own AdamW.

Its averages, and those of momentum and apply_update, hold at any weight.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ._tensors import DTYPES, LAYOUTS, SHAPES, assert_same, copies, draw
from .test_apply_update import MODES, rounding_options

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def kernels(submodule):
    return submodule("kernels")


@pytest.fixture(scope="module")
def module(submodule):
    return submodule("kernels.step.adamw")


@pytest.fixture(scope="module")
def expect(module):
    """The reference on CPU copies of all lists and residuals."""

    def call(lists, residuals=None, rounding=None, **options):
        lists = [copies(tensors) for tensors in lists]
        residuals = None if residuals is None else copies(residuals)
        if rounding is not None:
            rounding = module.StochasticRounding(
                rounding.seed, rounding.step.cpu(), rounding.parameter, rounding.offset
            )
        options = {**OPTIONS, **options}
        module._reference(*lists, residuals=residuals, rounding=rounding, **options)
        return lists, residuals

    return call


def draw_lists(shapes, device, dtypes=torch.float32, grad_dtypes=torch.float32, layout="plain"):
    """params, grads, exp_avgs, exp_avg_sqs, steps; entry k has made k steps."""
    options = {"layout": layout, "device": device}
    return [
        draw(shapes, dtypes, seed=0, **options),
        draw(shapes, grad_dtypes, seed=1, **options),
        draw(shapes, torch.float32, seed=2, **options),
        draw(shapes, torch.float32, seed=3, positive=True, **options),
        [torch.tensor(float(k % 1000), device=device) for k in range(len(shapes))],
    ]


def assert_same_lists(lists, expected):
    for ours, theirs in zip(lists, expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_same_bits_as_the_reference(kernels, expect, device, dtypes, layout, mode):
    lists = draw_lists(SHAPES, device, *dtypes, layout)
    options = rounding_options(kernels, mode, lists[0], layout=layout)
    expected, kept = expect(lists, **options)
    kernels.adamw(*lists, **OPTIONS, **options)
    assert_same_lists(lists, expected)
    if mode == "residual":
        assert_same(options["residuals"], kept)


@pytest.mark.parametrize("mode", MODES)
def test_one_list_of_every_dtype_and_layout(kernels, expect, device, mode):
    lists = draw_lists(SHAPES * 5, device, DTYPES, (*DTYPES, torch.float16))
    layouts = itertools.cycle(LAYOUTS)
    for number in range(4):
        next(layouts)
        lists[number] = [LAYOUTS[next(layouts)](x) for x in lists[number]]
    options = rounding_options(kernels, mode, lists[0])
    expected, _ = expect(lists, **options)
    kernels.adamw(*lists, **OPTIONS, **options)
    assert_same_lists(lists, expected)


def test_four_hundred_tensors(kernels, expect, device):
    shapes = [((k * 7919) % 3000 + 1,) for k in range(400)] + [(0,)] * 7
    lists = draw_lists(shapes, device, DTYPES, torch.bfloat16)
    expected, _ = expect(lists)
    kernels.adamw(*lists, **OPTIONS)
    assert_same_lists(lists, expected)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.5, 0.9999), (0.95, 0.999)], ids=str)
def test_bias_correction_at_any_step(kernels, expect, device, betas):
    """First steps and the largest step that float32 counts exactly."""
    lists = draw_lists([(9,)] * 5, device)
    lists[4] = [torch.tensor(float(step), device=device) for step in (0, 1, 2, 999, 2**24 - 2)]
    expected, _ = expect(lists, betas=betas)
    kernels.adamw(*lists, **{**OPTIONS, "betas": betas})
    assert_same_lists(lists, expected)


def test_scalars_on_the_device(kernels, expect, device):
    """lr, eps and decay give the bits of the same numbers; tensor betas have float32's digits."""
    lists = draw_lists(SHAPES, device, DTYPES)
    options = {name: torch.tensor(OPTIONS[name]) for name in ("lr", "eps", "weight_decay")}
    options["betas"] = tuple(torch.tensor(beta) for beta in OPTIONS["betas"])
    expected, _ = expect(lists, **options)
    plain, _ = expect(lists, betas=options["betas"])
    on_device = {name: options[name].to(device) for name in ("lr", "eps", "weight_decay")}
    on_device["betas"] = tuple(beta.to(device) for beta in options["betas"])
    kernels.adamw(*lists, **on_device)
    assert_same_lists(lists, expected)
    assert_same_lists(plain, expected)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_nan_and_inf_propagate(kernels, expect, device, bad):
    lists = draw_lists([(300, 5), (7,), (64,)], device, DTYPES)
    for grad in lists[1]:
        grad.view(-1)[3] = bad
    expected, _ = expect(lists)
    kernels.adamw(*lists, **OPTIONS)
    assert_same_lists(lists, expected)
    assert all((~p.isfinite()).sum() == 1 for p in lists[0])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_list(kernels, expect, device, data):
    count = data.draw(st.integers(1, 12))
    shapes = [tuple(data.draw(st.lists(st.integers(0, 40), max_size=3))) for _ in range(count)]
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    lists = draw_lists(shapes, device, DTYPES, DTYPES[::-1], layout)
    options = rounding_options(kernels, data.draw(st.sampled_from(MODES)), lists[0])
    options["lr"] = data.draw(st.floats(0, 1))
    expected, _ = expect(lists, **options)
    kernels.adamw(*lists, **{**OPTIONS, **options})
    assert_same_lists(lists, expected)


def test_float64_takes_the_reference(kernels, device):
    lists = [[x.double() for x in tensors] for tensors in draw_lists([(9, 4)], device)[:4]]
    steps = [torch.zeros((), device=device)]
    grad, before = lists[1][0], lists[0][0].clone()
    lists[2][0].zero_(), lists[3][0].zero_()
    kernels.adamw(*lists, steps, **{**OPTIONS, "eps": 0.0, "weight_decay": 0.0})
    expected = before - 0.02 * grad.sign()  # the first corrected step
    torch.testing.assert_close(lists[0][0], expected, rtol=1e-13, atol=1e-15)


def test_empty_list(kernels):
    kernels.adamw([], [], [], [], [], **OPTIONS)
    with pytest.raises(ValueError, match="params is empty, but another list is not"):
        kernels.adamw([], [torch.zeros(1)], [], [], [], **OPTIONS)
    with pytest.raises(ValueError, match="betas must be two"):
        kernels.adamw(*draw_lists([(2,)], "cpu"), **{**OPTIONS, "betas": (0.9,)})


BREAKS = {
    "length": (lambda a: a[2].pop(), ValueError, "exp_avgs has 1 entries and params has 2"),
    "shape": (
        lambda a: a[3].__setitem__(1, a[3][1].mT),
        ValueError,
        r"exp_avg_sqs\[1\] has shape \(4, 6\), params\[1\] has \(6, 4\)",
    ),
    "state dtype": (
        lambda a: a[2].__setitem__(1, a[2][1].bfloat16()),
        TypeError,
        r"exp_avgs\[1\] must be one of .* got torch.bfloat16",
    ),
    "step": (
        lambda a: a[4].__setitem__(1, a[4][1].long()),
        TypeError,
        r"steps\[1\] must be a float32 tensor",
    ),
    "steps": (
        lambda a: a[4].__setitem__(1, a[4][1].expand(2).clone()),
        ValueError,
        r"steps\[1\] must have one element",
    ),
    "expanded": (
        lambda a: a[0].__setitem__(1, a[0][1][:1].expand(6, 4)),
        ValueError,
        r"params\[1\] is expanded",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_errors_say_what_and_write_nothing(kernels, device, case):
    edit, error, message = BREAKS[case]
    lists = draw_lists([(6, 4), (6, 4)], device)
    kept = [copies(tensors) for tensors in lists]
    first = [tensors[0] for tensors in lists]
    edit(lists)
    with pytest.raises(error, match=message):
        kernels.adamw(*lists, **OPTIONS)
    assert_same(first, [tensors[0] for tensors in kept])


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(ops, device, mode):
    lists = draw_lists([(6, 4), (3, 2)], device, (torch.float32, torch.bfloat16))
    one = torch.ones((), device=device)
    scalars = (0.0, one * 0.1, 0.9, None, 0.95, None, 1e-8, None, 0.1, None)
    nothing = [torch.zeros(s, dtype=torch.int16, device=device) for s in ((0,), (3, 2))]
    residuals = nothing if mode == "residual" else []
    ids = [0, 1] if mode == "stochastic" else []
    tail = (residuals, 3, one if mode == "stochastic" else None, ids, ids)
    torch.library.opcheck(ops.adamw.default, (*lists, *scalars, *tail))


def test_compiles_without_a_graph_break(kernels, device):
    lists = draw_lists([(6, 4)], device)
    expected = [copies(tensors, device) for tensors in lists]
    kernels.adamw(*expected, **OPTIONS)

    def step(lists, lr):
        kernels.adamw(*lists, **{**OPTIONS, "lr": lr})
        return lists[0][0] + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    result = compiled(lists, torch.full((), 0.02, device=device))
    assert_same([result], [expected[0][0] + 1])


def test_meta_and_explain(opt, kernels):
    kernels.adamw(*draw_lists([(6, 4)], "meta"), **OPTIONS)
    assert opt.explain("adamw", device="xpu").startswith("reference: the loaded variant has no")


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


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("beta", BETAS)
def test_adamw_keeps_small_values(kernels, device, beta, kind):
    """Of a beta in a tensor 1 - beta is that of the float32 number."""
    given = GIVEN.clone()
    if kind == "tensor":
        beta = torch.tensor(beta, dtype=torch.float32).item()
    passed = torch.tensor(beta, device=device) if kind == "tensor" else beta
    first, second = adamw_averages(kernels, OLD, given, (passed, passed), device)
    assert_averages(first, OLD, given, beta)
    assert_averages(second, OLD * OLD, given * given, beta)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_adamw_without_memory_takes_the_gradient(kernels, device, kind):
    """beta = 0: the averages are the gradient and its square, bit for bit."""
    beta = torch.zeros((), device=device) if kind == "tensor" else 0.0
    found = adamw_averages(kernels, OLD, GIVEN, (beta, beta), device)
    torch.testing.assert_close(found, (GIVEN, GIVEN * GIVEN), rtol=0, atol=0)


def test_adamw_on_the_reference_path(kernels, device):
    """float64 parameters over float64 averages: the same form in plain torch."""
    old, given = OLD.double(), GIVEN.double()
    first, second = adamw_averages(kernels, old, given, (0.0, 0.0), device)
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
    kernels.apply_update(
        [torch.zeros_like(updates)],
        [updates],
        lr=0.0,
        factors=[1.0],
        weight_decay=0.0,
        second_moments=[second],
        beta2=beta2,
    )
    expected = exact(old, given.double().square() / 2, beta2)
    found = second.flatten().cpu().double()
    assert ((found - expected).abs() <= (ROUNDINGS + 2 * 2.0**-24) * expected).all()
