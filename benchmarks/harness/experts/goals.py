"""What rows of layers of experts should reach.

A goal is judged on the row that a user gets ("auto"), and the host's part of Triton's path on the
row where that path is asked for.
"""

from __future__ import annotations

from ..report import Goal
from .problems import Layer

# The host's milliseconds until it has queued a layer, and of what grouped_mm's layer takes.
HOST = {"fwd": 0.35, "fwd+bwd": 0.9}
HOST_OF_BASELINE = 0.43
TRITON_HOST = 1.6  # forward + backward where Triton's path is asked for
HOST_TOKENS, HOST_RANKS = (16, 2048, 8192), (12, 16)
# model -> by the clock over grouped_mm, forward + backward at 2048 tokens: bfloat16, NF4
SPEEDUP = {
    "Qwen3.5-35B-A3B": (2.5, 3.0),
    "Qwen3-30B-A3B": (2.5, 3.0),
    "OLMoE-1B-7B": (2.2, 2.6),
    "Mixtral-8x7B": (1.38, 1.4),
}
# model -> listed device ms of NF4's baseline: the layer takes at most their share by the factor
NF4_BASELINE = {
    "Qwen3.5-35B-A3B": 4.05,
    "Qwen3-30B-A3B": 3.68,
    "OLMoE-1B-7B": 3.20,
    "Mixtral-8x7B": 9.75,
}
NF4_FEW_TOKENS = {128: 5.0, 16: 5.0}  # tokens -> by the clock over the baseline, forward
OF_BF16 = 1.05  # of the same layer in bfloat16, by the clock
OF_PEAK = 0.25  # of the baseline's peak memory
OF_TRAFFIC = 1.3  # DRAM bytes of the fused products: packed weights and activations, moved once
TRAFFIC = ("Qwen3.5-35B-A3B", "Qwen3-30B-A3B")
# (format, tokens) -> of the same layer in bfloat16 by the clock, of the baseline's peak; by the
# clock over decoding first. Forward + backward, and forward.
FORMATS = {("mxfp4", 2048): (1.10, 0.25), ("fp8", 2048): (1.08, 0.55)}
FORMATS_FEW = {("mxfp4", 16): 2.0}
COPY, COPY_FEW = 0.9, 0.8  # of the rate of a copy: whole stacks, 8 of 256 experts
OFFLOAD = 1.5  # of the time with experts on the device


def host_goals(layer: Layer, direction: str) -> dict[str, Goal]:
    """Name -> goal of the host's part of a listed layer's row."""
    if not (layer.is_listed and layer.tokens in HOST_TOKENS and layer.rank in HOST_RANKS):
        return {}
    return {
        "host_ms": Goal(HOST[direction], False),
        "host_of_baseline": Goal(HOST_OF_BASELINE, False),
    }


def triton_goals(direction: str, variant: str) -> dict[str, Goal]:
    """Name -> goal of a row of Triton's path, asked for by name; none of another one."""
    judged = variant == "triton" and direction == "fwd+bwd"
    return {"host_ms": Goal(TRITON_HOST, False)} if judged else {}


def bf16_goals(layer: Layer, direction: str, variant: str = "auto") -> dict[str, Goal]:
    """Name -> goal of a row of `moe_lora`."""
    if variant == "triton":
        return triton_goals(direction, variant)
    goals = host_goals(layer, direction) if variant == "auto" else {}
    if goals and direction == "fwd+bwd" and is_judged(layer):
        goals["speedup"] = Goal(SPEEDUP[layer.model][0], True)
    return goals


def packed_goals(layer: Layer, direction: str) -> dict[str, Goal]:
    """Name -> goal of a layer's row of `quant` on the path that a user gets."""
    goals, kind = host_goals(layer, direction), (layer.format, layer.tokens)
    if direction == "fwd+bwd" and kind in FORMATS and layer.rank == 16 and not layer.fp32_lora:
        names = ("of_bf16", "of_baseline_peak")
        return goals | {n: Goal(b, False) for n, b in zip(names, FORMATS[kind], strict=True)}
    if direction == "fwd" and kind in FORMATS_FEW:
        goals["speedup"] = Goal(FORMATS_FEW[kind], True)
    if direction == "fwd+bwd" and is_judged(layer):
        factor = SPEEDUP[layer.model][1]
        goals["speedup"] = Goal(factor, True)
        goals["ms"] = Goal(NF4_BASELINE[layer.model] / factor, False)
        goals["of_baseline_peak"] = Goal(OF_PEAK, False)
        if layer.model in TRAFFIC:
            goals["of_least_traffic"] = Goal(OF_TRAFFIC, False)
        goals["of_bf16"] = Goal(OF_BF16, False)
    if direction == "fwd" and layer.model in SPEEDUP and layer.tokens in NF4_FEW_TOKENS:
        goals["speedup"] = Goal(NF4_FEW_TOKENS[layer.tokens], True)
        goals["of_bf16"] = Goal(OF_BF16, False)
    return goals


def is_judged(layer: Layer) -> bool:
    """Whether a ratio to grouped_mm is agreed for the layer; Triton and peers are then timed."""
    plain = layer.rank == 16 and not layer.fp32_lora and not layer.nested
    return plain and layer.tokens == 2048 and layer.model in SPEEDUP
