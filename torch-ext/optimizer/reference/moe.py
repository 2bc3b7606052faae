"""Grouped expert products with LoRA, one expert after the other, in float32 (float64 for float64).

Legend: T tokens, k experts per token, E experts, R = T k rows, r LoRA rank. Slot t k + j is the
j-th expert of token t; a row is a slot in expert order. `fan` says where row i lies in a tensor:
0: at row i (expert order), f > 0: at slots[i] // f (1: slot order, k: token order).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .glu import glu


def expert_sort(
    expert_ids: Tensor,  # (T, k)
    num_experts: int,
    tile_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort slots by expert; ids outside [0, E) come last. Nothing waits for the device.

    Returns:
        slots (R,), the slot of every row; rows (R,), its inverse; offsets (E + 1,), the first row
        of every expert and the number of valid rows; tiles (bound, 3) of at most `tile_rows` rows:
        expert (E: invalid rows, -1: unused), first row, end row. All int64.
    """
    ids = expert_ids.reshape(-1).long()
    total, device = ids.numel(), ids.device
    key = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    ordered, slots = torch.sort(key, stable=True)
    index = torch.arange(total, device=device)
    rows = torch.zeros_like(slots).scatter(0, slots, index)
    starts = torch.searchsorted(ordered, torch.arange(num_experts + 2, device=device))
    return slots, rows, starts[:-1].clone(), tile_map(starts, total, tile_rows)


def tile_map(
    starts: Tensor,  # (E + 2,) first row of every expert, of the sentinels, and the end
    rows: int,
    tile_rows: int,
) -> Tensor:
    """Tiles (bound, 3) of at most `tile_rows` rows of one expert: expert, first row, end row."""
    experts = starts.shape[0] - 2
    per_group = (starts.diff() + tile_rows - 1) // tile_rows  # (E + 1,) tiles
    tile_ends = per_group.cumsum(0)
    tile = torch.arange(tile_bound(rows, experts, tile_rows), device=starts.device)
    group = torch.searchsorted(tile_ends, tile, right=True)
    used, group = group <= experts, group.clamp(max=experts)
    first = starts[group] + (tile - (tile_ends - per_group)[group]) * tile_rows
    end = torch.minimum(first + tile_rows, starts[group + 1])
    return torch.where(used[:, None], torch.stack((group, first, end), 1), -1)


