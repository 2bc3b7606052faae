"""`MuonAdamW`: the same step under nanochat's group format and defaults, for one or many GPUs."""

from __future__ import annotations

from typing import Any

import torch

from .groups import Format
from .sharing import Sharing
from .step import MuonBase

GRADIENTS = ("reduced", "unreduced")

# nanochat's rule: a moving average, Nesterov, lr sqrt(max(1, rows / columns)), variance reduction,
# cautious decay by the shaped rate. lr has no default: the two kinds need very different ones.
DEFAULTS: dict[str, Any] = {
    "weight_decay": 0.0,
    "rounding": "nearest",
    "rounding_seed": 0,
    "none_grad": False,
    # kind "adamw"
    "adamw_betas": (0.9, 0.95),  # `betas` and `eps` in a group: see groups.DEFAULT_KEYS
    "adamw_eps": 1e-8,
    # kind "muon"
    "momentum": 0.95,
    "nesterov": True,
    "momentum_form": "ema",
    "momentum_dtype": None,
    "ns_steps": 5,
    "method": "auto",
    "dtype": None,
    "cautious": True,
    "shaped_decay": True,
    "adjust_lr_fn": "original",
    "beta2": 0.95,
    "expert_keys": None,
    "split_sizes": None,
    "num_heads": None,
    "flatten": False,
}


class MuonAdamW(MuonBase):
    """Muon with variance reduction and cautious decay, and AdamW, in groups marked `kind`.

    A matrix moves by lr sqrt(max(1, rows / columns)) along its orthogonalized, row- or column-wise
    equalized momentum; lr about 0.02 is usual. A group's options are read at every step.

    Args:
        param_groups: dicts. `{"kind": "adamw", "params", "lr"}` takes betas (0.9, 0.95), eps 1e-8,
            weight_decay 0, rounding "nearest", rounding_seed 0 and none_grad False. `{"kind":
            "muon", "params", "lr"}` takes momentum 0.95, ns_steps 5, beta2 0.95 (None for no
            variance reduction), weight_decay 0, none_grad False, and every option of `Muon`'s
            groups, with nesterov True, momentum_form "ema", adjust_lr_fn "original", cautious True
            and shaped_decay True as defaults. `names` are optional. Groups may hold matrices of any
            shapes, or nothing. `use_muon` is accepted for `kind`.
        gradients: "reduced": `p.grad` is what the step uses, as with one GPU or DDP. "unreduced":
            every rank holds its own contribution.
        process_group: with reduced gradients, the ranks that share the work, as of `Muon`. With
            unreduced ones, over whose ranks they are to be averaged; None for the default group, if
            there is one. An initialised process group alone changes nothing.
        wire_dtype: as of `Muon`.
        debug: log `report()` at INFO whenever the work is planned.
        clip_config: QK-clip of the attention layers in the Muon groups, as for `Muon`.

    Raises:
        ValueError, TypeError: an option, a parameter or a name is invalid; the message names it.
        ValueError: unreduced gradients over more than one rank, which this version does not have.

    Sources: nanochat's optimizer; arXiv 2510.05491 (NorMuon); arXiv 2505.16932 (Polar Express).
    """

    format = Format("kind", {})

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        gradients: str = "reduced",
        process_group: Any = None,
        wire_dtype: torch.dtype | None = None,
        debug: bool = False,
        clip_config: dict[str, Any] | None = None,
    ) -> None:
        _check_ranks(gradients, process_group)
        sharing = Sharing(process_group if gradients == "reduced" else None, wire_dtype)
        super().__init__(
            param_groups,
            dict(DEFAULTS),
            debug=debug,
            clip_config=clip_config,
            sharing=sharing,
        )


def DistMuonAdamW(  # noqa: N802 - a name for the class, spelled as one
    param_groups: list[dict[str, Any]],
    process_group: Any = None,
    *,
    debug: bool = False,
    clip_config: dict[str, Any] | None = None,
) -> MuonAdamW:
    """`MuonAdamW(param_groups, gradients="unreduced", process_group=process_group)`.

    Args:
        param_groups: as for `MuonAdamW`.
        process_group: whose ranks hold the contributions; None for the default group.
        debug: as for `MuonAdamW`.
        clip_config: as for `MuonAdamW`.

    Returns:
        A `MuonAdamW`. With one rank it steps exactly as any other.

    Raises:
        ValueError: the group has more than one rank, which this version does not have.
    """
    return MuonAdamW(
        param_groups,
        gradients="unreduced",
        process_group=process_group,
        debug=debug,
        clip_config=clip_config,
    )


def _check_ranks(gradients: str, process_group: Any) -> None:
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients must be 'reduced' or 'unreduced', got {gradients!r}")
    if gradients == "reduced":
        return
    from torch import distributed

    if process_group is None and not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks = distributed.get_world_size(process_group)
    if ranks > 1:
        raise ValueError(
            f"gradients='unreduced' over {ranks} ranks is not in this version; reduce the "
            "gradients first (DistributedDataParallel does) and use gradients='reduced'"
        )
