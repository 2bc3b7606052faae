"""examples/train_fsdp2.py: interrupted and resumed runs, on the same and on other ranks."""

# ruff: noqa: F811 - tests take the imported fixture as an argument

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from ..conftest import ROOT
from ..examples.test_examples import corpus  # noqa: F401 - a fixture
from ._ranks import same_everywhere

pytestmark = pytest.mark.dist

SIZES = ("--layers", 1, "--channels", 16, "--heads", 2, "--batch", 12, "--context", 16)
STEPS = 24
# Seconds for two ranks, which need 20 of a processor that other tests share.
WAIT = 300
COMMON = (*SIZES, "--device", "cpu", "--steps", STEPS, "--save-every", 6, "--report-every", 3)


def example(opt, stop_after: int | None, *arguments: object) -> int:
    """The example in this rank; with `stop_after`, rank 1 gets SIGTERM after so many steps."""
    sys.path.insert(0, str(ROOT / "examples"))
    module = importlib.import_module("train_fsdp2")
    kept = torch.utils.deterministic.fill_uninitialized_memory
    step, steps = module.Training.step, []

    def stopping(training, index: int) -> None:
        step(training, index)
        steps.append(index)
        if len(steps) == stop_after and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    module.Training.step = stopping
    try:
        return module.main([*map(str, (*COMMON, *arguments))])
    finally:
        module.Training.step = step
        sys.path.remove(str(ROOT / "examples"))
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = kept


def refused(opt, message: str, *arguments: object) -> bool:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        status = example(opt, None, *arguments)
    return status == 2 and message in told.getvalue()


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def runs(ranks, corpus, tmp_path_factory):
    """Two ranks left alone, and two of which one got SIGTERM: their folders, per optimizer."""
    made = {}

    def folders(name: str, *options: str) -> tuple[Path, Path]:
        if name not in made:
            whole, parts = made[name] = [tmp_path_factory.mktemp(f"{name}-{i}") for i in range(2)]
            common = ("--corpus", corpus, "--optimizer", name, *options, "--out-dir")
            assert same_everywhere(ranks(2).run(example, None, *common, whole)) == 0
            assert same_everywhere(ranks(2).run(example, 8, *common, parts)) == 130
        return made[name]

    return folders


def resume(ranks, world: int, corpus: Path, parts: Path, *options: object) -> dict:
    arguments = ("--corpus", corpus, *options, "--out-dir", parts, "--resume")
    assert same_everywhere(ranks(world).run(example, None, *arguments)) == 0
    assert checkpoints(parts) == [f"step-{STEPS:06d}"]
    return results(parts)


@pytest.mark.parametrize(
    ("name", "options"), [("Muon", ()), ("MuonAdamW", ("--async-save",))], ids=["now", "background"]
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    ranks,
    corpus,
    runs,
    name,
    options,
    tmp_path,
) -> None:
    """A signal to one rank stops both after the same step."""
    whole, parts = runs(name, *options)
    losses = results(whole)["train"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    assert checkpoints(parts) == ["step-000009"]  # at the next report
    assert not (parts / "results.json").exists()
    here = shutil.copytree(parts, tmp_path / "parts")
    assert resume(ranks, 2, corpus, here, "--optimizer", name, *options) == results(whole)
    assert (here / "loss.png").stat().st_size > 0


@pytest.mark.parametrize(("world", "options"), [(1, ()), (3, ()), (4, ("--replicas", 2))])
def test_other_ranks_go_on(ranks, corpus, runs, world, options, tmp_path) -> None:
    """The curve of two ranks but for the order in which gradients are added up; HSDP too."""
    whole, parts = runs("Muon")
    here = shutil.copytree(parts, tmp_path / "parts")
    expected = results(whole)["train"]
    found = resume(ranks, world, corpus, here, *options)["train"]
    assert found[:9] == expected[:9]
    assert found[9:] == pytest.approx(expected[9:], rel=1e-4)


def killed_ranks(output: Path, *arguments: object) -> list[int]:
    """Exit statuses of ranks 1 and 0 of KILLED; what they print goes to the file `output`.

    They have the variables and the store that torchrun gives its ranks, without torchrun: it can
    wait for minutes after they have ended (docs/dev/decisions/2026-11-23-killed-rank.md).
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"} | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with output.open("w") as file:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", KILLED, *map(str, arguments)],
                cwd=ROOT,
                env=environment | {"RANK": rank, "LOCAL_RANK": rank},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank in "10"
        ]
    try:
        return [process.wait(timeout=WAIT) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail(f"a rank has not ended after {WAIT} s:\n{output.read_text()}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(WAIT + 300)
def test_a_rank_that_is_killed(ranks, corpus, runs, tmp_path) -> None:
    """The other rank ends with an error, and the run goes on from its last whole checkpoint."""
    whole, _ = runs("Muon")
    out, output = tmp_path / "run", tmp_path / "output.txt"
    options = (*COMMON, "--corpus", corpus, "--async-save", "--out-dir", out)
    statuses, told = killed_ranks(output, *options), output.read_text()
    assert statuses == [-signal.SIGKILL, 1] and "by peer" in told, told
    assert checkpoints(out) == ["step-000006", "step-000012"]
    remains = out / "checkpoints" / "step-000012"
    assert not (remains / ".metadata").exists()
    assert resume(ranks, 2, corpus, out) == results(whole)


def test_what_cannot_be_resumed(ranks, corpus, runs, tmp_path) -> None:
    _, parts = runs("Muon")
    common = ("--corpus", corpus, "--resume", "--out-dir")
    for more, message in (
        ((tmp_path,), f"cannot resume: {tmp_path} holds no checkpoint"),
        ((parts, "--lr", 0.5), "is of another run: run.lr: 0.008 in the checkpoint, 0.5 now"),
        ((parts, "--replicas", 3), "2 ranks: --replicas 3 must divide them"),
    ):
        assert same_everywhere(ranks(2).run(refused, message, *common, *more))


# Rank 1 dies while its files of the second checkpoint are written by the thread.
# Were a rank to wait for the dead one, its stacks are told before the test gives up.
KILLED = f"""
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later({WAIT} - 20, exit=True)
sys.path.insert(0, "examples")
from torch.distributed.checkpoint.filesystem import FileSystemWriter
write, calls = FileSystemWriter.write_data, []
def killed(*arguments):
    calls.append(arguments)
    if os.environ["RANK"] == "1" and len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
FileSystemWriter.write_data = killed
import train_fsdp2
sys.exit(train_fsdp2.main())
"""
