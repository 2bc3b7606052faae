"""The module under test, and one call of it on a path with all its gradients."""

import pytest
import torch

from ..conftest import module_fixture
from ._eager import NAMES, product

moe = module_fixture("moe")


@pytest.fixture(scope="session")
def run(moe):
    """`run(problem, leaves, ids, grad, backend)` -> results by name: "y" and each gradient."""

    def call(problem, leaves, ids, grad, backend="auto"):
        y = product(moe, problem, leaves, ids, backend=backend)
        return {"y": y.detach(), **gradients(y, leaves, grad)}

    return call


def gradients(y: torch.Tensor, leaves: dict, grad: torch.Tensor) -> dict:
    """The gradient of every operand that is there, by name."""
    wanted = [name for name in NAMES if leaves[name] is not None and leaves[name].requires_grad]
    found = torch.autograd.grad(y, [leaves[name] for name in wanted], grad)
    return dict(zip(wanted, found, strict=True))
