"""benchmarks/benchmark.py is what `kernels benchmark` runs: every workload, and right."""

from __future__ import annotations

import inspect
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import torch
from kernels.benchmark import Benchmark

from ._checkout import ROOT

SMALL = {"Nf4DequantBenchmark": (3, 8, 16, 2), "PolarExpressBenchmark": (2, 24, 40)}


@pytest.fixture(scope="module")
def classes() -> dict[str, type]:
    spec = spec_from_file_location("hub_benchmark", ROOT / "benchmarks/benchmark.py")
    module: ModuleType = module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        name: found
        for name, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, Benchmark) and found is not Benchmark
    }


def test_every_workload_has_its_three_parts(classes) -> None:
    assert set(classes) == set(SMALL)
    for found in classes.values():
        workloads = [name for name in dir(found) if name.startswith("benchmark_")]
        assert workloads and isinstance(found.seed, int)
        for name in workloads:
            for part in ("setup", "verify"):
                assert callable(getattr(found, name.replace("benchmark", part, 1)))


@pytest.mark.parametrize("name", SMALL)
def test_results_are_those_of_plain_pytorch(classes, opt, device, name: str) -> None:
    torch.manual_seed(0)
    benchmark = classes[name]()
    benchmark.kernel, benchmark.device = opt, str(device)
    benchmark._setup(*SMALL[name])
    benchmark._run()
    expected = benchmark._verify()
    assert expected.dtype == benchmark.out.dtype and expected.abs().max() > 0.1
    torch.testing.assert_close(benchmark.out, expected, atol=2e-3, rtol=0)
