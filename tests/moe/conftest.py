"""The module under test, and one call of it on a path with all its gradients."""

import contextlib

import pytest

from ..conftest import module_fixture
from ._eager import gradients, product

moe = module_fixture("moe")
plans = module_fixture("kernels.launch.launch_plan")


@pytest.fixture
def launched(plans):
    """A context in which every launch is made by Triton."""

    @contextlib.contextmanager
    def without():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans, "_plays", lambda _: False)
            yield

    return without


@pytest.fixture
def played(plans, monkeypatch):
    """Names of the functions that were recorded, and a failure where one is refused."""
    names, real = [], plans._recorded

    def watched(name, *arguments):
        names.append(name)
        results = real(name, *arguments)
        assert not plans._refused, f"{name} cannot be played again"
        return results

    monkeypatch.setattr(plans, "_refused", set())
    monkeypatch.setattr(plans, "_tags", {})  # nothing has been recorded yet
    monkeypatch.setattr(plans, "_recorded", watched)
    return names


@pytest.fixture(scope="session")
def run(moe):
    """`run(problem, leaves, ids, grad, ...)`: a product, and what `gradients` gives of it."""

    def call(problem, leaves, ids, grad, backend="auto", weight=None):
        y = product(moe, problem, leaves, ids, weight, backend=backend)
        return gradients(y, leaves, grad)

    return call
