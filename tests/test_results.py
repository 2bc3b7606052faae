"""Result files have their form; those that pages quote match today's sources. No torch."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from .static.project import ROOT, report
from .static.results import quoted_results, result_findings

pytestmark = pytest.mark.static

RESULTS = ROOT / "benchmarks" / "results"

GOOD = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "commit": "0123456789" * 4,
    "sources": "ab" * 32,
    "ceilings": {"bf16_tflops": 700.0, "fp16_tflops": 710, "copy_tbps": 4.2},
    "rows": [
        {
            "case": "sum/8x8",
            "variant": "auto",
            "ok": True,
            "wall_ms": 0.6,
            "host_ms": 0.1,
            "baseline_wall_ms": 1.2,
            "baseline_host_ms": 0.2,
            "ms": 0.5,
            "floor_ms": 0.4,
            "fraction_of_floor": 0.8,
            "baseline": "torch.sum",
            "baseline_ms": 1.0,
            "speedup": 2.0,
            "error": 0.0,
            "error_baseline": 1e-3,
            "peak_mb": 0,
        },
        {"case": "sum/9x9", "variant": "auto", "ok": False},
        {
            "case": "C1",
            "variant": "auto",
            "ok": True,
            "value": 390,
            "unit": "GB/s",
            "target": 380,
            "transport": "nccl",
        },
    ],
}


def test_result_files_have_their_form() -> None:
    from benchmarks.harness.progress import is_partial

    findings = []
    for path in sorted(RESULTS.glob("*/*.json")):
        if is_partial(path):  # of a measurement that was cut off
            continue
        name = path.relative_to(ROOT).as_posix()
        findings += result_findings(name, json.loads(path.read_text()))
    assert not findings, report(findings)


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
    assert not findings, report(findings)


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

    (tmp_path / "kernels/toy_triton.py").unlink()
    with pytest.raises(ValueError, match=r"kernels/toy\*\.py"):
        sources.sources_digest("toy", tmp_path)
    with pytest.raises(ValueError, match="unknown"):
        sources.sources_digest("unknown", tmp_path)


def test_a_comment_in_a_string_is_code(tmp_path: Path) -> None:
    from benchmarks.harness.sources import code_of

    (tmp_path / "a.cu").write_text('auto s = "// not a comment";  // a comment\n')
    assert code_of(tmp_path / "a.cu") == 'auto s = "// not a comment";'


def test_good_result_has_no_findings() -> None:
    assert not result_findings("good", GOOD)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
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
        (("rows", 0, "ms"), 0.25, "fraction_of_floor is 0.8, but floor_ms / ms is 1.6"),
        (("rows", 0, "speedup"), 2.1, "speedup is 2.1, but baseline_wall_ms / wall_ms is 2"),
        (("rows", 0, "baseline"), None, "baseline must be text"),
        (("rows", 0, "error"), None, "error must be a number"),
        (("rows", 1, "ms"), 0.1, "is not ok, so it must have no ms"),
        (("rows", 1, "case"), "sum/8x8", "sum/8x8 / auto stands there twice"),
    ],
)
def test_form_can_be_broken(path: tuple, value: object, expected: str) -> None:
    result = copy.deepcopy(GOOD)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    findings = result_findings("toy", result)
    assert any(expected in finding for finding in findings), report(findings)


@pytest.mark.parametrize("key", ["unit", "target", "transport"])
def test_communication_figure_needs_its_unit(key: str) -> None:
    result = copy.deepcopy(GOOD)
    del result["rows"][2][key]
    assert result_findings("toy", result) == [f"toy: row 2: {key} is missing"]


def test_quotes_are_found() -> None:
    text = (
        "![plot](benchmarks/results/h200/a.svg), benchmarks/results/h200x8/b-c.json; results/x.json"
    )
    assert quoted_results(text) == {Path("h200/a.json"), Path("h200x8/b-c.json")}
    partial = "see benchmarks/results/h200/a.partial.json."
    assert quoted_results(partial) == {Path("h200/a.partial.json")}


def test_a_partial_file_is_no_result() -> None:
    (finding,) = result_findings("toy", {**GOOD, "partial": True})
    assert finding == "toy: is not complete; the command that wrote it goes on with it"
