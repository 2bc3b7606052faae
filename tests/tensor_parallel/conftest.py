import pytest

from ..conftest import ROOT, module_fixture
from ..distributed._ranks import Pools

graph = module_fixture("tensor_parallel.graph")
fused = module_fixture("tensor_parallel.fused")
report = module_fixture("tensor_parallel.report")
newton_schulz = module_fixture("tensor_parallel.sharded_newton_schulz")


@pytest.fixture(scope="package")
def ranks(opt, repo_id, device):
    """`ranks(4).run(function, *args)` runs a function of a test module on four ranks over gloo."""
    if device.type != "cpu":
        pytest.skip(
            "ranks over gloo need the CPU variant; on GPUs test_tensor_parallel_gpu.py runs"
        )
    pools = Pools(repo_id, str(ROOT), "cpu")
    yield pools
    pools.close()
