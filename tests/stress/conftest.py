import os

import pytest

from ..distributed.conftest import ranks  # noqa: F401 - a fixture
from ._calls import Package


def seeds(variable: str, each: int = 1) -> list[tuple[int, int]]:
    """Pairs of a seed and a number, at most `each`; the numbers add up to the variable's value."""
    wanted, first = int(os.environ[variable]), int(os.environ.get("SEED", "0")) * 10**6
    return [(first + k // each, min(each, wanted - k)) for k in range(0, wanted, each)]


@pytest.fixture
def package(opt, tmp_path) -> Package:
    return Package(opt, tmp_path)
