"""`make soak`: random events happen to optimizers for thousands of steps, and no bit may be lost.

Nine tenths of the steps are of one process, a tenth of four ranks over gloo.
"""

import pytest

from . import _episode, _together
from .conftest import seeds

EPISODE = 50  # steps


@pytest.mark.parametrize(("seed", "steps"), seeds("STEPS_ALONE", EPISODE))
def test_an_optimizer(opt, seed, steps) -> None:
    _episode.play(opt, seed, steps)


@pytest.mark.parametrize(("seed", "steps"), seeds("STEPS_TOGETHER", EPISODE))
def test_an_optimizer_on_ranks(ranks, seed, steps) -> None:
    ranks(4).run(_together.play, seed, steps, timeout=300)
