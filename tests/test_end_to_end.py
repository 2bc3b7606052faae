"""`end_to_end.json` away from torch: cases, merging, sweeps, text, form, tables. No build."""

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ._harness import COMMIT, HEAD, result_findings
from ._project import ROOT, write_files

pytestmark = pytest.mark.static

OTHER = "9876543210" * 4
DIGESTS: dict[str, str] = {}  # of this checkout, made once


def head(harness, commit: str = COMMIT) -> dict:
    def digest(entry: str) -> str:
        if entry not in DIGESTS:
            DIGESTS[entry] = harness.sources.sources_digest(entry)
        return DIGESTS[entry]

    experts = {"commit": commit, "sources": digest("end_to_end of experts")}
    parts = {"sources": digest("end_to_end"), "corpus": "ab" * 32, "experts": experts}
    return HEAD | {"commit": commit} | parts


TIMES = {
    "wall_ms": 55.0,
    "host_ms": 20.0,
    "baseline_wall_ms": 53.0,
    "baseline_host_ms": 18.0,
    "baseline": "torch AdamW(fused=True) on all parameters",
    "speedup": 53 / 55,
}


def training(harness, name: str, loss: float = 2.5):
    rates = sorted(harness.pretraining.KINDS[name].rates)
    return harness.cases.TrainingRow(
        f"gpt-124M/{name}",
        "auto",
        ok=True,
        **TIMES,
        lr=rates[2],
        lr_at_edge=False,
        sweep=[{"lr": lr, "loss": loss + (lr != rates[2])} for lr in rates[:4]]
        + [{"lr": rates[4], "stopped": 100}],
        seed=0,
        loss=loss,
        loss_mean=loss + 0.01,
        seeds=[{"seed": seed, "loss": loss + 0.01 * seed} for seed in range(3)],
        steps=400,
        tokens=400 * 32768,
        tokens_per_s=6e5,
        optimizer_ms=3.0,
        curve=[(5.0, 4.0), (22.0, 2.6)],
        held_out=[(100, 5.5, 4.0), (400, 22.0, loss)],
    )


def model(harness, case: str):
    measured = TIMES | {"error": 3e-3, "peak_mb": 900.0, "tokens_per_s": 51200.0}
    return harness.moe_model.ModelRow(case, "auto", ok=True, **measured)


def first_call(harness):
    found = {"2048": 1.5, "16": 0.1, "8192": 0.2}
    return harness.first_use.figure("first_use/layer", found, compiler=False)[0]


MODEL_CASE = "qwen3-moe-8l/2048/lora/eager"


@pytest.fixture
def written(harness, tmp_path: Path) -> Path:
    """A checkout with the measured sources, a README with markers and a file of every kind."""
    for entry in ("end_to_end", "end_to_end of experts"):
        harness.copy_sources(entry, tmp_path)
    harness.write_pages(tmp_path)
    rows = [training(harness, "adamw"), training(harness, "muon"), model(harness, MODEL_CASE)]
    path = tmp_path / "benchmarks/results/h200/end_to_end.json"
    harness.report.write(path, head(harness), [*rows, first_call(harness)])
    return path


def test_rates_go_up_stay_and_go_down(harness) -> None:
    plan = harness.pretraining.Plan()
    factors = [plan.factor(step) for step in range(plan.steps)]
    assert factors[0] == pytest.approx(1 / 30) and factors[29] == factors[30] == 1
    assert factors[240] == 1 and factors[241] == pytest.approx(159 / 160)
    assert factors[320] == pytest.approx(0.5) and factors[-1] == pytest.approx(1 / 160)
    assert plan.tokens == 32768
    rates = sorted(harness.pretraining.KINDS["muon"].rates)
    assert rates == pytest.approx([5e-4, 1e-3, 2e-3, 4e-3, 8e-3])


