"""Trainer and SFTTrainer over 4-bit experts through PEFT: killed, resumed, the same losses."""

from __future__ import annotations

import os
import signal

import pytest
from safetensors.torch import load_file

from .._compare import assert_same_bits
from ..conftest import ROOT
from ._trainers import SAVE_EVERY, STEPS, losses, trainer_of

KILLED_AFTER = 13


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(opt, device, forks, kind, tmp_path) -> None:
    whole = trainer_of(opt, kind, tmp_path / "whole", device)
    whole.train()
    expected = losses(whole)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 0.3

    killed = forks.run(
        *("-m", "tests.integrations._trainers", kind, tmp_path / "killed", KILLED_AFTER),
        folder=ROOT,
        environment=os.environ | {"TRAINER_DEVICE": device.type, "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = tmp_path / "killed" / f"checkpoint-{KILLED_AFTER // SAVE_EVERY * SAVE_EVERY}"
    kept = load_file(last / "adapter_model.safetensors")
    assert any("experts" in key for key in kept) and any("q_proj" in key for key in kept)

    resumed = trainer_of(opt, kind, tmp_path / "killed", device)
    resumed.train(resume_from_checkpoint=str(last))
    assert losses(resumed) == expected
    theirs = load_file(tmp_path / "whole" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "killed" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert_same_bits(ours[key], tensor)
