"""The tile of a grouped product: a pure function that fits into shared memory."""

from __future__ import annotations

import dataclasses

import pytest

from ._grouped import K, N


@pytest.fixture(scope="session")
def config(submodule):
    """The module kernels.experts.tiles of the loaded package."""
    return submodule("kernels.experts.tiles")


@pytest.mark.sees_defect("the plan is chosen by mutable globals, which the tests overwrite")
@pytest.mark.sees_defect("pruning leaves one tile of 32 x 32, or none")
@pytest.mark.sees_defect("shared memory is asked of a driver: no tile without a GPU")
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90", "sm75"])
@pytest.mark.parametrize("direction", ["forward", "dx", "dots", "low_rank", "product"])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_shape_has_a_tile_that_fits(config, arch, direction, element_bytes):
    """The predecessor's pruning left one tile of 32 x 32 or none; a tile is a pure function."""
    for rows in (16, 32, 64, 128, 256):
        for rank in (1, 16, 40, 256):
            for columns in (16, 768, 4096):
                shape = config.Shape(arch, rows, 2048, columns, element_bytes, direction, rank)
                tile = config.choose(shape)
                assert config.fits(tile, shape), (shape, tile)
                assert tile == config.choose(shape)
                assert min(tile.rows, tile.columns, tile.depth) >= 16 and tile.stages >= 1
                if direction in ("forward", "dx", "dots"):
                    assert tile.rows == rows


def test_rows_of_64_and_more_use_wide_tiles(config):
    """At 64 rows per expert and above the product runs on tiles that a wgmma takes."""
    for rows in (64, 128):
        tile = config.choose(config.Shape("sm90", rows, 2048, 1536, 2, "forward", 16))
        assert tile.rows >= 64 and tile.columns >= 128


@pytest.mark.parametrize("direction", ["forward", "dx", "dots"])
def test_tiles_that_were_the_fastest(config, direction):
    """128 x 256 where experts fill 128 rows and few columns are padding; the cases timed."""

    def choose(columns: int, arch: str = "sm90", rows: int = 128):
        return config.choose(config.Shape(arch, rows, 2048, columns, 2, direction, 16))

    for columns in (512, 768, 1024, 1536, 2048, 4096, 14336, 28672):
        assert choose(columns) == config.Tile(128, 256, 64, 8, 4), columns
    for columns in (64, 384, 640, 2880):
        assert choose(columns) == config.Tile(128, 128, 64, 4, 3), columns
    assert choose(2048, rows=64) == config.Tile(64, 128, 64, 4, 4)
    assert choose(2048, arch="sm80").columns == 64


def test_low_rank_sums_fit_with_factors_in_float32(config):
    """Float32 LoRA over bfloat16 rows: the factor's tiles take twice the bytes of the rows'."""
    shape = config.Shape("sm86", 32, 2048, 64, 2, "low_rank", 64)
    tile = config.choose(shape)
    taken = tile.stages * tile.depth * (tile.rows * 2 + tile.columns * 4)
    assert taken <= config.SMALLEST_SHARED_MEMORY


@pytest.mark.parametrize(
    ("rank", "block"), [(1, 16), (12, 16), (17, 32), (48, 64), (64, 64), (128, 64)]
)
def test_rank_is_padded_to_a_block(config, rank, block):
    assert config.block_rank(rank) == block


def test_unknown_direction(config):
    with pytest.raises(ValueError, match="direction must be one of"):
        config.choose(config.Shape("sm90", 64, K, N, 2, "backward"))


@pytest.mark.sees_defect("tuned anew for each number of tokens, without the rank in the key")
def test_what_a_tile_depends_on(config):
    """No number of tokens, no routing: the rows of a tile stand for the mean rows per expert."""
    names = {field.name for field in dataclasses.fields(config.Shape)}
    assert names == {"arch", "rows", "depth", "columns", "element_bytes", "direction", "rank"}
    low = [config.choose(config.Shape("sm90", 64, 2048, 16, 2, "low_rank", r)) for r in (16, 64)]
    assert low[0] != low[1]