def tile_bound(rows: int, num_experts: int, tile_rows: int) -> int:
    """Most tiles that `rows` rows in E + 1 groups can fill: sum of ceil(n / tile_rows)."""
    groups = min(num_experts + 1, rows)
    return (rows + groups * (tile_rows - 1)) // tile_rows


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _take(x: Tensor, rows: slice, slots: Tensor, fan: int) -> Tensor:
    """The rows of a slice in expert order, widened for accumulation."""
    x = x[rows] if fan == 0 else x[slots[rows] // fan]
    return x.to(_accumulator(x))


def _experts(offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of every expert that has any."""
    at = offsets.tolist()
    return [(e, slice(at[e], at[e + 1])) for e in range(len(at) - 1) if at[e] < at[e + 1]]


def _place(out: Tensor, rows: slice, slots: Tensor, grouped: bool, value: Tensor) -> None:
    out[rows if grouped else slots[rows]] = value.to(out.dtype)


def _low_rank(x: Tensor, factor: Tensor, scaling: float) -> Tensor:
    """scaling * x @ factor, rounded once to x's storage dtype by the caller."""
    return scaling * (x @ factor.to(x.dtype))


def grouped_product(
    x: Tensor,  # rows of K
    weight: Tensor,  # (E, K, N)
    low: Tensor | None,  # (R, r)
    factor: Tensor | None,  # (E, r, N)
    bias: Tensor | None,  # (E, N)
    gates: Tensor | None,  # (T, k)
    slots: Tensor,
    offsets: Tensor,
    fan: int,
    grouped_out: bool,
) -> Tensor:
    """Return (x W_e + low F_e + bias_e) times gates, (R, N), zero for sentinels."""
    out = x.new_zeros((slots.shape[0], weight.shape[2]))
    for expert, rows in _experts(offsets):
        source = _take(x, rows, slots, fan)
        value = source @ weight[expert].to(source.dtype)
        if factor is not None:
            value += low[rows].to(value.dtype) @ factor[expert].to(value.dtype)
        if bias is not None:
            value += bias[expert].to(value.dtype)
        if gates is not None:
            value *= gates.reshape(-1)[slots[rows], None].to(value.dtype)
        _place(out, rows, slots, grouped_out, value)
    return out


def grouped_lora_forward(
    x: Tensor,  # (T, K) or (R, K)
    weight: Tensor,  # (E, K, N)
    lora_a: Tensor | None,  # (E, r, K)
    lora_b: Tensor | None,  # (E, N, r)
    bias: Tensor | None,  # (E, N)
    slots: Tensor,
    offsets: Tensor,
    scaling: float,
    fan: int,
    grouped_out: bool,
) -> tuple[Tensor, Tensor]:
    """Return y = x W_e + xa B_e^T + b_e (R, N), and xa = scaling x A_e^T (R, r) in expert order."""
    total, rank = slots.shape[0], 0 if lora_a is None else lora_a.shape[1]
    y = x.new_zeros((total, weight.shape[2]))
    xa = x.new_zeros((total, rank))
    for expert, rows in _experts(offsets):
        source = _take(x, rows, slots, fan)
        value = source @ weight[expert].to(source.dtype)
        if lora_a is not None:
            xa[rows] = _low_rank(source, lora_a[expert].mT, scaling).to(x.dtype)
            value += xa[rows].to(value.dtype) @ lora_b[expert].mT.to(value.dtype)
        if bias is not None:
            value += bias[expert].to(value.dtype)
        _place(y, rows, slots, grouped_out, value)
    return y, xa


def grouped_lora_dx(  # noqa: PLR0913
    dy: Tensor,  # (R, N) or (T, N)
    weight: Tensor,  # (E, K, N)
    lora_a: Tensor | None,  # (E, r, K)
    lora_b: Tensor | None,  # (E, N, r)
    bias: Tensor | None,  # (E, N), read for the gradient of the gates
    gates: Tensor | None,  # (T, k)
    x: Tensor | None,  # (T, K) or (R, K); given, the gradient of the gates is wanted
    slots: Tensor,
    offsets: Tensor,
    scaling: float,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The input's gradient before the sum over k, the LoRA intermediate and the gates' gradient.

    Returns:
        dx = g (dy W_e^T + yb A_e) (R, K), or (0, K) unless wants_dx; yb = scaling dy B_e (R, r) in
        expert order; dgates = <dy W_eff^T, x> + <dy, b_e> (R,) in slot order, (0,) without x.
    """
    total, rank = slots.shape[0], 0 if lora_b is None else lora_b.shape[2]
    dx = dy.new_zeros((total if wants_dx else 0, weight.shape[1]))
    yb = dy.new_zeros((total, rank))
    dgates = dy.new_zeros((0 if x is None else total,), dtype=_accumulator(dy))
    for expert, rows in _experts(offsets):
        grad = _take(dy, rows, slots, dy_fan)
        if lora_b is not None:
            yb[rows] = _low_rank(grad, lora_b[expert], scaling).to(dy.dtype)
        if x is None and not wants_dx:
            continue
        value = grad @ weight[expert].mT.to(grad.dtype)
        if lora_a is not None:
            value += yb[rows].to(value.dtype) @ lora_a[expert].to(value.dtype)
        if x is not None:
            dots = (value * _take(x, rows, slots, x_fan)).sum(1)
            if bias is not None:
                dots += grad @ bias[expert].to(grad.dtype)
            dgates[slots[rows]] = dots
        if wants_dx:
            if gates is not None:
                value *= gates.reshape(-1)[slots[rows], None].to(value.dtype)
            _place(dx, rows, slots, grouped_out, value)
    return dx, yb, dgates


def _expert_products(
    left: Tensor,  # rows of a
    right: Tensor,  # rows of b
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    fans: tuple[int, int],
    out: Tensor,  # (E, a, b)
) -> Tensor:
    """out[e] = sum over the expert's rows of g left^T right; 0 for experts without rows."""
    out.zero_()
    for expert, rows in _experts(offsets):
        a = _take(left, rows, slots, fans[0])
        if gates is not None:
            a = a * gates.reshape(-1)[slots[rows], None].to(a.dtype)
        out[expert] = (a.mT @ _take(right, rows, slots, fans[1])).to(out.dtype)
    return out


def grouped_lora_dab(
    x: Tensor,  # (T, K) or (R, K)
    dy: Tensor,  # (R, N) or (T, N)
    xa: Tensor,  # (R, r), scaled
    yb: Tensor,  # (R, r), scaled
    gates: Tensor | None,  # (T, k)
    slots: Tensor,
    offsets: Tensor,
    da: Tensor,  # (E, r, K), written
    db: Tensor,  # (E, N, r), written
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """da = (g yb)^T x and db = dy^T (g xa) per expert; an empty da or db is not computed."""
    if da.numel() > 0:
        _expert_products(yb, x, gates, slots, offsets, (0, x_fan), da)
    if db.numel() > 0:
        _expert_products(xa, dy, gates, slots, offsets, (0, dy_fan), db.mT)
    return da, db


def grouped_lora_dw(
    x: Tensor,
    dy: Tensor,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    dw: Tensor,  # (E, K, N), written
    dbias: Tensor,  # (E, N), written
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """dw = x^T (g dy) and dbias = sum g dy per expert; an empty dw or dbias is not computed."""
    if dw.numel() > 0:
        _expert_products(x, dy, gates, slots, offsets, (x_fan, dy_fan), dw)
    if dbias.numel() > 0:
        ones = dy.new_ones((slots.shape[0], 1))
        _expert_products(ones, dy, gates, slots, offsets, (0, dy_fan), dbias[:, None])
    return dw, dbias


def combine(
    y: Tensor,  # (R, N) in expert order
    gates: Tensor | None,  # (T, k)
    rows: Tensor,  # (R,) row of every slot
    offsets: Tensor,  # (E + 1,)
    top_k: int,
) -> Tensor:
    """out[t] = sum_j gates[t, j] y[row of slot t k + j] (T, N), invalid slots left out."""
    valid = rows < offsets[-1]
    value = torch.where(valid[:, None], y[rows], 0).to(_accumulator(y))
    if gates is not None:
        value = value * torch.where(valid, gates.reshape(-1).to(value.dtype), 0)[:, None]
    return value.view(rows.shape[0] // top_k, top_k, y.shape[1]).sum(1).to(y.dtype)


def grouped_lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    expert_ids: Tensor,  # (T, k)
    scaling: float = 1.0,
) -> Tensor:
    """The products in slot order (R, N), or combined by the gates (T, N)."""
    top_k = expert_ids.shape[1]
    slots, rows, offsets, _ = expert_sort(expert_ids, weight.shape[0], 16)
    operands = (x, weight, lora_a, lora_b, bias, slots, offsets, scaling, top_k)
    y, _ = grouped_lora_forward(*operands, grouped_out=gates is not None)
    return y if gates is None else combine(y, gates, rows, offsets, top_k)


def gated_experts(  # noqa: PLR0913
    x: Tensor,  # (T, H)
    w1: Tensor,  # (E, H, 2I)
    a1: Tensor | None,  # (E, r, H)
    b1: Tensor | None,  # (E, 2I, r)
    bias1: Tensor | None,  # (E, 2I)
    w2: Tensor,  # (E, I, H)
    a2: Tensor | None,  # (E, r, I)
    b2: Tensor | None,  # (E, H, r)
    bias2: Tensor | None,  # (E, H)
    gates: Tensor,  # (T, k)
    expert_ids: Tensor,  # (T, k)
    scalings: tuple[float, float],
    activation: str,
    interleaved: bool,
) -> Tensor:
    """The layer (T, H): product, activation, product, sum over a token's experts."""
    top_k = expert_ids.shape[1]
    slots, rows, offsets, _ = expert_sort(expert_ids, w1.shape[0], 16)
    order = (slots, offsets)
    wide, _ = grouped_lora_forward(x, w1, a1, b1, bias1, *order, scalings[0], top_k, True)
    h = glu(wide, activation, interleaved)
    y, _ = grouped_lora_forward(h, w2, a2, b2, bias2, *order, scalings[1], 0, True)
    return combine(y, gates, rows, offsets, top_k)
