from __future__ import annotations

import pytest

from ..conftest import ROOT
from ._ranks import Pools


@pytest.fixture(scope="session")
def ranks(opt, repo_id, device):
    """`ranks(3).run(function, *args)` runs a function of a test module on three ranks."""
    pools = Pools(repo_id, str(ROOT), device.type)
    yield pools
    pools.close()
