"""Stochastic rounding and kept residuals: what is random, what is exact, what is not lost."""

from __future__ import annotations

import math

import pytest
import torch

from ..conftest import module_fixture
from ._tensors import NARROW, assert_same, draw

rounding = module_fixture("reference.rounding")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            0xFFFFFFFF_FFFFFFFF,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_is_random123s(rounding, counter, key, expected):
    """The known answers that the authors publish with Random123."""
    words = rounding.philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(word.item() for word in words) == expected


def rounded(kernels, x, dtype, *, seed=0, step=0, parameter=0, offset=0):
    """Stochastic rounding of x alone: p = 0, u = -x, rate 1."""
    param = torch.zeros(x.shape, dtype=dtype, device=x.device)
    key = kernels.StochasticRounding(
        seed, torch.tensor(step, device=x.device), [parameter], [offset]
    )
    kernels.apply_update([param], [-x], lr=1.0, factors=[1.0], weight_decay=0.0, rounding=key)
    return param


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_any_split_gives_the_same_bits(kernels, device, dtype):
    x = draw([(5000,)], torch.float32, seed=0, device=device)[0]
    whole = rounded(kernels, x, dtype, offset=3)
    for cut in (1, 8, 1021, 4999):
        left = rounded(kernels, x[:cut], dtype, offset=3)
        right = rounded(kernels, x[cut:], dtype, offset=3 + cut)
        assert_same([torch.cat((left, right))], [whole])
    matrix = x.view(50, 100)
    transposed = matrix.mT.contiguous().mT
    assert_same([rounded(kernels, transposed, dtype, offset=3).reshape(-1)], [whole])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_part_of_the_key_matters(kernels, device, dtype):
    x = draw([(4096,)], torch.float32, seed=0, device=device)[0]
    first = rounded(kernels, x, dtype, seed=1, step=2, parameter=3, offset=4)
    assert_same([rounded(kernels, x, dtype, seed=1, step=2, parameter=3, offset=4)], [first])
    for change in ({"seed": 2}, {"seed": 1 + 2**40}, {"step": 3}, {"parameter": 4}, {"offset": 5}):
        key = {"seed": 1, "step": 2, "parameter": 3, "offset": 4, **change}
        # Equal where nothing is dropped or both draws agree: half of the elements at most, here.
        assert (rounded(kernels, x, dtype, **key) != first).float().mean() > 0.2


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


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("op", ("apply_update", "adamw"))
def test_param_and_residual_follow_a_float32_run_bit_for_bit(kernels, rounding, device, op, dtype):
    """100 steps; float16 values are kept where the residual is exact, above 2^-17."""
    start = draw([(300, 7)], torch.float32, seed=0, device=device)[0]
    start = (start.sign() * (start.abs() + 1)).to(dtype)  # no sign change in 100 steps of 1e-3
    param, exact = [start.clone()], [start.float()]
    residual = [torch.zeros(start.shape, dtype=torch.int16, device=device)]
    state = [[torch.zeros_like(exact[0]) for _ in range(2)] for _ in range(2)]
    steps = [torch.zeros((), device=device) for _ in range(2)]
    for seed in range(100):
        u = draw([(300, 7)], torch.float32, seed=seed + 1, device=device)
        for number, (p, r) in enumerate(((param, residual), (exact, None))):
            if op == "apply_update":
                options = {"lr": 1e-3, "factors": [0.7], "weight_decay": 0.1}
                kernels.apply_update(p, u, residuals=r, **options)
            else:
                options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
                lists = ([x] for x in (*state[number], steps[number]))
                kernels.adamw(p, u, *lists, residuals=r, **options)
    assert_same([rounding.join(param[0].cpu(), residual[0].cpu())], exact)
    assert (param[0].float() - exact[0]).abs().max() <= exact[0].abs().max() * 2.0**-8
