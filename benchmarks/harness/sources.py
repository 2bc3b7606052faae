"""Which files a result file measures, and their digest. Needs neither torch nor git.

A result is stale when one of these files has changed since; `run.py plots --check` compares.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results")  # below the root: results/<gpu>/<name>.json

# What a step of the optimizers runs of kernels/.
_STEP_KERNELS = (
    "torch-ext/optimizer/kernels/_lists.py",
    "torch-ext/optimizer/kernels/_operands.py",
    "torch-ext/optimizer/kernels/adamw.py",
    "torch-ext/optimizer/kernels/apply_update.py",
    "torch-ext/optimizer/kernels/crop.py",
    "torch-ext/optimizer/kernels/matmul_add.py",
    "torch-ext/optimizer/kernels/momentum.py",
    "torch-ext/optimizer/kernels/norm_factors.py",
    "torch-ext/optimizer/kernels/normalize.py",
    "torch-ext/optimizer/kernels/square_chain.py",
    "torch-ext/optimizer/kernels/symmetric_matmul.py",
)

# Result file -> what its times depend on.
SOURCES: dict[str, tuple[str, ...]] = {
    "elementwise": (
        "kernels-src/common/*",
        "kernels-src/nf4_dequant/*",
        "kernels-src/optimizer_step/*",
        "torch-ext/optimizer/kernels/_lists.py",
        "torch-ext/optimizer/kernels/adamw.py",
        "torch-ext/optimizer/kernels/apply_update.py",
        "torch-ext/optimizer/kernels/momentum.py",
        "torch-ext/optimizer/kernels/nf4_dequant*.py",
    ),
    "moe_lora": (
        "kernels-src/launch_plan/*",
        "torch-ext/optimizer/kernels/_beside.py",
        "torch-ext/optimizer/kernels/_expert_product_triton.py",
        "torch-ext/optimizer/kernels/_gated_*.py",
        "torch-ext/optimizer/kernels/_grouped_*.py",
        "torch-ext/optimizer/kernels/launch_plan.py",
        "torch-ext/optimizer/kernels/_low_rank_triton.py",
        "torch-ext/optimizer/kernels/_moe_paths.py",
        "torch-ext/optimizer/kernels/_plan_memory.py",
        "torch-ext/optimizer/kernels/_triton_compile.py",
        "torch-ext/optimizer/kernels/combine*.py",
        "torch-ext/optimizer/kernels/expert_sort*.py",
        "torch-ext/optimizer/kernels/gated_experts*.py",
        "torch-ext/optimizer/kernels/glu*.py",
        "torch-ext/optimizer/kernels/grouped_lora_*.py",
        "torch-ext/optimizer/moe/activation.py",
        "torch-ext/optimizer/moe/compile_ahead.py",
        "torch-ext/optimizer/moe/eager_layer.py",
        "torch-ext/optimizer/moe/experts.py",
        "torch-ext/optimizer/moe/gated_linear.py",
        "torch-ext/optimizer/moe/grouped_linear.py",
        "torch-ext/optimizer/moe/lora.py",
        "torch-ext/optimizer/moe/sort.py",
    ),
    "nf4": (
        "kernels-src/common/*",
        "kernels-src/launch_plan/*",
        "kernels-src/nf4_dequant/*",
        "kernels-src/nf4_product/*",
        "torch-ext/optimizer/kernels/_beside.py",
        "torch-ext/optimizer/kernels/_expert_product_triton.py",
        "torch-ext/optimizer/kernels/_gated_beside_triton.py",
        "torch-ext/optimizer/kernels/_gated_nf4_triton.py",
        "torch-ext/optimizer/kernels/_grouped_*.py",
        "torch-ext/optimizer/kernels/launch_plan.py",
        "torch-ext/optimizer/kernels/_low_rank_triton.py",
        "torch-ext/optimizer/kernels/_moe_paths.py",
        "torch-ext/optimizer/kernels/_nf4_*.py",
        "torch-ext/optimizer/kernels/_row_dots_triton.py",
        "torch-ext/optimizer/kernels/_plan_memory.py",
        "torch-ext/optimizer/kernels/_triton_compile.py",
        "torch-ext/optimizer/kernels/combine*.py",
        "torch-ext/optimizer/kernels/expert_sort*.py",
        "torch-ext/optimizer/kernels/gated_nf4_experts*.py",
        "torch-ext/optimizer/kernels/glu*.py",
        "torch-ext/optimizer/kernels/grouped_lora_*.py",
        "torch-ext/optimizer/kernels/nf4_dequant*.py",
        "torch-ext/optimizer/kernels/nf4_product.py",
        "torch-ext/optimizer/moe/*.py",
    ),
    "optimizer_step": (
        "kernels-src/common/*",
        "kernels-src/newton_schulz/*",
        "kernels-src/optimizer_step/*",
        *_STEP_KERNELS,
        "torch-ext/optimizer/optimizers/*.py",
        "torch-ext/optimizer/orthogonalize/*",
    ),
    "optimizer_step on several GPUs": (
        "kernels-src/common/*",
        "kernels-src/newton_schulz/*",
        "kernels-src/optimizer_step/*",
        "torch-ext/optimizer/distributed/*.py",
        *_STEP_KERNELS,
        "torch-ext/optimizer/optimizers/*.py",
        "torch-ext/optimizer/orthogonalize/*",
    ),
    "orthogonalize": (
        "kernels-src/common/*",
        "kernels-src/newton_schulz/*",
        "torch-ext/optimizer/kernels/_operands.py",
        "torch-ext/optimizer/kernels/crop.py",
        "torch-ext/optimizer/kernels/matmul_add.py",
        "torch-ext/optimizer/kernels/norm_factors.py",
        "torch-ext/optimizer/kernels/normalize.py",
        "torch-ext/optimizer/kernels/square_chain.py",
        "torch-ext/optimizer/kernels/symmetric_matmul*.py",
        "torch-ext/optimizer/orthogonalize/*",
    ),
}

# A file of two parts, each with sources of its own: an edit of the experts leaves the optimizers'
# rows as they are.
PART = " of experts"
SOURCES["end_to_end"] = SOURCES["optimizer_step"]
SOURCES["end_to_end" + PART] = tuple(
    dict.fromkeys(
        [
            *SOURCES["moe_lora"],
            *SOURCES["nf4"],
            *(
                f"torch-ext/optimizer/integrations/{name}.py"
                for name in ("experts", "lora", "quantize", "transformers")
            ),
        ]
    )
)


def entry_of(path: Path) -> str:
    """The entry of SOURCES that a result file <gpu>/<name>.json measures, <gpu> as in "h200x8"."""
    several = re.search(r"x[0-9]+$", path.parent.name)
    return f"{path.stem} on several GPUs" if several else path.stem


def recorded(path: Path, result: dict) -> dict[str, str]:
    """Entries of SOURCES that a result file measures -> the digests that it was measured at."""
    found = {entry_of(path): result["sources"]}
    if "experts" in result:
        found[entry_of(path) + PART] = result["experts"]["sources"]
    return found


def source_files(name: str, root: Path = ROOT) -> list[Path]:
    """The files that result file `name` measures, sorted.

    Raises:
        ValueError: no such result file, or a pattern that matches nothing (a file was renamed).
    """
    if name not in SOURCES:
        raise ValueError(f"{name!r} is no result file; known: {', '.join(SOURCES)}")
    files: set[Path] = set()
    for pattern in SOURCES[name]:
        found = {path for path in root.glob(pattern) if path.is_file()}
        if not found:
            raise ValueError(f"sources of {name!r}: no file matches {pattern} below {root}")
        files |= found
    return sorted(files)


def sources_digest(name: str, root: Path = ROOT) -> str:
    """sha256 over names and contents of the files of `name`, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in source_files(name, root):
        content = path.read_bytes()
        label = path.relative_to(root).as_posix()
        digest.update(f"{label}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
