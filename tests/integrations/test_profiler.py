"""profile_steps: exactly the steps asked for, closed whatever happens, readable files."""

import json
import logging

import pytest
import torch
from transformers import TrainerCallback

from ..optimizers._steps import new_gradients, parameters

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
EVENTS = [name for name in EVENTS if name not in ("on_train_begin", "on_train_end")]


@pytest.fixture
def profiler(submodule):
    return submodule("integrations.profiler")


@pytest.fixture
def training(opt, device):
    params = parameters([(16, 8), (8, 16), (5,)], device=device)
    optimizer = opt.Muon(
        [{"params": params[:2], "use_muon": True}, {"params": params[2:], "use_muon": False}]
    )
    count = iter(range(1000))

    def step() -> None:
        with torch.profiler.record_function(f"mark {next(count)}"):
            new_gradients(params, seed=0)
            optimizer.step()

    return step


@pytest.fixture
def profiled(profiler, training):
    """A loop under `profile_steps` that makes some steps, and fails in the next one if it shall."""

    def loop(start: int, count: int, out, steps: int, error: BaseException | None = None):
        with profiler.profile_steps(start, count, out) as profile:
            for _ in range(steps):
                training()
                profile.step()
            if error is not None:
                training()
                raise error
        return profile

    return loop


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def marks(folder, name) -> list[str]:
    events = read(folder, f"trace-{name}")["traceEvents"]
    found = [e["name"] for e in events if e.get("cat") == "user_annotation" and "ts" in e]
    return sorted(name for name in found if name.startswith("mark "))


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 2), (1, 1), (2, 3)])
def test_exactly_these_steps(profiled, device, start, count, tmp_path) -> None:
    profile = profiled(start, count, tmp_path / "out", 7)
    name = f"rank000-steps{start}-{start + count - 1}"
    assert marks(tmp_path / "out", name) == [f"mark {i}" for i in range(start, start + count)]
    names = {f"trace-{name}.json", f"memory-{name}.json"}
    names |= {f"memory-{name}.pickle"} if device.type == "cuda" else set()
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert {path.name for path in profile.files} == names


def test_the_trace_and_the_history_of_memory(profiled, tmp_path, monkeypatch) -> None:
    """Ranges of the step, shapes, and allocations with the Python lines that made them."""
    monkeypatch.setenv("RANK", "12")
    profiled(1, 1, tmp_path, 2)
    events = read(tmp_path, "trace-rank012-steps1-1")["traceEvents"]
    names = {event["name"] for event in events}
    assert {"muon::momentum", "muon::newton_schulz", "muon::update_params", "muon::adamw"} <= names
    assert any("Input Dims" in event.get("args", {}) for event in events)
    memory = read(tmp_path, "memory-rank012-steps1-1")
    assert any(entry["bytes"] > 0 for entry in memory)
    assert any(entry["bytes"] < 0 for entry in memory)
    times = [entry["nanoseconds"] for entry in memory]
    assert times == sorted(times)
    stacks = [line for entry in memory for line in entry["stack"]]
    assert any("new_gradients" in line for line in stacks)
    assert any("_step_chunk" in line for line in stacks)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("steps", [2, 3])
def test_an_exception_closes_it_and_passes(profiled, error, steps, tmp_path) -> None:
    """What was recorded is there, and the profiler can be used again."""
    with pytest.raises(error, match="planted"):
        profiled(1, 5, tmp_path, steps, error("planted"))
    name = f"rank000-steps1-{steps}"
    assert marks(tmp_path, name) == [f"mark {i}" for i in range(1, steps + 1)]
    profiled(0, 1, tmp_path / "again", 1)
    assert marks(tmp_path / "again", "rank000-steps0-0") == [f"mark {steps + 1}"]


def test_a_failure_to_write_does_not_hide_the_exception(profiled, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="planted"):
        profiled(0, 2, tmp_path / "file", 1, ValueError("planted"))
    assert "the profile could not be written" in caplog.text


