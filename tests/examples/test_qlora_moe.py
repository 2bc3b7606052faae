"""The QLoRA example as a stranger runs it, and the usual way that it measures itself against."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .._compare import relative_error

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("qlora_moe")
    sys.path.remove(str(EXAMPLES))


@pytest.mark.usefixtures("opt")
def test_training_over_4_bits_in_host_memory(tmp_path: Path) -> None:
    command = [sys.executable, "examples/qlora_moe.py", "--tiny", "--device", "cpu", "--offload"]
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"}
    done = subprocess.run(
        [*command, "--threads", "1", "--steps", "30", "--out-dir", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    for words in ("LoRA: 100%", "(4.50 bits each;", "no comparison: bitsandbytes", "to the device"):
        assert words in printed
    results = json.loads((tmp_path / "results.json").read_text())
    (_, before), *_, (_, after) = results["held_out"]
    assert after < before - 1.0  # nats per byte
    assert results["experts"] == {"elements": 2 * 8 * 3 * 64 * 64, "bytes": 110_592}
    names = {"adapter", "loss.png", "results.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 10_000


def test_the_other_way_computes_the_same(script, opt) -> None:
    """What is timed beside ours is the same layer, or the comparison would say nothing."""
    pytest.importorskip("bitsandbytes")
    package = script.Package(opt, "", 1, "", "", False, "")
    size, device = script.SIZES["tiny"], torch.device("cpu")
    model = script.build_model(size, package, device, torch.bfloat16, seed=0, nested=False)
    stacks = [p for n, p in model.named_parameters() if ".experts." in n]
    assert stacks and not any(p.dtype == torch.bfloat16 for p in stacks)
    opt.integrations.attach_lora(model, 16, 32.0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    experts = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 64, generator=generator).bfloat16()
    weights, index = torch.rand(20, 8, generator=generator).topk(2)
    ours = experts(hidden, index, weights.bfloat16())
    other = script.dense_and_grouped(experts, hidden, index, weights.bfloat16())
    assert relative_error(ours, other.float()) < 0.02


def test_a_comparison_runs_both_ways_and_training_goes_on_with_ours(
    script, opt, monkeypatch
) -> None:
    """With LoRA attached, as on a GPU that has bitsandbytes; only the clock is another one."""
    pytest.importorskip("bitsandbytes")
    package = script.Package(opt, "", 1, "", "", False, "")
    size, device = script.SIZES["tiny"], torch.device("cpu")
    model = script.build_model(size, package, device, torch.bfloat16, seed=0, nested=False)
    opt.integrations.attach_lora(model, 8, 16.0)
    run = script.Run(
        "LoRA",
        model=model,
        corpus=script.read_corpus(None, context=size.context, max_bytes=1 << 16, device=device),
        size=size,
        steps=1,
        lr=1e-2,
        seed=0,
        device=SimpleNamespace(type="cuda"),
    )
    losses, used = [], []
    usual = script.dense_and_grouped

    def measure(step) -> dict[str, float]:
        before = len(used)
        step()
        return {"usual": float(len(used) - before)}

    def counted(*arguments):
        used.append(arguments)
        return usual(*arguments)

    monkeypatch.setattr(script, "dense_and_grouped", counted)
    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(run, "loss", lambda *batch: losses.append(model(*batch[:1])) or total())

    def total():
        return losses[-1].logits.float().square().mean()

    found = script.compare(run, package)
    layers = size.model["num_hidden_layers"]
    assert found == {"ours": {"usual": 0}, "bitsandbytes + grouped_mm": {"usual": layers}}
    first, second = (output.logits for output in losses)
    assert relative_error(second, first.float()) < 0.05
    model(losses[-1].logits.argmax(-1))
    assert len(used) == layers  # ours again


def test_the_table_of_a_comparison(script) -> None:
    ours = {"ms": 10.0, "peak_mb": 250.0, "weights_mb": 1.0}
    usual = {"ms": 25.0, "peak_mb": 1000.0, "weights_mb": 1.0}
    table = script.report({"ours": ours, "bitsandbytes + grouped_mm": usual})
    assert "2.50 times as fast, 25% of the memory" in table
    assert script.report("no comparison: reason") == "no comparison: reason"
