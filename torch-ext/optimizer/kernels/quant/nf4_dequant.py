"""nf4_dequant: gather the named experts of an NF4 stack and decode them in one pass.

out[i] = codebook[nibble(g)] * absmax[g // blocksize], rounded once to dtype; g counts elements over
the whole stack, so blocks may straddle experts and element counts may be odd.

path      | op                    | source                        | taken
compiled  | nf4_dequant           | kernels-src/{quant,cpu} | CUDA >= 8.0, CPU (CPU variant)
triton    | nf4_dequant_triton    | dequant_triton.py             | other CUDA devices, ROCm
reference | nf4_dequant_reference | reference/nf4.py              | everything else
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from types import NoneType

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from ..._ops import add_op_namespace_prefix
from ...reference import nf4 as reference
from .codec import dequant_op

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@register_fake(add_op_namespace_prefix("nf4_dequant"))
def _fake(
    packed,
    absmax,
    active_experts,
    expert_shape,
    blocksize,
    dtype,
    codebook=None,
    absmax_code=None,
    absmax_scale=None,
    absmax_offset=None,
):
    return packed.new_empty((active_experts.shape[0], *expert_shape), dtype=dtype)


_reference = custom_op(
    add_op_namespace_prefix("nf4_dequant_reference"),
    reference.nf4_dequant,
    mutates_args=(),
    schema="(Tensor packed, Tensor absmax, Tensor active_experts, SymInt[] expert_shape, "
    "SymInt blocksize, ScalarType dtype, Tensor? codebook, Tensor? absmax_code, "
    "Tensor? absmax_scale, Tensor? absmax_offset) -> Tensor",
)
_reference.register_fake(_fake)


def _check_tensor(name: str, value: object, *others: type) -> None:
    """The type of a tensor argument, and that no gradient is expected of what has none."""
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, but nf4_dequant has none: it decodes frozen weights; "
                f"call it under torch.no_grad() or pass {name}.detach()"
            )
    elif not isinstance(value, others):
        kinds = " or ".join(("torch.Tensor", *(kind.__name__ for kind in others)))
        raise TypeError(f"{name} must be {kinds}, got {type(value).__name__}")


def _check_sizes(expert_shape: Sequence[int], blocksize: int) -> tuple[int, ...]:
    """Return expert_shape as a tuple; its sizes may be symbolic while a graph is traced."""
    integer = (int, torch.SymInt)
    if not isinstance(expert_shape, Sequence) or not all(
        isinstance(size, integer) for size in expert_shape
    ):
        raise TypeError(f"expert_shape must be a sequence of integers, got {expert_shape!r}")
    if not isinstance(blocksize, integer):
        raise TypeError(f"blocksize must be an integer, got {blocksize!r}")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {blocksize}")
    if len(expert_shape) == 0 or min(expert_shape) <= 0:
        raise ValueError(f"expert_shape must hold positive sizes, got {tuple(expert_shape)}")
    return tuple(expert_shape)


def _check_values(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, like: Tensor) -> None:
    if tensor.dtype != dtype or tensor.device != like.device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} on {like.device}, got {tensor.dtype} with strides "
            f"{tuple(tensor.stride())} on {tensor.device}; convert it with "
            f"{name}.to({like.device}, {dtype}).contiguous()"
        )
    if tensor.numel() != numel:
        raise ValueError(
            f"{name} must have {numel} elements for these packed bytes, expert_shape and "
            f"blocksize, got shape {tuple(tensor.shape)}"
        )


def _check_experts(packed: Tensor, active_experts: Tensor, expert_shape: tuple[int, ...]) -> int:
    """Return the number of elements in the stack."""
    numel = math.prod(expert_shape)
    elements = 2 * packed.numel() // numel * numel
    if (elements + 1) // 2 != packed.numel():
        raise ValueError(
            f"packed holds {packed.numel()} bytes, which is no whole number of experts of shape "
            f"{expert_shape} ({numel} elements, two per byte); pass the shape of one expert"
        )
    if active_experts.dtype not in (torch.int32, torch.int64) or active_experts.ndim != 1:
        raise ValueError(
            f"active_experts must be a vector of int32 or int64 ids, got {active_experts.dtype} of "
            f"shape {tuple(active_experts.shape)}"
        )
    if active_experts.device != packed.device or not active_experts.is_contiguous():
        raise ValueError(
            f"active_experts must be contiguous on {packed.device}, got {active_experts.device} "
            f"with stride {active_experts.stride()}"
        )
    return elements


def nf4_dequant(
    packed: Tensor,
    absmax: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    blocksize: int,
    dtype: torch.dtype = torch.bfloat16,
    codebook: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_scale: Tensor | None = None,
    absmax_offset: Tensor | float | None = None,
) -> Tensor:
    """Gather experts from a 4-bit stack and decode them, bit for bit as bitsandbytes does.

    value = codebook[nibble] * absmax[element // blocksize] in float32, rounded once to `dtype`;
    `element` counts over the whole stack and the high nibble of a byte is the even element
    (Dettmers et al., QLoRA, arXiv:2305.14314). Nothing waits for the device: the call can be
    captured in a CUDA graph.

    Args:
        packed: two elements per byte over the flattened stack of E experts, any shape and any
            storage dtype, contiguous. E follows from its size.
        absmax: (ceil(E * numel / blocksize),) float32, or uint8 codes when nested.
        active_experts: (n,) int32 or int64 ids; may be empty, may repeat, any order.
        expert_shape: shape of one expert, numel elements.
        blocksize: elements per absmax, a power of two from 32 to 4096.
        dtype: bfloat16, float16 or float32.
        codebook: (16,) float32; None means NF4.
        absmax_code: (256,) float32, nested only: absmax = absmax_code[absmax] * absmax_scale[block
            // 256] + absmax_offset, rounded after the product and after the sum.
        absmax_scale: one float32 per 256 blocks, nested only.
        absmax_offset: one float32 in a tensor, or a number, nested only.

    Returns:
        (n, *expert_shape) in `dtype`. An id outside [0, E) gives NaN on CUDA, where looking at it
        would make the host wait.

    Raises:
        TypeError: if an argument is no tensor, integer or number where it must be one.
        ValueError: if sizes, dtypes, devices or layouts do not fit together, half of the nested
            arguments is missing, or an argument requires a gradient in grad mode.
        RuntimeError: on CPU, if an id is outside [0, E).
    """
    _check_tensor("packed", packed)
    _check_tensor("absmax", absmax)
    _check_tensor("active_experts", active_experts)
    _check_tensor("codebook", codebook, NoneType)
    _check_tensor("absmax_code", absmax_code, NoneType)
    _check_tensor("absmax_scale", absmax_scale, NoneType)
    _check_tensor("absmax_offset", absmax_offset, Real, NoneType)
    expert_shape = _check_sizes(expert_shape, blocksize)
    if not packed.is_contiguous():
        raise ValueError(
            f"packed must be contiguous, got strides {tuple(packed.stride())}; call "
            "packed.contiguous() once, when the weights are loaded"
        )
    packed = packed.reshape(-1).view(torch.uint8)
    blocks = -(-_check_experts(packed, active_experts, expert_shape) // blocksize)
    if codebook is not None:
        _check_values("codebook", codebook, torch.float32, 16, packed)

    nested = (absmax_code, absmax_scale, absmax_offset)
    if all(argument is None for argument in nested):
        _check_values("absmax", absmax, torch.float32, blocks, packed)
    elif any(argument is None for argument in nested):
        raise ValueError(
            "absmax_code, absmax_scale and absmax_offset describe nested absmax together: give all "
            "three or none"
        )
    else:
        if not isinstance(absmax_offset, Tensor):
            absmax_offset = torch.full(
                (1,), absmax_offset, dtype=torch.float32, device=packed.device
            )
        _check_values("absmax", absmax, torch.uint8, blocks, packed)
        _check_values("absmax_code", absmax_code, torch.float32, 256, packed)
        _check_values("absmax_scale", absmax_scale, torch.float32, -(-blocks // 256), packed)
        _check_values("absmax_offset", absmax_offset, torch.float32, 1, packed)

    return dequant_op("nf4_dequant", packed.device, dtype)(
        packed,
        absmax,
        active_experts,
        expert_shape,
        blocksize,
        dtype,
        codebook,
        absmax_code,
        absmax_scale,
        absmax_offset,
    )


def nf4_decoder(
    tensors: Sequence[Tensor],
    expert_shape: Sequence[int],
    blocksize: int,
    dtype: torch.dtype,
    codebook: Tensor | None,
) -> Callable[[Tensor], Tensor]:
    """ids -> decoded experts, by the op that `nf4_dequant` takes; arguments were checked before.

    Args:
        tensors: packed, absmax and, if it is nested, its code, scale and offset.
        expert_shape: As of `nf4_dequant`, and so is what follows.
        blocksize: Elements per absmax.
        dtype: Of the result.
        codebook: None for NF4.
    """
    packed, absmax, *nested = tensors
    op = dequant_op("nf4_dequant", packed.device, dtype)
    options = (list(expert_shape), blocksize, dtype, codebook, *(nested or (None, None, None)))
    return lambda ids: op(packed, absmax, ids, *options)
