"""grouped_lora_forward as an op: its two results slot by slot, opcheck, and its tile choices."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most
from ._grouped import PATHS, RANK, TOKENS, TOP_K, K, N, doubles, operands, valid_slots

NAMES = ("x", "weight", "lora_a", "lora_b", "bias", "slots", "offsets", "tiles")


def arguments(problem: dict, path: str, grouped_out: bool = False) -> tuple:
    return (*(problem[name] for name in NAMES), 16, 0.5, TOP_K, grouped_out, path)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("grouped_out", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_results(submodule, ops, device, path, grouped_out):
    """y and the scaled xa of every slot; zero where an id names no expert."""
    problem = operands(submodule, device)
    y, xa = ops.grouped_lora_forward(*arguments(problem, path, grouped_out))
    wide = doubles(problem)
    expected = torch.zeros(TOKENS * TOP_K, N, dtype=torch.float64)
    low = torch.zeros(TOKENS * TOP_K, RANK, dtype=torch.float64)
    for slot, token, e in valid_slots(problem):
        x = wide["x"][token]
        low[slot] = 0.5 * wide["lora_a"][e] @ x
        expected[slot] = x @ wide["weight"][e] + wide["lora_b"][e] @ low[slot] + wide["bias"][e]
    slots = problem["slots"].cpu()
    assert_error_at_most(y.cpu(), expected[slots] if grouped_out else expected, 1e-6)
    assert_error_at_most(xa.cpu(), low[slots], 1e-6)
    invalid = torch.ones(TOKENS * TOP_K, dtype=torch.bool)
    invalid[[slot for slot, _, _ in valid_slots(problem)]] = False
    assert (y.cpu()[invalid[slots] if grouped_out else invalid] == 0).all()


@pytest.mark.parametrize("path", [*PATHS, "grouped_mm"])
def test_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_forward.default, arguments(problem, path))


@pytest.fixture(scope="session")
def config(submodule):
    """The module kernels._grouped_config of the loaded package."""
    return submodule("kernels._grouped_config")


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90", "hip"])
@pytest.mark.parametrize("direction", ["forward", "dx", "low_rank", "product"])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_shape_has_a_tile_that_fits(config, arch, direction, element_bytes):
    """The predecessor's pruning left one tile of 32 x 32 or none; a tile is a pure function."""
    for rows in (16, 32, 64, 128):
        for rank in (1, 16, 40, 256):
            for columns in (16, 768, 4096):
                shape = config.Shape(arch, rows, 2048, columns, element_bytes, direction, rank)
                tile = config.choose(shape)
                assert config.fits(tile, shape), (shape, tile)
                assert tile == config.choose(shape)
                assert min(tile.rows, tile.columns, tile.depth) >= 16 and tile.stages >= 1
                if direction in ("forward", "dx"):
                    assert tile.rows == rows


def test_rows_of_64_and_more_use_wide_tiles(config):
    """At 64 rows per expert and above the product runs on tiles that a wgmma takes."""
    for rows in (64, 128):
        tile = config.choose(config.Shape("sm90", rows, 2048, 1536, 2, "forward", 16))
        assert tile.rows >= 64 and tile.columns >= 128


@pytest.mark.parametrize(
    ("rank", "block"), [(1, 16), (12, 16), (17, 32), (48, 64), (64, 64), (128, 64)]
)
def test_rank_is_padded_to_a_block(config, rank, block):
    assert config.block_rank(rank) == block


def test_unknown_direction(config):
    with pytest.raises(ValueError, match="direction must be one of"):
        config.choose(config.Shape("sm90", 64, K, N, 2, "backward"))
