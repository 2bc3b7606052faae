"""The Triton kernels of the grouped products and of LoRA.

_grouped_product  out = x W_e + low F_e + b_e: one program per (tile of rows, tile of columns)
_expert_sum       out (E, b) = sum g right: one program per (expert, tile of b)
_low_rank         out (R, r) = s x F_e^T: one program per (BLOCK_M of a tile's rows, block of the
                  rank, part of K)
_sum_parts        out = s (sum over the parts) + more: one program per block of elements, in order
_reorder          (E, r, N) between two strides: one program per tile of N x (r E)
_expert_products  out (E, a, b) = sum g left^T right, one or two such sums in a launch: one program
                  per (experts, tile of a, tile of b); the second sum follows the first

A tile of rows belongs to one expert; tiles of expert E hold sentinels and write zeros, unused ones
(-1) return. Rows are gathered on load: row i lies at i (FAN 0) or at slots[i] // FAN. Every element
is owned by one program and summed in order of the rows or of k: no atomics. What follows the number
of tokens is not specialized, so that another length of sequence compiles nothing.

A long K of `_low_rank` is cut into parts so that few tiles of rows still fill the device. Where the
cuts lie depends on K alone, so the bits of a row do not depend on how many rows there are.

A small a of `_expert_products`, which is LoRA's rank, would leave a tile of the tensor cores empty
and its program with a handful of rows: EXPERTS neighbours share a program, whose left side is zero
where a row belongs to another one. Their rows follow one another in memory and are one long sum,
with loads in flight throughout. Where experts are fastest in memory, as in PEFT's B, they also
share the stores. A row that is no number reaches the sums of the experts that share its program.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _begins_next(NEXT: tl.constexpr):
    """The next launch, if it is an early one, may begin; what it must wait for, it waits for."""
    if NEXT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _waits(EARLY: tl.constexpr):
    """Goes on when the launch before this one has ended and its results are there."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _source(rows, inside, slots, FAN: tl.constexpr):
    """Where rows in expert order lie in a tensor, int64."""
    if FAN == 0:
        return rows
    slot = tl.load(slots + rows, mask=inside, other=0)
    if FAN == 1:
        return slot
    return slot // FAN


