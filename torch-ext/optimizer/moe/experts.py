"""A stack of gated experts with LoRA: the sentence of this folder, and the module around it.

    tokens -> sort -> grouped linear + LoRA -> activation -> grouped linear + LoRA -> combine

Where one path serves every stage, the middle three are one op, `gated_lora_linear`.
`experts_forward` is that sentence. `Experts`, the Hub layer and the transformers integration call
it; nothing else computes experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.autocast import autocast_dtype, cast, without_autocast
from ..kernels.checks import check_dense
from ..kernels.experts.expert_sort import expert_sort
from ..kernels.experts.grouped_lora import ExpertWeights, LoraFactors
from ..kernels.experts.rows import glu
from ..reference.glu import ELEMENTWISE
from .eager_layer import eager_layer
from .grouped_linear import expert_linear, gated_lora_linear
from .layout import ExpertsLayout, ExpertsLora
from .lora import PROJECTIONS, ExpertAdapters


def experts_forward(
    hidden_states: Tensor,  # (..., H)
    top_k_index: Tensor,  # (..., k) integers; ids < 0 or >= E are skipped
    top_k_weights: Tensor,  # (..., k)
    gate_up: Tensor,  # (E, 2I, H), transposed (E, H, 2I)
    down: Tensor,  # (E, H, I), transposed (E, I, H)
    *,
    layout: ExpertsLayout,
    lora: ExpertsLora | None = None,
    gate_up_bias: Tensor | None = None,  # (E, 2I)
    down_bias: Tensor | None = None,  # (E, H)
    backend: str = "auto",
) -> Tensor:  # like hidden_states
    """Every token through its k experts, weighted and summed.

    Shapes stand beside the arguments; `Experts.forward` says more of the first three, and raises
    what this raises. `backend` is that of `grouped_lora_linear`.
    """
    lora = ExpertsLora() if lora is None else lora
    for name, value, kind in (("layout", layout, ExpertsLayout), ("lora", lora, ExpertsLora)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be an {kind.__name__}, got {type(value).__name__}")
    shapes = _stack_shape("gate_up", gate_up), _stack_shape("down", down)
    check_dense("hidden_states", hidden_states)
    _check_widths(hidden_states, *shapes, layout)
    tensors = (hidden_states, top_k_index, top_k_weights)
    parameters = ((gate_up, down), (gate_up_bias, down_bias))
    if (out := eager_layer(*tensors, *parameters, layout, lora, backend)) is not None:
        return out
    x, expert_ids, gates = _rows(*tensors)
    dtype = autocast_dtype(x)
    first = _weights(gate_up, gate_up_bias, lora.gate_up, layout, dtype)
    second = _weights(down, down_bias, lora.down, layout, dtype)

    with without_autocast(x.device):
        order = expert_sort(expert_ids, gate_up.shape[0], backend=backend)
        x = cast(x, dtype)
        out = gated_lora_linear(x, first, second, order, gates, layout, backend=backend)
        if out is None:
            wide = expert_linear(x, first, order, grouped_out=True, backend=backend)
            narrow = _activate(wide, layout, backend)
            del wide  # backward keeps it; without one it makes room
            out = expert_linear(narrow, second, order, gates, grouped_in=True, backend=backend)
    return out.to(hidden_states.dtype).reshape(hidden_states.shape)


class Experts(nn.Module):
    """E gated MLPs of which every token visits k, with LoRA on one or both projections.

    Parameters have the names and shapes of transformers: `gate_up_proj` (E, 2I, H), `down_proj`
    (E, H, I), with `bias` also `gate_up_proj_bias` (E, 2I) and `down_proj_bias` (E, H). A
    `transposed` layout swaps the last two dimensions of the weights; without a gate 2I is I.

    Args:
        num_experts: E.
        hidden: H.
        intermediate: I.
        layout: order of the dimensions and columns, and the activation.
        bias: give both projections a bias.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        expert_lora: the adapters of both projections, an `ExpertAdapters`: set_adapter, disabled.
        backend: passed to `grouped_lora_linear`; "auto" takes the path of its table.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        layout: ExpertsLayout | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (num_experts, hidden, intermediate)
        if min(sizes) < 1:
            raise ValueError(f"num_experts, hidden and intermediate must be positive, got {sizes}")
        self.num_experts, self.hidden, self.intermediate = sizes
        self.layout = layout = ExpertsLayout() if layout is None else layout
        if not isinstance(layout, ExpertsLayout):
            raise TypeError(f"layout must be an ExpertsLayout, got {type(layout).__name__}")
        self.backend = "auto"
        width = layout.width(intermediate)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(*layout.stored(num_experts, hidden, width))
        self.down_proj = parameter(*layout.stored(num_experts, intermediate, hidden))
        self.gate_up_proj_bias = parameter(num_experts, width) if bias else None
        self.down_proj_bias = parameter(num_experts, hidden) if bias else None
        self.expert_lora = ExpertAdapters(num_experts, hidden, intermediate, layout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights from a normal distribution of standard deviation 0.02, biases zero."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=0.02)
        for bias in (self.gate_up_proj_bias, self.down_proj_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        hidden_states: Tensor,  # (..., H)
        top_k_index: Tensor,  # (..., k)
        top_k_weights: Tensor,  # (..., k)
    ) -> Tensor:
        """Route hidden_states through the experts.

        Args:
            hidden_states: (..., H) of the weights' dtype, any strides; under autocast any dtype.
            top_k_index: (..., k) integers. Ids below 0 or from E on are skipped and add nothing.
            top_k_weights: (..., k), of any floating dtype; they get a gradient if they ask for it.

        Returns:
            (..., H) in the dtype of hidden_states: sum over j of the weight times the expert.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        return experts_forward(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            layout=self.layout,
            lora=self.expert_lora.factors(),
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            backend=self.backend,
        )

    def add_adapter(
        self,
        name: str = "default",
        *,
        r: int,
        alpha: float,
        targets: Sequence[str] = PROJECTIONS,
        train_base: bool = False,
        **options: Any,
    ) -> None:
        """Add an adapter to the targets and freeze the base, so that LoRA alone trains.

        Args:
            name: of the adapter.
            r: rank.
            alpha: the update is scaled by alpha / r (rslora=True: alpha / sqrt(r)).
            targets: "gate_up", "down" or both.
            train_base: leave the base's requires_grad as it is.
            **options: of `LoraProjection.add_adapter`. The device defaults to the weights'.

        Raises:
            ValueError: an unknown target, or what `LoraProjection.add_adapter` refuses.
        """
        options.setdefault("device", self.down_proj.device)
        self.expert_lora.add_adapter(name, r=r, alpha=alpha, targets=targets, **options)
        if not train_base:
            for parameter in self.parameters(recurse=False):
                parameter.requires_grad_(False)

    def merge(self, *, keep_on: torch.device | str | None = None) -> None:
        """Add the active adapter to the weights; see `ExpertAdapters.merge`."""
        self.expert_lora.merge(self._weights(), keep_on=keep_on)

    def unmerge(self) -> None:
        """Put the weights back as they were before `merge`, bit for bit."""
        self.expert_lora.unmerge(self._weights())

    def merge_and_unload(self) -> None:
        """Add the active adapter to the weights for good and drop every adapter."""
        self.merge()
        self.expert_lora.discard()

    def _weights(self) -> dict[str, Tensor]:
        return {"gate_up": self.gate_up_proj, "down": self.down_proj}

    def extra_repr(self) -> str:
        """Sizes and layout."""
        return f"{self.num_experts}, {self.hidden}, {self.intermediate}, {self.layout}"


def _weights(
    weight: Tensor,
    bias: Tensor | None,
    lora: LoraFactors | None,
    layout: ExpertsLayout,
    dtype: torch.dtype | None,
) -> ExpertWeights:
    """One projection as the grouped linears take it: (E, in, out), cast where autocast would."""
    if lora is not None:
        lora = LoraFactors(lora.a, lora.b, lora.scaling)  # PEFT's matrices are seen as stacks once
    return ExpertWeights(cast(layout.operand(weight), dtype), lora, cast(bias, dtype))


def _activate(gate_up: Tensor, layout: ExpertsLayout, backend: str) -> Tensor:
    """(M, I) of gate_up (M, 2I): act(gate) * up; without a gate act of (M, I)."""
    if callable(layout.activation):
        return layout.activation(gate_up)
    if not layout.gated:
        return ELEMENTWISE[layout.activation](gate_up)
    return glu(gate_up, layout.activation, interleaved=layout.interleaved, backend=backend)


def _rows(hidden_states: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states as (T, H), index and weights as (T, k), whatever the leading dimensions."""
    check_dense("top_k_index", index)
    check_dense("top_k_weights", weights)
    tokens = hidden_states.shape[:-1].numel()
    if index.ndim == 0 or index.shape != weights.shape or index.shape[:-1].numel() != tokens:
        raise ValueError(
            f"top_k_index and top_k_weights must be (..., k) for the {tokens} tokens of "
            f"hidden_states, got {tuple(index.shape)} and {tuple(weights.shape)}"
        )
    rows = hidden_states.reshape(tokens, hidden_states.shape[-1])
    return rows, *(x.reshape(tokens, x.shape[-1]) for x in (index, weights))


def _stack_shape(name: str, weight: Any) -> Sequence[int]:
    """Of a weight of three dimensions; of a packed one it is made anew by every look."""
    if (shape := getattr(weight, "shape", None)) is None:
        raise TypeError(f"{name} must be a stack of experts, got {type(weight).__name__}")
    if len(shape) != 3:
        raise ValueError(f"{name} must be a stack (E, ., .), got shape {tuple(shape)}")
    return shape


def _check_widths(
    x: Tensor, gate_up: Sequence[int], down: Sequence[int], layout: ExpertsLayout
) -> None:
    """The shapes of the two weights belong to each other and to the input."""
    (experts, width, hidden), (others, outputs, inputs) = gate_up, down
    if layout.transposed:
        width, hidden, outputs, inputs = hidden, width, inputs, outputs
    expected = (experts, hidden, width // 2 if layout.gated else width)
    if (others, outputs, inputs) != expected or (layout.gated and width % 2):
        raise ValueError(
            f"gate_up {tuple(gate_up)} and down {tuple(down)} are not one stack of "
            f"experts in {layout}; gate_up is (E, 2I, H) and down (E, H, I), transposed the other "
            "way around, and I in place of 2I without a gate"
        )
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise ValueError(f"hidden_states must be (..., {hidden}), got {tuple(x.shape)}")
