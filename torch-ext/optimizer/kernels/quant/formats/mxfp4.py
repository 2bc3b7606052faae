"""MXFP4 experts: blocks of 32 along the last dimension share a power of two, 4.25 bits an element.

value = E2M1[nibble] * 2^(scale - 127), rounded once to dtype; even elements lie in the low nibbles.
Bytes and scales are those of gpt-oss checkpoints, `*_blocks` (E, N, K / 32, 16) and `*_scales`
(E, N, K / 32), whose sum runs along K.

path      | op                      | source                 | taken
triton    | mxfp4_dequant_triton    | dequant_triton.py      | CUDA
reference | mxfp4_dequant_reference | reference/mxfp4.py     | everything else
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.library import custom_op

from ...._ops import add_op_namespace_prefix
from ....reference import mxfp4 as reference
from ....reference.mxfp4 import BLOCK, E2M1_TABLE
from ...checks import check_expert_shape, check_ids, check_packed, check_quantizable, check_stack
from ..codec import dequant_op, quantize_in_chunks
from ..packed_product import LEAST_ROWS_OF_FEW, PackedStack
from . import FORMATS, InRegisters, Layout

_reference = custom_op(
    add_op_namespace_prefix("mxfp4_dequant_reference"),
    reference.mxfp4_dequant,
    mutates_args=(),
    schema="(Tensor packed, Tensor scales, Tensor active_experts, SymInt[] expert_shape, "
    "ScalarType dtype) -> Tensor",
)


def _fake(packed, scales, active_experts, expert_shape, dtype):
    return packed.new_empty((active_experts.shape[0], *expert_shape), dtype=dtype)


_reference.register_fake(_fake)


def check_columns(name: str, columns: int) -> None:
    """Raise ValueError unless blocks end with their row."""
    if columns % BLOCK:
        raise ValueError(
            f"{name}: MXFP4 blocks of {BLOCK} run along the last dimension, whose size must be a "
            f"multiple of it, got {columns}; pad it or take another format"
        )


def mxfp4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight to MXFP4 (Open Compute Project, Microscaling Formats v1.0).

    The scale of a block is 2^(floor(log2(max |x|)) - 2), so that its largest element lies in
    [4, 8) and at most 6 is kept of it; elements go to the nearest value, ties to the even code.

    Args:
        weight: (..., K), K a multiple of 32; bfloat16, float16 or float32, any strides.

    Returns:
        packed (..., K / 32, 16) uint8, the low nibble first; scales (..., K / 32) uint8, exponents
        with a bias of 127. A NaN or an infinity makes its block NaN (scale 255); a block of zeros
        has scale 0.

    Raises:
        TypeError: weight is no tensor of these dtypes.
        ValueError: K is no multiple of 32, weight is empty, or a gradient is expected.
    """
    weight = check_quantizable(weight, 1)
    check_columns("weight", weight.shape[-1])
    blocks = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
    packed = weight.new_empty((*blocks, BLOCK // 2), dtype=torch.uint8)
    scales = weight.new_empty(blocks, dtype=torch.uint8)
    quantize_in_chunks(weight.reshape(-1), (packed, scales), reference.mxfp4_quantize)
    return packed, scales


def mxfp4_dequant(
    packed: Tensor,
    scales: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Gather experts from an MXFP4 stack and decode them in one pass.

    value = E2M1[nibble] * 2^(scale - 127) in float32, rounded once to `dtype`. Nothing waits for
    the device: the call can be captured in a CUDA graph.

    Args:
        packed: two elements per byte over the flattened stack of E experts, the low nibble first,
            uint8 of any shape, contiguous: gpt-oss's `*_blocks` as they are.
        scales: one uint8 per 32 elements, contiguous: its `*_scales`.
        active_experts: (n,) int32 or int64 ids; may be empty, may repeat, any order.
        expert_shape: shape of one expert, (N, K); K is a multiple of 32.
        dtype: bfloat16, float16 or float32.

    Returns:
        (n, *expert_shape) in `dtype`. A scale of 255 gives NaN. An id outside [0, E) gives NaN on
        CUDA, where looking at it would make the host wait.

    Raises:
        TypeError: an argument is no tensor, integer or dtype where it must be one.
        ValueError: sizes, dtypes, devices or layouts do not fit, or a gradient is expected.
        IndexError: on CPU, if an id is outside [0, E).
    """
    shape = check_expert_shape(expert_shape)
    check_columns("expert_shape", shape[-1])
    elements = math.prod(shape)
    elements *= check_stack(packed, elements, 2)
    packed = check_packed("packed", packed, (torch.uint8,), elements // 2)
    scales = check_packed("scales", scales, (torch.uint8,), elements // BLOCK)
    ids = check_ids(active_experts, packed)
    decode = dequant_op("mxfp4_dequant", packed.device, dtype)
    return decode(packed, scales, ids, shape, dtype)


@dataclasses.dataclass(frozen=True)
class Mxfp4(InRegisters):
    """MXFP4 of the Microscaling specification: 4-bit floats, a power of two for every 32."""

    by_outputs: ClassVar[bool] = True
    least_rows: ClassVar[int] = LEAST_ROWS_OF_FEW

    quant_type: str = "mxfp4"

    def layout(self, stored: Sequence[int]) -> Layout:
        """Codes, and exponents of blocks."""
        check_columns("stored", stored[2])
        elements = math.prod(stored)
        return {
            "packed": (elements // 2, torch.uint8),
            "scales": (elements // BLOCK, torch.uint8),
        }

    def unit(self, stored: Sequence[int]) -> int:
        """A block."""
        del stored
        return BLOCK

    def pack(self, flat: Tensor, stored: Sequence[int]) -> tuple[Tensor, ...]:
        """By `mxfp4_quantize`."""
        del stored
        return mxfp4_quantize(flat)

    def decode(
        self, tensors: Sequence[Tensor], ids: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """By `mxfp4_dequant`."""
        return mxfp4_dequant(*tensors, ids, shape, dtype)

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
        from ..dequant_triton import decode_nibbles

        decode_nibbles(out, *tensors, offsets, BLOCK, mx=True, first=first)

    def constants(self, device: torch.device) -> tuple[Tensor, ...]:
        """The values of the codes."""
        return (_table(device),)

    def opened(self, tensors: Sequence[Tensor], stored: Sequence[int]) -> PackedStack:
        """Powers of two as scales."""
        packed, scales, *table = tensors
        codebook = table[0] if table else None
        return PackedStack(packed, scales, codebook, None, tuple(stored), BLOCK, "mxfp4")


@functools.cache
def _table(device: torch.device) -> Tensor:
    """The values of 16 codes on a device, copied there once."""
    return torch.tensor(E2M1_TABLE, dtype=torch.float32, device=device)


FORMATS["mxfp4"] = Mxfp4
