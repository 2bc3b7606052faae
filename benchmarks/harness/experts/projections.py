"""The predecessor's table: one projection at a time; forward, base, dX, dA and dB in ms."""

from __future__ import annotations

from collections.abc import Iterator

from ..built_package import Built
from ..built_package import module as package_module
from ..lazy import torch
from ..report import floor_ms
from ..timer import medians
from .problems import Layer

HEADING = (
    f"{'projection':<10}{'fwd':>9}{'base':>9}{'LoRA':>8}{'dx':>9}{'dab':>9}{'total':>9}"
    f"{'% floor':>9}"
)


def lines(layer: Layer, built: Built) -> Iterator[str]:
    """A header, then a line per projection: down is timed from its T k rows in expert order."""
    yield (
        f"E={layer.experts} H={layer.hidden} I={layer.intermediate} k={layer.top_k} "
        f"T={layer.tokens} r={layer.rank}"
    )
    yield HEADING
    for name, (k, n) in layer.projections().items():
        yield _line(layer, built, name, k, n)


def _line(layer: Layer, built: Built, name: str, k: int, n: int) -> str:
    kernels, moe = built.package.kernels, built.package.moe
    generator = torch.Generator("cuda").manual_seed(42)

    def normal(*shape: int, std: float = 1.0):
        drawn = torch.randn(*shape, device="cuda", generator=generator) * std
        return drawn.bfloat16()

    e, r = layer.experts, layer.rank
    grouped_in = name == "down"
    x = normal(layer.rows if grouped_in else layer.tokens, k)
    dy = normal(layer.rows, n)
    weight = normal(e, n, k, std=0.02).mT
    a, b = normal(e, r, k, std=0.01), normal(e, n, r, std=0.01)
    logits = torch.randn(layer.tokens, e, device="cuda", generator=generator)
    order = moe.expert_sort(torch.topk(logits, layer.top_k, -1).indices, e)
    path = built.package.explain("grouped_lora_linear", device="cuda").split(":")[0]
    fan = 0 if grouped_in else layer.top_k
    records = package_module(built.package, "kernels.experts.grouped_lora")
    base = records.ExpertWeights(weight)
    weights = records.ExpertWeights(weight, records.LoraFactors(a, b, 2.0))

    def forward(of):
        return kernels.grouped_lora_forward(x, of, order, fan=fan, grouped_out=True, path=path)

    def dx():
        options = {"dy_fan": 0, "x_fan": fan, "grouped_out": True, "wants_dx": True}
        return kernels.grouped_lora_dx(dy, weights, order, None, None, **options, path=path)

    xa, yb = forward(weights)[1], dx()[1]

    def dab():
        options = {"x_fan": fan, "dy_fan": 0, "wants_a": True, "wants_b": True, "path": path}
        return kernels.grouped_lora_dab(x, dy, xa, yb, weights.lora, order, None, **options)

    variants = {
        "fwd": lambda _: forward(weights),
        "base": lambda _: forward(base),
        "dx": lambda _: dx(),
        "dab": lambda _: dab(),
    }
    ms = medians(variants, sets=1)
    total = ms["fwd"] + ms["dx"] + ms["dab"]
    active = int((order.offsets.diff() > 0).sum())
    moved = 2 * active * k * n + 2 * (x.numel() + dy.numel())
    floor = 2 * floor_ms(bytes_moved=moved, flops=2.0 * layer.rows * k * n)
    return (
        f"{name:<10}{ms['fwd']:>9.3f}{ms['base']:>9.3f}{ms['fwd'] / ms['base'] - 1:>8.1%}"
        f"{ms['dx']:>9.3f}{ms['dab']:>9.3f}{total:>9.3f}{floor / total:>9.1%}"
    )
