"""Results: their form, what pages quote of them, and the harness that writes them. No build."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from ._harness import COMMIT, HEAD, quoted_results, result_findings
from ._project import ROOT, assert_found, assert_none

pytestmark = pytest.mark.static

RESULTS = ROOT / "benchmarks" / "results"
DRAWN = "docs/benchmarks"


def test_result_files_have_their_form() -> None:
    from benchmarks.harness.progress import is_partial

    findings = []
    for path in sorted(RESULTS.glob("*/*.json")):
        if is_partial(path):  # of a measurement that was cut off
            continue
        name = path.relative_to(ROOT).as_posix()
        findings += result_findings(name, json.loads(path.read_text()))
    assert_none(findings)


def test_quoted_results_are_of_these_sources() -> None:
    """The numbers of README and docs/benchmarks stand only as long as the code they measured."""
    from benchmarks.harness.progress import is_partial
    from benchmarks.harness.sources import recorded, sources_digest

    pages = [ROOT / "README.md", *sorted((ROOT / "docs/benchmarks").glob("*.md"))]
    quotes = {path: page.name for page in pages for path in quoted_results(page.read_text())}
    assert quotes, "no page quotes a result"
    findings = []
    for path, page in sorted(quotes.items()):
        if is_partial(path):
            findings.append(f"{page} quotes {path}, which is not complete")
            continue
        if not (RESULTS / path).is_file():
            findings.append(f"{page} quotes benchmarks/results/{path}, which does not exist")
            continue
        for entry, digest in recorded(path, json.loads((RESULTS / path).read_text())).items():
            if digest != sources_digest(entry):
                findings.append(
                    f"{path}: the sources of {entry} have changed; run `make bench OP={path.stem}`"
                )
    assert_none(findings)


def test_digest_follows_code_alone(tmp_path: Path, monkeypatch) -> None:
    from benchmarks.harness import sources

    monkeypatch.setitem(sources.SOURCES, "toy", ("kernels-src/toy/*", "kernels/toy*.py"))
    cuda, python = tmp_path / "kernels-src/toy/a.cu", tmp_path / "kernels/toy.py"
    for path, text in ((cuda, "int one() { return 1; }\n"), (python, "def one():\n    return 1\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    first = sources.sources_digest("toy", tmp_path)
    (tmp_path / "kernels/other.py").write_text("two = 2")
    python.write_text(
        '"""Doc."""\nimport two\n\n\ndef one():\n    """Doc."""\n    return 1  # one\n'
    )
    python.rename(tmp_path / "kernels/toy_triton.py")
    cuda.write_text("/* one */\n// two\nint  one() { return 1; }\n")
    assert first == sources.sources_digest("toy", tmp_path)

    cuda.write_text("int one() { return 2; }\n")
    changed = sources.sources_digest("toy", tmp_path)
    (tmp_path / "kernels/toy_triton.py").write_text("def one():\n    return 2\n")
    both = sources.sources_digest("toy", tmp_path)
    (tmp_path / "kernels-src/toy/b.cuh").touch()
    added = sources.sources_digest("toy", tmp_path)
    assert len({first, changed, both, added}) == 4

    (tmp_path / "text.cu").write_text('auto s = "// no comment";  // a comment\n')
    assert sources.code_of(tmp_path / "text.cu") == 'auto s = "// no comment";'
    (tmp_path / "kernels/toy_triton.py").unlink()
    with pytest.raises(ValueError, match=r"no file matches kernels/toy\*\.py"):
        sources.sources_digest("toy", tmp_path)
    with pytest.raises(ValueError, match="'unknown' is no result file; known: communication"):
        sources.sources_digest("unknown", tmp_path)


def committed(name: str, *rows: dict) -> dict:
    """The head of a result file that is committed, and its first row."""
    result = json.loads((RESULTS / name).read_text())
    return result | {"rows": [*result["rows"][:1], *rows]}


FAILED = {"case": "sum/9x9", "variant": "auto", "ok": False}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ((), None, None),
        (("commit",), "0123456", "40 hexadecimal"),
        (("sources",), "AB" * 32, "64 hexadecimal"),
        (("driver",), None, "driver must be text"),
        (("gpu",), "", "gpu must be text"),
        (("ceilings", "copy_tbps"), 0, "ceilings.copy_tbps"),
        (("ceilings",), None, "ceilings.bf16_tflops"),
        (("rows",), [], "at least one row"),
        (("rows", 0, "ok"), 1, "ok must be true or false"),
        (("rows", 0, "case"), None, "case must be text"),
        (("rows", 0, "ms"), 0, "ms must be a positive number"),
        (("rows", 0, "ms"), float("nan"), "ms must be a positive number"),
        (("rows", 0, "ms"), 1e6, "but floor_ms / ms is"),
        (("rows", 0, "speedup"), 1e6, "speedup is 1000000.0, but baseline_wall_ms / wall_ms is"),
        (("rows", 0, "baseline"), None, "baseline must be text"),
        (("rows", 0, "error"), None, "error must be a number"),
        (("rows", 1, "ms"), 0.1, "is not ok, so it must have no ms"),
        (("rows", 1), dict(FAILED), "row 2: sum/9x9 / auto stands there twice"),
        (("partial",), True, "toy: is not complete; the command that wrote it goes on with it"),
    ],
)
def test_form_can_be_broken(path: tuple, value: object, expected: str | None) -> None:
    result = inner = committed("h200/quant.json", dict(FAILED))
    if "stands there twice" in str(expected):
        result["rows"].append(dict(FAILED))
    for key in path[:-1]:
        inner = inner[key]
    if path:
        inner[path[-1]] = value
    findings = result_findings("toy", result)
    assert_found(expected, findings) if expected else assert_none(findings)


@pytest.fixture
def checkout(harness, tmp_path: Path) -> Path:
    """A copy of the measured sources, a README with markers and one result file."""
    harness.copy_sources("elementwise", tmp_path)
    harness.write_pages(tmp_path)
    write_results(harness, tmp_path)
    return tmp_path


def passed(harness, case: str, ms: float = 0.26):
    made = harness.timer.Times
    times = {"ours": made(ms, ms + 0.01, 0.02), "baseline": made(0.41, 0.43, 0.03)}
    measured = {"errors": (1.7e-3, 1.7e-3), "peak_mb": 805.3}
    return harness.report.passed(case, times, "peer 1.0", 0.24, **measured)


def write_results(harness, root: Path) -> Path:
    report, elementwise = harness.report, harness.elementwise
    cases = [problem.case for problem in elementwise.LISTED_DEQUANTS]
    cases += sorted(elementwise.random_cases(COMMIT))
    rows = [passed(harness, case) for case in cases]
    path = root / "benchmarks/results/h200/elementwise.json"
    digest = harness.sources.sources_digest("elementwise", root)
    report.write(path, HEAD | {"sources": digest}, [*rows, report.failed("nf4_dequant/1x1x1")])
    return path


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"provenance": {"kernel": {"commit": COMMIT, "dirty": False}}}, (COMMIT, True)),
        ({"provenance": {"kernel": {"commit": COMMIT, "dirty": True}}}, (COMMIT, False)),
        ({"provenance": {"kernel": {"commit": COMMIT}}}, (COMMIT, False)),
        ({}, ("0" * 40, False)),
    ],
)
def test_only_a_clean_commit_is_clean(harness, metadata, expected):
    assert harness.built_package.provenance(metadata) == expected


def test_floors_by_hand(harness):
    floor = harness.report.floor_ms
    assert floor(bytes_moved=4.3e9) == pytest.approx(1.0)
    assert floor(bytes_moved=4.3e9, flops=1.58e12) == pytest.approx(2.0)  # the larger one

    ops = harness.elementwise
    dequant = ops.LISTED_DEQUANTS[0]
    assert dequant.bytes_moved == dequant.elements * (0.5 + 4 / 64 + 2)
    odd = ops.Dequant(1, 1, 2**17 + 1, 256, "float32", nested=True)
    assert odd.bytes_moved == (2**16 + 1) + (513 + 4 * 3) + 4 * (2**17 + 1)
    listed = {group.case: group.bytes_moved for group in ops.LISTED_GROUPS}
    assert listed["momentum/24x1280x5120/float32"] == 24 * 1280 * 5120 * 14
    assert listed["apply_update/24x1280x5120/float32"] == 24 * 1280 * 5120 * 10
    assert listed["adamw/65536x1280/float32"] == 65536 * 1280 * 28

    entry = harness.orthogonalize
    cases = {problem.case: problem for problem in entry.listed()}
    assert len(cases) == 22
    for shape, least in {"1x4096x14336": 2.697, "256x512x2048": 1.478}.items():
        assert cases[f"{shape}/heavy"].floor_ms == pytest.approx(least, rel=5e-3)
    assert cases["8x4096x4096/heavy"].bytes_moved == 8 * 4096**2 * 6
    assert cases["8x4096x4096/heavy/bfloat16"].bytes_moved == 8 * 4096**2 * 4

    step = harness.one_gpu
    assert step.least_flops((768, 768)) == 16 * 768**3
    assert step.least_flops((4096, 1024)) == 6 * 1024**2 * 4096 + 10 * 1024**3
    assert step.least_flops((128, 768, 2048)) == 128 * step.least_flops((2048, 768))
    models = {model.case: model for model in step.LISTED}
    experts, elements = models["experts-128/1gpu/heavy"], 128 * (1536 * 2048 + 2048 * 768)
    assert experts.bytes_moved == 24 * elements
    assert experts.floor_ms == pytest.approx((experts.flops / 790 + 24 * elements / 4.3) / 1e9)
    saved = models["llama-1B/1gpu/heavy"].bytes_moved
    saved -= models["llama-1B/bfloat16/1gpu/heavy"].bytes_moved
    assert saved == 6 * (128256 * 2048 + 2048 * (32 * 2048 + 32 * 512 + 48 * 8192))


RANDOM = [
    ("elementwise", "random_dequants", "case"),
    ("elementwise", "random_groups", "case"),
    ("orthogonalize", "random_problems", "case"),
    ("problems", "random_layers", "name"),
]


@pytest.mark.parametrize(("module", "draw", "name"), RANDOM)
def test_random_problems_repeat_and_differ_by_commit(harness, module, draw, name):
    draw, count = getattr(getattr(harness, module), draw), 10 if module == "elementwise" else 20
    assert draw(7) == draw(7) != draw(8)
    assert len({getattr(problem, name) for problem in draw(7)}) == len(draw(7)) == count


def test_shards_are_judged_by_one_gpu(harness, tmp_path):
    report, verdict, path = harness.report, harness.verdict, tmp_path / "optimizer_step.json"
    assert verdict.of_one_gpu(path) == verdict.of_one_gpu(None) == {}
    single = [passed(harness, "nanochat-d20/1gpu/heavy", ms=15.99)]
    report.write(path, HEAD, single)
    alone = verdict.of_one_gpu(path)
    assert alone == {"nanochat-d20": 16.0}
    row = passed(harness, "nanochat-d20/fsdp2", ms=3.99)
    judged = verdict.with_goals(row, 8, alone, on_cpus=False)
    assert judged.goals["over_one_gpu"] == {"value": 4.0, "goal": 4.0, "met": True}


def test_results_of_several_gpus_have_sources_of_their_own(harness):
    entry_of, sources = harness.sources.entry_of, harness.sources.SOURCES
    assert entry_of(Path("h200/optimizer_step.json")) == "optimizer_step"
    several = entry_of(Path("h200x8/optimizer_step.json"))
    assert set(sources[several]) - set(sources["optimizer_step"]) == {
        "kernels-src/communication/*",
        "torch-ext/optimizer/distributed/**/*.py",
        "torch-ext/optimizer/kernels/communication/*.py",
    }
    assert sources[entry_of(Path("h200x4/communication.json"))] == sources[several]
    assert harness.sources.sources_digest(several) != harness.sources.sources_digest(
        "optimizer_step"
    )


class RecordingStopwatch:
    pauses: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.rounds, self.calls, self.times = 0, 0, []
        self.pauses.clear()

    def pause(self, ms: float) -> None:
        self.pauses.append(ms)
        self.rounds += 1
        self.calls = 0

    def time(self, call: Callable[[], object]) -> None:
        call()
        self.calls += 1
        self.times.append(10.0 * self.calls + 100.0 * (self.rounds == 1))

    def finish(self) -> list[float]:
        return self.times


def test_variants_take_turns_over_the_input_sets(harness):
    called = []
    variants = {
        "ours": lambda number: called.append(("ours", number)),
        "base": lambda number: called.append(("base", number)),
    }
    ms = harness.timer.medians(variants, sets=2, rounds=3, warmup=1, stopwatch=RecordingStopwatch)
    assert ms == {"ours": 10.0, "base": 20.0}
    turns = [0, 0, 1, 0]  # one round of warm-up, then three timed ones
    assert called == [(name, number) for number in turns for name in ("ours", "base")]
    assert statistics.median([110.0, 10.0, 10.0]) == ms["ours"]
    assert RecordingStopwatch.pauses == [1.0] * 3


@pytest.mark.parametrize(("alone", "pauses"), [(False, [4.0]), (True, [1.6, 3.4])])
def test_the_device_is_busy_while_the_host_queues(harness, alone, pauses):
    """For a millisecond, and twice as long as the host needs for a round, or for each call."""
    variants = dict.fromkeys(("ours", "base"), lambda number: None)
    options = {"host_ms": {"ours": 0.3, "base": 1.2}, "alone": alone}
    options["stopwatch"] = RecordingStopwatch
    harness.timer.medians(variants, sets=1, rounds=2, **options)
    assert RecordingStopwatch.pauses == pytest.approx(pauses * 2)


def test_enough_input_sets_for_a_cold_cache(harness):
    cold_sets = harness.timer.cold_sets
    assert cold_sets(1_000_000_000, 60_000_000) == 4  # other addresses even then
    assert cold_sets(50_000_000, 60_000_000) == 4
    assert cold_sets(20_000_000, 60_000_000) == 9


def test_the_clock_is_the_host_and_what_the_device_has_left(harness):
    """Nothing is waited for within a burst; sets take turns; parameters change between bursts."""
    now, device, called, changed = 0.0, 0.0, [], []

    def call(number):
        nonlocal now, device
        called.append(number)
        now += 1e-3  # of the host
        device = max(device, now) + 2e-3

    def synchronize():
        nonlocal now
        now = max(now, device)

    wall, host = harness.timer.burst(call, 1, 5, 4, synchronize=synchronize, now=lambda: now)
    assert called == [1, 2, 3, 0, 1]
    assert (wall, host) == (pytest.approx((1 + 5 * 2) / 5), pytest.approx(1.0))
    called.clear()
    options = {"between": lambda: changed.append(len(called)), "bursts": 3, "settle_ms": 40}
    options |= {"synchronize": synchronize, "now": lambda: now}
    shown = harness.timer.clock({"a": call, "b": call}, sets=4, **options)
    took = (pytest.approx((1 + 30 * 2) / 30), pytest.approx(1.0))
    assert shown == {"a": took, "b": took}
    assert len(changed) == 3 * 2 * 2
    settling = 3 * 8  # three bursts of 1 + 8 x 2 ms: 40 ms of the variant itself before its wall
    assert len(called) == 2 * 8 + 3 * 2 * (8 + settling + 30)
    assert changed[:2] == [2 * 8, 2 * 8 + 8 + settling], "the host's calls follow the other variant"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("README.md", "README.md: the results table is stale"),
        (f"{DRAWN}/h200-elementwise.md", f"{DRAWN}/h200-elementwise.md: is stale"),
        ("benchmarks/results/h200/elementwise.json", "its plot is stale"),
        ("kernels-src/quant/nf4_dequant.cu", "its sources have changed since"),
    ],
)
def test_a_change_makes_it_stale(harness, checkout, edit, message):
    harness.plots.draw(checkout)
    path = checkout / edit
    text = path.read_text().replace("0.26", "0.27").replace("0.43", "0.44")
    path.write_text(text + ("int edited;\n" if path.suffix.startswith(".cu") else "\n"))
    assert any(message in finding for finding in harness.plots.findings(checkout))


def test_readme_has_eight_headlines_at_most(harness):
    assert harness.plots.HEADLINE_ROWS == 8
    table = harness.plots.headlines(harness.plots.headline_results(ROOT))
    assert 2 < sum(line.startswith("| ") for line in table.splitlines()) <= 9
