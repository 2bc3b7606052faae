"""The benchmarks of layers, of layers over 4-bit experts and of whole models, away from a GPU."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def tiny(harness):
    return harness.problems.Layer("tiny", 4, 32, 16, 2, tokens=40, rank=8)


def assert_passes(case, **options) -> None:
    good, ours, baseline = case.compare(**options)
    assert good and 0 < ours < 0.02 and 0 < baseline < 0.02


CHANGES = [{}, {"rank": 0}, {"rank": 12}, {"fp32_lora": True}, {"model": "gpt-oss-20b"}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_ours_and_the_baseline_compute_the_same_layer(harness, opt, tiny, change):
    """The gate passes on a right layer, PEFT's layout included."""
    layer = dataclasses.replace(tiny, **change)
    case = harness.moe_lora.LayerCase(layer, SimpleNamespace(package=opt), 0, device="cpu")
    assert_passes(case)


def test_the_gate_finds_a_wrong_gradient(harness, opt, tiny):
    case = harness.moe_lora.LayerCase(tiny, SimpleNamespace(package=opt), 0, device="cpu")
    assert not case.compare(lambda: case.ours() * 1.05)[0]
    with torch.no_grad():
        case.peft[1].zero_()
    assert not case.compare()[0]


def test_floors_are_those_of_the_arithmetic(harness):
    """By hand for Qwen3-30B, in bytes of 2 (weights of 805 and 403 MB) and in 4 bits."""
    floors = {
        layer.model: layer.floors(layer.experts)[0]
        for layer in harness.problems.listed()
        if layer.tokens == 2048 and layer.rank == 16 and not layer.fp32_lora
    }
    assert floors["Qwen3.5-35B-A3B"] == pytest.approx(0.41, rel=0.03)
    assert floors["Qwen3-30B-A3B"] == pytest.approx((805 + 403 + 92 + 22) / 4300, rel=0.01)
    assert floors["Mixtral-8x7B"] == pytest.approx(1.86, rel=0.03)

    layer = harness.problems.of_model("Qwen3-30B-A3B", 2048, 16)
    widths = 2048 + 1536 + 768 + 2048  # of what LoRA's factors meet
    matrices, rows = layer.hidden * layer.intermediate * 3, layer.rows
    products, low = 2 * rows * matrices, 2 * rows * 16 * widths
    least = harness.quant.floors(layer, 128)  # 128 rows per expert: bound by its operations
    assert least["fwd"] == pytest.approx((products + low) / 790e9, rel=0.01)
    assert least["fwd+bwd"] == pytest.approx((2 * products + 3 * low) / 790e9, rel=0.01)
    few = harness.quant.floors(dataclasses.replace(layer, tokens=8), 64)  # by their bytes
    weights, factors = 64 * matrices * (0.5 + 4 / 64), 64 * 16 * widths * 2
    assert few["fwd"] == pytest.approx((weights + factors) / 4.3e9, rel=0.02)
    moved = 2048 * 2048 + 16384 * (1536 + 768 + 2048)  # elements of rows, and of LoRA
    moved += 2 * 16384 * 16 + 128 * 16 * (1536 + 2048)
    found = harness.nf4_traffic.least_bytes(layer, 128, 0.5625)
    assert found == pytest.approx(128 * matrices * 0.5625 + 2 * moved)


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


def make_case(harness, opt, device: str, **form):
    pytest.importorskip("bitsandbytes")
    tiny = harness.problems.Layer("tiny", 4, 64, 64, 2, tokens=40, rank=8)
    layer = dataclasses.replace(tiny, **form)
    return harness.quant.PackedCase(layer, SimpleNamespace(package=opt), 0, device=device)


@pytest.fixture
def case(harness, opt):
    return make_case(harness, opt, "cpu")


VARIANTS = ("auto", "fused", "chunked", "selective", "triton")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gate_passes_for_every_variant(harness, opt, submodule, device, monkeypatch, variant):
    # Triton's kernels take the CPU's tensors in the interpreter alone.
    case = make_case(harness, opt, device.type if variant == "triton" else "cpu")
    case.use(variant)
    assert case.backend == ("triton" if variant == "triton" else "auto")
    interpreted = variant == "triton" and device.type == "cpu"
    if interpreted:  # It cuts bfloat16 off where a GPU rounds: in products, and in decoded weights.
        decoded = submodule("kernels.quant.formats").Format.decode_slice
        monkeypatch.setattr(type(case.packed[0].format), "decode_slice", decoded)
    assert_passes(case, factor=4.0 if interpreted else 1.5)


FORMS = [
    {"nested": True},
    {"model": "gpt-oss-20b"},
    {"model": "gpt-oss-20b", "format": "mxfp4"},
    {"format": "fp8"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_gate_passes_in_other_forms(harness, opt, form):
    case = make_case(harness, opt, "cpu", **form)
    nested = {getattr(stack.format, "nested", False) for stack in case.packed}
    assert nested == {form.get("nested", False)}
    assert_passes(case)


def test_the_gate_finds_wrong_weights(case):
    """A nibble that is decoded wrong in one expert must not be timed."""
    assert case.compare()[0]
    packed = case.packed[1].packed

    def wrong():
        keep = packed.data
        packed.data = torch.cat((keep[:64] ^ 0xFF, keep[64:]))
        found = case.ours()
        packed.data = keep
        return found

    assert not case.compare(wrong)[0]


def test_offload_gets_a_row_when_the_bits_agree(harness, opt, monkeypatch):
    offload = harness.nf4_offload
    monkeypatch.setattr(offload, "settle", lambda package, calls: [call() for call in calls])
    taken = harness.timer.Times(2.0, 2.0, 2.0)
    monkeypatch.setattr(offload, "times", lambda turns, **_: {"step": turns["step"](0) and taken})
    monkeypatch.setattr(offload, "peak_mb", lambda call, *_: [call(), 1.0][1])
    arguments = SimpleNamespace(package=opt), (4, 64, 64, 2), 3, 12, "cpu"
    row, printed = offload.offload_row(*arguments)
    assert row.ok and row.case == "offload/Qwen3-30B-A3B" and row.speedup == 1.0
    assert "2 layers copied per step, 2 on the device" in printed

    class Broken(opt.moe.ExpertOffload):
        def _copy(self, index, spare):
            slot = super()._copy(index, spare)
            slot.buffer[:64] = 0
            return slot

    moe = SimpleNamespace(**{**vars(opt.moe), "ExpertOffload": Broken})
    row, _ = offload.offload_row(SimpleNamespace(package=SimpleNamespace(moe=moe)), *arguments[1:])
    assert not row.ok and row.ms is None


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


@pytest.fixture
def entry(harness):
    return harness.moe_model


@pytest.fixture
def pair(entry, opt):
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
