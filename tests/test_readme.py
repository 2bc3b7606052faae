"""The Python blocks of README and of every page for users run as they stand, page by page.

The names of moe-lora.md's table exist, and every function of the predecessor stands in it."""

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


def test_the_code_of_nf4_runs(opt, device, tmp_path) -> None:
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


MOE_PAGE = (ROOT / "docs/concepts/moe-lora.md").read_text()
TABLE = MOE_PAGE[MOE_PAGE.index("## From axolotl's scattermoe_lora") :]
ROWS = [line.split("|")[1:3] for line in TABLE.splitlines() if line.startswith("| ")][1:]

# Every public name of the predecessor's package, and the private ones that callers have used.
PREDECESSOR = """
flatten_sort_count scatter2scatter group group_bwd_W single2scatter round_expert_counts
scatter2scatter_lora scatter2scatter_lora_dX _compute_lora_input_grad group_bwd_lora
group_bwd_lora_fused ScatterMoELoRA ParallelLinear parallel_linear_lora ParallelExperts set_lora
clear_lora get_lora_params_from_wrapper peft_lora_B_to_scattermoe peft_lora_to_scattermoe
peft_down_proj_lora_to_scattermoe _unwrap_experts_lora _unwrap_gate_lora HFScatterMoEGatedMLP
ScatterMoEGatedMLP get_active_experts remap_expert_indices selective_dequant_nf4_triton
_selective_dequant_bnb4 selective_expert_weights selective_lora_weights _use_selective_dequant
register_kernel_mapping PytorchProfilerCallback
"""


def test_the_code_of_moe_lora_runs(opt, monkeypatch, repo_id) -> None:
    import kernels

    blocks = re.findall(r"^```python\n(.*?)^```", MOE_PAGE, re.M | re.S)
    assert len(blocks) == 2 and repo_id in blocks[0]
    monkeypatch.setattr(kernels, "get_kernel", lambda *args, **options: opt)
    found: dict = {}
    exec("\n".join(blocks), found)
    assert found["reference"].shape == (4, 10, 64)
    assert found["out"].shape == (10, 64) and bool(found["out"].isfinite().all())


def test_every_function_of_the_predecessor_is_mapped() -> None:
    assert not [
        name for name in PREDECESSOR.split() if not any(f"`{name}`" in row for row, _ in ROWS)
    ]


def test_names_on_our_side_exist(opt) -> None:
    named = {
        name
        for _, ours in ROWS
        for name in re.findall(r"`((?:moe|layers|integrations)\.\w+|nf4_\w+)", ours)
    }
    assert len(named) > 15
    for name in sorted(named):
        target = opt
        for part in name.split("."):
            target = getattr(target, part)
        assert callable(target), name
