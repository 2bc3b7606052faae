"""The examples but the demo, each as a stranger runs it, at a tiny size; adapters load in PEFT."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .._compare import relative_error
from .test_train_demo import ROOT, corpus  # noqa: F401 - a fixture

TINY = ("--layers", "1", "--channels", "16", "--heads", "2", "--batch", "2", "--context", "16")


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, f"examples/{script}", *TINY, "--device", "cpu", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"}
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("opt")
def test_profile_step(tmp_path) -> None:
    output = run("profile_step.py", "--start", 2, "--count", 2, "--out", tmp_path)
    names = {"trace-rank000-steps2-3.json", "memory-rank000-steps2-3.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    events = json.loads((tmp_path / "trace-rank000-steps2-3.json").read_text())["traceEvents"]
    stages = [event for event in events if event["name"] == "muon::adamw" and "ts" in event]
    assert len(stages) == 2
    assert "blocks.0.attention.q.weight' (16, 16): muon" in output
    assert all(str(tmp_path / name) in output for name in names)


def loss(output: str) -> float:
    return float(re.search(r"held-out loss after \d+ steps: ([\d.]+) nats/byte", output)[1])


@pytest.mark.usefixtures("opt")
def test_train_nanochat_groups(corpus, tmp_path) -> None:  # noqa: F811
    """It learns, and a resumed run, also with its state in host memory, ends at the same loss."""
    common = ("--corpus", corpus, "--steps", 60, "--out-dir", tmp_path)
    whole = run("train_nanochat_groups.py", *common, "--save-every", 25)
    assert loss(whole) < 4.2  # log(256) = 5.55 nats before the first step
    (tmp_path / "step-000060" / "optimizer.safetensors").unlink()  # killed in mid-save
    resumed = run("train_nanochat_groups.py", *common, "--resume", "--offload")
    assert "from step 50" in resumed
    assert loss(resumed) == loss(whole)
    run("train_nanochat_groups.py", "--corpus", corpus, "--steps", 2, "--out-dir", tmp_path)
    # --resume would go on from steps of the run before.
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000002"]


EXAMPLES = ROOT / "examples"


def command(out: Path) -> list[str]:
    script = ["examples/finetune_moe_lora.py", "--tiny", "--device", "cpu"]
    return [*script, "--threads", "1", "--out-dir", str(out)]


def environment(**changes: str) -> dict[str, str]:
    """The caller's without LOCAL_KERNELS, which the example sets itself."""
    return {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"} | changes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finetune")
    done = subprocess.run(
        [sys.executable, *command(out)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (out / "printed.txt").write_text(done.stdout + done.stderr)
    return out


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("finetune_moe_lora")
    sys.path.remove(str(EXAMPLES))


def test_base_and_lora_learn(finished: Path) -> None:
    runs = json.loads((finished / "results.json").read_text())["runs"]
    for name, steps, gain in (("base", 60, 2.0), ("LoRA", 80, 0.15)):
        assert len(runs[name]["train"]) == steps
        losses = [loss for _, loss in runs[name]["held_out"]]
        assert losses[-1] < losses[0] - gain  # nats per byte


def test_bar_plot_and_table(finished: Path, repo_id: str) -> None:
    from matplotlib import image

    printed = (finished / "printed.txt").read_text()
    for words in (f"{repo_id} version 1, torch-stable-abi", "LoRA: 100%", "held-out loss: base"):
        assert words in printed
    pixels = image.imread(finished / "loss.png")
    assert ((pixels[..., :3] * 255).round() == (31, 119, 180)).all(axis=-1).sum() > 200  # LoRA's


def test_peft_gets_the_losses_that_training_saw(finished: Path, script) -> None:
    """Base and adapter are read by transformers and PEFT alone, and evaluated on the same text."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    runs = json.loads((finished / "results.json").read_text())["runs"]
    size = script.SIZES["tiny"]
    tokens, targets = script.held_out_batch(script.help_texts(torch.device("cpu")), size)
    base = AutoModelForCausalLM.from_pretrained(
        finished / "base", experts_implementation="grouped_mm"
    )
    model = peft.PeftModel.from_pretrained(base, finished / "adapter")

    @torch.no_grad()
    def loss() -> float:
        logits = model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    (_, before), *_, (_, after) = runs["LoRA"]["held_out"]
    assert loss() == pytest.approx(after, rel=1e-5)
    with model.disable_adapter():
        assert loss() == pytest.approx(before, rel=1e-5)
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16.0)


def test_set_up_errors_say_what_to_do(repo_id: str, forks, tmp_path: Path) -> None:
    empty = environment(LOCAL_KERNELS=f"{repo_id}={tmp_path}")
    done = forks.run(*command(tmp_path), folder=ROOT, environment=empty)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no cpu variant" in done.stderr and "make build" in done.stderr


@pytest.fixture(scope="module")
def script_qlora():
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


def test_the_other_way_computes_the_same(script_qlora, opt) -> None:
    """What is timed beside ours is the same layer, or the comparison would say nothing."""
    pytest.importorskip("bitsandbytes")
    package = script_qlora.Package(opt, "", 1, "", "", False, "")
    size, device = script_qlora.SIZES["tiny"], torch.device("cpu")
    model = script_qlora.build_model(size, package, device, torch.bfloat16, seed=0, nested=False)
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
    other = script_qlora.dense_and_grouped(experts, hidden, index, weights.bfloat16())
    assert relative_error(ours, other.float()) < 0.02


def test_a_comparison_runs_both_ways_and_training_goes_on_with_ours(
    script_qlora, opt, monkeypatch
) -> None:
    """With LoRA attached, as on a GPU that has bitsandbytes; only the clock is another one."""
    pytest.importorskip("bitsandbytes")
    package = script_qlora.Package(opt, "", 1, "", "", False, "")
    size, device = script_qlora.SIZES["tiny"], torch.device("cpu")
    model = script_qlora.build_model(size, package, device, torch.bfloat16, seed=0, nested=False)
    opt.integrations.attach_lora(model, 8, 16.0)
    run = script_qlora.Run(
        "LoRA",
        model=model,
        corpus=script_qlora.read_corpus(
            None, context=size.context, max_bytes=1 << 16, device=device
        ),
        size=size,
        steps=1,
        lr=1e-2,
        seed=0,
        device=SimpleNamespace(type="cuda"),
    )
    losses, used = [], []
    usual = script_qlora.dense_and_grouped

    def measure(step) -> dict[str, float]:
        before = len(used)
        step()
        return {"usual": float(len(used) - before)}

    def counted(*arguments):
        used.append(arguments)
        return usual(*arguments)

    monkeypatch.setattr(script_qlora, "dense_and_grouped", counted)
    monkeypatch.setattr(script_qlora, "measure", measure)
    monkeypatch.setattr(run, "loss", lambda *batch: losses.append(model(*batch[:1])) or total())

    def total():
        return losses[-1].logits.float().square().mean()

    found = script_qlora.compare(run, package)
    layers = size.model["num_hidden_layers"]
    assert found == {"ours": {"usual": 0}, "bitsandbytes + grouped_mm": {"usual": layers}}
    first, second = (output.logits for output in losses)
    assert relative_error(second, first.float()) < 0.05
    model(losses[-1].logits.argmax(-1))
    assert len(used) == layers  # ours again


def test_the_table_of_a_comparison(script_qlora) -> None:
    ours = {"ms": 10.0, "peak_mb": 250.0, "weights_mb": 1.0}
    usual = {"ms": 25.0, "peak_mb": 1000.0, "weights_mb": 1.0}
    table = script_qlora.report({"ours": ours, "bitsandbytes + grouped_mm": usual})
    assert "2.50 times as fast, 25% of the memory" in table
    assert script_qlora.report("no comparison: reason") == "no comparison: reason"
