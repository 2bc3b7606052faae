"""The Triton kernel of the sums over an expert's rows: out (E, a, b) = sum g left^T right.

_expert_products  one or two such products in a launch: one program per (experts, tile of a, tile of
                  b); the second product follows the first

Where experts are fastest in memory, as in PEFT's B, a program computes EXPERTS neighbours one after
the other and stores them in one go: they share sectors of memory, and no other layout is needed in
between. A sum runs over growing rows and belongs to one program: no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._grouped_triton import _dot, _source


@triton.jit
def _sum_of_rows(  # noqa: PLR0913
    expert,
    a,
    b,
    left,
    right,
    gates,
    slots,
    offsets,
    experts,
    A,
    B,
    left_row,
    left_col,
    right_row,
    right_col,
    LEFT_FAN: tl.constexpr,
    RIGHT_FAN: tl.constexpr,
    GATED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """(BLOCK_A, BLOCK_B) of one expert; zero from `experts` on."""
    begin = tl.load(offsets + tl.minimum(expert, experts))
    end = tl.load(offsets + tl.minimum(expert + 1, experts))
    total = tl.zeros((a.shape[0], b.shape[0]), tl.float32)
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
        total = _dot(left_values, right_values, total, WIDEN)
    return total


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
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    a_tiles, b_tiles = tl.cdiv(A, BLOCK_A), tl.cdiv(B, BLOCK_B)
    first = program // (a_tiles * b_tiles) * EXPERTS
    a = program // b_tiles % a_tiles * BLOCK_A + tl.arange(0, BLOCK_A)
    b = program % b_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = (a[:, None] < A) & (b[None, :] < B)
    at_out = out + a[:, None] * out_a + b[None, :] * out_b
    if EXPERTS == 1:
        total = _sum_of_rows(
            first,
            a,
            b,
            left,
            right,
            gates,
            slots,
            offsets,
            experts,
            A,
            B,
            left_row,
            left_col,
            right_row,
            right_col,
            LEFT_FAN,
            RIGHT_FAN,
            GATED,
            WIDEN,
            BLOCK_M,
        )
        tl.store(at_out + first * out_expert, total.to(out.dtype.element_ty), mask=mask)
    else:
        lane = tl.arange(0, EXPERTS)
        found = tl.zeros((BLOCK_A, BLOCK_B, EXPERTS), out.dtype.element_ty)
        for offset in range(EXPERTS):
            total = _sum_of_rows(
                first + offset,
                a,
                b,
                left,
                right,
                gates,
                slots,
                offsets,
                experts,
                A,
                B,
                left_row,
                left_col,
                right_row,
                right_col,
                LEFT_FAN,
                RIGHT_FAN,
                GATED,
                WIDEN,
                BLOCK_M,
            )
            rounded = total.to(out.dtype.element_ty)
            found = tl.where(lane[None, None, :] == offset, rounded[:, :, None], found)
        expert = first + lane
        at_out = at_out[:, :, None] + (expert * out_expert)[None, None, :]
        tl.store(at_out, found, mask=mask[:, :, None] & (expert < experts)[None, None, :])


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
    EXPERTS: tl.constexpr,  # neighbours that a program computes
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
            BLOCK_A,
            BLOCK_B,
            BLOCK_M,
        )
