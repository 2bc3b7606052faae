"""Imported once by the server that ranks are forked from: torch and the package under test."""

from __future__ import annotations

import os

import torch.distributed.tensor  # noqa: F401
from kernels import get_kernel

opt = get_kernel(
    os.environ["RANKS_REPO_ID"],
    version=1,
    backend=os.environ["RANKS_DEVICE"],
    trust_remote_code=True,
)
