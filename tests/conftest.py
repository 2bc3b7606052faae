"""Loads the built package as a user does, and makes unwritten memory visible.

Nothing is imported here that the static tests (`make check`) do not need: torch and kernels are
imported inside the fixtures.
"""

import functools
import importlib
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests" / "gpu_tests.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("optimizer")
    group.addoption("--device", default="cpu", help="torch device the tests run on")
    group.addoption(
        "--ranks",
        default=[1, 2, 3, 4],
        type=lambda text: [int(number) for number in text.split(",")],
        help="numbers of ranks, such as 2,4,8, of the tests that run with any",
    )
    group.addoption(
        "--expected-skips",
        type=Path,
        help="file of node ids; the run fails unless exactly these tests are skipped",
    )
    group.addoption(
        "--count-gpu-tests",
        action="store_true",
        help=f"write into {GPU_TESTS.name} how many tests of each folder need a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SKIPPED] = set()
    if config.getoption("--device") == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read by triton when it is first imported
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS in deterministic mode


@pytest.hookimpl(tryfirst=True)  # before -m takes any of them away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device").startswith("cuda"):
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    folders = Counter(item.path.parent.relative_to(ROOT).as_posix() for item in needs_gpu)
    config.stash[NEED_GPU] = dict(sorted(folders.items()))
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # only workers of pytest-xdist collect tests
        session.config.workeroutput["need_gpu"] = session.config.stash.get(NEED_GPU, None)


def module_fixture(name: str, *parts: str):
    """A fixture: that module of the loaded package, or what lies in it by these names."""

    @pytest.fixture(scope="session")
    def found(submodule):
        return functools.reduce(getattr, parts, submodule(name))

    return found


SKIPPED = pytest.StashKey[set]()
NEED_GPU = pytest.StashKey[dict[str, int]]()


@pytest.fixture(scope="session")
def repo_id() -> str:
    """The Hub id, which build.toml alone states."""
    return tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]["repo-id"]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest):
    import torch

    return torch.empty(0, device=request.config.getoption("--device")).device  # with its index


@pytest.fixture(scope="session")
def hopper(device) -> None:
    import torch

    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("machine code for compute capability 9.0")


@pytest.fixture(scope="session")
def opt(repo_id: str, device):
    """The package, loaded through `get_kernel` from this checkout's `build/` folder.

    The backend is named because a CUDA build of torch asks for a CUDA variant even without a GPU.
    """
    if not any((ROOT / "build").glob("torch*/metadata.json")):
        pytest.fail("no built variant in build/: run `make build` first", pytrace=False)
    from kernels import get_kernel

    os.environ["LOCAL_KERNELS"] = f"{repo_id}={ROOT}"
    return get_kernel(repo_id, version=1, backend=device.type, trust_remote_code=True)


@pytest.fixture(scope="session")
def submodule(opt):
    """`submodule("optimizers.state.slots")` -> that module of the loaded package."""
    return lambda name: importlib.import_module(f"{opt.__name__}.{name}")


dispatch = module_fixture("dispatch")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean checkout with its CPU variant."""
    from ._checkout import built_checkout

    return built_checkout(tmp_path_factory.getbasetemp())


@pytest.fixture
def checkout(built: Path, tmp_path: Path) -> Path:
    """A copy of `built` that the test may change."""
    return shutil.copytree(built, tmp_path / "checkout")


@pytest.fixture(scope="session")
def forks():
    """`forks.run("script.py", ...)`: a program in its own process, without its imports."""
    from ._forks import Forks

    started = Forks()
    yield started
    started.close()


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    """`harness.report`: a module of benchmarks/harness, imported as run.py imports it."""
    from ._harness import BENCHMARKS, Harness

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return Harness()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch):
    """`watch(module, name, note)`: every call goes on, and a list gets what `note` makes of it.

    `note` gets the result and the arguments; `seen` is a list that several calls share.
    """

    def on(place, name: str, note, seen: list | None = None) -> list:
        real, noted = getattr(place, name), [] if seen is None else seen

        def watched(*arguments, **options):
            result = real(*arguments, **options)
            noted.append(note(result, *arguments, **options))
            return result

        monkeypatch.setattr(place, name, watched)
        return noted

    return on


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch):
    """`begun(module, *names)`: a list of those functions' names as calls of them begin."""

    def on(place, *names: str, seen: list[str] | None = None) -> list[str]:
        made = [] if seen is None else seen
        for name in names:
            real = getattr(place, name)

            def call(*arguments, name=name, real=real, **options):
                made.append(name)
                return real(*arguments, **options)

            monkeypatch.setattr(place, name, call)
        return made

    return on


