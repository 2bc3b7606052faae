"""How a stack of gated experts lies in memory, and the low-rank factors that ride on it.

T tokens, k experts per token, E experts, H hidden size, I intermediate size, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..kernels.experts.glu import ACTIVATIONS


@dataclass(frozen=True)
class ExpertsLayout:
    """Order of the dimensions of the weights, and what stands between gate_up and down.

    Args:
        activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2" of the gate half, multiplied by
            the up half; "gpt_oss", the clamped GLU of that model; or a function from the whole
            gate_up output (M, 2I) to (M, I), for what has no name.
        transposed: weights are (E, in, out), as in gpt_oss; else (E, out, in), as in most models of
            transformers.
        interleaved: gate and up columns alternate, as in gpt_oss; else all gates come first.
        gated: False for experts without a gate: up_proj (E, I, H), the activation, down.
    """

    activation: str | Callable[[Tensor], Tensor] = "silu"
    transposed: bool = False
    interleaved: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        if not callable(self.activation) and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={self.activation!r} is unknown; pass one of {', '.join(ACTIVATIONS)}, "
                "or a function from gate_up (M, 2I) to (M, I)"
            )
        if not self.gated and (self.interleaved or self.activation == "gpt_oss"):
            raise ValueError(
                f"gated=False has no gate to interleave or to clamp, got interleaved="
                f"{self.interleaved} and activation={self.activation!r}"
            )

    def operand(self, weight: Tensor) -> Tensor:
        """The weight as (E, in, out): a view, whatever its strides."""
        return weight if self.transposed else weight.transpose(1, 2)

    def width(self, intermediate: int) -> int:
        """Columns of gate_up: 2I, or I without a gate."""
        return 2 * intermediate if self.gated else intermediate

    def stored(self, num_experts: int, inputs: int, outputs: int) -> tuple[int, int, int]:
        """Shape of a weight in the order that this layout stores."""
        sizes = (inputs, outputs) if self.transposed else (outputs, inputs)
        return num_experts, *sizes


@dataclass(frozen=True)
class LoraFactors:
    """The factors of one projection: W_e + scaling * (b_e a_e), views of any strides."""

    a: Tensor  # (E, r, in)
    b: Tensor  # (E, out, r)
    scaling: float = 1.0


@dataclass(frozen=True)
class ExpertsLora:
    """Factors per projection; None where a projection has no adapter."""

    gate_up: LoraFactors | None = None
    down: LoraFactors | None = None


class Form(NamedTuple):
    """What a layer's tensors do not say.

    Args:
        activation: Of `ExpertsLayout`, as interleaved and transposed.
        interleaved: Whether gate and up alternate.
        transposed: Whether the weights are (E, in, out).
        scalings: Of LoRA, per projection.
        factors: How LoRA's two tensors lie, per projection: "stacks" (E, r, in) and (E, out, r),
            PEFT's "matrices", those "swapped", or None without LoRA.
    """

    activation: str
    interleaved: bool
    transposed: bool
    scalings: tuple[float, float]
    factors: tuple[str | None, str | None]
