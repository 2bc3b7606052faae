"""MXFP4: all bytes times all scales by its definition, quantised stacks, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import torch

from .._compare import assert_same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def value_of(code: int, scale: int) -> float:
    """In float64, exactly."""
    if scale == 255:
        return math.nan
    return math.copysign(VALUES[code & 7] * 2.0 ** (scale - 127), -1 if code & 8 else 1)


@pytest.fixture(scope="module")
def everything(device):
    """Every byte under every scale: a block of 16 bytes and its scale in a row of its own."""
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1)
    expected = [
        [value_of(int(code), scale) for byte in row for code in (byte & 15, byte >> 4)]
        for scale, row in zip(scales.tolist(), packed.tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    return packed.to(device), scales.to(device), expected.to(device)


def assert_same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, but that one NaN is as good as another."""
    assert torch.equal(actual.isnan(), expected.isnan())
    nan = expected.isnan()
    assert_same_bits(actual.masked_fill(nan, 0.0), expected.masked_fill(nan, 0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_under_every_scale(opt, device, everything, dtype):
    packed, scales, expected = everything
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    found = opt.mxfp4_dequant(packed, scales, ids, (4096, 32), dtype)
    assert_same_values(found[0], expected.float().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)  # the interpreter truncates to bfloat16
def test_every_byte_under_every_scale_by_triton(submodule, ops, device, everything, dtype):
    submodule("kernels.quant.dequant_triton")
    packed, scales, expected = everything
    ids = torch.tensor([0, 1, -1], device=device)
    found = ops.mxfp4_dequant_triton(packed, scales, ids, (4096, 32), dtype)
    assert_same_values(found[0], expected.float().to(dtype))
    assert found[1:].isnan().all()  # there is one expert


@pytest.mark.parametrize("name", ("nf4", "mxfp4", "fp8"))
def test_triton_launches_on_the_device_of_the_packed_bytes(
    submodule, ops, device, monkeypatch, name
):
    """With several GPUs it would take the current one."""
    module = submodule("kernels.quant.dequant_triton")
    current, seen = [], []

    @contextlib.contextmanager
    def device_of(x):
        current.append(x.data_ptr())
        yield
        current.pop()

    class Noted:
        def __getitem__(self, grid):
            return lambda packed, *_, **__: seen.append((packed.data_ptr(), list(current)))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for kernel in ("_nibbles", "_fp8"):
        monkeypatch.setattr(module, kernel, Noted())
    packed = torch.zeros(2 * 64 * 64, dtype=torch.uint8, device=device)
    ids, shape, dtype = torch.tensor([1], device=device), [64, 64], torch.float32
    scales = {"nf4": torch.ones(256), "mxfp4": torch.zeros(512).byte(), "fp8": torch.ones(4)}
    options = {"nf4": [64, dtype, *[None] * 4], "mxfp4": [dtype], "fp8": [[32, 64], dtype]}
    decode = getattr(ops, f"{name}_dequant_triton")
    decode(packed, scales[name].to(device), ids, shape, *options[name])
    assert seen == [(packed.data_ptr(), [packed.data_ptr()])] and not current


def test_transformers_decodes_the_same(opt):
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    shape = (3, 20, 96)
    blocks = torch.randint(0, 256, (3, 20, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (3, 20, 3), dtype=torch.uint8, generator=generator)
    scales[0, :2] = torch.tensor([[0, 1, 2], [254, 253, 0]], dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone()).transpose(1, 2)
    assert_same_bits(opt.mxfp4_dequant(blocks, scales, torch.arange(3), shape[1:]), expected)


def test_experts_are_picked_by_id(opt, device):
    weight = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0)).to(device)
    packed, scales = opt.mxfp4_quantize(weight)
    ids = torch.tensor([3, 0, 3], device=device, dtype=torch.int32)
    every = opt.mxfp4_dequant(packed, scales, torch.arange(5, device=device), (7, 64))
    assert_same_bits(opt.mxfp4_dequant(packed, scales, ids, (7, 64)), every[ids.long()])
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert opt.mxfp4_dequant(packed, scales, none, (7, 64)).shape == (0, 7, 64)


def test_a_quantised_value_is_the_nearest(opt, device):
    """Of the values that the block's scale can express; the scale follows the specification."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-130, 120, (400, 1), generator=generator)
    weight = (torch.randn(400, 32, generator=generator) * 2.0**exponents).to(device)
    packed, scales = opt.mxfp4_quantize(weight)
    assert packed.shape == (400, 1, 16) and scales.shape == (400, 1)
    found = opt.mxfp4_dequant(
        packed, scales, torch.tensor([0]).to(device), (400, 32), torch.float32
    )
    # Powers of two are exact on the CPU alone.
    weight, scales, found = weight.cpu(), scales.cpu(), found[0].cpu().double()
    largest = weight.abs().amax(1).double()
    wanted = (largest.log2().floor() - 2).clamp(min=-127)
    assert torch.equal(scales[:, 0].double() - 127, wanted)
    grid = torch.tensor(VALUES, dtype=torch.float64)
    grid = torch.cat((-grid, grid)) * 2.0 ** wanted[:, None]
    best = (weight.double()[..., None] - grid[:, None]).abs().amin(-1)
    assert torch.equal((found - weight.double()).abs(), best)


def test_ties_go_to_the_even_code_and_signs_stay(opt, device):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.5]
    kept = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    row = torch.tensor([[*ties, *(-tie for tie in ties), 4.0, -0.0, *[0.0] * 14]], device=device)
    packed, scales = opt.mxfp4_quantize(row)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    found = opt.mxfp4_dequant(packed, scales, zero, (1, 32), torch.float32)
    expected = torch.tensor([*kept, *(-one for one in kept), 4.0, -0.0, *[0.0] * 14])
    assert_same_bits(found.view(-1), expected.to(device))


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_what_is_not_finite_makes_its_block_nan(opt, device, bad):
    weight = torch.ones(2, 64, device=device)
    weight[1, 40] = bad
    packed, scales = opt.mxfp4_quantize(weight)
    assert scales.tolist() == [[125, 125], [125, 255]]
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    found = opt.mxfp4_dequant(packed, scales, zero, (2, 64))[0]
    assert found[1, 32:].isnan().all() and (found[0] == 1).all() and (found[1, :32] == 1).all()


def test_chunks_and_strides_change_nothing(opt, submodule, monkeypatch, device):
    weight = torch.randn(6, 64, 10, generator=torch.Generator().manual_seed(1)).to(device).mT
    expected = opt.mxfp4_quantize(weight.contiguous())
    monkeypatch.setattr(submodule("kernels.quant.codec"), "CHUNK", 96)
    for one, other in zip(opt.mxfp4_quantize(weight), expected, strict=True):
        assert_same_bits(one, other)
    zeros = opt.mxfp4_quantize(torch.zeros(1, 32, device=device))
    assert not zeros[0].any() and not zeros[1].any()


def check_op(ops, device, name):
    packed = torch.zeros(96, dtype=torch.uint8, device=device)
    scales = torch.full((6,), 127, dtype=torch.uint8, device=device)
    arguments = (packed, scales, torch.tensor([1], device=device), [2, 32], torch.bfloat16)
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_opcheck(ops, device):
    check_op(ops, device, "mxfp4_dequant_reference")


@pytest.mark.gpu
def test_opcheck_by_triton(opt, submodule, ops, device):
    submodule("kernels.quant.dequant_triton")
    check_op(ops, device, "mxfp4_dequant_triton")


STACK = {
    "packed": torch.zeros(2, 3, 32, dtype=torch.uint8),
    "scales": torch.zeros(2, 3, 2, dtype=torch.uint8),
    "active_experts": torch.tensor([1]),
    "expert_shape": (3, 64),
}
WRONG = (
    ({"expert_shape": (3, 60)}, ValueError, "last dimension, whose size must be a multiple"),
    ({"expert_shape": (5, 32)}, ValueError, "no whole number of experts of 160"),
    ({"expert_shape": (3, 64.0)}, TypeError, "expert_shape must be a sequence of integers"),
    ({"packed": STACK["packed"].mT}, ValueError, "packed must hold 192 contiguous"),
    ({"packed": STACK["packed"].int()}, ValueError, "packed must hold 192 .* of uint8"),
    ({"scales": STACK["scales"][:1]}, ValueError, "scales must hold 12"),
    ({"scales": [0]}, TypeError, "scales must be a dense tensor, got list"),
    ({"active_experts": torch.tensor([1.0])}, TypeError, "active_experts must have dtype int32"),
    ({"active_experts": torch.tensor([[1]])}, ValueError, "active_experts must have 1 dim"),
    ({"dtype": torch.float64}, ValueError, "dtype must be one of"),
    ({"active_experts": torch.tensor([-1])}, IndexError, r"active_experts must be in \[0, 2\)"),
)


@pytest.mark.parametrize(("changed", "error", "said"), WRONG, ids=[one[2] for one in WRONG])
def test_wrong_arguments_are_named(opt, changed, error, said):
    with pytest.raises(error, match=said):
        opt.mxfp4_dequant(**{**STACK, **changed})
    opt.mxfp4_dequant(**STACK)


def test_wrong_weights_are_named(opt):
    with pytest.raises(ValueError, match=r"blocks of 32 .* got 33"):
        opt.mxfp4_quantize(torch.zeros(2, 33))
    with pytest.raises(TypeError, match=r"weight must be bfloat16, float16 or float32, got torch"):
        opt.mxfp4_quantize(torch.zeros(2, 32, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"pass weight.detach\(\)"):
        opt.mxfp4_quantize(torch.zeros(2, 32, requires_grad=True))
    with pytest.raises(ValueError, match="no empty one"):
        opt.mxfp4_quantize(torch.zeros(0, 32))


def test_the_module_holds_what_checkpoints_publish(opt, device):
    """And gives it back; expert by expert it is packed as at once."""
    weight = torch.randn(4, 6, 96, generator=torch.Generator().manual_seed(2)).to(device)
    blocks, scales = opt.mxfp4_quantize(weight)
    experts = opt.moe.QuantizedExperts.from_weight(weight, quant_type="mxfp4")
    assert_same_bits(experts.packed.data, blocks.view(-1))
    assert_same_bits(experts.scales.data, scales.view(-1))
    published = opt.moe.QuantizedExperts((4, 6, 96), quant_type="mxfp4", device=device)
    published.load_state_dict({"packed": blocks.view(-1), "scales": scales.view(-1)}, strict=False)
    assert_same_bits(published.decode(), experts.decode())
    with pytest.raises(ValueError, match="blocks of 32 run along the last dimension"):
        opt.moe.QuantizedExperts((4, 6, 100), quant_type="mxfp4")
    combinations = itertools.product(("chunked", "selective"), (0, 7))
    for strategy, rows in combinations:
        experts.strategy = strategy
        assert opt.moe.explain_quantized(experts, rows).startswith(strategy if rows else "selecti")
