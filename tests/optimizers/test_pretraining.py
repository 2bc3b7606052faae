"""The trainings of `end_to_end.json` at tiny size: every optimizer, the clock, what diverges."""

import json

import pytest
import torch

from .._harness import BENCHMARKS, HEAD, Harness, result_findings

TOO_MUCH = 1e38  # a rate


@pytest.fixture(scope="module")
def harness():
    """As everywhere, but once for the trainings of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield Harness()


@pytest.fixture(scope="module")
def training(harness, opt, device):
    """Random ids of which every token says the next: there is something to learn."""
    model = {"layers": 1, "channels": 32, "heads": 2, "context": 16, "vocabulary": 64}
    run = {"batch": 4, "steps": 3, "warmup": 1, "every": 2, "held_out": 2, "averaged": 2}
    plan = harness.pretraining.Plan(**model, **run, bursts=1, calls=2)
    ids = (torch.arange(1000) % 64).to(torch.uint16).numpy()
    tokens = harness.tokens.Tokens(ids[:700], ids[700:], "ab" * 32)
    return harness.pretraining.Pretraining(plan, tokens, opt, device.type)


KINDS = ("adamw", "muon", "muon_adamw", "torch_muon")


@pytest.mark.parametrize("name", KINDS)
def test_three_steps_of_each_optimizer(training, name) -> None:
    """The loss falls; evaluations stand behind steps 2 and 3; the same seed gives the same run."""
    training.reset(0)
    before = training.evaluate()
    run = training.run(name, 4e-3, 0)
    assert [steps for steps, _, _ in run.held_out] == [2, 3]
    seconds = [s for _, s, _ in run.held_out]
    assert 0 < seconds[0] < seconds[1]
    assert len(run.curve) == len(run.step_ms) == 2 and run.optimizer_ms > 0
    assert run.loss < before
    again = training.run(name, 4e-3, 0)
    assert again.held_out[-1][2] == pytest.approx(run.loss, rel=1e-4)
    assert training.run(name, 4e-3, 1).loss != run.loss


@pytest.mark.parametrize("name", KINDS)
def test_all_parameters_are_stepped(harness, training, name) -> None:
    training.reset(0)
    kind = harness.pretraining.KINDS[name]
    optimizer = harness.pretraining.Optimizers(kind.make(training.package, training.model, 1e-3))
    stepped = [p for group in optimizer.groups for p in group["params"]]
    assert len(stepped) == len({id(p) for p in stepped}) == len(list(training.model.parameters()))
    peaks = list(optimizer.peaks)
    optimizer.set_factor(0.25)
    assert [group["lr"] for group in optimizer.groups] == [0.25 * peak for peak in peaks]


def test_nothing_is_waited_for_between_evaluations(training, begun) -> None:
    events = begun(training, "wait", "step", "evaluate")
    training.run("adamw", 1e-3, 0)
    first = ["wait", "step", "step", "wait", "evaluate"]
    assert events == [*first, "wait", "step", "wait", "evaluate"]


def test_a_rate_that_diverges_is_recorded_and_the_sweep_goes_on(
    harness, training, monkeypatch
) -> None:
    """The row has the form that result files have, and says at which rate there was no number."""
    training.warm_up()
    run = training.run
    monkeypatch.setattr(
        training, "run", lambda name, lr, *rest: run(name, TOO_MUCH if lr == 8e-3 else lr, *rest)
    )
    row = harness.cases.training_row("muon", training)
    assert row.ok and row.lr == 4e-3 and not row.lr_at_edge
    entry = json.loads(json.dumps(harness.report.entry(row), allow_nan=False))
    assert ["loss" in run for run in entry["sweep"]] == [True] * 4 + [False]
    assert entry["sweep"][4].keys() == {"lr", "stopped"}
    assert [seed["seed"] for seed in entry["seeds"]] == [0, 1, 2]
    assert result_findings("e", HEAD | {"rows": [entry]}) == []
    assert "loss" in harness.cases.line(row)


def test_a_model_that_learns_nothing_is_not_timed(harness, training, monkeypatch) -> None:
    monkeypatch.setattr(training, "untrained", 0.0)
    assert not harness.cases.training_row("adamw", training).ok
    run = training.run
    monkeypatch.setattr(training, "run", lambda name, lr, seed, other: run(name, TOO_MUCH, seed))
    assert not harness.cases.training_row("adamw", training).ok


def test_too_little_text_is_refused(harness, opt, training) -> None:
    ids = torch.zeros(20, dtype=torch.uint16).numpy()
    tokens = harness.tokens.Tokens(ids, ids, "")
    with pytest.raises(ValueError, match="20, 20 tokens; 129 of each needed"):
        harness.pretraining.Pretraining(training.plan, tokens, opt, "cpu")
