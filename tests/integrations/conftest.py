"""The model that most of these tests begin with."""

import pytest

from ._models import build


@pytest.fixture
def fresh(device):
    """`fresh("gpt_oss")`: that model on the device, with the same weights on every call."""
    return lambda name="qwen3_moe", **changes: build(name, **changes).to(device)
