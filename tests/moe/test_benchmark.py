"""The benchmark of whole layers away from a GPU: its gate, its baseline, its names and floors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def tiny(harness):
    return harness.problems.Layer("tiny", 4, 32, 16, 2, tokens=40, rank=8)


CHANGES = [{}, {"rank": 0}, {"rank": 12}, {"fp32_lora": True}, {"model": "gpt-oss-20b"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_ours_and_the_baseline_compute_the_same_layer(harness, opt, tiny, change):
    """The gate passes on a right layer, PEFT's layout included."""
    layer = dataclasses.replace(tiny, **change)
    case = harness.moe_lora.LayerCase(layer, SimpleNamespace(package=opt), 0, device="cpu")
    good, ours, baseline = case.compare()
    assert good and 0 < ours < 0.02 and 0 < baseline < 0.02


def test_ours_gets_the_matrices_that_experts_hands_on(harness, opt, tiny):
    """Views of them would cost the host time that no user spends."""
    case = harness.moe_lora.LayerCase(tiny, SimpleNamespace(package=opt), 0, device="cpu")
    experts = opt.moe.Experts(tiny.experts, tiny.hidden, tiny.intermediate)
    experts.add_adapter("default", r=tiny.rank, alpha=2 * tiny.rank)
    timed, given = case._lora(), experts.expert_lora.factors()
    assert timed.gate_up.matrices == tuple(case.peft[:2])
    for mine, users in ((timed.gate_up, given.gate_up), (timed.down, given.down)):
        assert type(mine) is type(users)
        assert [m.shape for m in mine.matrices] == [m.shape for m in users.matrices]


def test_the_gate_finds_a_wrong_gradient(harness, opt, tiny):
    case = harness.moe_lora.LayerCase(tiny, SimpleNamespace(package=opt), 0, device="cpu")
    right = case.ours
    case.ours = lambda: right() * 1.05
    assert not case.compare()[0]
    with torch.no_grad():
        case.peft[1].zero_()
    case.ours = right
    assert not case.compare()[0]


def test_tritons_path_has_rows_of_its_own(harness, opt, tiny, monkeypatch):
    """Both directions of "auto" and of the path by name, each beside the baseline; one that is
    wrong has no time."""
    moe, asked = harness.moe_lora, []

    class Case(moe.LayerCase):
        def __init__(self, layer, built, seed):
            super().__init__(layer, built, seed, "cpu")

        def ours(self, backend="auto"):
            asked.append(backend)
            return super().ours() * (1.5 if backend == wrong else 1.0)

    def times(turns, sets, **_):
        assert sets == 2 and list(turns) == ["ours", "baseline"]
        turns["ours"](1)
        return {name: harness.timer.Times(1.0, 2.0, 0.5) for name in turns}

    monkeypatch.setattr(moe, "LayerCase", Case)
    monkeypatch.setattr(moe, "is_compared", lambda layer: True)
    monkeypatch.setattr(moe, "cold_sets", lambda *_: 2)
    monkeypatch.setattr(moe, "times", times)
    monkeypatch.setattr(moe, "peak_mb", lambda call, _: 1.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    properties = SimpleNamespace(L2_cache_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for wrong in ("none", "triton"):
        asked.clear()
        found = moe.measure(tiny, moe.cases_of(tiny)[1:], SimpleNamespace(package=opt))
        rows = [row for row, _ in found]
        good = {row.variant: row.ok for row in rows}
        assert good == {"auto": True, "triton": wrong != "triton"}
        assert asked == ["auto"] * 2 + ["triton"] * (1 if wrong == "triton" else 2)
        assert {row.case for row in rows} == {"tiny/T40/r8/fwd+bwd"}


def test_floors_are_those_of_the_arithmetic(harness):
    """Qwen3-30B by hand: (805 + 403 MB of weights, 92 MB of rows, 22 MB of LoRA) / 4.3."""
    floors = {
        layer.model: layer.floors(layer.experts)[0]
        for layer in harness.problems.listed()
        if layer.tokens == 2048 and layer.rank == 16 and not layer.fp32_lora
    }
    assert floors["Qwen3.5-35B-A3B"] == pytest.approx(0.41, rel=0.03)
    assert floors["Qwen3-30B-A3B"] == pytest.approx((805 + 403 + 92 + 22) / 4300, rel=0.01)
    assert floors["Mixtral-8x7B"] == pytest.approx(1.86, rel=0.03)


def test_sizes_come_from_a_configuration(harness, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        '{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, '
        '"num_local_experts": 6, "num_experts_per_tok": 3}'
    )
    layer = harness.problems.of_model(str(tmp_path), 128, 8)
    assert (layer.experts, layer.hidden, layer.intermediate, layer.top_k) == (6, 64, 96, 3)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="no mixture of experts"):
        harness.problems.of_model(str(tmp_path), 128, 8)
