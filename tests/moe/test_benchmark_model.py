"""The benchmark of whole models at tiny size: equal weights and adapters, and a gate that sees."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import report

from ..static.project import ROOT
from ..static.results import result_findings

SIZES = {
    "hidden_size": 64,
    # A row of a block or more: bitsandbytes 0.50 decodes shorter ones wrongly on CPUs with AVX512.
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}


@pytest.fixture(scope="module")
def entry():
    """The module of benchmarks/harness, imported as run.py imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from harness.end_to_end import moe_model

    yield moe_model
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def pair(entry, opt):
    """`pair("lora")` -> ours and the baseline, in float32 on the CPU."""

    def made(kind: str):
        sizes = tuple(SIZES.items())
        problem = entry.Problem(32, kind, "eager", layers=2, sequence=16, sizes=sizes)
        return entry.pair(problem, SimpleNamespace(package=opt), "cpu", torch.float32)

    return made


@pytest.mark.parametrize("kind", ["frozen", "lora", "nf4"])
def test_both_sides_are_one_model(entry, pair, kind) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    ours, baseline = pair(kind)
    good, error = entry.compare(ours, baseline)
    assert good and error < 1e-5
    count = sum(p.numel() for p in baseline.trained)
    assert sum(p.numel() for p in ours.trained) == count > 0
    for side in (ours, baseline):
        before = [p.detach().clone() for p in side.trained]
        side.step(0)
        side.step(1)
        assert all(p.grad is None for p in side.trained)
        changed = [not torch.equal(p, b) for p, b in zip(side.trained, before, strict=True)]
        assert all(changed) if kind != "frozen" else not any(changed)
    if kind != "frozen":
        assert entry.compare(ours, baseline)[1] < 1e-3  # they train alike


def test_the_gate_sees_a_lost_adapter_and_a_wrong_expert(entry, pair) -> None:
    ours, baseline = pair("lora")
    lost = ours.trained[-1]
    kept = lost.detach().clone()
    with torch.no_grad():
        lost.zero_()
    assert not entry.compare(ours, baseline)[0]
    with torch.no_grad():
        lost.copy_(kept)
        ours.model.model.layers[1].mlp.experts.down_proj[2].neg_()
    assert not entry.compare(ours, baseline)[0]


def test_the_gate_sees_a_gradient_of_another_size(entry, pair) -> None:
    ours, baseline = pair("frozen")
    ours.trained[0].register_hook(lambda grad: grad * 1.2)
    assert not entry.compare(ours, baseline)[0]


def test_a_compiled_baseline_is_stepped_by_the_same_parameters(entry, pair, monkeypatch) -> None:
    """The eager side stays eager; one that cannot be compiled is said and left out."""
    _, baseline = pair("frozen")
    calls = []

    def compiled(model, **_):
        return lambda **inputs: calls.append(1) or model(**inputs)

    monkeypatch.setattr(torch, "compile", compiled)
    step = entry.compiled_step(baseline)
    step(1)
    assert len(calls) == 2 and baseline.run is baseline.model

    def fails(model, **_):
        def run(**_):
            raise RuntimeError("no graph\nat all")

        return run

    monkeypatch.setattr(torch, "compile", fails)
    assert entry.compiled_step(baseline) is None and baseline.run is baseline.model


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_the_row_of_a_case(entry, pair, monkeypatch, mode) -> None:
    """The baseline is eager in both; times are given, not taken."""
    settled = []
    times = {"ours": (4.0, 3.0), "baseline": (8.0, 6.0), "compiled baseline": (6.0, 2.0)}
    sides = pair("lora")
    monkeypatch.setattr(entry, "pair", lambda *_: sides)
    monkeypatch.setattr(entry, "clock", lambda sides, **_: {name: times[name] for name in sides})
    monkeypatch.setattr(entry, "peak_mb", lambda call, _: call() or 5.0)
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda **inputs: model(**inputs))
    monkeypatch.setattr(entry, "settle", settled.append)
    case = f"qwen3-moe-8l/2048/lora/{mode}"
    built = types.SimpleNamespace(package="the package")
    ((row, line),) = entry.rows(built, [case])
    assert settled == ["the package"], "nothing is compiled beside the clock"
    assert row.ok and row.speedup == 2.0 and row.tokens_per_s == 512_000
    assert row.baseline_compiled_wall_ms == (6.0 if mode == "compile" else None)
    known = {"gpu": "x", "driver": "x", "torch": "x", "triton": "x"}
    known |= {"commit": "0" * 40, "sources": "0" * 64}
    known["ceilings"] = {"bf16_tflops": 1, "fp16_tflops": 1, "copy_tbps": 1}
    assert result_findings("e", known | {"rows": [report.entry(row)]}) == []
    assert row.goals["speedup"] == {
        "value": 2.0,
        "goal": 2.3 if mode == "compile" else 1.75,
        "met": mode == "eager",
    }
    assert case in line and ("compiled baseline 6.00 ms" in line) == (mode == "compile")


def test_a_case_that_fails_does_not_end_the_command(entry, monkeypatch, capsys) -> None:
    def measure(problem, built):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(entry, "measure", measure)
    cases = ["qwen3-moe-8l/2048/lora/compile", "qwen3-moe-8l/2048/frozen/compile"]
    assert [row.ok for row, _ in entry.rows(None, cases)] == [False, False]
    assert "RuntimeError: out of memory" in capsys.readouterr().out


def test_cases_and_their_baselines(entry) -> None:
    assert len(entry.CASES) == 12
    problem = entry.CASES["qwen3-moe-8l/8192/nf4/compile"]
    assert problem.baseline == "transformers grouped_mm + bitsandbytes nf4 + PEFT, eager"
    assert entry.CASES["qwen3-moe-8l/2048/frozen/eager"].baseline == (
        "transformers grouped_mm, eager"
    )
    assert dict(problem.sizes)["num_experts"] == 128


def test_without_bitsandbytes_nf4_is_said_not_to_run(entry, monkeypatch, capsys) -> None:
    monkeypatch.setattr(entry.importlib.util, "find_spec", lambda name: None)
    assert list(entry.rows(None, ["qwen3-moe-8l/2048/nf4/eager"])) == []
    assert "not run: bitsandbytes is not installed" in capsys.readouterr().out
    lora = entry.CASES["qwen3-moe-8l/2048/lora/eager"]
    assert entry.why_not(lora) is None
