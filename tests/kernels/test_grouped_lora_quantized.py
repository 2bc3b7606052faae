"""grouped_lora_quantized_forward and _dx: tiles of any size, slices, and only what is wanted.

What they compute is compared in tests/moe/test_quantized_linear.py.
"""

import dataclasses

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ..moe._eager import Problem
from ..moe.test_quantized_linear import Case

PROBLEM = Problem(23, k=128, n=96, rank=3, bias=True, gates=True, routing="sentinels")


@pytest.fixture
def tile(submodule, monkeypatch):
    """`tile(rows, columns, depth)` is taken instead of the one that was timed."""
    launch = submodule("kernels.quant.packed_product_triton")

    def take(*sizes: int) -> None:
        monkeypatch.setattr(launch, "choose_tile", lambda *_: launch.Tile(*sizes, 4, 1))

    return take


@pytest.mark.parametrize("rows", (16, 64))
@pytest.mark.parametrize("across", (False, True))
def test_tiles_of_other_sizes_than_the_order_s(opt, device, tile, across, rows):
    """Two programs share a tile of 32 rows, or one takes two: an expert has up to 50 rows."""
    problem = Problem(50, experts=5, k=128, n=96, rank=3)
    case = Case(opt, device, problem, across, strategy="fused", blocksize=32)
    case.ids.copy_(torch.tensor([[2, 0]] * 45 + [[2, 5]] * 5))
    assert opt.moe.expert_sort(case.ids, 5).tile_rows == 32
    tile(rows, 64, 32)
    assert relative_error(case.product("triton"), case.eager(torch.float64)["out"]) <= 2e-6


@pytest.mark.parametrize("sizes", ((32, 64, 128), (16, 128, 128), (16, 64, 256)), ids=str)
def test_steps_over_several_blocks(opt, device, tile, sizes):
    """A step of 128 or 256 holds several absmax per row, and the last one ends behind the row."""
    problem = Problem(23, k=320, n=40, rank=3, bias=True, routing="sentinels")
    case = Case(opt, device, problem, strategy="fused", nested=True)
    tile(*sizes)
    assert relative_error(case.product("triton"), case.eager(torch.float64)["out"]) <= 2e-6


def test_few_rows_take_the_tile_that_was_timed_and_others_keep_theirs(submodule):
    """(columns, depth, warps, stages, registers) by mean rows per expert and depth of the sum."""
    choose = submodule("kernels.quant.packed_product_triton").choose_tile
    before, short = (64, 128, 4, 4, None), (128, 64, 4, 4, None)
    for mean, depth, expected in (
        (0.5, 2048, before),  # Qwen3.5-35B-A3B, 16 tokens
        (1, 2048, (128, 128, 4, 3, None)),  # Qwen3-30B-A3B
        (1, 768, short),
        (2, 2048, (64, 128, 4, 4, 128)),  # OLMoE-1B-7B
        (2, 1024, (64, 128, 4, 4, 128)),
        (4, 4096, (64, 256, 4, 3, None)),  # Mixtral-8x7B
        (4, 14336, (64, 256, 4, 3, None)),
        (4, 2048, before),  # Qwen3.5-35B-A3B, 128 tokens
        (4, 512, short),
        (8, 4096, before),
    ):
        tile = choose(mean, True, depth, False, 2)
        assert tile.rows == 16
        found = (tile.columns, tile.depth, tile.warps, tile.stages, tile.registers)
        assert found == expected, (mean, depth)
        across = choose(mean, False, depth, False, 2)
        assert (across.rows, across.columns, across.depth) == (16, 128, 64)


@pytest.mark.parametrize("path", ("triton", "reference"))
def test_strided_rows(opt, device, path):
    case = Case(opt, device, PROBLEM, strategy="fused")
    x = case.leaves["x"].detach()
    wide = torch.stack((x, torch.zeros_like(x)), -1).flatten(1)[:, ::2]
    assert not wide.is_contiguous()
    assert relative_error(case.product(path, x=wide), case.product(path)) <= 1e-6


def test_a_weight_is_used_as_it_decodes(opt, device):
    """The rows of a unit matrix read the decoded weights back, to the bit."""
    problem = Problem(128, top_k=1, k=128, n=96, rank=None, dtype=torch.float16)
    case = Case(opt, device, problem, strategy="fused", nested=True)
    case.ids.fill_(2)
    y = case.product("triton", x=torch.eye(128, dtype=torch.float16, device=device))
    assert_same_bits(y + 0.0, case.dense[2] + 0.0)


def operands(opt, submodule, case: Case) -> tuple:
    """The weights and the order as ops take them."""
    kind = submodule("kernels.experts.grouped_lora").ExpertWeights
    a, b, bias = (case.leaves[name].detach() for name in ("lora_a", "lora_b", "bias"))
    weights = kind.of(case.weight, a, b, bias, 1.0)
    opened = submodule("kernels.quant.grouped_lora_quantized").quantized_operands(weights)
    return (*opened, *opt.moe.expert_sort(case.ids, 4).operands())


@pytest.mark.parametrize("path", ("triton", "reference"))
def test_empty_batch(opt, submodule, ops, device, path):
    case = Case(opt, device, dataclasses.replace(PROBLEM, tokens=0))
    given = (case.leaves["x"].detach(), *operands(opt, submodule, case))
    y, xa = ops.grouped_lora_quantized_forward(*given, 2, False, 0, path)
    assert y.shape == (0, 96) and xa.shape == (0, 3)


def test_opcheck(opt, submodule, ops, device):
    case = Case(opt, device, PROBLEM)
    x, gates, given = case.leaves["x"], case.leaves["gates"], operands(opt, submodule, case)
    arguments = (x.detach(), *given, 2, False, 0, "reference")
    torch.library.opcheck(ops.grouped_lora_quantized_forward.default, arguments)
    rows = (*given, gates.detach(), x.detach())
    arguments = (case.grad, *rows, 2, 2, True, True, 0, "reference")
    torch.library.opcheck(ops.grouped_lora_quantized_dx.default, arguments)


@pytest.mark.parametrize("count", (1, 2, 3, 4, 7, 8))
@pytest.mark.parametrize("seed", range(3))
def test_every_tile_belongs_to_one_slice(submodule, device, count, seed):
    """With its expert counted from the slice's first; sentinels follow the last one's experts."""
    experts = 7
    module = submodule("kernels.quant.sliced_product_triton")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, experts + 1, (90, 2), generator=generator)
    ids[ids == seed] = 3  # an expert without rows
    tiles = submodule("moe").expert_sort(ids.to(device), experts, tile_rows=16).tiles
    parts = module.tiles_of_slices(tiles, experts, count)
    assert parts.shape == (-(-experts // count), *tiles.shape)
    found = []
    for number, part in enumerate(parts.tolist()):
        used = [tile for tile in part if tile[0] >= 0]
        size = min(count, experts - number * count)
        last = number == parts.shape[0] - 1
        assert all(expert < size or (last and expert == size) for expert, *_ in used)
        found += [[expert + number * count, *rows] for expert, *rows in used]
    assert found == [tile for tile in tiles.tolist() if tile[0] >= 0]


@pytest.mark.parametrize("frozen", ("x", "gates"))
def test_only_what_is_wanted(opt, device, frozen):
    case = Case(opt, device, PROBLEM, strategy="fused")
    expected = case.results("triton")
    case.leaves[frozen].requires_grad_(False)
    found = case.results("triton")
    assert expected.keys() - found.keys() == {frozen}
    for name, value in found.items():
        assert_same_bits(value, expected[name])
