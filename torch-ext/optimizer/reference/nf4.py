"""NF4 decoding as bitsandbytes defines it: codebook[nibble] * absmax of the element's block."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Dettmers et al., QLoRA, arXiv:2305.14314, appendix E: the 16 values of NormalFloat4.
NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


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
    """Decode the named experts; arguments and result as in `kernels.quant.nf4_dequant`.

    Raises:
        ValueError: if an id names no expert of the stack.
    """
    device = packed.device
    byte = packed.reshape(-1).view(torch.uint8)
    numel = math.prod(expert_shape)
    ids = active_experts.long()
    experts = 2 * byte.numel() // numel
    if ((ids < 0) | (ids >= experts)).any():
        raise ValueError(f"active_experts {ids.tolist()} must lie in [0, {experts})")
    element = ids[:, None] * numel + torch.arange(numel, device=device)  # (n, numel) of the stack
    nibble = torch.where(element % 2 == 0, byte[element // 2] >> 4, byte[element // 2] & 15)
    block = element // blocksize
    if codebook is None:
        codebook = torch.tensor(NF4_TABLE, device=device)
    scale = absmax.reshape(-1)[block]
    if absmax_code is not None:  # nested: absmax is itself quantised, in blocks of 256
        scale = absmax_code[scale.long()] * absmax_scale[block // 256] + absmax_offset
    return (codebook[nibble.long()] * scale).to(dtype).reshape(-1, *expert_shape)
