"""Launches that begin before their predecessor ended: each waits for it before it may touch it.

What is compiled for an H100 is read: a wait that is missing gives wrong numbers only where the
predecessor happens to be slow.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("early_launches.py")
EARLY = {  # launches of a forward and a backward
    "_reorder": 2,
    "_low_rank": 2,
    "_gated_forward": 1,
    "_gated_backward": 1,
    "_grouped_product": 2,
}


@pytest.fixture(scope="module")
def launches():
    """Every launch of a step by problem; see the script."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("compiles with Triton, which is not here")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = (json.loads(text) for text in done.stdout.splitlines() if text.startswith("{"))
    return {one["problem"]: one["launches"] for one in found}


def early(launches: list[dict], kernel: str) -> list[list[str]]:
    """The order of signals, waits, loads and stores of a kernel's early launches."""
    return [one["order"] for one in launches if one["early"] and one["kernel"] == kernel]


@pytest.mark.parametrize("problem", ["ahead", "after"])
def test_early_launches_follow_one_that_signals(launches, problem):
    counts, before = dict.fromkeys(EARLY, 0), {}
    for one in launches[problem]:
        if one["early"]:
            counts[one["kernel"]] += 1
            assert "signal" in before[one["stream"]]["order"], (before[one["stream"]], one)
        else:
            assert "wait" not in one["order"], one
        before[one["stream"]] = one
    assert counts == EARLY


def test_intermediates_wait_before_they_load_and_before_the_next_begins(launches):
    """The next launch reads what was written before this one."""
    for order in early(launches["ahead"], "_low_rank") + early(launches["after"], "_low_rank"):
        assert order[0] == "wait"
        assert order.count("wait") == 1
    for one in launches["ahead"]:
        if one["kernel"] == "_low_rank":
            assert one["order"][one["early"]] == "signal"


def test_copies_end_after_their_predecessor(launches):
    """They read none of its results, but who waits for the copy must have waited for both."""
    for order in early(launches["ahead"], "_reorder"):
        assert order[-1] == "wait"


@pytest.mark.parametrize("kernel", ["_gated_forward", "_gated_backward", "_grouped_product"])
def test_products_wait_before_they_load_the_intermediates(launches, kernel):
    """Two waits where loads come ahead: for programs of the first wave, and for the others."""
    for order in early(launches["ahead"], kernel):
        first, second = (n for n, what in enumerate(order) if what == "wait")
        assert "load" in order[first:second]
        assert order[second + 1] == "load"
        assert "store" not in order[:second]
    for order in early(launches["after"], kernel):
        (at,) = (n for n, what in enumerate(order) if what == "wait")
        assert order[at + 1] == "load"
        assert "store" not in order[:at]
