"""bitsandbytes' 4 bits in plain PyTorch: quantise, nest, decode, and products over decoded stacks.

value = codebook[nibble] * absmax of the element's block. The thresholds are those of the kernels
bitsandbytes 0.50.2 ships (read off their machine code); four differ from the midpoints of the NF4
table by one unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import moe

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

# nibble = how many of these x / absmax exceeds
NF4_THRESHOLDS = (
    -0.84809643030166625977,
    -0.61063289642333984375,
    -0.459995269775390625,
    -0.33967941999435424805,
    -0.23460739850997924805,
    -0.13791173696517944336,
    -0.045525018125772476196,
    0.039790149778127670288,
    0.12025525420904159546,
    0.20352125167846679688,
    0.29201376438140869141,
    0.38931253552436828613,
    0.50166338682174682617,
    0.64278692007064819336,
    0.86147838830947875977,
)

# FP4: sign, two exponent bits, one of mantissa; the largest value is 12, the table is divided by
# it. -0.0 for code 8 is what bitsandbytes' CUDA kernel decodes.
FP4_MAGNITUDES = (0.0, 0.0052083334885537624, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
FP4_TABLE = (*FP4_MAGNITUDES, *(-value for value in FP4_MAGNITUDES))
# |x| / absmax against these counts magnitudes in rising order; the codes of that order follow.
FP4_THRESHOLDS = (
    0.0026041700039058923721,
    0.0859375,
    0.20833332836627960205,
    0.2916666567325592041,
    0.4166666865348815918,
    0.58333301544189453125,
    0.8333333134651184082,
)
FP4_ORDER = (0, 1, 6, 7, 4, 5, 2, 3)

NESTED_BLOCKSIZE = 256
_TINY = torch.finfo(torch.float32).tiny


def _flush(x: Tensor) -> Tensor:
    """Subnormal numbers to zero: bitsandbytes' kernels are compiled so."""
    return torch.where(x.abs() < _TINY, torch.zeros_like(x), x)


def _in_blocks(x: Tensor, blocksize: int) -> Tensor:
    """(ceil(n / blocksize), blocksize) float32, the end filled with zeros."""
    flat = x.reshape(-1).float()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % blocksize)).view(-1, blocksize)


def nf4_quantize(
    weight: Tensor, blocksize: int = 64, quant_type: str = "nf4"
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor of any shape; arguments and result as in `kernels.quant.nf4_quantize`."""
    blocks = _flush(_in_blocks(weight, blocksize))
    absmax = blocks.abs().amax(1)  # NaN propagates
    # A block of zeros: 0 * inf is NaN, which exceeds no threshold, as in bitsandbytes' kernel.
    scaled = _flush(blocks * absmax.reciprocal()[:, None]).reshape(-1)
    if quant_type == "nf4":
        code = sum((scaled > t).to(torch.uint8) for t in _values(NF4_THRESHOLDS, scaled))
    else:
        order = torch.tensor(FP4_ORDER, dtype=torch.uint8, device=scaled.device)
        magnitude = scaled.abs()
        rank = sum((magnitude > t).to(torch.uint8) for t in _values(FP4_THRESHOLDS, scaled))
        code = order[rank.long()] | (scaled < 0).to(torch.uint8) << 3
    pairs = code.view(-1, 2)[: (weight.numel() + 1) // 2]
    return pairs[:, 0] << 4 | pairs[:, 1], absmax


def _values(thresholds: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(thresholds, dtype=torch.float32, device=like.device)


def dynamic_map() -> Tensor:
    """The 256 values of the signed dynamic 8-bit type (Dettmers et al., arXiv:2110.02861).

    Decade i of 7 holds 2^i means of equal steps of [0.1, 1], scaled by 10^(i - 6), with both
    signs; 0 and 1 complete the table. Rising, float32, on the CPU.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def nest_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise absmax itself, in blocks of 256, to the dynamic 8-bit type.

    Args:
        absmax: (blocks,) float32.

    Returns:
        codes (blocks,) uint8; code (256,), scale (ceil(blocks / 256),) and offset (1,) float32:
        absmax is about code[codes] * scale[block // 256] + offset. They are `absmax`,
        `absmax_code`, `absmax_scale` and `absmax_offset` of `nf4_dequant`.
    """
    offset = absmax.mean()
    blocks = _in_blocks(absmax - offset, NESTED_BLOCKSIZE)
    scale = blocks.abs().amax(1)
    # bitsandbytes clamps a scale before it divides by it, not the one it stores.
    scaled = blocks * (1.0 / scale.clamp(min=1e-38))[:, None]
    code = dynamic_map().to(absmax.device)
    bounds = (code[:-1] + code[1:]) / 2
    codes = torch.bucketize(scaled.reshape(-1), bounds, out_int32=True).to(torch.uint8)
    return codes[: absmax.numel()].contiguous(), code, scale, offset.reshape(1)


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


def decoded(
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor | None,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    stored: tuple[int, int, int],  # (E, N, K)
    blocksize: int,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The stack as (E, N, K), or (E, K, N) when transposed."""
    ids = torch.arange(stored[0], device=packed.device)
    weight = nf4_dequant(
        packed, absmax, ids, stored[1:], blocksize, dtype, codebook, *(nested or (None,) * 3)
    )
    return weight.transpose(1, 2) if transposed else weight


def nf4_product(  # noqa: PLR0913
    x: Tensor,  # rows of K (along) or of N
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor | None,
    stored: tuple[int, int, int],  # (E, N, K)
    blocksize: int,
    slots: Tensor,
    offsets: Tensor,
    *,
    along: bool,
    low: Tensor | None = None,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    fan: int,
    grouped_out: bool,
) -> Tensor:
    """`moe.grouped_product` with the stack as (E, K, N) if the sum runs `along` its rows."""
    weight = decoded(packed, absmax, codebook, None, stored, blocksize, along, x.dtype)
    return moe.grouped_product(
        x, weight, low, factor, bias, gates, slots, offsets, fan, grouped_out
    )


def gated_nf4_experts(
    x: Tensor,  # (T, H)
    first: tuple,  # what `decoded` takes up to transposed, a, b, bias, scaling
    second: tuple,
    gates: Tensor,  # (T, k)
    expert_ids: Tensor,  # (T, k)
    activation: str,
    interleaved: bool,
) -> Tensor:
    """Both stacks decoded, then `gated_experts`."""
    (*stack1, a1, b1, bias1, scaling1), (*stack2, a2, b2, bias2, scaling2) = first, second
    w1, w2 = (decoded(*stack, x.dtype) for stack in (stack1, stack2))
    factors = (w1, a1, b1, bias1, w2, a2, b2, bias2)
    scalings = (scaling1, scaling2)
    return moe.gated_experts(x, *factors, gates, expert_ids, scalings, activation, interleaved)
