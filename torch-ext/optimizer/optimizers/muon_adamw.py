"""`MuonAdamW`: the same step under nanochat's group format and defaults, for one or many GPUs."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from .groups.options import MuonOptions, check_choice, option_names
from .groups.param_groups import Format, refuses_foreign_arguments
from .muon import Muon
from .sharded.buffers import DistributedConfig, config_of
from .sharded.partition import REDUCE_OPS, Owners
from .sharded.shared_plan import Ranks
from .step import MuonBase

GRADIENTS = ("reduced", "unreduced")

# nanochat's rule: a moving average, Nesterov, lr sqrt(max(1, rows / columns)), variance reduction,
# cautious decay by the shaped rate. lr has no default: the two kinds need very different ones.
_OF_MUON = {name: given.default for name, given in inspect.signature(Muon).parameters.items()}
DEFAULTS: dict[str, Any] = {
    option: _OF_MUON[option]
    for option in (*option_names(MuonOptions), "adamw_betas", "adamw_eps")
    if option != "lr"
} | {
    "weight_decay": 0.0,
    "momentum_form": "ema",
    "cautious": True,
    "shaped_decay": True,
    "adjust_lr_fn": "original",
    "beta2": 0.95,
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
        lr: of Muon groups that have none of their own; None where all have. `defaults["lr"]` is it,
            or the lr of the first group.
        adamw_lr: of AdamW groups that have none of their own.
        gradients: "reduced": `p.grad` is what the step uses, as with one GPU or DDP. "unreduced":
            every rank holds its own contribution. Then matrices and large parameters have owners,
            which add up the contributions and keep the state: a state_dict holds this rank's part,
            keyed as everywhere. Not under DistributedDataParallel, which reduces them already.
            None: "reduced", but replicas on several ranks compare their gradients in the first step
            that has some, and raise if they differ, or if parameters do in a `process_group`.
        reduce_op: "avg" or "sum" of unreduced gradients.
        process_group: with reduced gradients, the ranks that share the work, as of `Muon`. With
            unreduced ones, over whose ranks they are to be averaged; None for the default group, if
            there is one. An initialised process group alone changes no result.
        distributed: how ranks exchange what they share; see `DistributedConfig`.
        clip_config: QK-clip of the attention layers in the Muon groups, as for `Muon`.
        debug: log `report()` at INFO whenever the work is planned.
        row_equilibration, renormalize: of Muon groups that have none of their own, as of `Muon`.
            nanochat's class does both since July 2026:
            `functools.partial(DistMuonAdamW, row_equilibration=True, renormalize=True)`.

    Raises:
        ValueError, TypeError: an option, a parameter or a name is invalid; the message names it.

    Sources: nanochat's optimizer; arXiv 2510.05491 (NorMuon); arXiv 2505.16932 (Polar Express);
    arXiv 2603.28254 (MuonEq); arXiv 2602.21545 (Muon+).
    """

    format = Format("kind", {})

    @refuses_foreign_arguments
    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        lr: float | Tensor | None = None,
        *,
        adamw_lr: float | Tensor | None = None,
        gradients: str | None = None,
        reduce_op: str = "avg",
        process_group: Any = None,
        distributed: DistributedConfig | None = None,
        clip_config: dict[str, Any] | None = None,
        debug: bool = False,
        row_equilibration: bool = False,
        renormalize: bool = False,
    ) -> None:
        config = config_of(distributed)
        unreduced = _unreduced(gradients, process_group, reduce_op)
        group = None if gradients == "unreduced" else process_group
        ranks = Ranks(group, config, unreduced, assumed=gradients is None)
        given = {"lr": lr, "adamw_lr": adamw_lr}
        given |= {"row_equilibration": row_equilibration, "renormalize": renormalize}
        super().__init__(
            param_groups,
            DEFAULTS | given,
            debug=debug,
            clip_config=clip_config,
            ranks=ranks,
        )
        if lr is None:  # schedulers of transformers read it
            self.defaults["lr"] = self.param_groups[0]["lr"]


class DistMuonAdamW(MuonAdamW):
    """`MuonAdamW(param_groups, gradients="unreduced", process_group=process_group)`.

    With one rank it steps exactly as any other.

    Args:
        param_groups: as for `MuonAdamW`.
        process_group: whose ranks hold the contributions; None for the default group.
        options: every other argument of `MuonAdamW` but `gradients`.

    """

    def __init__(
        self, param_groups: list[dict[str, Any]], process_group: Any = None, **options: Any
    ) -> None:
        super().__init__(
            param_groups, gradients="unreduced", process_group=process_group, **options
        )


def _unreduced(gradients: str | None, process_group: Any, reduce_op: str) -> Owners | None:
    """Who adds up the gradients; None where there is nothing to add."""
    if gradients is not None:
        check_choice("gradients", gradients, GRADIENTS, "MuonAdamW")
    check_choice("reduce_op", reduce_op, REDUCE_OPS, "MuonAdamW")
    if gradients != "unreduced":
        return None
    from torch import distributed

    if process_group is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        process_group = distributed.group.WORLD
    if distributed.get_world_size(process_group) == 1:
        return None
    return Owners(process_group, reduce_op)
