"""FP8: all bytes by their definition under many scales, quantised stacks, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from .._compare import assert_same_bits
from .test_mxfp4 import DTYPES, assert_same_values

BLOCKS = ((128, 128), (1, 0), (0, 0), (1, 128), (32, 32), (0, 64))
# Ordinary, subnormal, the ends of float32, and what is no number
SCALES = (1.0, 0.37, -2.5, 1e-40, 2.0**-149, 3.4e38, 0.0, math.inf, math.nan, 2.0**-130)


def value_of(byte: int) -> float:
    """e4m3 without infinities: sign, four bits of exponent (bias 7), three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return math.copysign(value, -1 if byte & 128 else 1)


@pytest.fixture(scope="module")
def everything(device):
    """Every byte under every scale: a row of 256 bytes per scale."""
    row = torch.tensor([value_of(byte) for byte in range(256)], dtype=torch.float64)
    scales = torch.tensor(SCALES)
    packed = torch.arange(256, dtype=torch.uint8).repeat(len(SCALES), 1)
    expected = (row.float() * scales[:, None]).to(device)
    return packed.to(device), scales.to(device), expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_under_every_scale(opt, device, everything, dtype):
    packed, scales, expected = everything
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    found = opt.fp8_dequant(packed, scales, ids, tuple(packed.shape), (1, 0), dtype)
    assert_same_values(found[0], expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)  # the interpreter truncates to bfloat16
def test_every_byte_under_every_scale_by_triton(submodule, ops, device, everything, dtype):
    submodule("kernels.quant.dequant_triton")
    packed, scales, expected = everything
    ids = torch.tensor([0, 1, -1], device=device)
    found = ops.fp8_dequant_triton(packed, scales, ids, tuple(packed.shape), (1, 0), dtype)
    assert_same_values(found[0], expected.to(dtype))
    assert found[1:].isnan().all()  # there is one expert


def test_bytes_are_torch_s(opt):
    packed = torch.arange(256, dtype=torch.uint8).view(1, 2, 128)
    found = opt.fp8_dequant(packed, torch.ones(1, 1, 1), torch.tensor([0]), (2, 128))
    assert_same_values(found.view(-1), packed.view(torch.float8_e4m3fn).bfloat16().view(-1))
    as_floats = packed.view(torch.float8_e4m3fn)
    again = opt.fp8_dequant(as_floats, torch.ones(1, 1, 1), torch.tensor([0]), (2, 128))
    assert_same_values(again, found)


