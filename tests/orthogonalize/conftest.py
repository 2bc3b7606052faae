"""The modules behind the public functions, and their plain references."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def coefficients(submodule):
    return submodule("orthogonalize.coefficients")


@pytest.fixture(scope="session")
def restarts(submodule):
    return submodule("orthogonalize.gram_newton_schulz")


@pytest.fixture
def forgets_devices(dispatch):
    """What is remembered of a device does not outlive a test that pretends another one."""
    known = (dispatch.pick, dispatch.runs_compiled)
    for remembered in known:
        remembered.cache_clear()
    yield
    for remembered in known:
        remembered.cache_clear()


@pytest.fixture(scope="session")
def choose(submodule):
    return submodule("orthogonalize.choose")


@pytest.fixture(scope="session")
def reference(submodule):
    return submodule("reference.orthogonalize")