@pytest.mark.parametrize(
    ("losses", "lr", "at_edge"),
    [
        ([3.0, 2.5, 2.7], 2.0, False),
        ([2.4, 2.5, 2.7], 1.0, True),
        ([math.nan, 2.5, 2.3], 3.0, True),
        ([3.0, 2.5, math.inf], 2.0, False),
    ],
)
def test_the_best_rate_and_whether_it_is_the_last_one(harness, losses, lr, at_edge) -> None:
    """In any order; a run that diverges is never chosen."""
    runs = [
        harness.pretraining.Run(number + 1.0, 0, [(1, 1.0, loss)], stopped=not math.isfinite(loss))
        for number, loss in enumerate(losses)
    ]
    best, edge = harness.pretraining.choose([runs[1], runs[0], runs[2]])
    assert (best.lr, edge) == (lr, at_edge)
    runs = [harness.pretraining.Run(lr=lr, seed=0, stopped=True) for lr in (1.0, 2.0)]
    with pytest.raises(ValueError, match=r"no rate of \[1.0, 2.0\] trains"):
        harness.pretraining.choose(runs)


def test_a_rate_that_is_far_behind_is_stopped(harness) -> None:
    """Compared at its own step, not at the end of the other; and never where it is not far."""
    made = harness.pretraining.Run
    leader = made(2e-3, 0, [(100, 5.0, 4.0), (200, 10.0, 3.0)])
    assert made(5e-4, 0, [(100, 5.0, 4.6)]).is_behind(leader, 0.5)
    assert not made(1e-3, 0, [(100, 5.0, 4.4)]).is_behind(leader, 0.5)
    assert not made(1e-3, 0, [(100, 5.0, 9.0)]).is_behind(None, 0.5)
    assert made(1e-3, 0, [(100, 5.0, math.nan)]).is_behind(None, 0.5)
    stopped = made(5e-4, 0, [(100, 5.0, 4.6)], stopped=True)
    assert harness.pretraining.choose([leader, stopped])[0] is leader
    assert harness.cases.swept(stopped) == {"lr": 5e-4, "stopped": 100, "behind": 4.6}
    assert harness.cases.swept(leader) == {"lr": 2e-3, "loss": 3.0}


def test_rows_join_the_file_that_is_there(harness, written: Path) -> None:
    entry = harness.cases
    earlier = json.loads(written.read_text())
    new = [training(harness, "muon", loss=2.4), training(harness, "torch_muon")]
    merged, rows = entry.merged(earlier, head(harness), new, [row.case for row in new])
    cases = [row["case"] if isinstance(row, dict) else row.case for row in rows]
    trained = [f"gpt-124M/{name}" for name in ("adamw", "muon", "torch_muon")]
    assert cases == [*trained, MODEL_CASE, "first_use/layer"]
    harness.report.write(written, merged, rows)
    result = json.loads(written.read_text())
    assert result["rows"][1]["loss"] == 2.4 and result["rows"][0] == earlier["rows"][0]
    assert result_findings("end_to_end", result) == []
    assert entry.merged(None, head(harness), new, [])[1] == new


def test_each_part_may_be_of_a_commit_of_its_own(harness, written: Path) -> None:
    earlier, now = json.loads(written.read_text()), head(harness, OTHER)
    cases = [MODEL_CASE, "first_use/layer"]
    rows = [model(harness, MODEL_CASE), first_call(harness)]
    merged, _ = harness.cases.merged(earlier, now, rows, cases)
    assert (merged["commit"], merged["experts"]["commit"]) == (COMMIT, OTHER)
    trainings = [training(harness, name) for name in ("adamw", "muon")]
    merged, _ = harness.cases.merged(earlier, now, trainings, [t.case for t in trainings])
    assert (merged["commit"], merged["experts"]["commit"]) == (OTHER, COMMIT)


