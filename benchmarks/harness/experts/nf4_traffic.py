"""DRAM bytes of the products over 4-bit experts, counted by Nsight Compute in a child process.

Counters need a process that ncu has started, and rights that not every machine gives: whatever is
missing is said in the row instead of a number.
"""

from __future__ import annotations

import functools

from ..device import NotCountedError, counted
from ..lazy import torch
from .goals import TRAFFIC
from .problems import MODELS, Layer

KERNELS = "regex:packed_product|nf4_product"  # Triton's and the compiled one
LIMIT = 40  # seconds
CHILD = "harness.experts.nf4_traffic"


def least_bytes(layer: Layer, active: int, per_weight: float) -> float:
    """Packed weights, factors and activations of both forward products, each moved once."""
    total = 0.0
    for name, (k, n) in layer.projections().items():
        outer, inner = (k, n) if name == "gate_up" else (n, k)
        rows = layer.tokens if name == "gate_up" else layer.rows  # down leaves a row per slot
        low = layer.rows * layer.rank + active * layer.rank * n
        total += active * k * n * per_weight + 2 * (rows * outer + layer.rows * inner + low)
    return total


@functools.cache
def measured() -> dict[str, float | str]:
    """Model -> DRAM bytes over the least that the forward products need, or why there is none."""
    try:
        kernels, text = counted(CHILD, "--kernel-name", KERNELS, limit=LIMIT)
        if len(kernels) != 2 * len(TRAFFIC):
            raise NotCountedError(f"ncu counted {len(kernels)} kernels, not two per layer")
        per_layer = [sum(kernels[at : at + 2]) for at in range(0, len(kernels), 2)]
        printed = [line.split() for line in text.splitlines() if line.startswith("least ")]
        least = {model: float(number) for _, model, number in printed}
        return {
            model: value / least[model] for model, value in zip(TRAFFIC, per_layer, strict=True)
        }
    except NotCountedError as reason:
        return dict.fromkeys(TRAFFIC, str(reason))
    except Exception as error:  # of any kind: the rows are wanted without these bytes, too
        return dict.fromkeys(TRAFFIC, f"not counted: {type(error).__name__} {str(error)[-80:]}")


def main() -> None:
    """Forward of each layer once: the child that ncu looks at."""
    from .. import built_package
    from .moe_lora import calls_of
    from .quant import BYTES, PackedCase

    built = built_package.load()
    for model in TRAFFIC:
        layer = Layer(model, *MODELS[model])
        case = PackedCase(layer, built, 0)
        print(f"least {model} {least_bytes(layer, case.active, BYTES)}", flush=True)
        torch.cuda.profiler.start()
        calls_of(case)["fwd"]["ours"]()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
