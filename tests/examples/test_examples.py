"""The smaller examples, each as a process, at a tiny size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

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
