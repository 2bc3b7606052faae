"""What stands between the two grouped linears: (M, 2I) -> (M, I), row by row."""

from __future__ import annotations

from torch import Tensor

from ..kernels.experts.glu import glu
from ..reference.glu import ELEMENTWISE
from .layout import ExpertsLayout


def activate(gate_up: Tensor, layout: ExpertsLayout, *, backend: str = "auto") -> Tensor:
    """Apply the activation of a layout to the output of the first grouped linear.

    Args:
        gate_up: (M, 2I); (M, I) where the layout has no gate.
        layout: names the activation and says how gate and up columns are ordered.
        backend: of `kernels.experts.glu`, which computes everything that has a gate and a name.

    Returns:
        (M, I): act(gate) * up; act(gate_up) without a gate; what the layout's own function gives.
    """
    if callable(layout.activation):
        return layout.activation(gate_up)
    if not layout.gated:
        return ELEMENTWISE[layout.activation](gate_up)
    return glu(gate_up, layout.activation, interleaved=layout.interleaved, backend=backend)