def test_a_loop_that_ends_early(profiled, tmp_path, caplog) -> None:
    profiled(1, 50, tmp_path, 3)
    assert marks(tmp_path, "rank000-steps1-2") == ["mark 1", "mark 2"]
    with caplog.at_level(logging.WARNING):
        assert profiled(50, 1, tmp_path / "none", 1).files == []
    assert "nothing was profiled: 1 steps were made, the first to record was 50" in caplog.text


def test_wrong_arguments(profiler, tmp_path) -> None:
    for arguments, error, message in (
        ((-1, 1), ValueError, "start must be at least 0, got -1"),
        ((0, 0), ValueError, "count must be at least 1, got 0"),
        ((1.5, 1), TypeError, r"start must be an integer, got 1\.5"),
        ((0, True), TypeError, "count must be an integer, got True"),
    ):
        with pytest.raises(error, match=message):
            profiler.profile_steps(*arguments, tmp_path)
    with pytest.raises(TypeError, match="out must be a path, got b'x'"):
        profiler.profile_steps(0, 1, b"x")
    profile = profiler.profile_steps(0, 1, tmp_path)
    with pytest.raises(RuntimeError, match="outside of the `with` block"):
        profile.step()
    with profile, pytest.raises(RuntimeError, match="is in use"):
        profile.__enter__()


def drive(callback, training, steps: int, fail_at: int | None = None) -> None:
    """As Hugging Face's Trainer drives its callbacks: every event, by name, with its state."""

    def tell(event: str) -> None:
        result = getattr(callback, event)("args", "state", "control", model=None)
        assert result is None  # anything else would replace the Trainer's control

    tell("on_train_begin")
    for step in range(steps):
        if step == fail_at:
            raise ValueError("planted")
        training()
        for event in EVENTS:
            tell(event)
    tell("on_train_end")


def test_the_callback(profiler, training, tmp_path) -> None:
    callback = profiler.ProfileCallback(2, 2, tmp_path)
    drive(callback, training, 6)
    assert marks(tmp_path, "rank000-steps2-3") == ["mark 2", "mark 3"]
    assert len(callback.files) >= 2
    drive(callback, training, 3)  # again, and it ends early
    assert marks(tmp_path, "rank000-steps2-3") == ["mark 2", "mark 3"]
    assert marks(tmp_path, "rank000-steps2-2") == ["mark 8"]
    assert not hasattr(callback, "state")


def test_the_callback_after_an_exception(profiler, training, tmp_path) -> None:
    """And after it was closed, where training goes on."""
    callback = profiler.ProfileCallback(1, 5, tmp_path)
    with pytest.raises(ValueError, match="planted"):
        drive(callback, training, 6, fail_at=3)
    callback.close()
    (trace,) = tmp_path.glob("trace-*")
    assert marks(tmp_path, trace.stem.removeprefix("trace-")) == ["mark 1", "mark 2"]
    callback.close()
    training()
    callback.on_step_end()
    callback.on_train_end()
    assert list(tmp_path.glob("trace-*")) == [trace]


def test_the_callback_writes_when_the_process_ends(opt, submodule, forks, tmp_path) -> None:
    """The Trainer tells its callbacks nothing of an exception."""
    source = submodule("integrations.profiler").__file__
    code = (
        "import importlib.util, sys, torch\n"
        "spec = importlib.util.spec_from_file_location('profiler', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "callback = module.ProfileCallback(0, 5, sys.argv[2])\n"
        "callback.on_train_begin()\n"
        "torch.ones(3).add(1)\n"
        "callback.on_step_end()\n"
        "raise SystemExit(3)\n"
    )
    done = forks.run("-c", code, source, tmp_path)
    assert done.returncode == 3, done.stderr
    assert len(list(tmp_path.glob("trace-rank000-*.json"))) == 1
