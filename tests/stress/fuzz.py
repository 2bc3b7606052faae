"""`make fuzz`: random valid and invalid calls of every public function, plans on random meshes.

A call may give what the reference gives, or raise ValueError, TypeError or what its documentation
lists, with a message that names an argument; nothing that it only reads may change. All else is a
finding: another error, a crash, a call that takes too long.
"""

import logging
import resource

import pytest

from . import _cases, _meshes
from .conftest import seeds

MEMORY = 8 * 2**30  # bytes of address space above which an allocation fails instead of swapping


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """Also imported is here what takes seconds, none of a call."""
    import peft  # noqa: F401
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.WARNING)


@pytest.mark.parametrize(("seed", "_"), seeds("CALLS"))
def test_a_call(package, seed, _) -> None:
    _cases.play(package, seed)


@pytest.mark.parametrize(("seed", "_"), seeds("MESHES"))
def test_a_plan(package, seed, _) -> None:
    _meshes.play(package, seed)
