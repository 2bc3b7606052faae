"""The benchmark of steps on several ranks, away from GPUs: its gate, its baseline, its table."""

import contextlib
import importlib
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from ..conftest import ROOT
from ._arenas import SharedMemory
from ._ranks import on_ranks
from .test_partition import module_of

pytestmark = pytest.mark.dist


def harness(name: str):
    """A module as run.py imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def steps_of(opt):
    """The benchmark of steps, and the package as it takes it."""
    built = harness("harness.built_package").Built(opt, "0" * 40, True)
    return harness("harness.optimizer_step.several_gpus"), built


def table(
    opt, out: Path, end: float | None = None, name: str = "optimizer_step"
) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = harness("run").measure_on_ranks(name, out, draft=False, device="cpu", end=end)
    return status, printed.getvalue()


def test_every_form_is_right_on_cpus(ranks, tmp_path) -> None:
    """Equal to one process to the bit where the wire rounds nothing; nothing is written."""
    answers = ranks(2).run(table, tmp_path)
    assert [wrong for wrong, _ in answers] == [0, 0]
    lines = answers[0][1].splitlines()
    assert not any(text for _, text in answers[1:])  # the first rank speaks
    verdict = lines.index(next(line for line in lines if line.endswith("  verdict")))
    rows = {line.split()[0]: line for line in lines[:verdict] if line.startswith("tiny/")}
    assert list(rows) == ["tiny/fsdp2", "tiny/unreduced-fp32", "tiny/unreduced-fp16"]
    assert all("; by gloo" in line for line in rows.values())
    for form in ("fsdp2", "unreduced-fp32"):
        assert "7 of 7 tensors equal to the bit, error 0.0e+00" in rows[f"tiny/{form}"]
    assert [line.split()[1] for line in lines[verdict + 1 : -1] if line.endswith("pass")] == [
        "error_share"
    ] * 3
    assert lines[-1] == "verdict on 2 ranks, of 9: 3 pass, 0 short, 6 missing"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("form", "name", "target"),
    [
        ("fsdp2", "optimizers.step", "orthogonalize"),
        ("unreduced-fp16", "optimizers.step", "orthogonalize"),
        ("unreduced-fp32", "optimizers.sharded.reduce_scatter", "adamw_on"),
    ],
)
@on_ranks(2)
def test_the_gate_finds_wrong_updates(opt, form, name, target) -> None:
    """Updates of one owner that are too long by a hundredth, rows of one that are off a little."""
    step, built = steps_of(opt)
    module = module_of(opt, name)
    original = getattr(module, target)
    with step.joined("cpu") as here, pytest.MonkeyPatch.context() as patch:

        def wrong(first, *arguments, **options):
            result = original(first, *arguments, **options)
            if here.rank == 1 and target == "orthogonalize":
                result *= 1.01
            elif here.rank == 0 and target == "adamw_on":
                first[0].add_(1e-5)
            return result

        patch.setattr(module, target, wrong)
        row, line = step.measure(step.Problem("tiny", form), built, here, rounds=1)
    assert not row.ok
    assert "WRONG RESULTS, not timed" in line


@on_ranks(2)
def test_the_baseline_reduces_gradients_of_its_own(opt) -> list[float]:
    step, built = steps_of(opt)
    with step.joined("cpu") as here:
        case = step.RankCase(step.Problem("tiny", "unreduced-fp32"), built, here)
        total = case.matrices[0].grad.clone()
        distributed.all_reduce(total)
        kept = [param.grad.clone() for param in case.matrices]
        case.baseline()
        first = case.adamw.param_groups[0]["params"][0]
        assert torch.equal(first.grad, total)
        assert all(map(torch.equal, kept, (param.grad for param in case.matrices)))
        assert first.data_ptr() == case.matrices[0].data_ptr()
    return [first.sum().item()]


def transports_table(opt, out: Path, end: float | None = None) -> tuple[int, str]:
    module = module_of(opt, "distributed.transport").GroupTransport
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "memory", SharedMemory)
        return table(opt, out, end, "communication")


def test_every_row_of_transports_is_measured_both_ways(ranks, tmp_path) -> None:
    """Messages and steps have equal bits, or a row would say so."""
    answers = ranks(2).run(transports_table, tmp_path)
    assert [wrong for wrong, _ in answers] == [0, 0]
    rows = [line for line in answers[0][1].splitlines() if "(goal " in line]
    named = [line.split("/")[0] for line in rows]
    assert named == ["C3", "C13", "C4", "C4", "C2", "C5", "C7"]
    assert not answers[1][1] and not any(tmp_path.iterdir())


def wrong_link(opt, how: str) -> list[tuple[bool, str]]:
    """Rows of a transport that moves other bytes, or cannot be had."""
    transports, (step, built) = harness("harness.transports"), steps_of(opt)
    module = module_of(opt, "distributed.transport").GroupTransport
    engine = module_of(opt, "distributed.p2p").PeerToPeer
    exchange = engine.exchange

    def wrong(self, going, outbox, coming, inbox):
        done = exchange(self, going, outbox, coming, inbox)
        if distributed.get_rank() == 1:
            inbox[:1] += 1
        return done

    with step.joined("cpu") as here, pytest.MonkeyPatch.context() as patch:
        if how == "wrong":
            patch.setattr(module, "memory", SharedMemory)
            patch.setattr(engine, "exchange", wrong)
        found = [*transports.bandwidth(built, here, 2**20)]
        if how != "wrong":
            found += transports.step(built, here, "C5", "tiny", "fsdp2", 0.6)
            found += transports.gather(built, here, 8, 64, 1.0, 1.0)
    return [(row.ok, line) for row, line in found]


@pytest.mark.parametrize(
    ("how", "said"), [("wrong", "WRONG RESULTS"), ("none", "NOT TAKEN (rank 0")]
)
def test_a_transport_that_is_wrong_or_not_there_has_no_figure(ranks, how, said) -> None:
    for of_rank in ranks(2).run(wrong_link, how):
        assert not any(ok for ok, _ in of_rank)
        assert all(said in line for _, line in of_rank)
