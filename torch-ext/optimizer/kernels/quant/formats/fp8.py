"""FP8 experts: e4m3 bytes and float32 scales of blocks of rows and columns.

value = e4m3[byte] * scale[row / block rows, column / block columns] in float32, rounded once to
dtype. Blocks of 128 x 128 are those of `weight_scale_inv` in DeepSeek-V3's and Qwen3's checkpoints;
a block of all columns is a scale per row, one of all rows and columns a scale per expert.

path      | op                    | source                 | taken
triton    | fp8_dequant_triton    | dequant_triton.py      | CUDA
reference | fp8_dequant_reference | reference/fp8.py       | everything else
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.library import custom_op

from ...._ops import add_op_namespace_prefix
from ....reference import fp8 as reference
from ....reference.fp8 import block_of, scale_shape
from ...checks import check_expert_shape, check_ids, check_packed, check_quantizable, check_stack
from ..codec import dequant_op
from ..packed_product import PackedStack
from . import FORMATS, InRegisters, Layout

BLOCK = (128, 128)  # rows, columns
_STORED = (torch.uint8, torch.float8_e4m3fn)


_reference = custom_op(
    add_op_namespace_prefix("fp8_dequant_reference"),
    reference.fp8_dequant,
    mutates_args=(),
    schema="(Tensor packed, Tensor scales, Tensor active_experts, SymInt[] expert_shape, "
    "int[] block, ScalarType dtype) -> Tensor",
)


def _fake(packed, scales, active_experts, expert_shape, block, dtype):
    return packed.new_empty((active_experts.shape[0], *expert_shape), dtype=dtype)


_reference.register_fake(_fake)


def check_block(block: object) -> tuple[int, int]:
    """Rows and columns of a block, powers of two from 32 on, or 0 for the whole side."""
    sizes = tuple(block) if isinstance(block, Sequence) else ()
    if len(sizes) != 2 or any(isinstance(s, bool) or not isinstance(s, int) for s in sizes):
        raise TypeError(f"block must be two integers (rows, columns), got {block!r}")
    rows, columns = sizes
    if rows < 0 or rows & (rows - 1) or (columns and columns < 32) or columns & (columns - 1):
        raise ValueError(
            "block must hold powers of two, of columns 32 or more, or 0 for the whole side, got "
            f"{sizes}"
        )
    return sizes


def fp8_quantize(weight: Tensor, block: Sequence[int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise a weight to FP8 (e4m3) with a float32 scale per block.

    The scale of a block is max |x| / 448; elements go to the nearest value, ties to even.

    Args:
        weight: (..., N, K) in bfloat16, float16 or float32, any strides.
        block: rows and columns that share a scale, powers of two, of columns 32 or more; 0 for the
            whole side: (1, 0) is a scale per row, (0, 0) one per matrix.

    Returns:
        packed (..., N, K) float8_e4m3fn; scales (..., ceil(N / rows), ceil(K / columns)) float32,
        by which elements are multiplied. A NaN or an infinity makes its block NaN.

    Raises:
        TypeError: weight is no tensor of these dtypes, or block no pair of integers.
        ValueError: block has other sizes, weight is empty, or a gradient is expected.
    """
    return reference.fp8_quantize(check_quantizable(weight, 2), check_block(block))


def fp8_dequant(
    packed: Tensor,
    scales: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    block: Sequence[int] = BLOCK,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Gather experts from an FP8 (e4m3) stack and decode them in one pass.

    value = e4m3[byte] * scale in float32, rounded once to `dtype`. Nothing waits for the device:
    the call can be captured in a CUDA graph.

    Args:
        packed: the stack of E experts as float8_e4m3fn or its bytes as uint8, contiguous.
        scales: float32, (E, ceil(N / rows), ceil(K / columns)) in any shape, contiguous.
        active_experts: (n,) int32 or int64 ids; may be empty, may repeat, any order.
        expert_shape: (N, K) of one expert.
        block: of `fp8_quantize`.
        dtype: bfloat16, float16 or float32.

    Returns:
        (n, N, K) in `dtype`. An id outside [0, E) gives NaN on CUDA, where looking at it would make
        the host wait.

    Raises:
        TypeError: an argument is no tensor, integer or dtype where it must be one.
        ValueError: sizes, dtypes, devices or layouts do not fit, or a gradient is expected.
        IndexError: on CPU, if an id is outside [0, E).
    """
    shape, sizes = check_expert_shape(expert_shape), check_block(block)
    if len(shape) != 2:
        raise ValueError(f"expert_shape must be (N, K), got {shape}")
    experts = check_stack(packed, math.prod(shape))
    packed = check_packed("packed", packed, _STORED, experts * math.prod(shape))
    blocks = math.prod(scale_shape((experts, *shape), sizes))
    scales = check_packed("scales", scales, (torch.float32,), blocks)
    ids = check_ids(active_experts, packed)
    packed = packed.view(torch.uint8)
    decode = dequant_op("fp8_dequant", packed.device, dtype)
    return decode(packed, scales, ids, shape, sizes, dtype)


@dataclasses.dataclass(frozen=True)
class Fp8(InRegisters):
    """FP8 (e4m3) with a float32 scale for every block of an expert's rows and columns."""

    by_outputs: ClassVar[bool] = True

    quant_type: str = "fp8"
    block_rows: int = BLOCK[0]
    block_columns: int = BLOCK[1]

    def __post_init__(self) -> None:
        check_block(self.block)
        super().__post_init__()

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 0 for the whole side."""
        return self.block_rows, self.block_columns

    def layout(self, stored: Sequence[int]) -> Layout:
        """Bytes of elements, and scales of blocks."""
        return {
            "packed": (math.prod(stored), torch.uint8),
            "scales": (math.prod(scale_shape(stored, self.block)), torch.float32),
        }

    def unit(self, stored: Sequence[int]) -> int:
        """An expert."""
        return stored[1] * stored[2]

    def pack(self, flat: Tensor, stored: Sequence[int]) -> tuple[Tensor, ...]:
        """By `fp8_quantize`."""
        return fp8_quantize(flat.view(-1, *stored[1:]), self.block)

    def decode(
        self, tensors: Sequence[Tensor], ids: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """By `fp8_dequant`."""
        return fp8_dequant(*tensors, ids, shape, self.block, dtype)

    def decode_slice(
        self,
        tensors: Sequence[Tensor],
        stored: Sequence[int],
        first: int,
        offsets: Tensor,
        out: Tensor,
    ) -> None:
        """By Triton, and the experts that have rows alone."""
        del stored
        from ..dequant_triton import decode_fp8

        decode_fp8(out, *tensors, offsets, self.block, first)

    def opened(self, tensors: Sequence[Tensor], stored: Sequence[int]) -> PackedStack:
        """Scales of blocks of rows and columns."""
        packed, scales = tensors
        rows, columns = block_of(stored, self.block)
        return PackedStack(packed, scales, None, None, tuple(stored), columns, "fp8", rows)


FORMATS["fp8"] = Fp8
