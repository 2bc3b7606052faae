"""adamw on every path: bit for bit the reference, whatever the list, and torch's own AdamW.

Its averages, and those of momentum and apply_update, hold at any weight.
"""

from __future__ import annotations

import pytest
import torch

from ._tensors import DTYPES, SHAPES, assert_same, copies
from .test_step_ops import ADAMW as OPTIONS
from .test_step_ops import AdamW, draw_lists


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.5, 0.9999), (0.95, 0.999)], ids=str)
def test_bias_correction_at_any_step(submodule, device, betas):
    """First steps and the largest step that float32 counts exactly."""
    lists = draw_lists([(9,)] * 5, device)
    lists[4] = [torch.tensor(float(step), device=device) for step in (0, 1, 2, 999, 2**24 - 2)]
    AdamW(submodule).check(lists, betas=betas)


def test_scalars_on_the_device(submodule, device):
    """lr, eps and decay give the bits of the same numbers; tensor betas have float32's digits."""
    lists, op = draw_lists(SHAPES, device, DTYPES), AdamW(submodule)
    options = {name: torch.tensor(OPTIONS[name]) for name in ("lr", "eps", "weight_decay")}
    options["betas"] = tuple(torch.tensor(beta) for beta in OPTIONS["betas"])
    by_numbers, by_tensors = ([copies(tensors) for tensors in lists] for _ in range(2))
    op.expect(by_numbers, **op.on_cpu({"betas": options["betas"]}))
    op.expect(by_tensors, **op.on_cpu(options))
    on_device = {name: options[name].to(device) for name in ("lr", "eps", "weight_decay")}
    on_device["betas"] = tuple(beta.to(device) for beta in options["betas"])
    op.call(*lists, **on_device)
    for ours, *expected in zip(lists, by_numbers, by_tensors, strict=True):
        assert all(assert_same(ours, one) is None for one in expected)


def test_float64_takes_the_reference(kernels, device):
    lists = [[x.double() for x in tensors] for tensors in draw_lists([(9, 4)], device)[:4]]
    steps = [torch.zeros((), device=device)]
    grad, before = lists[1][0], lists[0][0].clone()
    lists[2][0].zero_(), lists[3][0].zero_()
    kernels.adamw(*lists, steps, **{**OPTIONS, "eps": 0.0, "weight_decay": 0.0})
    expected = before - 0.02 * grad.sign()  # the first corrected step
    torch.testing.assert_close(lists[0][0], expected, rtol=1e-13, atol=1e-15)


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
