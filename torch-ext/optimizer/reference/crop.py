"""A batch of matrices without what lies behind their first rows and columns."""

from __future__ import annotations

import torch


def crop(x: torch.Tensor, r: int, c: int) -> torch.Tensor:
    """The upper left r x c of every matrix of x (G, R, C)."""
    return x[:, :r, :c]
