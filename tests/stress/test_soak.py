"""The soak itself: a short run of it, and the defects that it must see."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from . import _episode, _events, _together, soak
from ._report import Report
from ._workers import Workers

SEEDS = range(4)


def findings(opt: Any, steps: int = 12) -> list[str]:
    played = [_episode.play(opt, seed, steps) for seed in SEEDS]
    return [one["difference"] for one in played if one["difference"]]


def test_a_short_run_finds_nothing(opt) -> None:
    assert findings(opt) == []


def test_every_event_happens(opt) -> None:
    for name in _events.EVENTS:
        episode = _episode.Episode(opt, 3)
        try:
            episode.fill_gradients()
            _events.EVENTS[name](episode)
            episode.step(name)
        finally:
            episode.close()


def drops_a_momentum(optimizer: Any) -> None:
    """Loading forgets the state of one parameter."""
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["momentum_buffer"].zero_()


DEFECTS = {
    "loading loses state": ("state_dict_to_itself", "load_state_dict", drops_a_momentum),
    "offload loses state": ("offload_on", "turn_on_cpu_offload", drops_a_momentum),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_seen(opt, name, monkeypatch) -> None:
    event, method, damage = DEFECTS[name]
    original = getattr(opt.MuonAdamW, method)

    def damaged(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        damage(self)

    monkeypatch.setattr(opt.MuonAdamW, method, damaged)
    monkeypatch.setattr(opt.Muon, method, damaged)
    monkeypatch.setattr(_events, "EVENTS", {event: _events.EVENTS[event]})
    assert any("momentum_buffer differs" in text for text in findings(opt))


def test_a_wrong_step_is_seen_by_the_slow_one(opt, submodule, monkeypatch) -> None:
    """The run and its twin have the same defect."""
    module = submodule("optimizers.stages.muon")
    original = module.factor_of
    monkeypatch.setattr(module, "factor_of", lambda *shape: 1.05 * original(*shape))
    assert any("farther from float64" in text for text in findings(opt))


def test_half_a_step_that_goes_on_is_seen(opt, submodule, monkeypatch) -> None:
    """A step that raises after a batch, and an optimizer that forgets it."""
    monkeypatch.setattr(_events, "EVENTS", {"interrupted": _events.step_is_interrupted})
    assert findings(opt) == []
    forgetful = submodule("optimizers.sharded.consistency").Consistency
    monkeypatch.setattr(forgetful, "check_unbroken", lambda self: None)
    assert any("was interrupted" in text for text in findings(opt))


@pytest.mark.dist
def test_several_ranks() -> None:
    workers = Workers(2)
    answers = workers.run(_together.play, 1, 6, limit=120)
    workers.close()
    assert [how for how, _ in answers] == ["done", "done"]
    assert [answer["difference"] for _, answer in answers] == [None, None]
    assert answers[0][1]["counts"]["ranks: step"] == 6


@pytest.mark.parametrize("found", [0, 1])
def test_the_report_says_what_was_found(tmp_path, capsys, found) -> None:
    report = Report("soak", 7)
    report.counts["step"] = 3
    for _ in range(found):
        report.add("difference", "1 rank, seed 7", "differs", ["step"])
    assert report.finish(tmp_path / "soak.json") == found
    assert f"{found} undocumented differences, 0 crashes, 0 hangs" in capsys.readouterr().out
    written = json.loads((tmp_path / "soak.json").read_text())
    assert (written["seed"], written["counts"], written["hangs"]) == (7, {"step": 3}, 0)
    assert written["torch"] == torch.__version__ and len(written["findings"]) == found


def test_steps_are_shared_out(monkeypatch) -> None:
    """Nine tenths to one process; an episode that fails counts the steps that it took."""
    asked = []

    class Played:
        def __init__(self, world: int) -> None:
            self.world = world

        def run(self, play: Any, seed: int, steps: int, limit: float) -> list[Any]:
            asked.append((self.world, steps))
            answer = {"steps": steps, "counts": {}, "difference": None, "happened": []}
            return [("done", answer)] * self.world

        def close(self) -> None: ...

    monkeypatch.setattr(soak, "Workers", Played)
    report = soak.soak(1000, 0)
    assert sum(n for world, n in asked if world == 1) == 900
    assert sum(n for world, n in asked if world == 4) == 100
    assert report.counts["steps of 4 ranks"] == 100 and not report.findings
