"""Layers of `moe_lora.json`: sizes, names, floors, and where sizes of a model come from."""

from __future__ import annotations

import dataclasses
import random

from ..report import floor_ms

# (experts, hidden, intermediate, experts per token), from the models' configurations on the Hub.
MODELS = {
    "Qwen3.5-35B-A3B": (256, 2048, 512, 8),
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "OLMoE-1B-7B": (64, 2048, 1024, 8),
    "Mixtral-8x7B": (8, 4096, 14336, 2),
}
# Weights (E, in, out), gate and up alternating, biases, and a clamped activation of its own.
GPT_OSS = ("gpt-oss-20b", 32, 2880, 2880, 4)
ELEMENT = 2  # bytes of bfloat16


@dataclasses.dataclass(frozen=True)
class Layer:
    """One mixture-of-experts layer: gate_up -> SwiGLU -> down -> combine, with LoRA of rank r."""

    model: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int = 2048
    rank: int = 16  # 0: no LoRA
    fp32_lora: bool = False
    nested: bool = False  # of 4-bit experts: absmax is quantised, too
    format: str = "nf4"  # of packed experts

    @property
    def name(self) -> str:
        """Name in the result file, before /fwd or /fwd+bwd."""
        extra = "-fp32lora" * self.fp32_lora + "-nested" * self.nested
        named = "" if self.format == "nf4" else f"{self.format}/"
        return f"{named}{self.model}/T{self.tokens}/r{self.rank}{extra}"

    @property
    def is_gpt_oss(self) -> bool:
        """Whether the layer has gpt-oss's layout, biases and activation."""
        return self.model == GPT_OSS[0]

    @property
    def is_listed(self) -> bool:
        """Whether the sizes are a model's, not drawn at random."""
        return self.model in MODELS or self.is_gpt_oss

    @property
    def rows(self) -> int:
        """Rows of the grouped products."""
        return self.tokens * self.top_k

    @property
    def weight_bytes(self) -> int:
        """Of all experts in bfloat16."""
        return 3 * ELEMENT * self.experts * self.hidden * self.intermediate

    def projections(self) -> dict[str, tuple[int, int]]:
        """(K, N) by name."""
        return {
            "gate_up": (self.hidden, 2 * self.intermediate),
            "down": (self.intermediate, self.hidden),
        }

    def floors(self, active: int, per_weight: float = ELEMENT) -> tuple[float, float]:
        """Least milliseconds of forward and of forward + backward; `active` experts have rows.

        Forward: each active weight (`per_weight` bytes, scales included) and factor is read once,
        inputs read and results written once. Backward: dX of the same size, dA and dB from the
        operands that it reads anyway.
        """
        lora_bytes = 4 if self.fp32_lora else ELEMENT
        forward = backward = 0.0
        for name, (k, n) in self.projections().items():
            # The outer side is in token order, the inner one has a row per slot.
            outer, inner = (k, n) if name == "gate_up" else (n, k)
            activations = self.tokens * outer + self.rows * inner
            factors = active * self.rank * (k + n) * lora_bytes
            weights = active * k * n * per_weight
            low = self.rows * self.rank * (k + n)
            flops = 2 * (self.rows * k * n + low)
            forward += floor_ms(bytes_moved=weights + factors + activations * ELEMENT, flops=flops)
            # dY and X are read, dX is written; the factors' gradients are written once
            moved = weights + 2 * factors + (activations + self.rows * k) * ELEMENT
            backward += floor_ms(bytes_moved=moved, flops=flops + 2 * low)
        return forward, forward + backward


def listed() -> list[Layer]:
    """The agreed layers, those that README and goals name first."""
    layers = [Layer(model, *sizes) for model, sizes in MODELS.items()]
    for base in tuple(layers):
        layers += [dataclasses.replace(base, tokens=tokens) for tokens in (16, 128, 512, 8192)]
        layers += [dataclasses.replace(base, rank=64), dataclasses.replace(base, fp32_lora=True)]
    return [*layers, dataclasses.replace(layers[1], rank=12), Layer(*GPT_OSS)]


def random_layers(seed: int, count: int = 20) -> list[Layer]:
    """Layers that nobody tuned for; sizes are multiples of 16, which the baseline needs."""
    rng = random.Random(seed)
    layers = []
    for number in range(count):
        experts = rng.choice((4, 8, 16, 32, 60, 64, 128))
        hidden, intermediate = (round(2 ** rng.uniform(8, 11.5) / 16) * 16 for _ in range(2))
        layers.append(
            Layer(
                f"random-{number}",
                experts,
                hidden,
                intermediate,
                top_k=rng.randint(1, min(8, experts)),
                tokens=round(2 ** rng.uniform(6, 12)),
                rank=8 * rng.randint(1, 8),
            )
        )
    return layers


def of_model(name: str, tokens: int, rank: int) -> Layer:
    """A layer of a model by its name above, or by a Hugging Face id or folder of a configuration.

    Raises:
        ValueError: the configuration has no experts.
    """
    if name in MODELS:
        return Layer(name, *MODELS[name], tokens=tokens, rank=rank)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name)
    config = getattr(config, "text_config", None) or config

    def first(*keys: str, default: int | None = None) -> int:
        found = [getattr(config, key) for key in keys if getattr(config, key, None) is not None]
        if not found and default is None:
            raise ValueError(f"{name} is no mixture of experts: none of {keys} is in its config")
        return found[0] if found else default

    return Layer(
        name.rstrip("/").rsplit("/", 1)[-1],
        first("num_experts", "num_local_experts", "n_routed_experts"),
        first("hidden_size"),
        first("moe_intermediate_size", "intermediate_size"),
        first("num_experts_per_tok", "num_experts_per_token", default=2),
        tokens,
        rank,
    )
