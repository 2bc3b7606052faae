"""What normalize must give, by hand in float64, and how far a path may be off."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PREFACTOR = 1.02


def draw(*shape: int, dtype: torch.dtype, device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def exact(x: torch.Tensor, prefactor: float = PREFACTOR) -> torch.Tensor:
    """x (b, r, c) over prefactor times its norm, in float64; zeros stay."""
    norms = torch.stack([m.double().square().sum().sqrt() for m in x])
    norms = torch.where(norms == 0, 1.0, norms)
    return x.double() / (prefactor * norms)[:, None, None]


def assert_rounded_once(actual: torch.Tensor, x: torch.Tensor, prefactor: float = PREFACTOR):
    """Every element is within the rounding to its dtype and two of float32: factor, product."""
    expected, info = exact(x, prefactor), torch.finfo(actual.dtype)
    assert actual.shape == x.shape
    allowed = expected.abs() * (info.eps / 2 + 2.0**-23) * (1 + 2.0**-20)
    allowed += info.tiny * info.eps * 0.5 * (1 + 2.0**-10)  # of subnormal numbers
    off = (actual.double() - expected).abs()
    worst = (off / allowed).max().item()
    assert (off <= allowed).all(), f"an element is off by {worst:.3f} times its budget"


def framed(pieces: Sequence[torch.Tensor], dtype: torch.dtype, more=(0, 0, 0)) -> torch.Tensor:
    """A frame of NaN that has room for the pieces and `more` matrices, rows and columns."""
    r, c = pieces[0].shape[1:]
    shape = (sum(map(len, pieces)) + more[0], r + more[1], c + more[2])
    return torch.full(shape, torch.nan, dtype=dtype, device=pieces[0].device)
