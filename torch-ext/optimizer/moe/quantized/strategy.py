"""How much of a stack of 4-bit experts is decoded at a time.

strategy  | decodes                                        | "auto" takes it
fused     | in registers, inside the product               | up to FUSED_UP_TO_ROWS rows per expert,
          |                                                | by CUDA up to COMPILED_UP_TO_ROWS
selective | the active experts, at most min(E, T k)        | where that is at most half of E
chunked   | slices of experts, two of them at a time        | everything else
resident  | the whole stack                                | never; by name
"""

from __future__ import annotations

from torch import Tensor

from ...dispatch import MEASURED, TRITON_PATHS, Path
from ...kernels.quant.grouped_lora_nf4_forward import decodes_in_registers
from ...kernels.quant.nf4_product import serves
from .expert_weights import STRATEGIES, QuantizedWeight

# Decoded weights of a slice, of which two exist at a time: an eighth of the stack between these
# bounds. Eight slices cost the host little, and two of them stay below what a layer's activations
# take at 2048 tokens; the bounds keep small stacks in few slices and large ones in bounded memory.
SLICES = 8
SLICE_BYTES = (64 << 20, 128 << 20)
# Mean rows per expert up to which decoding inside the product takes less time than decoding to
# memory first. Forward and backward of a layer at 2048 tokens on an H200, ms
# (docs/dev/decisions/2026-11-22-nf4-products.md):
#   rows              64     128    256    512
#   fused, CUDA       1.60   1.49   1.60    7.26
#   fused, Triton     1.71   1.94   1.95   10.67
#   chunked, 1 stream 3.01   2.73   2.10    9.10
#   chunked           2.92   2.46   not timed
# Two streams gained 3 and 9 %, so that 256 rows may be a tie; there the fused product takes less
# memory. With 0.5 to 32 rows its forward takes a quarter to a half of the time.
FUSED_UP_TO_ROWS = 256
COMPILED_UP_TO_ROWS = 512  # more were not timed


def choose_strategy(
    rows: int,
    num_experts: int,
    wanted: str = "auto",
    *,
    fusable: bool = True,
    fast: bool = True,
    compiled: bool = False,
) -> Path:
    """The strategy for some rows over some experts, and why: a pure function of its arguments.

    Args:
        rows: T k.
        num_experts: E.
        wanted: a strategy by name, or "auto".
        fusable: whether the fused product can take these weights on this path.
        fast: whether it decodes in registers there, and was measured.
        compiled: whether CUDA's product takes it, which is faster with many rows.

    Returns:
        Name and reason.

    Raises:
        ValueError: unknown strategy, or fused by name for what it cannot take.
    """
    if wanted not in STRATEGIES:
        raise ValueError(f"wanted: strategy must be one of {STRATEGIES}, got {wanted!r}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if wanted == "fused" and not fusable:
        raise ValueError(
            'strategy="fused" needs blocks that do not leave their row (the last stored size a '
            'multiple of the blocksize); use "chunked"'
        )
    if wanted != "auto":
        return Path(wanted, "asked for by name")
    mean = rows / num_experts
    most = COMPILED_UP_TO_ROWS if compiled else FUSED_UP_TO_ROWS
    if fusable and fast and mean <= most:
        return Path("fused", f"{mean:g} rows per expert, at most {most}")
    if 2 * rows <= num_experts:
        return Path("selective", f"{rows} rows reach at most half of the {num_experts} experts")
    if fusable and fast:
        return Path("chunked", f"{mean:g} rows per expert, more than {most}")
    return Path("chunked", f"{mean:g} rows per expert, and the fused product is none or slow here")


def chunk_experts(num_experts: int, numel: int, element_bytes: int) -> int:
    """Experts per slice: slices of equal size, within SLICE_BYTES (one expert at least)."""
    each, (least, limit) = numel * element_bytes, SLICE_BYTES
    wanted = min(max(num_experts * each // SLICES, least), limit)
    most = max(1, wanted // each)
    return -(-num_experts // -(-num_experts // most))


def pick_strategy(
    x: Tensor,
    weight: QuantizedWeight,
    rows: int,
    rank: int,
    path: str,
    by_name: bool,
    strategy: str | None = None,
) -> tuple[str, str]:
    """The strategy of a product of x with a weight, and the path of its ops.

    Args:
        x: Rows; their dtype, device and alignment.
        weight: Seen as (E, K, N).
        rows: T k.
        rank: Of LoRA, or 0.
        path: "compiled", "triton" or "reference".
        by_name: Whether the path was asked for; else Triton's gives way to what is faster.
        strategy: None for the weight's own.

    Raises:
        ValueError: As `choose_strategy`.
    """
    replaceable = path == "triton" and not by_name
    chosen = choose_strategy(
        rows,
        weight.shape[0],
        strategy or weight.strategy,
        fusable=weight.fusable_over(x),
        fast=path in TRITON_PATHS and decodes_in_registers(x),
        compiled=replaceable and serves(x, weight.operands(), rank),
    ).name
    if rows == 0:
        # Of an empty batch no expert is active; one slice of all of them would be decoded for none.
        chosen = "selective"
    return chosen, MEASURED if replaceable and chosen == "fused" else path
