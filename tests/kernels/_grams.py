"""Gram matrices of known kinds, and lists of matrices as kernels take them."""

from __future__ import annotations

import torch


def listed(numbers: list[int], device: torch.device, batch: int) -> torch.Tensor:
    """A subset; behind the last number lies what must not be read as one."""
    filled = [len(numbers), *numbers, *[2**30] * (batch - len(numbers))]
    return torch.tensor(filled, dtype=torch.int32, device=device)


def grams(device: torch.device, m: int) -> torch.Tensor:
    """(9, m, m) float16: Gaussian 1:8, 1:4, 1:3, 1:2, 1:1, rank 1, zero, NaN, the identity."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(m, k * m, generator=generator) for k in (8, 4, 3, 2, 1)]
    x += [torch.ones(m, m), torch.zeros(m, m), torch.full((m, m), torch.nan), torch.eye(m)]
    return torch.stack([(y @ y.mT) / y.shape[-1] for y in x]).to(device).half()


WELL_CONDITIONED = [True, True, True, False, False, False, False, False, True]
