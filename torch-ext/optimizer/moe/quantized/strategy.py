"""How much of a stack of packed experts is decoded at a time, and `explain_quantized`.

strategy  | decodes                                        | "auto" takes it
fused     | in registers, inside the product               | up to FUSED_UP_TO_ROWS rows per expert,
          |                                                | by CUDA up to COMPILED_UP_TO_ROWS
selective | the active experts, at most min(E, T k)        | where that is at most half of E
chunked   | slices of experts, one at a time               | everything else

On the reference path experts are decoded one after another, whatever the strategy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch import MEASURED, TRITON_PATHS, Path, experts_path
from ...kernels.quant.grouped_lora_quantized import ACTIVE, decodes_in_registers
from .expert_weights import QuantizedWeight, as_quantized, check_strategy
from .quantized_experts import QuantizedExperts

# Decoded weights of a slice: a quarter of the stack between these bounds. Four slices cost the host
# little, and one stays below what a layer's activations take at 2048 tokens; the bounds keep small
# stacks in one slice and large ones in bounded memory.
SLICES = 4
SLICE_BYTES = (128 << 20, 256 << 20)
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
    check_strategy(wanted, "wanted")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    if wanted == "fused" and not fusable:
        raise ValueError(
            'strategy="fused" needs a format whose product decodes in registers, and blocks that '
            "do not leave their row (the last stored size a multiple of the blocksize); use "
            '"chunked"'
        )
    if wanted != "auto":
        return Path(wanted, "asked for by name")
    most = COMPILED_UP_TO_ROWS if compiled else FUSED_UP_TO_ROWS
    # Under torch.compile rows may be a symbol, of which no sentence can be made.
    named = "some" if torch.compiler.is_compiling() else rows
    mean = named if named == "some" else f"{rows / num_experts:g}"
    if fusable and fast and rows <= most * num_experts:
        return Path("fused", f"{mean} rows per expert, at most {most}")
    if 2 * rows <= num_experts:
        return Path("selective", f"{named} rows reach at most half of the {num_experts} experts")
    if fusable and fast:
        return Path("chunked", f"{mean} rows per expert, more than {most}")
    return Path("chunked", f"{mean} rows per expert, and the fused product is none or slow here")


def chunk_experts(num_experts: int, numel: int, element_bytes: int) -> int:
    """Experts per slice: slices of equal size, within SLICE_BYTES (one expert at least)."""
    each, (least, limit) = numel * element_bytes, SLICE_BYTES
    wanted = min(max(num_experts * each // SLICES, least), limit)
    most = max(1, wanted // each)
    return -(-num_experts // -(-num_experts // most))


def slice_experts(weight: QuantizedWeight, strategy: str, element_bytes: int) -> int:
    """Experts that an op decodes to memory at a time, ACTIVE, or 0: it decodes in registers."""
    if strategy == "chunked":
        experts, n, k = weight.stored
        return chunk_experts(experts, n * k, element_bytes)
    return ACTIVE if strategy == "selective" else 0


def pick_strategy(
    x: Tensor,
    weight: QuantizedWeight,
    rows: int,
    path: str,
    by_name: bool,
) -> tuple[str, str]:
    """The strategy of a product of x with a weight (E, K, N), and the path of its ops.

    Of x the dtype, the device and the alignment matter; `rows` is T k. Triton's path gives way to
    what is faster unless it was asked for by name. It raises as `choose_strategy`.
    """
    replaceable = path == "triton" and not by_name
    tensors = tuple(weight.tensors.values())
    refused = weight.format.compiled_refusal
    chosen = choose_strategy(
        rows,
        weight.shape[0],
        weight.strategy,
        fusable=weight.fusable_over(x),
        fast=path in TRITON_PATHS and decodes_in_registers(x.device, x.dtype),
        compiled=replaceable and refused(x.device, x, tensors, weight.stored) is None,
    ).name
    if rows == 0:
        chosen = "selective"  # of an empty batch no expert is active
    return chosen, MEASURED if replaceable and chosen == "fused" else path


def pick_slices(
    x: Tensor,
    weights: tuple[QuantizedWeight, QuantizedWeight],
    rows: int,
    path: str,
    by_name: bool,
) -> tuple[str, tuple[int, int]] | None:
    """How one op runs a gated layer: its path and `slice_experts` of both products.

    The weights are seen as (E, H, 2I) and (E, I, H); the rest is that of `pick_strategy`. None
    where a product is "selective": its experts are found by torch, outside of the op.
    """
    taken, found = path, []
    for weight in weights:
        strategy, own = pick_strategy(x, weight, rows, path, by_name)
        if strategy == "selective":
            return None
        taken = own if strategy == "fused" else taken
        found.append(slice_experts(weight, strategy, x.element_size()))
    return taken, tuple(found)


def explain_quantized(
    weight: QuantizedWeight | QuantizedExperts,
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    backend: str = "auto",
) -> str:
    """Say in words how `grouped_lora_linear` would multiply rows with 4-bit experts.

    Args:
        weight: the stack, as a layer multiplies it: (E, N, K) with K the size of the input.
        rows: T k, of all experts together; they are taken to be contiguous.
        dtype: of the activations.
        device: where they are; None for where the stack's products run.
        backend: as in `grouped_lora_linear`.

    Returns:
        The strategy and its reason; where it decodes in registers, whose products run forward and
        backward; where it does not although the rows are few, what is in the way.

    Raises:
        TypeError: weight is not in 4 bits.
        ValueError: unknown backend, or a strategy set by name that cannot take the stack.
    """
    record = as_quantized(weight)
    if record is None:
        raise TypeError(f"weight must be in 4 bits, got {type(weight).__name__}; see explain")
    where = torch.device(record.device if device is None else device)
    path = experts_path(where, dtype, backend)
    x = torch.empty((1, record.stored[2]), dtype=dtype, device="meta")
    tensors, refusal = tuple(record.tensors.values()), record.format.compiled_refusal
    refused = refusal(where, x, tensors, record.stored)
    in_memory = record.registers_refusal
    fast = path.name in TRITON_PATHS and decodes_in_registers(where, dtype)
    chosen = choose_strategy(
        rows,
        record.stored[0],
        record.strategy,
        fusable=in_memory is None,
        fast=fast,
        compiled=path.name == "triton" and backend == "auto" and refused is None,
    )
    if rows == 0:
        return "selective: an empty batch"
    said = f"{chosen.name}: {chosen.reason}"
    if chosen.name == "fused":
        return f"{said}; {_products(record, rows, path.name, backend, refused)}"
    if record.strategy != "auto" or (in_memory is None and fast):
        return said
    if in_memory is not None:
        return f"{said}: {in_memory}"
    if path.name not in TRITON_PATHS:
        return f"{said}: products are {path.name}'s, {path.reason}"
    return f"{said}: {dtype} on {where} is not decoded in registers"


def _products(
    record: QuantizedWeight, rows: int, path: str, backend: str, refused: str | None
) -> str:
    """Whose products decode in registers, forward and backward."""
    if path not in TRITON_PATHS:
        return f"products are {path}'s, which decodes expert after expert"
    if backend == "triton":
        return "products by Triton, asked for by name"
    if refused is not None:
        return f"products by Triton, since CUDA's cannot take them: {refused}"
    if path == "compiled":
        return "products by CUDA, asked for by name"
    experts, n, k = record.stored
    mean = rows / experts

    def source(depth: int) -> str:
        return "CUDA" if record.format.compiled_pays(mean, depth) else "Triton"

    return f"forward by {source(k)}, backward by {source(n)}, as measured"
