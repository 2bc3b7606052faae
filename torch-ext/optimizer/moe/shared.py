"""The expert that every token visits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..reference.glu import ELEMENTWISE


class SharedExperts(nn.Module):
    """A gated MLP, optionally times the sigmoid of a gate of its own (Qwen2-MoE, Qwen3-Next).

    Its parts are `nn.Linear`s that are called as modules, so PEFT's LoRA and hooks work on them.

    Args:
        hidden: H.
        intermediate: size between the projections; for n shared experts n times their size.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2".
        sigmoid_gate: multiply the output by sigmoid(x @ w), one number per token.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: an activation that is not elementwise, or unknown.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str = "silu",
        sigmoid_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ELEMENTWISE:
            known = ", ".join(ELEMENTWISE)
            raise ValueError(f"activation={activation!r} is none of the elementwise ones: {known}")
        options = {"bias": False, "device": device, "dtype": dtype}
        self.activation = activation
        self.gate_proj = nn.Linear(hidden, intermediate, **options)
        self.up_proj = nn.Linear(hidden, intermediate, **options)
        self.down_proj = nn.Linear(intermediate, hidden, **options)
        self.shared_expert_gate = nn.Linear(hidden, 1, **options) if sigmoid_gate else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., H) to (..., H)."""
        act = ELEMENTWISE[self.activation]
        out = self.down_proj(act(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        if self.shared_expert_gate is None:
            return out
        return torch.sigmoid(self.shared_expert_gate(hidden_states)) * out
