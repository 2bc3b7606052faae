"""The modules behind the public functions, and their plain references."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def coefficients(submodule):
    return submodule("orthogonalize.coefficients")


@pytest.fixture(scope="session")
def restarts(submodule):
    return submodule("orthogonalize.restarts")


@pytest.fixture(scope="session")
def choose(submodule):
    return submodule("orthogonalize.choose")


@pytest.fixture(scope="session")
def reference(submodule):
    return submodule("reference.orthogonalize")
