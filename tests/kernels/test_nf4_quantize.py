"""nf4_quantize: bitsandbytes' format whatever the shape, and the same bits on every path."""

import logging

import pytest
import torch

from .._compare import assert_all_same_bits, assert_same_bits
from .test_nf4_dequant import BLOCKSIZES, DTYPES

QUANT_TYPES = ("nf4", "fp4")
# Odd, less than a block, more than the 4096 elements of a thread block, with and without a tail.
SHAPES = ((1,), (3, 7), (64, 64), (5, 3, 7), (203, 101), (2, 96, 256), (4097,))


def draw(shape, dtype, device, *, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)


def run(ops, path: str, weight: torch.Tensor, blocksize: int, quant_type: str):
    """One path's op on poisoned outputs."""
    packed = torch.full(((weight.numel() + 1) // 2,), 0xA5, dtype=torch.uint8, device=weight.device)
    blocks = -(-weight.numel() // blocksize)
    absmax = torch.full((blocks,), float("nan"), device=weight.device)
    op = ops.nf4_quantize if path == "compiled" else ops.nf4_quantize_reference
    op(weight, packed, absmax, blocksize, quant_type == "fp4")
    return packed, absmax


def nibbles(packed: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.stack((packed >> 4, packed & 15), -1).reshape(-1)[:numel]


def at_a_threshold(weight, absmax, blocksize: int, thresholds: tuple[float, ...]) -> torch.Tensor:
    """Which x / absmax lie within two float32 units of a threshold."""
    flat = weight.reshape(-1).double()
    ratio = flat / absmax.double().repeat_interleave(blocksize)[: flat.numel()]
    near = torch.zeros_like(ratio, dtype=torch.bool)
    for threshold in thresholds:
        near |= (ratio - threshold).abs() <= abs(threshold) * 2.0**-22
    return near


@pytest.fixture(scope="session")
def tables(submodule):
    reference = submodule("reference.nf4")
    return {"nf4": reference.NF4_TABLE, "fp4": reference.FP4_TABLE}


@pytest.fixture(scope="session")
def thresholds(submodule):
    reference = submodule("reference.nf4")
    both_signs = (*reference.FP4_THRESHOLDS, *(-t for t in reference.FP4_THRESHOLDS))
    return {"nf4": reference.NF4_THRESHOLDS, "fp4": both_signs}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("path", ("compiled", "reference"))
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_gets_its_nearest_code(ops, tables, device, path, quant_type, shape):
    weight = draw(shape, torch.float32, device)
    packed, absmax = run(ops, path, weight, 64, quant_type)
    exact = weight.cpu().double().reshape(-1)
    largest = torch.stack([block.abs().max() for block in exact.split(64)])
    assert torch.equal(absmax.cpu().double(), largest)
    values = torch.tensor(tables[quant_type], dtype=torch.float64)
    values = largest.repeat_interleave(64)[: exact.numel(), None] * values
    distances = (values - exact[:, None]).abs()
    taken = distances.gather(1, nibbles(packed, exact.numel()).cpu().long()[:, None])
    # The thresholds are midpoints to one part in 10^6, so a tie may be broken either way.
    assert (taken[:, 0] <= distances.amin(1) * (1 + 1e-5) + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_paths_agree(ops, thresholds, device, dtype, blocksize, quant_type):
    """To the bit on the CPU. The CUDA kernel divides approximately, as bitsandbytes does: it takes
    the other neighbour only where x / absmax is a threshold to two units in the last place."""
    for seed, shape in enumerate(SHAPES):
        weight = draw(shape, dtype, device, seed=seed)
        packed, absmax = run(ops, "compiled", weight, blocksize, quant_type)
        expected_packed, expected_absmax = run(ops, "reference", weight, blocksize, quant_type)
        assert_same_bits(absmax, expected_absmax)
        if device.type == "cpu":
            assert_same_bits(packed, expected_packed)
        else:
            other = nibbles(packed, weight.numel()) != nibbles(expected_packed, weight.numel())
            assert at_a_threshold(weight, absmax, blocksize, thresholds[quant_type])[other].all()


def test_one_absmax_nests_to_itself(submodule, device):
    """Nothing is left of it once its mean is taken off: the offset alone decodes."""
    absmax = torch.tensor([0.37], device=device)
    codes, code, scale, offset = submodule("reference.nf4").nest_absmax(absmax)
    assert_same_bits(code[codes.long()] * scale + offset, absmax)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("path", ("compiled", "reference"))
def test_hostile_values(ops, device, path, quant_type):
    """Zeros, subnormals, infinities and NaN: defined, and never in silence."""
    weight = torch.zeros(6, 64, device=device)
    weight[1] = 1e-40  # subnormal: a block of zeros
    weight[2, 5] = float("nan")
    weight[3, 7] = -float("inf")
    weight[4] = draw((64,), torch.float32, device)
    weight[5, 0], weight[5, 1] = 1e-37, -1e-39
    packed, absmax = run(ops, path, weight, 64, quant_type)
    assert absmax[:2].tolist() == [0.0, 0.0]
    assert absmax[2].isnan()
    assert absmax[3] == float("inf")
    assert absmax[4].isfinite() and absmax[5] == weight[5, 0]
    assert (packed.view(6, 32)[:3] == 0).all()
    alone, _ = run(ops, path, weight[4:5].clone(), 64, quant_type)
    assert torch.equal(packed.view(6, 32)[4], alone)  # neighbours do not reach it
    first = packed.view(6, 32)[5, 0].item()
    assert first == {"nf4": 0xF7, "fp4": 0x30}[quant_type]  # 1e-37 is the largest, -1e-39 is zero


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_against_bitsandbytes(opt, device, tables, quant_type):
    """Equal but for elements within 2 ulp of a threshold: the CPU quantizer of bitsandbytes takes
    computed midpoints where its CUDA kernels, and ours, have written ones."""
    functional = pytest.importorskip("bitsandbytes.functional")
    for dtype in DTYPES:
        weight = draw((257, 512), dtype, device, seed=3)
        theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type=quant_type)
        packed, absmax = opt.nf4_quantize(weight, 64, quant_type=quant_type)
        assert_same_bits(absmax, state.absmax)
        mine, other = (
            nibbles(codes.view(torch.uint8).reshape(-1), weight.numel())
            for codes in (packed, theirs)
        )
        scaled = weight.float().reshape(-1, 64) / absmax[:, None]
        table = torch.tensor(sorted(tables[quant_type]), device=device)
        middle = (table[1:] + table[:-1]) / 2
        nearest = (scaled.reshape(-1, 1) - middle).abs().amin(1)
        near = nearest <= 3e-7
        zero = torch.zeros_like(near)
        if quant_type == "fp4":  # +0 and -0 are two codes of one value
            zero = (mine & 7 == 0) & (other & 7 == 0)
        assert ((mine == other) | near | zero).all()
        assert (mine == other).float().mean() > 0.99


def test_nested_absmax_against_bitsandbytes(submodule, device):
    functional = pytest.importorskip("bitsandbytes.functional")
    reference = submodule("reference.nf4")
    assert_same_bits(reference.dynamic_map(), functional.create_dynamic_map())
    for blocks in (2, 255, 256, 1000, 2560):
        absmax = draw((blocks,), torch.float32, device, seed=blocks).abs() + 0.1
        codes, code, scale, offset = reference.nest_absmax(absmax)
        centred = absmax - absmax.mean()
        theirs, state = functional.quantize_blockwise(centred, blocksize=256)
        assert_same_bits(code, state.code)
        assert_same_bits(scale, state.absmax)
        assert_same_bits(offset, absmax.mean().reshape(1))
        # Its C++ quantizer breaks near ties another way, hence neighbours, and few of them.
        assert (codes != theirs).sum() <= 1 + blocks // 100
        assert (codes.int() - theirs.int()).abs().max() <= 1
        decoded = code[codes.long()] * scale.repeat_interleave(256)[:blocks] + offset
        other = code[theirs.long()] * scale.repeat_interleave(256)[:blocks] + offset
        torch.testing.assert_close(
            (decoded - absmax).norm(), (other - absmax).norm(), rtol=1e-3, atol=0
        )


def test_large_weights_are_taken_in_chunks(ops, submodule, device, monkeypatch):
    """A chunk border changes nothing."""
    weight = draw((5, 700), torch.bfloat16, device)
    whole = run(ops, "reference", weight, 32, "nf4")
    monkeypatch.setattr(submodule("kernels.quant.codec"), "CHUNK", 4096 // 4)
    assert_all_same_bits(run(ops, "reference", weight, 32, "nf4"), whole)


def test_empty_weight(opt, device):
    packed, absmax = opt.nf4_quantize(torch.empty(0, 8, device=device))
    assert packed.numel() == 0 and absmax.numel() == 0


@pytest.mark.parametrize("path", ("compiled", "reference"))
def test_opcheck(ops, device, path):
    weight = draw((3, 40), torch.bfloat16, device)
    packed = torch.empty(60, dtype=torch.uint8, device=device)
    absmax = torch.empty(2, device=device)
    op = ops.nf4_quantize if path == "compiled" else ops.nf4_quantize_reference
    torch.library.opcheck(op.default, (weight, packed, absmax, 64, False))


def test_meta_tensors_give_shapes(opt):
    packed, absmax = opt.nf4_quantize(torch.empty(3, 5, 7, device="meta"), 32)
    assert (packed.shape, packed.dtype) == ((53,), torch.uint8)
    assert (absmax.shape, absmax.dtype) == ((4,), torch.float32)


BAD = {
    "weight must be torch.Tensor, got list": (TypeError, {"weight": [1.0]}),
    "blocksize must be an integer, got 64.0": (TypeError, {"blocksize": 64.0}),
    "blocksize must be one of": (ValueError, {"blocksize": 48}),
    "quant_type must be one of ('nf4', 'fp4'), got 'int4'": (ValueError, {"quant_type": "int4"}),
    "backend must be one of": (ValueError, {"backend": "triton"}),
    "got torch.float64": (ValueError, {"weight": torch.zeros(8, dtype=torch.float64)}),
    "weight must be contiguous": (ValueError, {"weight": torch.zeros(8, 8).T}),
    "weight requires a gradient": (ValueError, {"weight": torch.zeros(8, requires_grad=True)}),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(opt, message):
    kind, changed = BAD[message]
    with pytest.raises(kind) as caught:
        opt.nf4_quantize(**{"weight": torch.zeros(8), **changed})
    assert message in str(caught.value)


def test_a_slow_path_is_reported_once(submodule, dispatch, monkeypatch, caplog):
    module = submodule("kernels.quant.nf4_quantize")
    monkeypatch.setattr(dispatch, "has_compiled", lambda op, key: False)
    dispatch.pick.cache_clear()
    dispatch.say_once.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            module.nf4_quantize(torch.ones(8))
            module.nf4_quantize(torch.ones(8))
    finally:
        dispatch.pick.cache_clear()
    assert [record.message for record in caplog.records].count(
        "nf4_quantize runs its portable path, which is slow: torch in chunks; no kernel for cpu "
        "tensors is loaded"
    ) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_bitsandbytes(ops, device, dtype, blocksize, quant_type):
    functional = pytest.importorskip("bitsandbytes.functional")
    for seed, shape in enumerate((*SHAPES, (8, 768, 2048))):
        for scale in (1.0, 0.02, 1e-3):
            weight = draw(shape, dtype, device, seed=seed, scale=scale)
            weight.view(-1)[: weight.numel() // 9] = 0  # blocks of zeros
            packed, absmax = run(ops, "compiled", weight, blocksize, quant_type)
            theirs, state = functional.quantize_4bit(
                weight, blocksize=blocksize, quant_type=quant_type
            )
            assert_same_bits(absmax, state.absmax)
            assert_same_bits(packed, theirs.reshape(-1))


@pytest.mark.gpu
def test_a_user_gets_the_kernel_without_asking(opt, ops, dispatch, device, caplog):
    """The portable path, which takes 250 times as long, is neither taken nor reported."""
    weight = draw((6, 700), torch.bfloat16, device)
    dispatch.say_once.cache_clear()
    assert_all_same_bits(opt.nf4_quantize(weight), run(ops, "compiled", weight, 64, "nf4"))
    assert dispatch.path_name("nf4_quantize", device) == "compiled"
    assert not [r for r in caplog.records if "nf4_quantize" in r.getMessage()]


@pytest.mark.gpu
def test_unaligned_weight(ops, device):
    buffer = draw((4097,), torch.bfloat16, device)
    assert_all_same_bits(
        run(ops, "compiled", buffer[1:], 64, "nf4"),
        run(ops, "compiled", buffer[1:].clone(), 64, "nf4"),
    )


@pytest.mark.gpu
def test_beyond_two_to_the_31_elements(ops, device):
    elements = 2**31 + 4096 + 33
    weight = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    tail = draw((4096 + 33,), torch.bfloat16, device)
    weight[2**31 :] = tail
    packed, absmax = run(ops, "compiled", weight, 64, "nf4")
    expected = run(ops, "compiled", tail, 64, "nf4")
    assert_same_bits(packed[2**30 :], expected[0])
    assert_same_bits(absmax[2**25 :], expected[1])
    assert (packed[: 2**30] == 0).all() and (absmax[: 2**25] == 0).all()
