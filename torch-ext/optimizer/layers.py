"""Pure Hub layers: `kernelize` swaps their forward into modules of a model."""

from torch import Tensor, nn

from .moe.module_layout import module_forward

__all__ = ["ScatterMoEExperts"]


class ScatterMoEExperts(nn.Module):
    """The experts of transformers 5 on grouped kernels; the model's router and parameters stay."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,  # (T, H)
        top_k_index: Tensor,  # (T, k)
        top_k_weights: Tensor,  # (T, k)
    ) -> Tensor:
        """(T, H): every token through its experts, weighted and summed."""
        return module_forward(self, hidden_states, top_k_index, top_k_weights)
