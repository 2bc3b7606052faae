"""Formats: MXFP4 and FP8 by their definitions, and a made-up one, since FORMATS has it."""

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from .._compare import (
    assert_all_same_bits,
    assert_same_bits,
    assert_same_numbers,
    assert_same_tensors,
    relative_error,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


BLOCKS = ((128, 128), (1, 0), (0, 0), (1, 128), (32, 32), (0, 64))
# Ordinary, subnormal, the ends of float32, and what is no number
SCALES = (1.0, 0.37, -2.5, 1e-40, 2.0**-149, 3.4e38, 0.0, math.inf, math.nan, 2.0**-130)


@pytest.fixture(scope="module", params=["mxfp4", "fp8"])
def everything(request, device):
    """The format, and every byte under every scale: packed, scales, shape and block, values."""
    if request.param == "fp8":  # a row of 256 bytes per scale
        scales = torch.tensor(SCALES)
        packed = torch.arange(256, dtype=torch.uint8).repeat(len(SCALES), 1)
        expected = packed.view(torch.float8_e4m3fn).float() * scales[:, None]
        place = (tuple(packed.shape), (1, 0))
    else:  # a block of 16 bytes and its scale in a row of its own
        scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16)
        packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)
        expected = (signed[codes] * 2.0 ** (scales.double() - 127)[:, None]).float()
        expected[scales == 255] = math.nan
        place = ((4096, 32),)
    return request.param, (packed.to(device), scales.to(device)), place, expected.to(device)


# The interpreter truncates to bfloat16.
BY_PATH = [("public", dtype) for dtype in DTYPES] + [("triton", dtype) for dtype in DTYPES[:2]]


@pytest.mark.parametrize(("path", "dtype"), BY_PATH, ids=str)
def test_every_byte_under_every_scale(opt, submodule, ops, device, everything, path, dtype):
    submodule("kernels.quant.dequant_triton")
    name, stack, place, expected = everything
    decode = getattr(opt, f"{name}_dequant")
    if path == "triton":
        decode = getattr(ops, f"{name}_dequant_triton")
        ids = torch.tensor([1, -1], device=device)
        assert decode(*stack, ids, *place, dtype).isnan().all()  # there is one expert
    found = decode(*stack, torch.tensor([0], device=device), *place, dtype)
    assert_same_numbers(found[0], expected.to(dtype))


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
@pytest.mark.parametrize("name", ("mxfp4", "fp8"))
def test_what_is_not_finite_makes_its_block_nan(opt, device, name, bad):
    weight, block = torch.ones(256, 128, device=device), torch.zeros(256, 128, dtype=torch.bool)
    weight[3, 40] = bad
    block[(3, slice(32, 64)) if name == "mxfp4" else slice(128)] = True
    quantize, dequant = (getattr(opt, f"{name}_{part}") for part in ("quantize", "dequant"))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    packed, scales = quantize(weight[None])
    found = dequant(packed, scales, zero, (256, 128))[0].cpu()
    assert found[block].isnan().all() and (found[~block] == 1).all()
    if name == "mxfp4":
        assert scales[0, 3].tolist() == [125, 255, 125, 125]
    nothing = quantize(torch.zeros(1, 8, 32, device=device))
    assert not dequant(*nothing, zero, (8, 32)).any()


def test_chunks_and_strides_change_nothing(opt, submodule, monkeypatch, device):
    weight = torch.randn(6, 64, 10, generator=torch.Generator().manual_seed(1)).to(device).mT
    expected = opt.mxfp4_quantize(weight.contiguous())
    monkeypatch.setattr(submodule("kernels.quant.codec"), "CHUNK", 96)
    assert_all_same_bits(opt.mxfp4_quantize(weight), expected)
    for zeros in opt.mxfp4_quantize(torch.zeros(1, 32, device=device)):
        assert not zeros.any()


DECODED = {
    "mxfp4": ((96,), (6,), torch.uint8, ()),
    "fp8": ((3, 2, 32), (3, 1, 1), torch.float32, ([128, 128],)),
}