@pytest.fixture(autouse=True)
def launch_what_a_test_replaces(request: pytest.FixtureRequest) -> None:
    """On a GPU, a test that replaces functions of the package sees every launch call them.

    Launches that were recorded before would be played again past them
    (kernels/launch/launch_plan.py); a test that names the fixture `plans` is about that.
    """
    names = set(request.fixturenames)
    if "opt" not in names or request.getfixturevalue("device").type != "cuda":
        return
    plans = request.getfixturevalue("submodule")("kernels.launch.launch_plan")
    plans._tags.clear()  # what another test replaced for a moment was recorded, too
    if "monkeypatch" in names and "plans" not in names:
        # What another test began to compile ahead would call what this one replaces.
        request.getfixturevalue("submodule")("kernels.launch.triton_compile").settle()
        request.getfixturevalue("monkeypatch").setattr(plans, "_plays", lambda _: False)


@pytest.fixture(autouse=True)
def poison_uninitialized_memory(request: pytest.FixtureRequest):
    """Fill every new tensor with NaN (largest integer), in Python and in C++.

    torch does it as part of its deterministic mode; `warn_only` keeps operations without a
    deterministic form usable.
    """
    if request.node.get_closest_marker("static"):
        yield
        return
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


class Ledger:
    """Compares the tests of a run with a committed list, so that none fades away unseen."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.differences() and session.exitstatus in (0, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for line in self.differences():
            terminalreporter.write_line(line)


class SkipLedger(Ledger):
    """Those that it skipped."""

    def record(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped or hasattr(report, "wasxfail"):
            self.config.stash[SKIPPED].add(report.nodeid)

    pytest_runtest_logreport = record
    pytest_collectreport = record

    def differences(self) -> list[str]:
        file: Path = self.config.getoption("--expected-skips")
        lines, skipped = file.read_text().splitlines(), self.config.stash[SKIPPED]
        expected = {line.split("  #")[0].strip() for line in lines if line and line[0] != "#"}
        return [
            *(f"SKIPPED BUT NOT LISTED in {file}: {node}" for node in sorted(skipped - expected)),
            *(f"LISTED in {file} BUT NOT SKIPPED: {node}" for node in sorted(expected - skipped)),
        ]


class GpuLedger(Ledger):
    """Those that a run without a GPU leaves out, by numbers per folder.

    Nothing runs them there, so nobody would see that one is no longer collected.
    """

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node) -> None:
        if (counted := getattr(node, "workeroutput", {}).get("need_gpu")) is not None:
            self.config.stash[NEED_GPU] = counted

    def differences(self) -> list[str]:
        found = self.config.stash.get(NEED_GPU, None)
        if found is None or self.config.getoption("--count-gpu-tests"):
            return []  # the run ended before it had collected, or its numbers are the list
        lines = GPU_TESTS.read_text().splitlines() if GPU_TESTS.is_file() else []
        listed = {folder: int(count) for folder, count in map(str.split, lines)}
        differing = [
            f"{GPU_TESTS.relative_to(ROOT)} COUNTS {listed.get(folder, 0)} TESTS FOR A GPU in "
            f"{folder}, FOUND {found.get(folder, 0)}"
            for folder in sorted(listed.keys() | found.keys())
            if listed.get(folder, 0) != found.get(folder, 0)
        ]
        remedy = "if that is meant: python -m pytest tests --collect-only -q --count-gpu-tests"
        return [*differing, remedy] if differing else []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.getoption("--count-gpu-tests"):
            counted = self.config.stash.get(NEED_GPU, {})
            GPU_TESTS.write_text("".join(f"{folder} {n}\n" for folder, n in counted.items()))
        super().pytest_sessionfinish(session)


def is_whole(config: pytest.Config) -> bool:
    """Whether a run collects every test, on a CPU."""
    folders = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    chosen = config.option.keyword or config.option.ignore or config.option.deselect
    on_gpu = config.getoption("--device").startswith("cuda")
    return folders == [ROOT / "tests"] and not chosen and not on_gpu


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist; its controller compares
        return
    if config.getoption("--expected-skips"):
        config.pluginmanager.register(SkipLedger(config), "skip-ledger")
    if is_whole(config):
        config.pluginmanager.register(GpuLedger(config), "gpu-ledger")
    elif config.getoption("--count-gpu-tests"):
        raise pytest.UsageError("--count-gpu-tests counts a whole run: pytest tests, on the CPU")