@triton.jit
def _dot(a, b, total, WIDEN: tl.constexpr):
    """total + a b in float32; WIDEN because the interpreter multiplies the bits of bfloat16.

    float32 operands run on the FMA units, which round every addition: a step is summed on its own,
    so that the rounding errors of a long sum do not all pass through one chain of additions. The
    product with 1 keeps the compiler from folding the two sums into one.
    """
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    if a.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision="ieee"), 1.0, total)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _tile_of(program, tile_count, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles walk the columns together and share weights."""
    per_group = GROUP * column_tiles
    first = program // per_group * GROUP
    size = tl.minimum(tile_count - first, GROUP)
    inner = program % per_group
    return first + inner % size, inner // size


@triton.jit
def _product(
    at,
    places,
    steps,
    K,
    known,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of rows and columns over K, (BLOCK_M, BLOCK_N); zero unless known.

    Its first arguments are those of `_product_with_low_rank`, and so are those of its other parts.
    """
    at_rows, at_columns, _ = at
    _, inside, within = places
    row_step, column_step, _ = steps
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    at_x = at_rows[:, None] + k[None, :] * row_step
    at_weight = at_columns[None, :] + k[:, None] * column_step
    x_step, weight_step = tl.full((), row_step, tl.int64), tl.full((), column_step, tl.int64)
    total = tl.zeros((at_rows.shape[0], at_columns.shape[0]), tl.float32)
    for start in range(0, tl.where(known, K, 0), BLOCK_K):
        if EVEN_K:
            values = tl.load(at_x + start * x_step, mask=inside[:, None], other=0.0)
        else:
            x_mask = inside[:, None] & (k[None, :] < K - start)
            values = tl.load(at_x + start * x_step, mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:
            weights = tl.load(at_weight + start * weight_step)
        else:
            weight_mask = (k[:, None] < K - start) & within[None, :]
            weights = tl.load(at_weight + start * weight_step, mask=weight_mask, other=0.0)
        total = _dot(values, weights, total, WIDEN)
    return total


@triton.jit
def _low_rank_step(at, low, places, steps, start, rank, known, BLOCK_R: tl.constexpr):
    """Ranks from start on of low and of F_e, zero unless known."""
    _, _, at_factor = at
    rows, inside, within = places
    _, _, factor_rank = steps
    r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
    low_mask = (inside & known)[:, None] & (r[None, :] < rank)
    values = tl.load(low + rows[:, None] * rank + r[None, :], mask=low_mask, other=0.0)
    mask = (r[:, None] < rank) & (within & known)[None, :]
    weights = tl.load(at_factor[None, :] + r[:, None] * factor_rank, mask=mask, other=0.0)
    return values, weights


@triton.jit
def _plus_step(total, values, weights, places, WIDEN: tl.constexpr):
    """total + values weights of `_low_rank_step`, which has had a sum's time to arrive.

    What is selected is there already; without it the compiler would move the operands into shared
    memory, and wait for them, where they are loaded.
    """
    _, inside, within = places
    values = tl.where(inside[:, None], values, 0.0)
    weights = tl.where(within[None, :], weights, 0.0).to(values.dtype)
    return _dot(values, weights, total, WIDEN)


@triton.jit
def _plus_low_rank(
    total, at, low, places, steps, rank, known, WIDEN: tl.constexpr, BLOCK_R: tl.constexpr
):
    """total + low F_e."""
    # One or two steps: in flight they would only take memory, float32 factors beyond what is.
    for start in tl.range(0, tl.where(known, rank, 0), BLOCK_R, num_stages=1):
        values, weights = _low_rank_step(at, low, places, steps, start, rank, known, BLOCK_R)
        total = _dot(values, weights.to(values.dtype), total, WIDEN)
    return total


@triton.jit
def _product_with_low_rank(  # noqa: PLR0913
    at,  # pointers to the rows, to the columns and, if LORA, to those of the expert's first rank
    low,  # (R, r), contiguous
    places,  # rows, which of them are inside, and which columns are within
    steps,  # of rows and columns along K, and of the factor along the rank
    K,
    rank,
    known,
    LORA: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """`_product`, and with LORA low F_e.

    AHEAD: low and F_e are loaded before the sum over K, which hides how long that takes. The first
    EARLY programs may begin before there is anything to load, and do so after their sum.
    """
    if LORA and AHEAD:
        there = known
        if EARLY > 0:
            late = tl.program_id(0) < EARLY
            if not late:
                _waits(EARLY)
            there = known & (not late)
        values, weights = _low_rank_step(at, low, places, steps, 0, rank, there, BLOCK_R)
    total = _product(at, places, steps, K, known, WIDEN, EVEN_K, EVEN_N, BLOCK_K)
    if LORA and AHEAD:
        if EARLY > 0:
            late = tl.program_id(0) < EARLY
            if late:
                _waits(EARLY)
                values, weights = _low_rank_step(at, low, places, steps, 0, rank, known, BLOCK_R)
        total = _plus_step(total, values, weights, places, WIDEN)
    else:
        _waits(EARLY)
    if LORA and not AHEAD:
        total = _plus_low_rank(total, at, low, places, steps, rank, known, WIDEN, BLOCK_R)
    return total


@triton.jit(do_not_specialize=["total_rows", "tile_count"])
def _grouped_product(  # noqa: PLR0913
    x,  # rows of K
    weight,  # (E, K, N)
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, N) if LORA
    bias,  # (E, N) if BIAS
    gates,  # (R,) in slot order if GATED
    other,  # rows of N if DOTS
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # rows of N, whose columns are contiguous, if STORES
    dots,  # (column tiles, R) in slot order if DOTS
    K,
    N,
    rank,
    experts,
    total_rows,
    tile_count,
    column_tiles,
    x_row,
    x_col,
    weight_expert,
    weight_k,
    weight_n,
    factor_expert,
    factor_rank,
    factor_n,
    bias_expert,
    bias_n,
    other_row,
    other_col,
    out_row,
    FAN: tl.constexpr,
    OTHER_FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    LORA: tl.constexpr,
    AHEAD: tl.constexpr,  # LoRA's operands are loaded before the sum over K, which hides the wait
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DOTS: tl.constexpr,
    STORES: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,
    EARLY: tl.constexpr,  # launched before `low` and `factor` are there; so many do not wait
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    expert = tl.load(tiles + 3 * tile)
    if expert < 0:
        return
    first = tl.load(tiles + 3 * tile + 1)
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(tiles + 3 * tile + 2)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    within = columns < N
    known = expert < experts
    at_x = x + _source(rows, inside, slots, FAN) * x_row
    at_weight = weight + expert * weight_expert + columns * weight_n
    at_factor = at_weight
    if LORA:
        at_factor = factor + expert * factor_expert + columns * factor_n
    total = _product_with_low_rank(
        (at_x, at_weight, at_factor),
        low,
        (rows, inside, within),
        (x_col, weight_k, factor_rank),
        K,
        rank,
        known,
        LORA,
        AHEAD,
        EARLY,
        WIDEN,
        EVEN_K,
        EVEN_N,
        BLOCK_K,
        BLOCK_R,
    )
    if BIAS:
        at_bias = bias + expert * bias_expert + columns * bias_n
        total += tl.load(at_bias, mask=within & known, other=0.0).to(tl.float32)[None, :]
    slot = _source(rows, inside, slots, 1)
    mask = inside[:, None] & within[None, :]
    if DOTS:
        at_other = other + _source(rows, inside, slots, OTHER_FAN)[:, None] * other_row
        values = tl.load(at_other + columns[None, :] * other_col, mask=mask, other=0.0)
        # Of sentinels other and the gate may hold anything.
        products = tl.where(known, tl.sum(total * values.to(tl.float32), 1), 0.0)
        tl.store(dots + column_tile * total_rows + slot, products, mask=inside)
    if STORES:
        if GATED:
            gate = tl.load(gates + slot, mask=inside & known, other=0.0)
            total *= gate.to(tl.float32)[:, None]
        target = slot if SCATTER else rows
        at_out = out + target[:, None] * out_row + columns[None, :]
        tl.store(at_out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _expert_sum(  # noqa: PLR0913
    right,  # rows of B
    gates,  # (R,) in slot order if GATED
    slots,  # (R,)
    offsets,  # (E + 1,)
    out,  # (E, B)
    B,
    right_row,
    right_col,
    out_expert,
    out_b,
    FAN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK_B,), tl.float32)
    for start in range(0, (end - begin).to(tl.int32), BLOCK_M):
        rows = begin + start + tl.arange(0, BLOCK_M)
        inside = rows < end
        at_right = right + _source(rows, inside, slots, FAN)[:, None] * right_row
        mask = inside[:, None] & (b[None, :] < B)
        values = tl.load(at_right + b[None, :] * right_col, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            slot = _source(rows, inside, slots, 1)
            values *= tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(values, 0)
    tl.store(out + expert * out_expert + b * out_b, total.to(out.dtype.element_ty), mask=b < B)


@triton.jit(do_not_specialize=["total_rows"])
def _low_rank(  # noqa: PLR0913
    x,  # rows of K
    factor,  # (E, r, K)
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # (parts, R, r), contiguous
    K,
    rank,
    experts,
    total_rows,
    span,  # of K per part
    x_row,
    x_col,
    factor_expert,
    factor_rank,
    factor_col,
    scaling,
    FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,  # every step of every part lies within K
    SHARE: tl.constexpr,  # programs that share a tile of rows
    EARLY: tl.constexpr,  # launched before its predecessor ended
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NEXT: tl.constexpr,  # the next launch may begin beside this one
):
    _waits(EARLY)
    _begins_next(NEXT)  # not before: the next launch reads what the one before this wrote
    program = tl.program_id(0).to(tl.int64)
    tile = program // SHARE
    ranks = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    part = tl.program_id(2)
    expert = tl.load(tiles + 3 * tile)
    first = tl.load(tiles + 3 * tile + 1) + program % SHARE * BLOCK_M
    last = tl.load(tiles + 3 * tile + 2)
    if (expert < 0) | (first >= last):
        return
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < last
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    at_x = x + _source(rows, inside, slots, FAN)[:, None] * x_row + k[None, :] * x_col
    at_factor = factor + expert * factor_expert + ranks[None, :] * factor_rank
    at_factor += k[:, None] * factor_col
    wanted = ranks[None, :] < rank
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    begin = part * span
    end = tl.where(expert < experts, tl.minimum(begin + span, K), begin)
    x_step, factor_step = tl.full((), x_col, tl.int64), tl.full((), factor_col, tl.int64)
    for start in range(begin, end, BLOCK_K):
        if EVEN:
            x_mask, factor_mask = inside[:, None], wanted
        else:
            x_mask = inside[:, None] & (k[None, :] < K - start)
            factor_mask = (k[:, None] < K - start) & wanted
        values = tl.load(at_x + start * x_step, mask=x_mask, other=0.0)
        weights = tl.load(at_factor + start * factor_step, mask=factor_mask, other=0.0)
        total = _dot(values, weights.to(values.dtype), total, WIDEN)
    target = _source(rows, inside, slots, 1) if SCATTER else rows
    at_out = out + (part.to(tl.int64) * total_rows + target)[:, None] * rank + ranks[None, :]
    value = (scaling * total).to(out.dtype.element_ty)
    tl.store(at_out, value, mask=inside[:, None] & wanted)


@triton.jit(do_not_specialize=["size"])
def _sum_parts(
    parts,  # (parts, size) float32
    more,  # (size,) float32 if MORE
    out,  # (size,)
    size,
    count,
    scaling,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT: tl.constexpr,  # the next launch may begin beside this one
):
    _begins_next(NEXT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    step = tl.full((), size, tl.int64)
    for part in range(count):
        total += tl.load(parts + part * step + at, mask=at < size, other=0.0)
    total *= scaling
    if MORE:
        total += tl.load(more + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _at(column, experts, by_expert, by_rank, FLAT: tl.constexpr):
    """Where column (rank, expert), expert fastest, begins; FLAT: columns follow one another."""
    if FLAT:
        return column * by_expert
    return column % experts * by_expert + column // experts * by_rank


@triton.jit
def _reorder(  # noqa: PLR0913
    source,  # (E, r, N), any strides
    target,  # (E, r, N), other strides
    N,
    columns,  # r E
    experts,
    source_expert,
    source_rank,
    source_n,
    target_expert,
    target_rank,
    target_n,
    SOURCE_FLAT: tl.constexpr,
    TARGET_FLAT: tl.constexpr,
    EARLY: tl.constexpr,  # launched before its predecessor ended, which it does not read
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NEXT: tl.constexpr,  # the next launch may begin beside this one
):
    _begins_next(NEXT)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    mask = (n[:, None] < N) & (column[None, :] < columns)
    at = _at(column, experts, source_expert, source_rank, SOURCE_FLAT)
    value = tl.load(source + n[:, None] * source_n + at[None, :], mask=mask)
    at = _at(column, experts, target_expert, target_rank, TARGET_FLAT)
    place = target + n[:, None] * target_n + at[None, :]
    tl.store(place, value.to(target.dtype.element_ty), mask=mask)
    if EARLY:  # it ends after its predecessor: who waits for this waits for both
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        if is_first:
            _waits(EARLY)


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
    sizes,  # A and B
    left_strides,
    right_strides,
    out_strides,
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
    A, B = sizes
    left_row, left_col = left_strides
    right_row, right_col = right_strides
    out_expert, out_a, out_b = out_strides
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
            (A, B),
            (left_row, left_col),
            (right_row, right_col),
            (out_expert, out_a, out_b),
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
            (other_A, other_B),
            (other_left_row, other_left_col),
            (other_right_row, other_right_col),
            (other_out_expert, other_out_a, other_out_b),
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
