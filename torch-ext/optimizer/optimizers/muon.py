"""The sentence of the package, once, and `Muon`, its front end with `use_muon` groups.

gradient -> momentum -> gather -> orthogonalize -> scatter -> update
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..orthogonalize import orthogonalize
from .adamw import adamw
from .base import GroupedOptimizer
from .blocks import cut
from .chunks import Chunk, plan_chunks
from .groups import Format
from .momentum import momentum
from .options import AdamWOptions, LrRule, MuonOptions, fingerprint
from .param_groups import default_is_muon, get_default_muon_param_groups
from .parameters import check_gradient, check_rate, is_dtensor, label, local
from .report import report
from .shared import Shared, placement_of
from .sharing import Sharing
from .state import Slot, layout_of, slots_of
from .update import Rate, rate_of, update

__all__ = ["Muon", "default_is_muon", "get_default_muon_param_groups"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step works through, and the groups it was made for."""

    signature: list[tuple[Any, ...]]
    labelled: list[list[tuple[str, Tensor]]]  # (name for messages, parameter), per group
    chunks: list[list[Chunk]]  # per group; none for AdamW
    shared: Shared  # what several ranks work on


class MuonBase(GroupedOptimizer):
    """The step over Muon and AdamW groups; its subclasses differ in names and defaults."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, debug: bool, sharing: Sharing
    ) -> None:
        self.debug = debug
        self._sharing = sharing
        self._plan: Plan | None = None
        self._checked: list[Any] = []  # per group the fingerprint of the options checked last
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "debug": self.debug, "_sharing": self._sharing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._checked = None, []
        self._sharing.mend()

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, qk_logits: dict[int, Tensor] | None = None
    ) -> Any:
        """Update every parameter that has a gradient; the others are left alone, decay included.

        All gradients and all options that changed are checked, and adjust_lr_fn is called, before
        anything is written. NaN and inf pass through to the parameters they belong to. Nothing here
        waits for the device.

        Args:
            closure: computes the loss and the gradients, under `torch.enable_grad()`.
            qk_logits: layer index -> maximum attention logit per head, for QK-clip. This version
                has no QK-clip, so anything but None is refused.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: `qk_logits` was given, a gradient is sparse, complex or misshapen, or an
                option was set to a value that the constructor would refuse.
            TypeError: a gradient is a DTensor that is not fully replicated, or an option has a
                wrong type.
        """
        if qk_logits is not None:
            raise ValueError(
                "qk_logits was given, but no QK-clip is configured and this version has none; call "
                "step() without it"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options = self._current_options()
        plan = self._current_plan(options)
        for group, labelled in zip(options, plan.labelled, strict=True):
            for where, param in labelled:
                check_gradient(param, where)
                check_rate(group.lr, param, where)
        self._sharing.ask(plan.shared)
        rates = [
            [rate_of(group, *chunk.matrix, chunk.device) for chunk in chunks]
            for group, chunks in zip(options, plan.chunks, strict=True)
        ]

        def own_work() -> None:
            for number, group in enumerate(options):
                if isinstance(group, AdamWOptions) and self._sharing.unreduced is None:
                    self._step_adamw(self.param_groups[number]["params"], group)
                for chunk, rate in zip(plan.chunks[number], rates[number], strict=True):
                    self._step_chunk(chunk, rate, group)

        params = [group["params"] for group in self.param_groups]
        self._sharing.step(plan.shared, options, params, self.state, own_work)
        return loss

    @torch.no_grad()
    def report(self) -> str:
        """What a step does with every parameter that has a gradient, as text.

        A line per parameter has its name or number, its shape, the route (muon or adamw), and for
        muon the matrices it is cut into, the number of the batch they are in, the method and the
        dtype of the iteration, and its floating-point operations per step with dense products. The
        last line has the sums. It can be asked for at any time and waits for no device.

        Returns:
            The lines, without a newline at the end.

        Raises:
            ValueError, TypeError: a group or an option changed so that a step would be refused.
        """
        options = self._current_options()
        plan = self._current_plan(options)
        return report(plan.labelled, plan.chunks, options, plan.shared)

    def _step_chunk(self, chunk: Chunk, rate: Rate, options: MuonOptions) -> None:
        """momentum -> gather -> orthogonalize -> scatter -> update for one batch of matrices.

        On one device gather and scatter are the identity and leave no trace here.
        """
        members = [member for member in chunk.members if member.param.grad is not None]
        if not members:
            return
        state = self.state
        with record_function("muon::momentum"):
            direction = momentum(
                [member.grad_view() for member in members],
                [member.view(state[member.param]["momentum_buffer"]) for member in members],
                chunk.matrix,
                mu=options.momentum,
                nesterov=options.nesterov,
                form=options.momentum_form,
            )  # (B, m, n)
            if options.none_grad:
                for param in chunk.finished:
                    param.grad = None
        with record_function("muon::newton_schulz"):
            orthogonal = orthogonalize(
                direction, method=options.method, steps=options.ns_steps, dtype=options.dtype
            )  # (B, m, n)
        with record_function("muon::update_params"):
            second_moments = None
            if options.beta2 is not None:
                second_moments = [
                    member.piece.statistics_view(
                        local(state[member.param]["second_momentum_buffer"])
                    )
                    for member in members
                ]
            params = [member.param_view() for member in members]
            update(params, orthogonal, second_moments, rate, options)

    def _step_adamw(self, params: Sequence[Tensor], options: AdamWOptions) -> None:
        params = [param for param in params if param.grad is not None]
        with record_function("muon::adamw"):
            adamw(
                [local(param) for param in params],
                [local(param.grad) for param in params],
                [{key: local(value) for key, value in self.state[p].items()} for p in params],
                options,
            )
        if options.none_grad:
            for param in params:
                param.grad = None

    def _current_options(self) -> list[MuonOptions | AdamWOptions]:
        """The options of all groups; those that changed since the last time are checked."""
        current, checked = [], []
        for number, group in enumerate(self.param_groups):
            options = self.format.options(group)
            values = fingerprint(options)
            if number >= len(self._checked) or values != self._checked[number]:
                options = self.format.recheck(group, f"group {number}")
                values = fingerprint(options)
            current.append(options)
            checked.append(values)
        self._checked = checked
        return current

    def _current_plan(self, options: Sequence[MuonOptions | AdamWOptions]) -> Plan:
        """The plan; a new one where groups, parameters or the options of their layout changed."""
        signature = [
            (
                layout_of(of_group),
                [(id(p), p.shape, p.dtype, p.device, placement_of(p)) for p in group["params"]],
            )
            for of_group, group in zip(options, self.param_groups, strict=True)
        ]
        if self._plan is None or self._plan.signature != signature:
            self._plan = self._make_plan(signature, options)
            if self.debug:
                plan = self._plan
                logger.info("%s", report(plan.labelled, plan.chunks, options, plan.shared))
        return self._plan

    def _make_plan(
        self, signature: list[tuple[Any, ...]], options: Sequence[MuonOptions | AdamWOptions]
    ) -> Plan:
        """Cut, bucket and batch."""
        self.fit_state()
        labelled, cuts = [], []
        for number, group in enumerate(options):
            entries = self.labelled(number)
            labelled.append([(where, param) for where, param, _ in entries])
            if isinstance(group, MuonOptions):
                blocks = [
                    (where, param, cut(tuple(param.shape), name, group, where))
                    for where, param, name in entries
                ]
                cuts.append((number, group, blocks))
        count = len(options)
        chunks: list[list[Chunk]] = [[] for _ in range(count)]
        if self._sharing.unreduced is not None:
            with_muon = {number for number, _, _ in cuts}
            others = [(i, named) for i, named in enumerate(labelled) if i not in with_muon]
            shared = self._sharing.divide_unreduced(cuts, others, count)
            return Plan(signature, labelled, chunks, shared)
        with_others = []
        for number, group, blocks in cuts:
            own, together = self._sharing.divide(blocks, group, number)
            chunks[number] = plan_chunks(own)
            with_others += together
        return Plan(signature, labelled, chunks, self._sharing.plan(with_others, count))

    def adopt(self, groups: Sequence[tuple[str, dict[str, Any], Sequence[str | None]]]) -> None:
        if self._sharing.unreduced is None:
            return
        entries = []
        for where, group, names in groups:
            options = self.format.options(group)
            for index, (param, name) in enumerate(zip(group["params"], names, strict=True)):
                here = label(where, index, name)
                if is_dtensor(param):
                    raise TypeError(
                        f"{here}: gradients='unreduced' takes plain parameters that every rank has "
                        "whole, got a DTensor; its gradients are reduced, use gradients='reduced'"
                    )
                if isinstance(options, MuonOptions):
                    blocks = cut(tuple(param.shape), name, options, here)
                    entries.append((param, blocks, options))
        self._sharing.adopt(entries)

    def slots(self, param: Tensor, name: str | None, options: Any, where: str) -> dict[str, Slot]:
        return self._sharing.keeps(param, slots_of(param, name, options, where), options)

    def saved_here(self, param: Tensor, saved: Any, slots: dict[str, Slot]) -> Any:
        return saved if slots else {}


class Muon(MuonBase):
    """Muon for hidden matrices and AdamW for everything else, in groups marked `use_muon`.

    A matrix moves along its orthogonalized momentum by lr 0.2 sqrt(max(rows, columns)), so that its
    update has the root mean square 0.2 lr that AdamW's typically has: learning rates and decays
    tuned for AdamW carry over. Decoupled weight decay shrinks it by lr weight_decay. AdamW groups
    share lr, weight_decay and none_grad unless they override them. A group's options are read at
    every step.

    Args:
        params: groups `{"params", "names" (optional), "use_muon": bool, **options}`, as from
            `get_default_muon_param_groups(model)`; or any iterable of parameters or of (name,
            parameter) pairs, which become one Muon group. Every argument below but `debug`,
            `process_group` and `wire_dtype` is an option of Muon groups; AdamW groups take lr,
            adamw_betas, adamw_eps, weight_decay and none_grad.
        lr: learning rate; a number or a 0-D Tensor, which is never read on the host by a step.
        momentum: decay of the momentum buffer, in [0, 1).
        nesterov: orthogonalize g + momentum * buffer instead of the buffer.
        ns_steps: steps of the iteration, at least 1; its coefficients are derived for this count.
        weight_decay: decoupled decay, times the raw lr.
        adamw_betas, adamw_eps: of AdamW groups.
        none_grad: set `p.grad = None` as soon as it was used; False leaves it bit for bit.
        debug: log `report()` at INFO whenever the work is planned.
        expert_keys: name components such as "experts" of 3-D parameters (experts, out, in), of
            which every expert is a matrix of its own. Needs names, and each must occur in the
            group. "experts" does not match "shared_experts".
        adjust_lr_fn: "match_rms_adamw"; "original", lr sqrt(max(1, rows / columns)); "spectral",
            lr sqrt(rows / columns); None, lr; or a callable (lr, rows, columns) -> lr, which is not
            saved in a state_dict.
        method: "auto", "polar_express", "gram_newton_schulz" or "newton_schulz".
        dtype: dtype of the iteration; None picks float16 on GPUs that have it, else float32.
        split_sizes: row counts of the parts of fused parameters (Q, K, V; gate, up), each
            orthogonalized on its own; or a dict from names to them.
        num_heads: the rows are cut into so many equal blocks, each orthogonalized on its own; or a
            dict from names to numbers.
        flatten: take 3-D parameters that are no experts as matrices (out, rest). Parameters with 4
            and more dimensions, such as convolution filters, always are.
        cautious: decay only weights whose update does not push them away from zero.
        beta2: decay of the row- or column-wise second moment that evens out the update (NorMuon,
            arXiv 2510.05491); None for none.
        momentum_form: "heavy_ball", buf <- momentum buf + g, or "ema", the moving average. They
            differ by a factor, which orthogonalization removes.
        momentum_dtype: dtype of the buffer; None for float32 (float64 for float64 parameters).
        shaped_decay: decay by the rate after adjust_lr_fn instead of the raw lr.
        process_group: the ranks that hold the same plain parameters and, after
            DistributedDataParallel has reduced them, the same gradients. Each orthogonalizes its
            part of the matrices for all. None: this process does all of them. DTensors bring their
            own mesh.
        wire_dtype: torch.float32 or torch.float16, in which directions go to the rank that
            orthogonalizes them, and updates come back; float16 has one power of two as scale per
            matrix. None: float16 where the iteration is in half precision, else float32. Given as
            float16, one rank rounds to it too, so that the bits do not depend on how many there
            are.

    Raises:
        ValueError, TypeError: an option, a parameter or a name is invalid; the message names it.

    Sources: Keller Jordan's Muon, arXiv 2502.16982 (scale), arXiv 2505.16932 (Polar Express).
    """

    format = Format("use_muon", {"betas": "adamw_betas", "eps": "adamw_eps"})

    def __init__(  # noqa: PLR0913 - one keyword per group option, in the order of its predecessor
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        none_grad: bool = True,
        debug: bool = False,
        expert_keys: Sequence[str] | None = None,
        *,
        adjust_lr_fn: str | LrRule | None = "match_rms_adamw",
        method: str = "auto",
        dtype: torch.dtype | None = None,
        split_sizes: Sequence[int] | dict[str, Sequence[int]] | None = None,
        num_heads: int | dict[str, int] | None = None,
        flatten: bool = False,
        cautious: bool = False,
        beta2: float | None = None,
        momentum_form: str = "heavy_ball",
        momentum_dtype: torch.dtype | None = None,
        shaped_decay: bool = False,
        process_group: Any = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "weight_decay": weight_decay,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "none_grad": none_grad,
            "expert_keys": expert_keys,
            "adjust_lr_fn": adjust_lr_fn,
            "method": method,
            "dtype": dtype,
            "split_sizes": split_sizes,
            "num_heads": num_heads,
            "flatten": flatten,
            "cautious": cautious,
            "beta2": beta2,
            "momentum_form": momentum_form,
            "momentum_dtype": momentum_dtype,
            "shaped_decay": shaped_decay,
        }
        super().__init__(
            _as_groups(params), defaults, debug=debug, sharing=Sharing(process_group, wire_dtype)
        )


def _as_groups(params: Any) -> list[Any]:
    """Groups as they are; anything else that can be iterated becomes one Muon group."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got one Tensor")
    if isinstance(params, (set, frozenset)):
        raise TypeError("params must be ordered; a set has no fixed order between runs")
    entries = list(params)
    if entries and not isinstance(entries[0], dict):
        return [{"params": entries, "use_muon": True}]
    return entries
