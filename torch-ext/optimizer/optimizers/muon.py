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
from .blocks import cut
from .chunks import Chunk, plan_chunks
from .clip_config import parse_clip_config
from .groups import Format
from .host_state import InHostMemory, OnDevice
from .momentum import momentum
from .offload import OffloadingOptimizer
from .options import AdamWOptions, LrRule, MuonOptions, fingerprint
from .param_groups import default_is_muon, get_default_muon_param_groups
from .parameters import check_gradient, check_rate
from .qk_clip import Batch, Target, check_logits, clip, find_targets, plan_batches
from .report import report
from .state import layout_of
from .timing import StepTimer, untimed
from .update import Rate, rate_of, update

__all__ = ["Muon", "default_is_muon", "get_default_muon_param_groups"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a step works through, and the groups it was made for."""

    signature: list[tuple[Any, ...]]
    labelled: list[list[tuple[str, Tensor]]]  # (name for messages, parameter), per group
    chunks: list[list[Chunk]]  # per group; none for AdamW
    clips: list[Batch]  # what QK-clip scales


class MuonBase(OffloadingOptimizer):
    """The step over Muon and AdamW groups; its subclasses differ in names and defaults."""

    _timer: StepTimer | None = None

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, debug: bool, clip_config: Any
    ) -> None:
        self.debug = debug
        self.clip_config = parse_clip_config(clip_config)
        self._plan: Plan | None = None
        self._checked: list[Any] = []  # per group the fingerprint of the options checked last
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "debug": self.debug, "clip_config": self.clip_config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._checked = None, []

    def _check_group(
        self, options: MuonOptions | AdamWOptions, entries: Sequence[tuple[str, Tensor, str | None]]
    ) -> None:
        if self.clip_config is not None and isinstance(options, MuonOptions):
            added = find_targets(self.clip_config, entries, options.expert_keys)
            plan_batches(self.clip_config, [*self._clip_targets(), *added])

    def _clip_targets(self) -> list[Target]:
        """The projections that QK-clip scales, in all groups."""
        found = []
        for number, group in enumerate(self.param_groups):
            options = self.format.options(group)
            if isinstance(options, MuonOptions):
                entries = self.labelled(number)
                found += find_targets(self.clip_config, entries, options.expert_keys)
        return found

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
            qk_logits: layer number -> 1-D tensor of the largest attention logit (after the division
                by sqrt(head_dim), over all tokens) for every entry of `clip_config["q_indices"]`,
                for QK-clip. Layers that are missing are not clipped; layers without a projection
                here are ignored.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: a gradient is sparse, complex or misshapen, an option was set to a value
                that the constructor would refuse, or `qk_logits` does not fit or was given without
                `clip_config`.
            TypeError: a gradient is a DTensor that is not fully replicated, or an option or an
                entry of `qk_logits` has a wrong type.
        """
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
        logits = check_logits(qk_logits, self.clip_config, plan.clips)
        rates = [
            [rate_of(group, *chunk.matrix, chunk.device) for chunk in chunks]
            for group, chunks in zip(options, plan.chunks, strict=True)
        ]
        state = self._state_of_step(plan, options)
        timed = untimed if self._timer is None else self._timer.begin()
        for number, group in enumerate(options):
            if isinstance(group, AdamWOptions):
                for batch in state.batches(number, self.param_groups[number]["params"]):
                    with timed(number, batch[0].device):
                        self._step_adamw(batch, group, state)
            for chunk, rate in zip(plan.chunks[number], rates[number], strict=True):
                with timed(chunk, chunk.device):
                    self._step_chunk(chunk, rate, group, state)
        if logits:
            with record_function("muon::qk_clip"):
                clip(plan.clips, logits)
        return loss

    @torch.no_grad()
    def report(self) -> str:
        """What a step does with every parameter that has a gradient, as text.

        A line per parameter has its name or number, its shape, the route (muon or adamw), and for
        muon the matrices it is cut into, the number of the batch they are in, the method and the
        dtype of the iteration, and its floating-point operations per step with dense products; then
        who computes it, the kernels, the bytes of its state and those that the elementwise stages
        move, and the time that an H200 takes for these operations and bytes at the least. After
        `measure_steps()` also its share of the time that its batches took in the last step that is
        over. The last line has the sums. It can be asked for at any time and waits for no device.

        Returns:
            The lines, without a newline at the end.

        Raises:
            ValueError, TypeError: a group or an option changed so that a step would be refused.
        """
        options = self._current_options()
        plan = self._current_plan(options)
        return self._report_of(plan, options)

    def measure_steps(self, on: bool = True) -> None:
        """Time every batch of the following steps, for `report`.

        By events on the current stream for CUDA, which are read only once they are over, and by the
        clock elsewhere. Steps that are captured in a CUDA graph are not timed.

        Args:
            on: False stops it.
        """
        self._timer = StepTimer() if on else None

    def _report_of(self, plan: Plan, options: Sequence[MuonOptions | AdamWOptions]) -> str:
        measured = {} if self._timer is None else self._timer.milliseconds()
        return report(
            plan.labelled, plan.chunks, options, self.state, measured, offloaded=self.offloaded
        )

    def _state_of_step(
        self, plan: Plan, options: Sequence[MuonOptions | AdamWOptions]
    ) -> OnDevice | InHostMemory:
        """Where a step finds its state."""
        if self._host is None:
            return OnDevice(self.state)
        adamw = [
            group["params"] if isinstance(of_group, AdamWOptions) else []
            for of_group, group in zip(options, self.param_groups, strict=True)
        ]
        return self._host.begin(plan, adamw, self.state)

    def _step_chunk(
        self, chunk: Chunk, rate: Rate, options: MuonOptions, state: OnDevice | InHostMemory
    ) -> None:
        """momentum -> gather -> orthogonalize -> scatter -> update for one batch of matrices.

        On one device gather and scatter are the identity and leave no trace here.
        """
        members = [member for member in chunk.members if member.param.grad is not None]
        if not members:
            return
        state.enter(chunk)
        with record_function("muon::momentum"):
            direction = momentum(
                [member.grad_view() for member in members],
                [state.piece(member, "momentum_buffer") for member in members],
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
                    member.piece.statistics_view(self.state[member.param]["second_momentum_buffer"])
                    for member in members
                ]
            params = [member.param_view() for member in members]
            update(params, orthogonal, second_moments, rate, options)
        state.leave(chunk)

    def _step_adamw(
        self, batch: Sequence[Any], options: AdamWOptions, state: OnDevice | InHostMemory
    ) -> None:
        state.enter(batch)
        with record_function("muon::adamw"):
            adamw(*state.adamw(batch), options)
        state.leave(batch)
        if options.none_grad:
            for param in state.finished(batch):
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
            (layout_of(of_group), [(id(p), p.shape, p.dtype, p.device) for p in group["params"]])
            for of_group, group in zip(options, self.param_groups, strict=True)
        ]
        if self._plan is None or self._plan.signature != signature:
            self._plan = self._make_plan(signature, options)
            if self.debug:
                logger.info("%s", self._report_of(self._plan, options))
        return self._plan

    def _make_plan(
        self, signature: list[tuple[Any, ...]], options: Sequence[MuonOptions | AdamWOptions]
    ) -> Plan:
        """Cut, bucket and batch."""
        self.fit_state()
        labelled, chunks = [], []
        for number, group in enumerate(options):
            entries = self.labelled(number)
            labelled.append([(where, param) for where, param, _ in entries])
            blocks = []
            if isinstance(group, MuonOptions):
                blocks = [
                    (param, cut(tuple(param.shape), name, group, where))
                    for where, param, name in entries
                ]
            chunks.append(plan_chunks(blocks))
        clips = plan_batches(self.clip_config, self._clip_targets())
        return Plan(signature, labelled, chunks, clips)


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
            parameter) pairs, which become one Muon group. Every argument below but `debug` and
            `clip_config` is an option of Muon groups; AdamW groups take lr, adamw_betas, adamw_eps,
            weight_decay and none_grad.
        lr: learning rate; a number or a 0-D Tensor, which is never read on the host by a step.
        momentum: decay of the momentum buffer, in [0, 1).
        nesterov: orthogonalize g + momentum * buffer instead of the buffer.
        ns_steps: steps of the iteration, at least 1; its coefficients are derived for this count.
        weight_decay: decoupled decay, times the raw lr.
        adamw_betas, adamw_eps: of AdamW groups.
        none_grad: set `p.grad = None` as soon as it was used; False leaves it bit for bit.
        debug: log `report()` at INFO whenever the work is planned.
        clip_config: QK-clip of the attention layers in the Muon groups, which needs names; None for
            none. A dict with q_indices and k_indices (the query head and the key head of every
            entry of a layer's `qk_logits`), head_dim (128) and threshold (100.0); for MLA is_mla,
            qk_nope_head_dim, qk_rope_head_dim and v_head_dim. See `ClipConfig`.
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
        clip_config: dict[str, Any] | None = None,
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
        super().__init__(_as_groups(params), defaults, debug=debug, clip_config=clip_config)


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
