import os
from collections import Counter

import pytest

from ..conftest import ROOT
from ._ranks import DOOMED_TIMEOUT, Pools, Ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `world` run with each number of ranks of --ranks, on any device."""
    by_hand = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    named = [name for names in by_hand for name in (names if isinstance(names, tuple) else [names])]
    if "world" in metafunc.fixturenames and "world" not in named:
        metafunc.parametrize("world", metafunc.config.getoption("--ranks"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the part that tools/symm_parts.py runs here."""
    if (part := os.environ.get("SYMM_PART")) is None:
        return
    parts = [item.get_closest_marker("part").args[0] for item in items]
    if never := set(parts) - set(os.environ["SYMM_PARTS"].split(",")):
        raise pytest.UsageError(f"tools/symm_parts.py has no part {sorted(never)}")
    kept = [item for item, of in zip(items, parts, strict=True) if of == part]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests that run many cases have passed."""
    counted: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", ()):
        counted.update(dict(report.user_properties))
    if counted:
        cases, exchanges = counted["random cases"], counted["exchanges"]
        terminalreporter.write_line(f"{cases} random cases, {exchanges} exchanges of soaks")


@pytest.fixture(scope="package")
def ranks(opt, repo_id, device):
    """`ranks(3).run(function, *args)` runs a function of a test module on three ranks.

    They end with the tests of this folder: every group that gloo was ever asked for keeps threads
    that look for messages a hundred times a second, which took half a core from all later tests.
    """
    pools = Pools(repo_id, str(ROOT), device.type)
    yield pools
    pools.close()


@pytest.fixture
def doomed(opt, repo_id, device):
    """Makes ranks of their own, whose collectives give up early."""
    pools = []

    def make(world: int) -> Ranks:
        pools.append(Ranks(world, repo_id, str(ROOT), device.type, timeout=DOOMED_TIMEOUT))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def gpu_ranks(ranks, device):
    """`ranks` that share the GPUs there are."""
    if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        pytest.fail("run these tests by `make test-symm`, which sets what torch reads at import")
    return ranks
