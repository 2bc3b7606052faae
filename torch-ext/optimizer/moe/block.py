"""Router, experts and shared experts: a whole mixture-of-experts block from its parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..reference.glu import ELEMENTWISE
from .experts import Experts
from .routers import Router


class MoEBlock(nn.Module):
    """hidden_states (..., H) -> routed experts + shared experts (..., H).

    Every part is called as a module: a LoRA around the router's gate or the shared experts' linears
    and forward hooks (router logits for an auxiliary loss are the router's first output) act.

    Args:
        router: hidden_states -> (logits, top_k_index, top_k_weights); `moe.Router` or any module
            that keeps to that.
        experts: (hidden_states, top_k_index, top_k_weights) -> (..., H); `moe.Experts`, or any
            module that keeps to that.
        shared_experts: hidden_states -> (..., H), added to the routed output; or None.
    """

    def __init__(
        self,
        router: Router | nn.Module,
        experts: Experts | nn.Module,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., H) to (..., H), in the dtype of hidden_states."""
        _, top_k_index, top_k_weights = self.router(hidden_states)
        out = self.experts(hidden_states, top_k_index, top_k_weights)
        if self.shared_experts is None:
            return out
        return out + self.shared_experts(hidden_states)


class SharedExperts(nn.Module):
    """The expert that every token visits: a gated MLP, optionally times the sigmoid of a gate.

    Qwen2-MoE and Qwen3-Next have such a gate.
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
