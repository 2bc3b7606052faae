"""docs/concepts/moe-lora.md: its code runs as it stands, and the names in its table exist."""

from __future__ import annotations

import re

from ..conftest import ROOT

PAGE = (ROOT / "docs/concepts/moe-lora.md").read_text()
TABLE = PAGE[PAGE.index("## From axolotl's scattermoe_lora") :]
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


def test_code_runs(opt, monkeypatch, repo_id) -> None:
    import kernels

    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
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


def test_every_public_name_of_moe_is_on_the_page(moe) -> None:
    missing = [name for name in moe.__all__ if not re.search(rf"\b{name}\b", PAGE)]
    assert not missing