@pytest.mark.parametrize(
    ("key", "case", "said"),
    [
        ("gpu", "gpt-124M/muon", "the file has gpu NVIDIA H200, this is other"),
        ("triton", "first_use/layer", "the file has triton 3.6.0, this is other"),
        ("commit", "gpt-124M/muon", "the rows of gpt-124M/adamw are of commit 0123"),
        ("sources", "gpt-124M/muon", "the rows of gpt-124M/adamw are of sources"),
        ("corpus", "gpt-124M/muon", "the rows of gpt-124M/adamw are of corpus abab"),
        ("experts", "first_use/layer", f"the rows of {MODEL_CASE} are of commit 0123"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(harness, written, key, case, said) -> None:
    earlier, now = json.loads(written.read_text()), head(harness)
    now[key] = {"commit": "other", "sources": "other"} if key == "experts" else "other"
    why = harness.cases.refusal(earlier, now, [case])
    assert why.startswith(said)
    with pytest.raises(ValueError, match=said[:20]):
        harness.cases.merged(earlier, now, [], [case])
    assert harness.cases.refusal(earlier, head(harness), [case]) is None
    assert harness.cases.refusal(None, now, [case]) is None


def test_an_edit_of_experts_leaves_the_trainings_alone(harness, written: Path) -> None:
    root = written.parents[3]
    harness.plots.draw(root)
    edited = set(harness.sources.source_files("end_to_end of experts", root))
    path = sorted(edited - set(harness.sources.source_files("end_to_end", root)))[-1]
    path.write_text(path.read_text() + "edited = True\n")
    stale = f"{written.relative_to(root).as_posix()}: its sources have changed since; measure again"
    assert harness.plots.findings(root) == [stale]
    result = json.loads(written.read_text())
    changed = {
        entry
        for entry, digest in harness.sources.recorded(written, result).items()
        if digest != harness.sources.sources_digest(entry, root)
    }
    assert changed == {"end_to_end of experts"}


def test_no_text_is_trained_on_and_held_out(harness, tmp_path: Path) -> None:
    """Of 300 files, every third of which stands there twice, and one that is no text."""
    for number in range(300):
        text = "\n".join(f"def f{number}_{k}(x):\n    return x + {k}" for k in range(20))
        folders = ("a", "b")[: 1 + (number % 3 == 0)]
        write_files(tmp_path, {f"{f}/m{number}.py": text for f in folders})
    (tmp_path / "latin.py").write_bytes(b"# \xff\n")
    split, recipe = harness.tokens.split, harness.tokens.Recipe(vocabulary=400)
    train, held_out = split([tmp_path], recipe)
    assert len(train) + len(held_out) == 300  # a copy counts once
    assert not set(train) & set(held_out) and 5 < len(held_out) < 45
    assert (train, held_out) == split([tmp_path, tmp_path], recipe)
    few, _ = split([tmp_path], dataclasses.replace(recipe, train_bytes=10_000))
    assert few == train[: len(few)] and 9_000 < sum(map(len, few)) < 12_000


def test_layers_of_the_first_calls_are_listed_and_not(harness) -> None:
    """What `make prebuilt` compiles has the one layer and lacks the other."""
    text = (ROOT / "tools/prebuild.py").read_text()
    listed, unlisted = (", ".join(map(str, sizes)) for sizes in harness.first_use.SIZES.values())
    assert f"Model({listed})" in text and f"Model({unlisted})" not in text


def test_a_first_call_finds_no_compiler(harness, monkeypatch) -> None:
    """One that fails has no time."""
    use, seen = harness.first_use, {}
    assert not use.figure("first_use/layer", None, compiler=True)[0].ok

    def run(command, **options):
        seen.update(options["env"], command=command)
        return SimpleNamespace(returncode=0, stdout='told\n{"2048": 1.0}\n', stderr="")

    monkeypatch.setattr(use.subprocess, "run", run)
    monkeypatch.setenv("CC", "gcc")
    assert use.measure((64, 2048, 1024, 8)) == {"2048": 1.0}
    assert "CC" not in seen and shutil.which("cc", path=seen["PATH"]) is None
    command = [sys.executable, "-m", "harness.end_to_end.first_use", "64", "2048", "1024", "8"]
    assert seen["command"] == command
    assert not Path(seen["TRITON_CACHE_DIR"]).exists()
