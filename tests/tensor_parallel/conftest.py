from ..conftest import module_fixture
from ..distributed.conftest import gpu_ranks, ranks  # noqa: F401 - fixtures

graph = module_fixture("tensor_parallel.graph")
fused = module_fixture("tensor_parallel.fused")
report = module_fixture("tensor_parallel.report")
newton_schulz = module_fixture("tensor_parallel.sharded_newton_schulz")
