"""Pure Hub layers: `kernelize` swaps their forward into modules of a model."""

from torch import Tensor, nn

from .moe import expert_weight, experts_forward
from .moe.layout import module_layout

__all__ = ["ScatterMoEExperts"]


class ScatterMoEExperts(nn.Module):
    """The experts of transformers 5 on grouped kernels; the model's router and parameters stay.

    LoRA is taken from the module's `expert_lora`, an `ExpertAdapters`, if there is one.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,  # (T, H)
        top_k_index: Tensor,  # (T, k)
        top_k_weights: Tensor,  # (T, k)
    ) -> Tensor:
        """(T, H): every token through its experts, weighted and summed."""
        layout = module_layout(self)
        adapters = getattr(self, "expert_lora", None)
        first = "gate_up_proj" if layout.gated else "up_proj"
        biased = getattr(self, "has_bias", False)
        return experts_forward(
            hidden_states,
            top_k_index,
            top_k_weights,
            expert_weight(self, first),
            expert_weight(self, "down_proj"),
            layout=layout,
            lora=adapters.factors() if adapters is not None else None,
            gate_up_bias=getattr(self, f"{first}_bias") if biased else None,
            down_bias=self.down_proj_bias if biased else None,
        )
