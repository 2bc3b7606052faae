"""The fuzzer itself: a short run of it, and the defects that it must see."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from . import _cases, _meshes, fuzz
from ._arguments import Call
from ._calls import CALLS, Package
from ._runs import DifferenceError
from ._workers import Workers

QUICK = [name for name in CALLS if not name.startswith("integrations.")]


@pytest.fixture
def package(opt, tmp_path) -> Package:
    return Package(opt, tmp_path)


@pytest.mark.parametrize("name", QUICK)
def test_valid_calls_are_right(package, name, monkeypatch) -> None:
    monkeypatch.setattr(_cases, "VALID_RATE", 1.0)
    monkeypatch.setattr(_cases, "CALLS", {name: CALLS[name]})
    for number in range(3):
        _, outcome, text, _ = _cases.play_one(package, number, None)
        assert outcome in ("right", "refused") and not text, text


def test_every_public_function_is_called(opt) -> None:
    """Or it is a module, a record that another call makes, or a name of the same function."""
    same = {
        "COEFFICIENT_SETS": "gram_newton_schulz",
        "DistMuonAdamW": "MuonAdamW",
        "ProfileCallback": "profile_steps",
        "save_optimizer_async": "save_optimizer",
    }
    modules = {"integrations", "layers", "moe", "muon"}
    for name in set(opt.__all__) - modules:
        assert same.get(name, name) in CALLS
    records = {"ActiveExperts", "ExpertOrder", "ExpertsLora", "LoraFactors", "ExpertOffload"}
    for name in set(opt.moe.__all__) - records:
        assert f"moe.{name}" in CALLS
    switches = {"set_lora", "disable_lora", "enable_lora", "merge_lora", "unmerge_lora"}
    switches |= {"detach_lora", "lora_disabled", "save_peft_adapter"}
    switches |= {"save_quantized", "load_quantized"}  # of a quantised folder, in tests/integrations
    switches |= {"checkpoint"}  # a module, whose functions the package has under its own names
    for name in set(opt.integrations.__all__) - switches:
        assert f"integrations.{name}" in CALLS


def judged(function: Any, spoiled: tuple[str, ...] = ("x",), **options: Any) -> str:
    call = Call("planted", function, {"x": torch.ones(3)}, **options)
    call.spoiled = list(spoiled)
    return _cases.judge(call)


def _raise(error: BaseException) -> Any:
    def function(x: Any) -> None:
        raise error

    return function


def _write(x: torch.Tensor) -> None:
    x.zero_()


def _write_and_refuse(x: torch.Tensor) -> None:
    x.zero_()
    raise ValueError("x must not be that")


def _wrong(result: Any) -> None:
    raise DifferenceError("not what the reference says")


DEFECTS = {
    "another error": (_raise(KeyError("x")), {}),
    "an assertion": (_raise(AssertionError("x")), {}),
    "a message without the argument": (_raise(ValueError("bad input")), {}),
    "an input that changes": (_write, {}),
    "an output that changes before a refusal": (_write_and_refuse, {"written": ("x",)}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(name) -> None:
    function, options = DEFECTS[name]
    with pytest.raises((DifferenceError, KeyError, AssertionError)):
        judged(function, **options)


def test_a_wrong_result_and_a_refusal_of_valid_arguments_are_seen() -> None:
    with pytest.raises(DifferenceError, match="reference"):
        judged(lambda x: x, (), check=_wrong)
    with pytest.raises(DifferenceError, match="valid arguments were refused"):
        judged(_raise(ValueError("x must be two")), ())


def test_what_is_documented_is_no_finding() -> None:
    assert judged(_raise(ValueError("x must be two"))) == "refused"
    assert judged(lambda x: None) == "accepted"
    assert judged(lambda x: x, ()) == "right"


def test_a_slow_call_is_a_hang(package, monkeypatch) -> None:
    monkeypatch.setattr(_cases, "LIMIT", 1)
    endless = Call("endless", lambda x: time.sleep(60), {"x": 1}, exact=("x",))
    monkeypatch.setattr(_cases, "CALLS", {"endless": lambda *_: endless})
    assert _cases.play_one(package, 0, None)[1] == "hang"


def killed(opt: Any, numbers: list[int], only: str | None) -> dict[str, Any]:
    """A planted crash in call number 1."""
    if 1 in numbers:
        os.kill(os.getpid(), 11)
    return {"counts": {"calls": len(numbers)}, "findings": []}


@pytest.mark.dist
def test_a_crash_is_found_and_the_others_go_on(monkeypatch) -> None:
    monkeypatch.setattr(fuzz._cases, "play", killed)
    report = fuzz.fuzz(3, 0, 0)
    (finding,) = report.findings
    assert finding["kind"] == "crash" and finding["where"].endswith(" 1")
    assert "code -11" in finding["text"] and report.counts["calls"] == 2


def test_plans_on_random_meshes(opt) -> None:
    played = _meshes.play(opt, [*range(12)])
    assert played["findings"] == [] and played["counts"]["meshes: chunks carried"] > 5


@pytest.mark.parametrize("what", ["owner", "size"])
def test_a_rank_that_plans_otherwise_is_seen(opt, submodule, what, monkeypatch) -> None:
    if what == "owner":
        module, name = submodule("optimizers.sharded.plan"), "assign"
        original, calls = module.assign, iter(range(10**6))

        def defective(costs: Any, candidates: Any, ranks: int) -> Any:
            owners = original(costs, candidates, ranks)
            turned = tuple((owner + 1) % ranks for owner in owners)
            return turned if next(calls) % 2 else owners
    else:
        module, name = submodule("distributed.route"), "boxes"
        original = module.boxes

        def defective(runs: Any, region: Any) -> Any:
            return original(runs, region)[:1]

    monkeypatch.setattr(module, name, defective)
    played = _meshes.play(opt, [*range(12)])
    assert played["findings"]


def test_workers_survive_a_crash() -> None:
    workers = Workers(1)
    ((how, text),) = workers.run(killed, [1], None, limit=60)
    assert how == "crash" and "-11" in text
    ((how, answer),) = workers.run(killed, [2], None, limit=60)
    workers.close()
    assert how == "done" and answer["counts"]["calls"] == 1


def test_the_folder_of_a_batch_is_removed(opt, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_cases.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "here"))
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(_cases.resource, "setrlimit", lambda *_: None)
    _cases.play(opt, [5], "polar_express_coefficients")
    assert not Path(tmp_path / "here").exists()
