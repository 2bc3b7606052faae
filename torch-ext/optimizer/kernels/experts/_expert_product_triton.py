"""The Triton kernel of the sums over an expert's rows: out (E, a, b) = sum g left^T right.

_expert_products  one or two such products in a launch: one program per (experts, tile of a, tile of
                  b); the second product follows the first

A small a, which is LoRA's rank, would leave a tile of the tensor cores empty and its program with a
handful of rows: EXPERTS neighbours share a program, whose left side is zero where a row belongs to
another one. Their rows follow one another in memory and are one long sum, with loads in flight
throughout. Where experts are fastest in memory, as in PEFT's B, they also share the stores.

A sum runs over growing rows and belongs to one program: no atomics. A row that is no number
reaches the sums of the experts that share its program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._grouped_triton import _dot, _source


@triton.jit
def _products_of(  # noqa: PLR0913
    program,
    left,
    right,
    gates,
    slots,
    offsets,
    out,
    experts,
    A,
    B,
    left_row,
    left_col,
    right_row,
    right_col,
    out_expert,
    out_a,
    out_b,
    LEFT_FAN: tl.constexpr,
    RIGHT_FAN: tl.constexpr,
    GATED: tl.constexpr,
    WIDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_LAST: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    a_tiles, b_tiles = tl.cdiv(A, BLOCK_A), tl.cdiv(B, BLOCK_B)
    first = program // (a_tiles * b_tiles) * EXPERTS
    a = program // b_tiles % a_tiles * BLOCK_A + tl.arange(0, BLOCK_A)
    b = program % b_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    neighbour = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + tl.minimum(first + 1 + neighbour, experts))
    begin = tl.load(offsets + first)
    end = tl.load(offsets + tl.minimum(first + EXPERTS, experts))
    total = tl.zeros((EXPERTS * BLOCK_A, BLOCK_B), tl.float32)
    for start in range(0, (end - begin).to(tl.int32), BLOCK_M):
        rows = begin + start + tl.arange(0, BLOCK_M)
        inside = rows < end
        at_left = left + _source(rows, inside, slots, LEFT_FAN)[None, :] * left_row
        left_mask = inside[None, :] & (a[:, None] < A)
        left_values = tl.load(at_left + a[:, None] * left_col, mask=left_mask, other=0.0)
        at_right = right + _source(rows, inside, slots, RIGHT_FAN)[:, None] * right_row
        right_mask = inside[:, None] & (b[None, :] < B)
        right_values = tl.load(at_right + b[None, :] * right_col, mask=right_mask, other=0.0)
        if GATED:
            slot = _source(rows, inside, slots, 1)
            gate = tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)
            left_values = (left_values.to(tl.float32) * gate[None, :]).to(right_values.dtype)
        if EXPERTS > 1:  # each row in the lanes of its expert
            mine = tl.sum((rows[None, :] >= ends[:, None]).to(tl.int32), 0)
            spread = mine[None, None, :] == neighbour[:, None, None]
            spread = tl.where(spread, left_values[None, :, :], 0.0).to(left_values.dtype)
            left_values = tl.reshape(spread, (EXPERTS * BLOCK_A, BLOCK_M))
        total = _dot(left_values, right_values, total, WIDEN)
    rounded = total.to(out.dtype.element_ty)
    place = first + neighbour
    if EXPERTS_LAST:
        found = tl.permute(tl.reshape(rounded, (EXPERTS, BLOCK_A, BLOCK_B)), (1, 2, 0))
        at_out = out + a[:, None, None] * out_a + b[None, :, None] * out_b
        at_out += place[None, None, :] * out_expert
        mask = (a < A)[:, None, None] & (b < B)[None, :, None] & (place < experts)[None, None, :]
        tl.store(at_out, found, mask=mask)
    else:
        lane = tl.arange(0, EXPERTS * BLOCK_A)
        expert = first + lane // BLOCK_A
        of_a = program // b_tiles % a_tiles * BLOCK_A + lane % BLOCK_A
        at_out = out + (expert * out_expert + of_a * out_a)[:, None] + b[None, :] * out_b
        mask = ((of_a < A) & (expert < experts))[:, None] & (b < B)[None, :]
        tl.store(at_out, rounded, mask=mask)


@triton.jit(do_not_specialize=["first_programs"])
def _expert_products(  # noqa: PLR0913
    left,  # rows of A
    right,  # rows of B
    out,  # (E, A, B)
    other_left,  # the second product, if TWO
    other_right,
    other_out,
    gates,  # (R,) in slot order if a product is gated
    slots,  # (R,)
    offsets,  # (E + 1,)
    experts,
    first_programs,  # programs of the first product
    A,
    B,
    left_row,
    left_col,
    right_row,
    right_col,
    out_expert,
    out_a,
    out_b,
    other_A,
    other_B,
    other_left_row,
    other_left_col,
    other_right_row,
    other_right_col,
    other_out_expert,
    other_out_a,
    other_out_b,
    LEFT_FAN: tl.constexpr,
    RIGHT_FAN: tl.constexpr,
    GATED: tl.constexpr,
    OTHER_LEFT_FAN: tl.constexpr,
    OTHER_RIGHT_FAN: tl.constexpr,
    OTHER_GATED: tl.constexpr,
    TWO: tl.constexpr,
    WIDEN: tl.constexpr,
    EXPERTS: tl.constexpr,  # neighbours that share a program
    EXPERTS_LAST: tl.constexpr,  # and lie next to each other in the result
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < first_programs:
        _products_of(
            program,
            left,
            right,
            gates,
            slots,
            offsets,
            out,
            experts,
            A,
            B,
            left_row,
            left_col,
            right_row,
            right_col,
            out_expert,
            out_a,
            out_b,
            LEFT_FAN,
            RIGHT_FAN,
            GATED,
            WIDEN,
            EXPERTS,
            EXPERTS_LAST,
            BLOCK_A,
            BLOCK_B,
            BLOCK_M,
        )
    elif TWO:
        _products_of(
            program - first_programs,
            other_left,
            other_right,
            gates,
            slots,
            offsets,
            other_out,
            experts,
            other_A,
            other_B,
            other_left_row,
            other_left_col,
            other_right_row,
            other_right_col,
            other_out_expert,
            other_out_a,
            other_out_b,
            OTHER_LEFT_FAN,
            OTHER_RIGHT_FAN,
            OTHER_GATED,
            WIDEN,
            EXPERTS,
            EXPERTS_LAST,
            BLOCK_A,
            BLOCK_B,
            BLOCK_M,
        )
