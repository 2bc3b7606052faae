"""4-bit and nested quantisation as bitsandbytes' CUDA kernels define it, in plain PyTorch.

The thresholds are those of the kernels bitsandbytes 0.50.2 ships (read off their machine code);
four differ from the midpoints of the NF4 table by one unit in the last place.
"""

import torch
from torch import Tensor

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
        `absmax_code`, `absmax_scale` and `absmax_offset` of `kernels.quant.nf4_dequant`.
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
