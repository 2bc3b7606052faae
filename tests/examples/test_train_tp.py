"""examples/train_tp.py on two ranks over gloo: its curves, beside those of one whole model."""

# ruff: noqa: F811 - tests take the imported fixture as an argument

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..conftest import ROOT
from ..distributed._ranks import Pools, same_everywhere
from .test_examples import corpus  # noqa: F401 - a fixture

pytestmark = pytest.mark.dist

STEPS = 12
COMMON = ("--layers", 1, "--channels", 32, "--heads", 4, "--batch", 8, "--context", 16)
COMMON += ("--device", "cpu", "--steps", STEPS, "--lr", 0.01)
ON_CPU = "symmetric memory is CUDA's, and the tensors are not on a CUDA device"


@pytest.fixture(scope="module")
def ranks(opt, repo_id, device):
    if device.type != "cpu":
        pytest.skip("ranks over gloo need the CPU variant")
    pools = Pools(repo_id, str(ROOT), "cpu")
    yield pools
    pools.close()


def example(opt, *arguments: object) -> int:
    sys.path.insert(0, str(ROOT / "examples"))
    kept = torch.utils.deterministic.fill_uninitialized_memory
    try:
        return importlib.import_module("train_tp").main([*map(str, (*COMMON, *arguments))])
    finally:
        sys.path.remove(str(ROOT / "examples"))
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = kept


def whole_model(opt, corpus: Path) -> list[float]:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from demo.corpus import read_corpus, windows
        from demo.model import Decoder, ModelConfig
    finally:
        sys.path.remove(str(ROOT / "examples"))
    text = read_corpus(corpus, context=16, max_bytes=2**22, device=torch.device("cpu"))
    model = Decoder(ModelConfig(1, 32, 4, 16), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    starts = text.train_starts(seed=0, steps=STEPS, batch=8, context=16)
    losses = []
    for index in range(STEPS):
        loss = model(*windows(text.train, starts[index], 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def results(ranks, corpus, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tp")
    options = ("--corpus", corpus, "--out-dir", folder, "--forms", "plain", "fused", "float8")
    assert same_everywhere(ranks(2).run(example, *options)) == 0
    assert (folder / "loss.png").stat().st_size > 0
    return json.loads((folder / "results.json").read_text())


def test_every_form_trains_the_whole_model(ranks, corpus, results) -> None:
    (expected,) = ranks(1).run(whole_model, corpus)
    assert expected[-1] < expected[0] - 0.5
    # Fused products fall back to the plain ones here: the same sums in the same order.
    assert results["plain"]["losses"] == results["fused"]["losses"]
    assert results["plain"]["losses"] == pytest.approx(expected, rel=1e-3)
    assert results["float8"]["losses"] == pytest.approx(expected, rel=0.05)
    assert results["float8"]["losses"] != results["plain"]["losses"]


@pytest.mark.parametrize(
    ("form", "prefix", "reason"),
    [
        ("plain", "", 'fuse="never" was asked for'),
        ("fused", "", ON_CPU),
        ("float8", "scaled_", ON_CPU),
    ],
)
def test_paths_are_told(results, form: str, prefix: str, reason: str) -> None:
    paths = {path["op"]: path for path in results[form]["paths"]}
    assert set(paths) == {f"all_gather_{prefix}matmul", f"{prefix}matmul_reduce_scatter"}
    for path in paths.values():
        # Two of each in a layer, and each is the other's backward.
        assert (path["path"], path["reason"], path["calls"]) == ("plain", reason, 4 * STEPS)


def refused(opt, *arguments: object) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert example(opt, *arguments) == 2
    return told.getvalue()


def test_ranks_must_divide_heads_and_tokens(ranks) -> None:
    for name in ("--heads", "--context"):
        (told, _) = ranks(2).run(refused, name, 5)
        assert f"2 ranks do not divide {name} 5" in told


def test_says_how_to_start_it() -> None:
    command = [sys.executable, "examples/train_tp.py", "--device", "cpu"]
    bare = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "start it with torchrun" in done.stderr, done.stderr