def exact(packed, scales, block):
    """(E, N, K) in float64, block by block."""
    found = packed.view(torch.float8_e4m3fn).double()
    experts, n, k = found.shape
    rows, columns = block[0] or n, block[1] or k
    for e in range(experts):
        for i in range(-(-n // rows)):
            for j in range(-(-k // columns)):
                part = found[e, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                part *= scales[e, i, j].double()
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("path", ("auto", "triton"))
def test_blocks_cover_odd_sizes(opt, submodule, ops, device, block, path):
    """Sides that end inside of a block; experts by id, in any order."""
    weight = torch.randn(3, 150, 200, generator=torch.Generator().manual_seed(0)).to(device)
    packed, scales = opt.fp8_quantize(weight, block)
    rows, columns = block[0] or 150, block[1] or 200
    assert packed.shape == weight.shape and packed.dtype == torch.float8_e4m3fn
    assert scales.shape == (3, -(-150 // rows), -(-200 // columns))
    ids = torch.tensor([2, 0, 2], device=device)
    submodule("kernels.quant.dequant_triton")
    if path == "auto":
        found = opt.fp8_dequant(packed, scales, ids, (150, 200), block, torch.float32)
    else:
        bits = packed.view(torch.uint8)
        found = ops.fp8_dequant_triton(bits, scales, ids, (150, 200), block, torch.float32)
    assert_same_bits(found, exact(packed, scales, block)[ids].float())
    # Three bits of mantissa round by at most 1/16; what is below 2^-6 of 448 by 2^-10 of it.
    allowed = (weight.abs() / 16).clamp(min=float(weight.abs().max()) / 448 * 2**-10)
    error = (opt.fp8_dequant(packed, scales, ids[:1], (150, 200), block).float() - weight[2]).abs()
    assert (error <= 1.01 * allowed[2] + weight[2].abs() / 256).all()


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_what_is_not_finite_makes_its_block_nan(opt, device, bad):
    weight = torch.ones(1, 256, 128, device=device)
    weight[0, 3, 5] = bad
    packed, scales = opt.fp8_quantize(weight)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    found = opt.fp8_dequant(packed, scales, ids, (256, 128))[0]
    assert found[:128].isnan().all() and (found[128:] == 1).all()
    nothing = opt.fp8_quantize(torch.zeros(1, 8, 32, device=device))
    assert not opt.fp8_dequant(*nothing, ids, (8, 32)).any()


def check_op(ops, device, name):
    packed = torch.zeros(3, 2, 32, dtype=torch.uint8, device=device)
    scales = torch.ones(3, 1, 1, device=device)
    ids = torch.tensor([1], device=device)
    arguments = (packed, scales, ids, [2, 32], [128, 128], torch.bfloat16)
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_opcheck(ops, device):
    check_op(ops, device, "fp8_dequant_reference")


@pytest.mark.gpu
def test_opcheck_by_triton(opt, submodule, ops, device):
    submodule("kernels.quant.dequant_triton")
    check_op(ops, device, "fp8_dequant_triton")


STACK = {
    "packed": torch.zeros(2, 3, 160, dtype=torch.uint8),
    "scales": torch.ones(2, 1, 2),
    "active_experts": torch.tensor([1]),
    "expert_shape": (3, 160),
}
WRONG = (
    ({"expert_shape": (3, 100)}, ValueError, "no whole number of experts of 300"),
    ({"expert_shape": (3, 2, 80)}, ValueError, r"expert_shape must be \(N, K\)"),
    ({"scales": torch.ones(2, 2, 2)}, ValueError, "scales must hold 4 contiguous"),
    ({"scales": torch.ones(2, 1, 2).half()}, ValueError, "of float32, got torch.float16"),
    ({"packed": STACK["packed"].int()}, ValueError, "packed must hold 960 .* uint8 or float8"),
    ({"block": (128, 16)}, ValueError, "powers of two, of columns 32 or more"),
    ({"block": (48, 128)}, ValueError, "powers of two"),
    ({"block": 128}, TypeError, "block must be two integers"),
    ({"dtype": torch.float64}, ValueError, "dtype must be one of"),
    ({"active_experts": torch.tensor([-1])}, IndexError, r"active_experts must be in \[0, 2\)"),
)


def test_a_block_larger_than_its_sides(opt):
    weight = torch.randn(2, 130, 150, generator=torch.Generator().manual_seed(0))
    found, expected = opt.fp8_quantize(weight, (2**62, 2**62)), opt.fp8_quantize(weight, (0, 0))
    assert_same_bits(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert_same_bits(found[1], expected[1])


@pytest.mark.parametrize(("changed", "error", "said"), WRONG, ids=[one[2] for one in WRONG])
def test_wrong_arguments_are_named(opt, changed, error, said):
    with pytest.raises(error, match=said):
        opt.fp8_dequant(**{**STACK, **changed})
    opt.fp8_dequant(**STACK)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_module_packs_expert_by_expert(opt, device, block):
    weight = torch.randn(4, 70, 160, generator=torch.Generator().manual_seed(2)).to(device)
    packed, scales = opt.fp8_quantize(weight, block)
    options = {"quant_type": "fp8", "block_rows": block[0], "block_columns": block[1]}
    experts = opt.moe.QuantizedExperts.from_weight(weight, **options)
    assert_same_bits(experts.packed.data, packed.view(torch.uint8).view(-1))
    assert_same_bits(experts.scales.data, scales.view(-1))
    again = opt.moe.QuantizedExperts.from_state_dict(experts.state_dict())
    assert again.format.block == block
    assert_same_bits(again.half().decode(), experts.decode())
