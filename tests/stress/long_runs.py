"""What `make fuzz` and `make soak` run: a test per call, mesh and episode, of SEED and onwards.

Fuzz: random valid and invalid calls of every public function, and plans on random meshes. A call
may give something finite, or raise ValueError, TypeError or what its documentation lists, with a
message that names an argument; nothing that it only reads may change. All else is a finding:
another error, a crash, a call that takes too long.

Soak: random events happen to optimizers for thousands of steps, nine tenths of one process and a
tenth of four ranks over gloo, and no bit may be lost.
"""

# ruff: noqa: F811 - tests take the imported fixtures as arguments

import logging
import os
import resource

import pytest

from . import _cases, _episode, _meshes, _together
from .test_stress import package, ranks  # noqa: F401 - fixtures

MEMORY = 8 * 2**30  # bytes of address space above which an allocation fails instead of swapping
EPISODE = 50  # steps


@pytest.fixture(scope="module")
def little_memory():
    """Imported beforehand is what takes seconds, none of a call."""
    import peft  # noqa: F401
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.WARNING)


def seeds(variable: str, each: int = 1) -> list[tuple[int, int]]:
    """Pairs of a seed and a number, at most `each`; the numbers add up to the variable's value."""
    wanted, first = int(os.environ.get(variable, "0")), int(os.environ["SEED"]) * 10**6
    return [(first + k // each, min(each, wanted - k)) for k in range(0, wanted, each)]


@pytest.mark.parametrize(("seed", "_"), seeds("CALLS"))
def test_fuzz_of_calls(package, little_memory, seed, _) -> None:
    _cases.play(package, seed)


@pytest.mark.parametrize(("seed", "_"), seeds("MESHES"))
def test_fuzz_of_plans(package, little_memory, seed, _) -> None:
    _meshes.play(package, seed)


@pytest.mark.parametrize(("seed", "steps"), seeds("STEPS_ALONE", EPISODE))
def test_soak(opt, seed, steps) -> None:
    _episode.play(opt, seed, steps)


@pytest.mark.parametrize(("seed", "steps"), seeds("STEPS_TOGETHER", EPISODE))
def test_soak_on_ranks(ranks, seed, steps) -> None:
    ranks(4).run(_together.play, seed, steps, timeout=300)
