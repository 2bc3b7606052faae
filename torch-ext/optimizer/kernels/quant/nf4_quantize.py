"""nf4_quantize: 4-bit codes and block maxima of a weight, in bitsandbytes' format.

absmax[b] = max |x| over the b-th blocksize elements of the flattened weight; a nibble is the code
whose interval holds x * (1 / absmax); even elements fill the high nibbles.

path      | op                     | source                  | taken
compiled  | nf4_quantize           | kernels-src/{quant,cpu} | CUDA, CPU (CPU variant)
reference | nf4_quantize_reference | reference/nf4.py        | everything else
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ...reference import nf4 as reference
from .codec import DTYPES, quantize_in_chunks
from .nf4_dequant import BLOCKSIZES

QUANT_TYPES = ("nf4", "fp4")
BACKENDS = ("auto", "compiled", "reference")


@register_fake(add_op_namespace_prefix("nf4_quantize"))
def _fake(weight, packed, absmax, blocksize, fp4):
    return None


@custom_op(add_op_namespace_prefix("nf4_quantize_reference"), mutates_args=("packed", "absmax"))
def _reference(weight: Tensor, packed: Tensor, absmax: Tensor, blocksize: int, fp4: bool) -> None:
    options = (blocksize, "fp4" if fp4 else "nf4")
    quantize_in_chunks(weight.reshape(-1), (packed, absmax), reference.nf4_quantize, *options)


_reference.register_fake(lambda *_: None)


def _check(weight: Tensor, blocksize: int, quant_type: str, backend: str) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be torch.Tensor, got {type(weight).__name__}")
    if isinstance(blocksize, bool) or not isinstance(blocksize, int):
        raise TypeError(f"blocksize must be an integer, got {blocksize!r}")
    if blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {blocksize}")
    if quant_type not in QUANT_TYPES:
        raise ValueError(f"quant_type must be one of {QUANT_TYPES}, got {quant_type!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if weight.layout != torch.strided or weight.dtype not in DTYPES:
        raise ValueError(
            f"weight must be dense and one of {DTYPES}, got {weight.dtype} with layout "
            f"{weight.layout}; convert it first"
        )
    if not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous, got strides {tuple(weight.stride())}: quantisation runs "
            "over the elements in memory order; pass weight.contiguous()"
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "weight requires a gradient, but quantisation has none: pass weight.detach()"
        )


def nf4_quantize(
    weight: Tensor, blocksize: int = 64, *, quant_type: str = "nf4", backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Quantise a weight to 4 bits in blocks, in the format of bitsandbytes.

    NF4 of Dettmers et al., QLoRA, arXiv:2305.14314. On CUDA the compiled kernel computes with the
    instructions of bitsandbytes' own, an approximate reciprocal among them; the other paths divide
    exactly, so that an element within an ulp of a threshold may get the neighbouring code.

    Args:
        weight: any shape, contiguous; bfloat16, float16 or float32. Blocks run over the flattened
            tensor and may straddle rows and experts.
        blocksize: elements per absmax, a power of two from 32 to 4096.
        quant_type: "nf4" or "fp4".
        backend: "auto", "compiled" or "reference"; `explain` says what "auto" takes.

    Returns:
        packed (ceil(numel / 2),) uint8 and absmax (ceil(numel / blocksize),) float32. The low
        nibble behind an odd number of elements is that of a zero. A NaN makes its block's absmax
        NaN, so that it is seen after decoding; a block of zeros gets nibbles 0 and absmax 0.

    Raises:
        TypeError: weight is no tensor, or blocksize no integer.
        ValueError: an option, dtype or layout is none of the above, or a gradient is expected.
    """
    _check(weight, blocksize, quant_type, backend)
    packed = weight.new_empty((weight.numel() + 1) // 2, dtype=torch.uint8)
    absmax = weight.new_empty(-(-weight.numel() // blocksize), dtype=torch.float32)
    path = dispatch.path_name("nf4_quantize", weight.device) if backend == "auto" else backend
    op = ops.nf4_quantize if path == "compiled" else ops.nf4_quantize_reference
    op(weight.detach(), packed, absmax, blocksize, quant_type == "fp4")
    return packed, absmax
