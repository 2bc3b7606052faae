"""Fixtures that reach an op of one path directly."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def nf4(submodule):
    """The module kernels.nf4_dequant of the loaded package."""
    return submodule("kernels.quant.nf4_dequant")


@pytest.fixture(scope="session")
def run_nf4(nf4):
    """`run_nf4(path, arguments, ids, dtype)` calls the op of one path."""

    def call(path: str, arguments: dict, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return nf4._op(path)(active_experts=ids, dtype=dtype, **arguments)

    return call


@pytest.fixture(scope="session")
def ops(submodule):
    """The registered ops of the loaded package."""
    return submodule("_ops").ops
