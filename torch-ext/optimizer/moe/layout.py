"""How a stack of gated experts lies in memory, and the layout of the experts of transformers 5.

T tokens, k experts per token, E experts, H hidden size, I intermediate size, r rank.

Modules of transformers are read by their attributes and never by their class: its decorator leaves
`has_gate`, `has_bias`, `is_transposed` and `is_concatenated` on every experts module and gives it
`_apply_gate`; the parameters are `gate_up_proj` (`up_proj` without a gate), `down_proj` and their
`_bias`es.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.experts.grouped_lora import ExpertWeights, GatedLayer, LoraFactors
from ..kernels.experts.rows import ACTIVATIONS
from ..reference.glu import GPT_OSS_ALPHA, GPT_OSS_LIMIT

# Classes of activation functions, of torch and of transformers' table, that have a name with us.
NAMES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
# Where transformers' decorator defines the gate of modules that have none of their own.
DEFAULT_GATE = "transformers.integrations.moe"
# Its clamped gate has no name of its own: it is told by interleaved columns and these two numbers.
GPT_OSS = (GPT_OSS_ALPHA, GPT_OSS_LIMIT)


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


class LayerLaunches(Protocol):
    """What a layer in eager mode launches over one kind of weights; hashable, as launches are kept.

    Attributes:
        frozen: How many tensors the weights have beside the stored ones.
    """

    frozen: int

    def num_experts(self, gate_up: Tensor | None) -> int:
        """E."""

    def weights(
        self, stored: tuple[Tensor | None, Tensor | None], frozen: Sequence[Tensor | None]
    ) -> tuple[Any, Any]:
        """The weights of both projections as `forward` and `backward` take them."""

    def checked(self, weights: ExpertWeights) -> ExpertWeights:
        """The same as `check_projection` takes it."""

    def forward(self, layer: GatedLayer, keeps: bool) -> Sequence[Tensor]:
        """(T, H), and with `keeps` what backward reads."""

    def backward(
        self, grad: Tensor, layer: GatedLayer, kept: Sequence[Tensor], wants: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Gradients of x, gate_up, its A, B and bias, down, its own, and the gates."""


def module_layout(module: nn.Module) -> ExpertsLayout:
    """The layout of an experts module.

    Args:
        module: made by that decorator, or alike; an attribute that is missing has the decorator's
            default.

    Returns:
        The layout. A gate or activation that has no name with us is called as the module has it.

    Raises:
        ValueError: the module normalizes each expert's output, which the kernels would leave out;
            or its activation is missing.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{type(module).__name__} normalizes every expert's output before it is weighted, "
            "which these kernels do not compute; keep its own experts implementation"
        )
    gated = getattr(module, "has_gate", True)
    return ExpertsLayout(
        activation=_activation(module, gated),
        transposed=getattr(module, "is_transposed", False),
        interleaved=gated and not getattr(module, "is_concatenated", True),
        gated=gated,
    )


def _activation(module: nn.Module, gated: bool) -> str | Callable[[Tensor], Tensor]:
    """A name where we know the function, else the module's own."""
    function, kind = getattr(module, "act_fn", None), type(module)
    named = None if function is None else _elementwise_name(function)
    if not gated:
        if function is None:
            raise ValueError(f"{kind.__name__} has no gate and no `act_fn`; give it the activation")
        return named or function
    gate = getattr(kind, "_apply_gate", None)
    concatenated = getattr(module, "is_concatenated", True)
    default = gate is None or gate.__module__ == DEFAULT_GATE
    if default and concatenated and named is not None:
        return named
    if gate is None:
        raise ValueError(
            f"{kind.__name__} has no `_apply_gate`; without it only concatenated columns and an "
            "`act_fn` that has a name here are known: give the class one, from gate_up (M, 2I) to "
            "(M, I)"
        )
    constants = (getattr(module, "alpha", None), getattr(module, "limit", None))
    if gate.__module__ != DEFAULT_GATE and not concatenated and constants == GPT_OSS:
        return "gpt_oss"
    return module._apply_gate


def _elementwise_name(function: object) -> str | None:
    """The name of an activation of torch or of transformers' table, by its class and its inner."""
    kind, inner = type(function).__name__, getattr(function, "act", None)
    if kind == "GELU":
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    if kind == "GELUActivation":
        return "gelu" if inner is F.gelu else None
    if kind in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh" if getattr(inner, "func", F.gelu) is F.gelu else None
    return NAMES.get(kind)