@pytest.mark.parametrize("path", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", DECODED)
def test_opcheck(submodule, ops, device, name, path):
    submodule("kernels.quant.dequant_triton")
    packed, scales, dtype, block = DECODED[name]
    packed = torch.zeros(packed, dtype=torch.uint8, device=device)
    scales = torch.ones(scales, dtype=dtype, device=device)
    ids = torch.tensor([1], device=device)
    arguments = (packed, scales, ids, [2, 32], *block, torch.bfloat16)
    torch.library.opcheck(getattr(ops, f"{name}_dequant_{path}").default, arguments)


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


FP8_STACK = {
    "packed": torch.zeros(2, 3, 160, dtype=torch.uint8),
    "scales": torch.ones(2, 1, 2),
    "active_experts": torch.tensor([1]),
    "expert_shape": (3, 160),
}
WRONG_FP8 = (
    ({"expert_shape": (3, 100)}, ValueError, "no whole number of experts of 300"),
    ({"expert_shape": (3, 2, 80)}, ValueError, r"expert_shape must be \(N, K\)"),
    ({"scales": torch.ones(2, 2, 2)}, ValueError, "scales must hold 4 contiguous"),
    ({"scales": torch.ones(2, 1, 2).half()}, ValueError, "of float32, got torch.float16"),
    ({"packed": FP8_STACK["packed"].int()}, ValueError, "packed must hold 960 .* uint8 or float8"),
    ({"block": (128, 16)}, ValueError, "powers of two, of columns 32 or more"),
    ({"block": (48, 128)}, ValueError, "powers of two"),
    ({"block": 128}, TypeError, "block must be two integers"),
    ({"dtype": torch.float64}, ValueError, "dtype must be one of"),
    ({"active_experts": torch.tensor([-1])}, IndexError, r"active_experts must be in \[0, 2\)"),
)
WRONGS = [("mxfp4", STACK, *one) for one in WRONG] + [("fp8", FP8_STACK, *one) for one in WRONG_FP8]


@pytest.mark.parametrize(
    ("name", "stack", "changed", "error", "said"),
    WRONGS,
    ids=[f"{one[0]}-{one[-1]}" for one in WRONGS],
)
def test_wrong_arguments_are_named(opt, name, stack, changed, error, said):
    dequant = getattr(opt, f"{name}_dequant")
    with pytest.raises(error, match=said):
        dequant(**{**stack, **changed})
    dequant(**stack)


def test_wrong_weights_are_named(opt):
    with pytest.raises(ValueError, match=r"blocks of 32 .* got 33"):
        opt.mxfp4_quantize(torch.zeros(2, 33))
    with pytest.raises(TypeError, match=r"weight must be bfloat16, float16 or float32, got torch"):
        opt.mxfp4_quantize(torch.zeros(2, 32, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"pass weight.detach\(\)"):
        opt.mxfp4_quantize(torch.zeros(2, 32, requires_grad=True))
    with pytest.raises(ValueError, match="no empty one"):
        opt.mxfp4_quantize(torch.zeros(0, 32))


def test_blocks_of_mxfp4_run_along_the_last_dimension(opt):
    with pytest.raises(ValueError, match="blocks of 32 run along the last dimension"):
        opt.moe.QuantizedExperts((4, 6, 100), quant_type="mxfp4")
    experts = opt.moe.QuantizedExperts((4, 6, 96), quant_type="mxfp4")
    for strategy, rows in itertools.product(("chunked", "selective"), (0, 7)):
        experts.strategy = strategy
        assert opt.moe.explain_quantized(experts, rows).startswith(strategy if rows else "selecti")


@pytest.mark.parametrize("block", (None, *BLOCKS), ids=str)
def test_the_module_holds_what_checkpoints_publish(opt, device, block):
    """And gives it back; expert by expert it is packed as at once."""
    weight = torch.randn(4, 70, 160, generator=torch.Generator().manual_seed(2)).to(device)
    options = {"quant_type": "mxfp4"}
    if block is None:
        packed, scales = opt.mxfp4_quantize(weight)
    else:
        packed, scales = opt.fp8_quantize(weight, block)
        options = {"quant_type": "fp8", "block_rows": block[0], "block_columns": block[1]}
    state = {"packed": packed.view(torch.uint8).view(-1), "scales": scales.view(-1)}
    experts = opt.moe.QuantizedExperts.from_weight(weight, **options)
    assert_same_tensors(dict(experts.named_parameters()), state)
    published = opt.moe.QuantizedExperts((4, 70, 160), device=device, **options)
    published.load_state_dict(state, strict=False)
    assert_same_bits(published.decode(), experts.decode())
    again = opt.moe.QuantizedExperts.from_state_dict(experts.state_dict())
    assert again.format == experts.format
    assert_same_bits(again.half().decode(), experts.decode())


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


def test_a_block_larger_than_its_sides(opt):
    weight = torch.randn(2, 130, 150, generator=torch.Generator().manual_seed(0))
    found, expected = opt.fp8_quantize(weight, (2**62, 2**62)), opt.fp8_quantize(weight, (0, 0))
    assert_same_bits(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert_same_bits(found[1], expected[1])


@pytest.fixture
def formats(submodule, monkeypatch):
    """The module, which knows 8-bit rows beside its own formats."""
    module = submodule("kernels.quant.formats")

    @dataclasses.dataclass(frozen=True)
    class Rows8(module.Format):
        """Signed bytes, and a scale for every row of an expert."""

        quant_type: str = "rows8"
        levels: int = 127

        def layout(self, stored):
            rows = stored[0] * stored[1]
            return {
                "packed": (math.prod(stored), torch.uint8),
                "scales": (rows, torch.float32),
            }

        def unit(self, stored):
            return stored[2]

        def pack(self, flat, stored):
            rows = flat.float().view(-1, stored[2])
            scales = rows.abs().amax(1) / self.levels
            return (rows / scales[:, None]).round().to(torch.int8), scales

        def decode(self, tensors, ids, shape, dtype):
            packed, scales = tensors
            codes = packed.view(torch.int8).view(-1, *shape)[ids.long()].float()
            return (codes * scales.view(-1, shape[0], 1)[ids.long()]).to(dtype)

    monkeypatch.setitem(module.FORMATS, "rows8", Rows8)
    yield module
    module.format_of.cache_clear()
    module.format_of_text.cache_clear()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("strategy", ("auto", "chunked", "selective"))
@pytest.mark.parametrize("backend", ("triton", "reference"))
def test_a_format_is_multiplied_without_being_known(opt, formats, device, backend, strategy):
    experts = opt.moe.QuantizedExperts.from_weight(
        draw(4, 24, 40).to(device), quant_type="rows8", strategy=strategy
    )
    dense = experts.decode(dtype=torch.float32)
    assert relative_error(dense, draw(4, 24, 40).to(device)) < 0.01
    order = opt.moe.expert_sort(torch.tensor([[3, 0], [0, 3], [-1, 2]], device=device), 4)
    x = draw(3, 40).to(device).requires_grad_()
    found, expected = (
        opt.moe.grouped_lora_linear(x, one.transpose(1, 2), order, backend=backend)
        for one in (experts, dense)
    )
    assert relative_error(found, expected) <= 1e-6
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    assert relative_error(*gradients) <= 1e-6
    with pytest.raises(ValueError, match=r"strategy=.fused. needs a format whose product"):
        opt.moe.choose_strategy(
            6, 4, "fused", fusable=experts.quantized_weight().registers_refusal is None
        )


def test_a_format_is_saved_moved_and_offloaded_without_being_known(opt, formats):
    experts = opt.moe.QuantizedExperts.from_weight(draw(4, 24, 40), quant_type="rows8", levels=100)
    assert set(experts.state_dict()) == {"packed", "scales", "_extra_state"}
    again = opt.moe.QuantizedExperts.from_state_dict(experts.state_dict())
    assert again.format == experts.format and again.format.levels == 100
    assert_same_bits(again.half().decode(), experts.decode())
    offload = opt.moe.ExpertOffload(nn.ModuleDict({"down_proj": experts}), device="cpu")
    assert_same_bits(experts.decode(), again.decode())
    offload.turn_off()
    said = opt.moe.explain_quantized(experts, 64)
    assert "no product decodes rows8 in registers" in said


def test_names_and_options(formats):
    nf4 = formats.format_of("nf4", blocksize=128, nested=True)
    assert formats.format_of_text(nf4.text) == nf4
    assert nf4.options() == {"quant_type": "nf4", "blocksize": 128, "nested": True}
    assert formats.format_of() == formats.format_of("nf4") != formats.format_of("fp4")
    with pytest.raises(ValueError, match=r"quant_type must be one of .*, got 'int4'"):
        formats.format_of("int4")
    with pytest.raises(ValueError, match=r"nf4 has the options .*blocksize.*, got levels"):
        formats.format_of("nf4", levels=3)
    with pytest.raises(ValueError, match="blocksize must be one of"):
        formats.format_of("fp4", blocksize=48)
