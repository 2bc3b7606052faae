"""Router, experts and shared experts: a whole mixture-of-experts block from its parts."""

from __future__ import annotations

from torch import Tensor, nn

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
