"""The fine-tuning example as a stranger runs it, and its adapter in the hands of PEFT."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
