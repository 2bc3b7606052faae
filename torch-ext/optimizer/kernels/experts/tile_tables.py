"""Tiles of the grouped products: frozen tables and pure functions, never an autotune at run time.

A tile choice depends on (architecture, rows per tile, K, N, dtype, direction) alone, so every rank
runs the same code and no step stops to compile a search. Rules for 64 and 128 rows of 2 bytes come
from timings on an H200 (docs/dev/decisions/2026-11-22-expert-tiles.md); the rest follows the
arithmetic beside it.
"""

from __future__ import annotations

import dataclasses

# Shared memory that one block may take, in bytes: CUDA C++ Programming Guide, table of compute
# capabilities (less 1 KiB that the system keeps). An unknown architecture counts as the smallest.
SHARED_MEMORY = {"sm80": 166_912, "sm90": 232_448, "sm100": 232_448}
SMALLEST_SHARED_MEMORY = 65_536


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a tile choice may depend on.

    Directions: forward; dx; dots: dx and the gates' gradient; gated: these and the activation's;
    low_rank; product: a sum over an expert's rows; neighbours: such sums that share a tile.
    """

    arch: str
    rows: int  # rows per tile: stands for the mean rows per expert
    depth: int  # summed dimension; rows of an expert for "product"
    columns: int
    element_bytes: int
    direction: str
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes and how Triton compiles them."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def shared_memory(self, element_bytes: int) -> int:
        """Bytes of the operand tiles in flight, which is what Triton's pipeline allocates."""
        return self.stages * self.depth * (self.rows + self.columns) * element_bytes


# (rows per tile, bytes per element) -> columns, depth, warps, stages. Two blocks fit into an SM's
# shared memory, while the weights stream from HBM; 64 rows are the least that a wgmma takes.
_GENERAL = {
    (16, 2): (64, 128, 4, 4),
    (32, 2): (128, 64, 4, 4),
    (64, 2): (128, 64, 4, 4),
    (128, 2): (128, 64, 4, 3),
    (256, 2): (128, 64, 8, 4),
    (16, 4): (64, 32, 4, 3),
    (32, 4): (64, 32, 4, 3),
    (64, 4): (64, 32, 4, 3),
    (128, 4): (64, 32, 8, 3),
    (256, 4): (64, 32, 8, 3),
}
# Where experts fill 128 rows the widest accumulator took the least time of the tiles timed over the
# four products of every layer: 1 to 4 percent less than 128 columns, which padding would outweigh.
_WIDE = Tile(rows=128, columns=256, depth=64, warps=8, stages=4)
_WIDE_PADDING = 16  # one column in so many
_WIDE_ARCHS = ("sm90", "sm100")
_NARROW = Tile(rows=128, columns=64, depth=64, warps=8, stages=3)  # 128 x 128 without wgmma spills

_GATED = Tile(rows=128, columns=128, depth=64, warps=8, stages=3)  # four such tiles at its end

GROUP = 8  # row tiles that walk the columns together, so that they share an expert's weights in L2
NEIGHBOURS = 8  # experts whose results leave together where they are fastest: 16 or 32 bytes
MAX_BLOCK_RANK = 64  # wider ranks take several steps
SPAN = 2048  # of K; a longer sum is cut into parts, so that few tiles of rows fill the device


def block_rank(rank: int) -> int:
    """The rank padded to a power of two that tl.dot takes, at most MAX_BLOCK_RANK."""
    return min(max(16, 1 << (rank - 1).bit_length()), MAX_BLOCK_RANK)


def ahead(rank: int) -> bool:
    """Whether LoRA's operands wait in registers, a dozen per thread, while a product is summed."""
    return 0 < rank <= 16


def fits(tile: Tile, shape: Shape) -> bool:
    """Whether the operand tiles fit into the architecture's shared memory."""
    taken = tile.shared_memory(shape.element_bytes)
    if shape.direction == "low_rank":  # the factor may be float32 beside narrow rows
        taken += tile.stages * tile.depth * tile.columns * (4 - shape.element_bytes)
    return taken <= SHARED_MEMORY.get(shape.arch, SMALLEST_SHARED_MEMORY)


def choose(shape: Shape) -> Tile:
    """The tile of a shape; the number of stages yields where shared memory is small."""
    tile = _general(shape)
    while not fits(tile, shape):
        if tile.stages > 1:
            tile = dataclasses.replace(tile, stages=tile.stages - 1)
        else:
            tile = dataclasses.replace(tile, depth=tile.depth // 2)
    return tile


def lanes(tile: Tile, a: int) -> int:
    """Rows of an expert's result, of `a`, in a tile of NEIGHBOURS experts."""
    return min(max(16, 1 << (a - 1).bit_length()), tile.rows // NEIGHBOURS)


def registers(tile: Tile, element_bytes: int, arch: str) -> dict[str, int]:
    """The option of a gated backward that limits the registers of a thread, where it helps.

    With 128 two blocks of 8 warps are in an SM, one's activations beside the other's sum. With LoRA
    the compiler takes 174 on its own, and under the limit it spills none.
    """
    limited = tile.warps == 8 and element_bytes == 2 and arch in _WIDE_ARCHS
    return {"maxnreg": 128} if limited else {}


def piece(tile: Tile) -> int:
    """Columns of a gated tile whose activations are in registers at once, 16 to 32 per thread."""
    return max(tile.columns // 4, min(tile.columns, 32 * 32 * tile.warps // tile.rows, 32), 16)


def span(depth: int, tile: Tile) -> int:
    """How much of K one program of low_rank sums: parts of about SPAN, whole steps of the tile."""
    parts = max(depth // SPAN, 1)
    return -(-depth // (parts * tile.depth)) * tile.depth


def _general(shape: Shape) -> Tile:
    narrow = shape.element_bytes == 2
    if shape.direction == "neighbours":
        return Tile(128, 128, 64, 8, 3) if narrow else Tile(128, 64, 32, 8, 2)
    if shape.direction == "product":  # rows: of the result's left side; depth: expert rows per step
        rows = min(max(16, 1 << (shape.rows - 1).bit_length()), 128 if narrow else 64)
        if narrow and rows == 16:  # gathers: short steps, and programs instead of steps in flight
            return Tile(rows, 128, 32, 4, 1)
        columns = 128 if narrow else 64
        return Tile(rows, columns, 64 if narrow else 32, 8 if rows == 128 else 4, 3)
    if shape.direction == "low_rank":  # reads rows once: many small programs in flight
        depth = 128 if narrow and shape.rows < 64 else 64
        return Tile(min(shape.rows, 64), block_rank(shape.rank), depth, 4, 4)
    columns, depth, warps, stages = _GENERAL[min(shape.rows, 256), shape.element_bytes]
    if narrow and shape.rows >= _NARROW.rows and shape.arch not in _WIDE_ARCHS:
        return dataclasses.replace(_NARROW, rows=shape.rows)
    if narrow and shape.direction == "gated" and shape.rows >= _GATED.rows:
        return dataclasses.replace(_GATED, rows=shape.rows)
    padding = -shape.columns % _WIDE.columns
    if narrow and shape.rows == _WIDE.rows and padding * _WIDE_PADDING <= shape.columns:
        return _WIDE
    return Tile(shape.rows, columns, depth, warps, stages)
