"""`explain_quantized`: how a product over 4-bit experts would run, and why, without running it."""

from __future__ import annotations

import torch

from ... import dispatch
from ...dispatch import TRITON_PATHS, experts_path
from ...kernels.quant.nf4_product import pays, refusal
from .expert_weights import QuantizedWeight, as_quantized
from .quantized_experts import QuantizedExperts
from .strategy import choose_strategy


def explain_quantized(
    weight: QuantizedWeight | QuantizedExperts,
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    rank: int = 0,
    backend: str = "auto",
) -> str:
    """Say in words how `grouped_lora_linear` would multiply rows with 4-bit experts.

    Args:
        weight: the stack, as a layer multiplies it: (E, N, K) with K the size of the input.
        rows: T k, of all experts together; they are taken to be contiguous.
        dtype: of the activations.
        device: where they are; None for where the stack's products run.
        rank: of LoRA, 0 without.
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
    refused = _refusal(record, where, dtype, rank)
    fast = path.name in TRITON_PATHS and _decodes_in_registers(where, dtype)
    chosen = choose_strategy(
        rows,
        record.stored[0],
        record.strategy,
        fusable=record.fusable,
        fast=fast,
        compiled=path.name == "triton" and backend == "auto" and refused is None,
    )
    if rows == 0:
        return "selective: an empty batch"
    said = f"{chosen.name}: {chosen.reason}"
    if chosen.name == "fused":
        return f"{said}; {_products(record, rows, path.name, backend, refused)}"
    if record.strategy != "auto" or (record.fusable and fast):
        return said
    if not record.fusable:
        block, inputs = record.blocksize, record.stored[2]
        return f"{said}: blocks of {block} leave their row of {inputs} elements"
    if path.name not in TRITON_PATHS:
        return f"{said}: products are {path.name}'s, {path.reason}"
    return f"{said}: {dtype} on {where} is not decoded in registers"


def _refusal(
    record: QuantizedWeight, device: torch.device, dtype: torch.dtype, rank: int
) -> str | None:
    """Why CUDA's product cannot take contiguous rows of a dtype; None if it can."""
    if not dispatch.is_hopper(device):
        return "it needs capability 9.0"
    x = torch.empty((1, record.stored[2]), dtype=dtype, device="meta")
    nested = (record.absmax_code,) if record.nested else None
    stack = (record.packed, record.absmax, None, nested, record.stored, record.blocksize)
    return refusal(x, stack, rank)


def _products(
    record: QuantizedWeight, rows: int, path: str, backend: str, refused: str | None
) -> str:
    """Whose products decode in registers, forward and backward."""
    if path not in TRITON_PATHS:
        return f"products are {path}'s, which decodes the whole stack"
    if backend == "triton":
        return "products by Triton, asked for by name"
    if refused is not None:
        return f"products by Triton, since CUDA's cannot take them: {refused}"
    if path == "compiled":
        return "products by CUDA, asked for by name"
    experts, n, k = record.stored
    mean = rows / experts

    def source(depth: int, along: bool) -> str:
        return "CUDA" if pays(mean, depth, along) else "Triton"

    return f"forward by {source(k, True)}, backward by {source(n, False)}, as measured"


def _decodes_in_registers(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and torch.version.hip is None and dtype.itemsize == 2
