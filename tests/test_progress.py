"""A measurement that is cut off goes on behind its finished rows; what Nsight Compute counts."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ._harness import COMMIT, HEAD

CASES = [f"toy/{number}" for number in range(5)]


class Toy:
    """An entry of run.py that measures nothing, and the machine that it runs on."""

    def __init__(self, harness, monkeypatch, out: Path) -> None:
        self.harness, self.out = harness, out
        self.head, self.measured = dict(HEAD), []
        self.before: Callable[[str], object] = lambda case: None
        entry = ModuleType("harness.toy")
        entry.rows = self.rows
        monkeypatch.setitem(sys.modules, entry.__name__, entry)
        monkeypatch.setitem(harness.run.ENTRIES, "toy", entry.__name__)
        monkeypatch.setattr(harness.run, "header", lambda *_, **__: self.head)
        built = harness.built_package.Built(ModuleType("package"), COMMIT, clean=True)
        monkeypatch.setattr(harness.built_package, "load", lambda root: built)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: HEAD["gpu"])

    def rows(self, built, progress):
        times = dict.fromkeys(("ours", "baseline"), self.harness.timer.Times(1.0, 1.5, 0.5))
        for case in CASES:
            if progress.begin(case):
                self.before(case)
                self.measured.append(case)
                for variant in ("auto", "other"):
                    row = self.harness.report.passed(case, times, "peer", 0.5, variant=variant)
                    yield row, case

    def __call__(self, *arguments: str) -> int:
        self.measured = []
        return self.harness.run.main(["toy", "--out", str(self.out), *arguments])

    def cut_off(self, case: str) -> None:
        """A command that ends within a case."""

        def ends(now: str) -> None:
            if now == case:
                raise KeyboardInterrupt

        self.before = ends
        with pytest.raises(KeyboardInterrupt):
            self()
        self.before = lambda case: None

    @property
    def complete(self) -> Path:
        return self.out / "h200" / "toy.json"

    @property
    def partial(self) -> Path:
        return self.out / "h200" / "toy.partial.json"


@pytest.fixture
def toy(harness, monkeypatch, tmp_path) -> Toy:
    return Toy(harness, monkeypatch, tmp_path)


def cases_in(path: Path) -> list[str]:
    return [row["case"] for row in json.loads(path.read_text())["rows"] if row["variant"] == "auto"]


def test_what_was_finished_before_a_cut_off_is_not_measured_again(toy) -> None:
    """Twice cut off; the ceilings are those of the first rows."""
    toy.cut_off(CASES[2])
    assert cases_in(toy.partial) == CASES[:2] and not toy.complete.exists()
    assert json.loads(toy.partial.read_text())["partial"] is True
    toy.head["ceilings"] = {**HEAD["ceilings"], "copy_tbps": 4.0}
    toy.cut_off(CASES[3])
    assert toy.measured == [CASES[2]]
    assert toy() == 0
    assert toy.measured == CASES[3:] and not toy.partial.exists()
    result = json.loads(toy.complete.read_text())
    assert [row["case"] for row in result["rows"]] == [case for case in CASES for _ in range(2)]
    assert {key: result[key] for key in HEAD} == HEAD and "partial" not in result


def test_an_older_complete_file_stays_until_the_new_one_is(toy) -> None:
    assert toy() == 0
    assert cases_in(toy.complete) == CASES == toy.measured
    assert list(toy.complete.parent.iterdir()) == [toy.complete]
    before = toy.complete.read_text()
    toy.head["driver"] = "590.1"
    toy.cut_off(CASES[4])
    assert toy.complete.read_text() == before
    assert toy() == 0
    assert json.loads(toy.complete.read_text())["driver"] == "590.1"


def test_wrong_rows_before_a_cut_off_count(toy, harness) -> None:
    toy.cut_off(CASES[2])
    content = json.loads(toy.partial.read_text())
    content["rows"][0] = harness.report.entry(harness.report.failed(CASES[0]))
    toy.partial.write_text(json.dumps(content))
    assert toy() == 1
    assert toy.measured == CASES[2:]


@pytest.mark.parametrize("key", ["gpu", "driver", "torch", "triton", "commit", "sources"])
def test_rows_of_anything_else_are_refused(toy, key) -> None:
    toy.cut_off(CASES[2])
    before = toy.partial.read_text()
    toy.head[key] = "another"
    with pytest.raises(SystemExit) as refused:
        toy()
    said = f"toy.partial.json: the file has {key} {HEAD[key]}, this is another; finish it with what"
    assert said in str(refused.value) and "or delete it to begin anew" in str(refused.value)
    assert toy.measured == [] and toy.partial.read_text() == before


def test_a_draft_neither_reads_nor_writes(toy) -> None:
    toy.cut_off(CASES[2])
    before = toy.partial.read_text()
    toy.head["commit"] = "another"
    assert toy("--draft") == 0
    assert toy.measured == CASES and toy.partial.read_text() == before
    assert not toy.complete.exists()


def test_no_case_begins_behind_the_budget(toy, harness, monkeypatch, capsys) -> None:
    """Each case takes 10 s; what has begun is finished, both of its rows."""
    clock = SimpleNamespace(now=100.0)
    for module in (harness.run, harness.progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def takes(case: str) -> None:
        clock.now += 10

    toy.before = takes
    assert toy("--budget", "25") == 3
    assert toy.measured == CASES[:3] == cases_in(toy.partial) and not toy.complete.exists()
    said = "the time is over, 2 cases are left: the same command goes on"
    assert said in capsys.readouterr().out
    assert toy("--budget", "25") == 0
    assert toy.measured == CASES[3:] and cases_in(toy.complete) == CASES


def test_two_commands_share_the_cases_of_a_file(toy, capsys) -> None:
    """One begins within a case of the other: that case stays the other's, in its place; a case
    without a row, as of a peer that failed, is finished, too."""
    inner = []

    def other(case: str) -> None:
        toy.before = lambda case: None
        assert toy("--budget", "0") == 3
        assert "4 cases are left" in capsys.readouterr().out
        assert toy() == 0
        inner.extend(toy.measured)
        assert "other commands measure what is missing" in capsys.readouterr().out
        assert cases_in(toy.partial) == CASES[1:] and not toy.complete.exists()
        toy.measured = []

    toy.before = other
    assert toy() == 0
    assert inner == CASES[1:] and toy.measured == CASES[:1]
    assert cases_in(toy.complete) == CASES and not toy.partial.exists()
    before = toy.complete.read_text()
    assert toy() == 0 and toy.measured == [] and toy.complete.read_text() == before
    assert "toy.json is complete; delete it to measure it anew" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "some", "count"),
    [
        ("elementwise", "adamw/65536x1280/float32", 24),
        ("moe_lora", "Mixtral-8x7B/T8192/r16/fwd+bwd", 100),
        ("quant", "offload/Qwen3-30B-A3B", 73),
        ("one_gpu", "llama-1B/1gpu/heavy/fsdp2", 7),
        ("orthogonalize", "real/8x8192x2048", 49),
    ],
)
def test_an_entry_sets_up_nothing_for_known_cases(harness, monkeypatch, entry, some, count) -> None:
    """Anything that it would do here for a case would fail for want of a GPU."""
    specimen = SimpleNamespace(x=SimpleNamespace(shape=(2, 4)))
    monkeypatch.setattr(
        harness.matrices, "specimens", lambda m: {"one": specimen, "other": specimen}
    )
    rows = getattr(harness, entry).rows
    built = SimpleNamespace(commit=COMMIT, package=SimpleNamespace(explain=lambda *_, **__: ""))
    with monkeypatch.context() as patched:
        patched.setattr(harness.compile_ahead, "run", lambda *_: None)
        late = harness.progress.Progress(end=0.0)
        assert list(rows(built, late)) == []
    assert some in late.left and len(late.left) == len(set(late.left))
    assert len(late.left) == count
    known = harness.progress.Progress(late.left)
    assert list(rows(built, known)) == [] == known.left


@pytest.mark.parametrize("entry", ["moe_lora", "orthogonalize", "quant"])
def test_only_what_is_missing_is_compiled_ahead(harness, entry) -> None:
    module = getattr(harness, entry)
    built = SimpleNamespace(commit=COMMIT, package=None)
    everything = module.compile_jobs(built)
    random = module.random_cases(COMMIT)
    assert len(everything) - len(module.compile_jobs(built, random)) == 20
    assert harness.compile_ahead.jobs_of(module.__name__, "compile_jobs", built, random)


def test_cases_are_measured_again_in_a_file_of_the_same_sources(harness, tmp_path) -> None:
    path = tmp_path / "toy.json"
    head = dict.fromkeys(harness.progress.SAME, "x")
    rows = [harness.report.failed(case, "auto") for case in ("a", "b", "c")]
    rows.append(harness.report.failed("a", "peer"))
    harness.report.write(path, head, rows)
    _, kept, done = harness.progress.continued(path, head, ["b"])
    assert [row.case for row in kept] == ["a", "c", "a"] and done == {"a", "c", "a [peer]"}
    with pytest.raises(ValueError, match="has no row of d"):
        harness.progress.continued(path, head, ["b", "d"])
    with pytest.raises(ValueError, match="the file has commit x, this is y"):
        harness.progress.continued(path, head | {"commit": "y"}, ["b"])


@pytest.mark.parametrize("name", ("elementwise", "moe_lora", "orthogonalize", "quant"))
def test_a_partial_file_is_finished_with_what_it_has(harness, tmp_path, name: str) -> None:
    path = tmp_path / f"{name}.json"
    partial = harness.progress.partial_path(path)
    sources = harness.run.sources_digest(name)
    head = {"commit": COMMIT, "sources": sources, "partial": True}
    cases = harness.progress.Progress(end=0.0)
    module = importlib.import_module(harness.run.ENTRIES[name])
    assert not list(module.rows(SimpleNamespace(commit=COMMIT), cases))
    first, *others = dict.fromkeys(cases.left)
    done = {"done": [first]}
    harness.report.write(partial, head | done, [harness.report.failed(first, "auto")])
    assert harness.run.main([name, "--finish", str(tmp_path)]) == 0
    written = json.loads(path.read_text())
    assert not {"partial", "done"} & written.keys() and not partial.exists()
    assert written["missing"] == sorted(others)
    harness.report.write(partial, head | {"sources": "other"}, [])
    with pytest.raises(SystemExit, match="of other sources"):
        harness.run.main([name, "--finish", str(tmp_path)])


TABLE = """==PROF== Connected
some line of the child
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","first","dram__bytes_read.sum","byte","1,024"
"0","7","first","dram__bytes_write.sum","byte","512"
"1","7","second, with a comma","dram__bytes_read.sum","byte","2,000,000"
"1","7","second, with a comma","gpu__time_duration.sum","ns","9"
"""


def test_bytes_of_kernels_in_order(harness) -> None:
    assert harness.device.parsed(TABLE) == [1536.0, 2_000_000.0]
