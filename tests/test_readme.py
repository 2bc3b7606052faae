"""The Python blocks of README and of every page for users run as they stand, page by page."""

import os
import re
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest
import torch
from kernels import get_kernel

from ._checkout import GIT_ENVIRONMENT, ROOT, copy_checkout, copy_from_root, run_command, tool

# README says that a CUDA build of torch needs backend="cpu" where only the CPU variant is built.
CPU_BACKEND = """
import functools, kernels
kernels.get_kernel = functools.partial(kernels.get_kernel, backend="cpu")
"""
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# Pages whose blocks a test of their own runs, with what they need beside them, and looks at.
ELSEWHERE = {
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


def blocks(page: str | Path) -> list[str]:
    """The Python of a page or its text, block by block."""
    text = page if isinstance(page, str) else page.read_text()
    return [textwrap.dedent(code) for code in BLOCK.findall(text)]


def pages() -> list[str]:
    """README and the pages for users that hold Python."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [page.relative_to(ROOT).as_posix() for page in found if blocks(page)]
    return [name for name in names if not name.startswith("docs/dev/")]


@pytest.mark.parametrize("name", ["CARD.md", *(n for n in pages() if n not in ELSEWHERE)])
def test_python_blocks_run(opt, forks, repo_id: str, name: str) -> None:
    """All blocks of a page, in order, in one process; each page imports what it uses."""
    text = (ROOT / name).read_text()
    if name == "CARD.md":
        text = tool("hub_card").render_card(tool("local_build.project").load_project(ROOT))
    code = blocks(text)
    assert code
    if torch.version.cuda and not torch.cuda.is_available():
        code.insert(0, CPU_BACKEND)
    result = forks.run(
        *("-c", "\n".join(code)),
        environment={**os.environ, "LOCAL_KERNELS": f"{repo_id}={ROOT}", "OMP_NUM_THREADS": "1"},
    )
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

    *parts, loading, training = blocks(ROOT / "docs/concepts/nf4.md")
    assert len(parts) == 3
    found = {"opt": opt}
    exec("\n".join(parts), found)
    found["model"] = torch.nn.Sequential(found["experts"])
    exec(loading, found)
    assert not found["offload"].is_on and found["model"][0].keeper is None
    assert found["decoded"].shape == (2, 96, 64) and found["y"].shape == (4, 96)
    assert torch.equal(found["again"].packed, found["experts"].packed)
    build("qwen3_moe").save_pretrained(tmp_path)
    found["source"] = tmp_path
    exec(training.replace('"cuda"', repr(str(device))), found)
    assert found["offload"].is_on
    ids = tokens().to(device)
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


def installation() -> list[str]:
    """The commands of README's section on installation, without their comments."""
    section = (ROOT / "README.md").read_text().split("\n## Install\n")[1].split("\n## ")[0]
    fenced = re.search(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[1]
    return [line.split("  #")[0].strip() for line in fenced.splitlines()]


@pytest.fixture
def newcomer(tmp_path: Path) -> dict[str, str]:
    """The variables of somebody with an empty home and a new environment of Python.

    What `pip install` would download lies in it already, and `make build` takes it: packages and
    compiled objects are this checkout's, so that only what is new to a newcomer runs.
    """
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    inside = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", inside))
    (packages / "already.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = environment / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)
    (tmp_path / "home").mkdir()
    return {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "NO_VENV": "1",
        "PIP_NO_INDEX": "1",
        "OMP_NUM_THREADS": "1",
        **GIT_ENVIRONMENT,
    }


def test_three_commands_of_the_readme_lead_to_a_trained_model(newcomer, tmp_path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    copy_from_root(checkout, "Makefile", "README.md", "metadata.json", "no_variant", "tools")
    quickstart = blocks(ROOT / "README.md")[0]
    if torch.version.cuda and not torch.cuda.is_available():
        quickstart = CPU_BACKEND + quickstart
    (checkout / "quickstart.py").write_text(quickstart)
    commands = [*installation(), "python quickstart.py"]
    assert len(commands) <= 3
    done = run_command("bash", "-ec", "\n".join(commands), cwd=checkout, env=newcomer)
    assert done.returncode == 0, done.stdout + done.stderr
    loss, before = map(float, re.search(r"loss (\S+), from (\S+)", done.stdout).groups())
    assert loss < before / 2
