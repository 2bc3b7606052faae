"""The Python blocks of README and of every page for users run as they stand, page by page."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest
import torch
from kernels import get_kernel

from ._checkout import tool
from .conftest import ROOT

# README says that a CUDA build of torch needs backend="cpu" where only the CPU variant is built.
CPU_BACKEND = """
import functools, kernels
kernels.get_kernel = functools.partial(kernels.get_kernel, backend="cpu")
"""
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# Pages whose blocks a test of their own runs, with what they need beside them, and looks at.
ELSEWHERE = {
    "docs/concepts/moe-lora.md",
    "docs/concepts/nf4.md",
    "docs/recipes/axolotl.md",
    "docs/recipes/llama-factory.md",
    "docs/recipes/megatron.md",
    "docs/recipes/ms-swift.md",
    "docs/recipes/nanochat.md",
    "docs/recipes/qlora-moe.md",
    "docs/recipes/qwen3-30b-a3b.md",
    "docs/recipes/torchtitan.md",
    "docs/recipes/trainer-trl-peft.md",
    "docs/recipes/trainer.md",
    "docs/recipes/verl.md",
}


def blocks(page: Path) -> list[str]:
    """The Python of a page, block by block."""
    return [textwrap.dedent(code) for code in BLOCK.findall(page.read_text())]


def pages() -> list[str]:
    """README and the pages for users that hold Python."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [page.relative_to(ROOT).as_posix() for page in found if blocks(page)]
    return [name for name in names if not name.startswith("docs/dev/")]


@pytest.mark.parametrize("name", [name for name in pages() if name not in ELSEWHERE])
def test_python_blocks_run(opt, forks, repo_id: str, name: str) -> None:
    """All blocks of a page, in order, in one process; each page imports what it uses."""
    code = blocks(ROOT / name)
    if torch.version.cuda and not torch.cuda.is_available():
        code.insert(0, CPU_BACKEND)
    result = forks.run(
        *("-c", "\n".join(code)),
        environment={**os.environ, "LOCAL_KERNELS": f"{repo_id}={ROOT}", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]


def test_the_block_of_the_card_runs(opt, forks, repo_id: str) -> None:
    project = tool("local_build.project").load_project(ROOT)
    (code,) = re.findall(
        r"^```python\n(.*?)^```", tool("hub_card").render_card(project), re.M | re.S
    )
    if torch.version.cuda and not torch.cuda.is_available():
        code = CPU_BACKEND + code
    local = {"LOCAL_KERNELS": f"{repo_id}={ROOT}", "OMP_NUM_THREADS": "1"}
    result = forks.run("-c", code, environment=os.environ | local)
    assert result.returncode == 0, result.stderr[-4000:]


def test_pages_that_are_run_elsewhere_exist() -> None:
    assert set(pages()) >= ELSEWHERE


def test_message_for_a_missing_version_is_the_one_shown(opt, repo_id: str) -> None:
    shown = re.search(r'"(A kernel version[^"]*) \[…\]"', (ROOT / "README.md").read_text())
    assert shown, "README.md no longer shows the message"
    with pytest.raises(ValueError, match=re.escape(shown.group(1))) as error:
        get_kernel(repo_id)
    assert "Use `version=<major>`" in str(error.value)


def test_design_snippet_runs(opt) -> None:
    """The first lines of use: default groups from a model, both optimizers, one step each."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    groups = opt.muon.get_default_muon_param_groups(model)
    muon = opt.Muon(groups, lr=2e-3, weight_decay=0.1)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    muon_adamw = opt.MuonAdamW(
        [
            {"kind": "muon", "params": matrices, "lr": 0.02},
            {"kind": "adamw", "params": vectors, "lr": 3e-3},
        ]
    )
    for optimizer in (muon, muon_adamw):
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_code_runs(opt, device, tmp_path) -> None:
    from .integrations._models import build, tokens

    page = (ROOT / "docs/concepts/nf4.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 5
    found = {"opt": opt}
    exec("\n".join(blocks[:3]), found)
    found["model"] = torch.nn.Sequential(found["experts"])
    exec(blocks[3], found)
    assert not found["offload"].is_on and found["model"][0].keeper is None
    assert found["decoded"].shape == (2, 96, 64) and found["y"].shape == (4, 96)
    assert torch.equal(found["again"].packed, found["experts"].packed)
    build("qwen3_moe").save_pretrained(tmp_path)
    found["source"] = tmp_path
    exec(blocks[4].replace('"cuda"', repr(str(device))), found)
    assert found["offload"].is_on
    ids = tokens(found["model"]).to(device)
    assert found["model"](ids).logits.isfinite().all()
