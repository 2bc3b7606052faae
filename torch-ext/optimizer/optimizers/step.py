"""The sentence of the package, once, for every front end.

gradient -> momentum -> gather -> orthogonalize -> scatter -> update
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import say_once
from ..distributed import Phases, run_pipeline
from ..kernels.step.scale_rows import equilibrate_rows, renormalize
from ..orthogonalize import newton_schulz, orthogonalize
from .groups.blocks import Blocks, check_names, cut, unmatched_keys
from .groups.options import (
    POLAR_EXPRESS,
    AdamWOptions,
    KnownOptions,
    MuonOptions,
    all_plain,
    fingerprint,
    parse_clip_config,
    rows_for,
)
from .groups.parameters import is_dtensor, label, local
from .plan import Chunk, GroupTensors, OnDevice, Plan, plan_chunks, same_objects
from .qk_clip import Target, check_logits, clip, find_targets, largest_logits, plan_batches
from .report import StepTimer, Timed, report, stage, untimed
from .sharded.chunks import Bands, SharedChunk, SliceChunk
from .sharded.exchange import Exchange
from .sharded.partition import check_statistics
from .sharded.reduce_scatter import Batch, ReduceScatter, step_slices, step_small
from .sharded.shared_plan import Ranks, Shared, in_turn, rates_of
from .state.in_host_memory import InHostMemory, OffloadingOptimizer
from .state.slots import (
    RESIDUAL,
    STATISTICS,
    Slot,
    check_unreduced,
    count_step,
    layout_of,
    rounding_of,
    rows_here,
    sharded_dims,
    slots_of,
)
from .update_rules import Rate, adamw, momentum, rate_of, update

logger = logging.getLogger(__name__)


def _step_chunk(work: Local | Exchange | ReduceScatter, rate: Rate, options: MuonOptions) -> Phases:
    """gradient -> momentum -> gather -> orthogonalize -> scatter -> update for some matrices.

    The one sentence, for one rank and many. `work` knows where the pieces of its matrices are:
    `Local` has them whole, so that nothing travels; `Exchange` sends directions to the owners of
    matrices; `ReduceScatter` sends gradients that nobody has added up yet.

    It yields as `run_pipeline` says, with a transfer under way each time, and not at all if nothing
    crosses ranks.
    """
    # Where a rank has the momentum of its gradients, it becomes the direction to orthogonalize.
    # Contributions to a gradient are packed for the owner instead, who has the momentum.
    with stage(f"muon::{work.prepares}"):
        work.prepare()
    # Pieces of directions go to the owner of their matrix, contributions to that of their momentum.
    if work.communicates:
        yield None
        with stage(f"muon::launch_{work.gathers}"):
            work.launch_gather()
        yield None
        with stage(f"muon::wait_{work.gathers}"):
            work.wait_gather()
    # The owner has whole directions (B, m, n) and makes the updates (B, m, n) of them.
    with stage("muon::newton_schulz"):
        work.orthogonalize(_iteration(options))
    # Updates go to all who hold a piece of the parameter.
    if work.communicates:
        yield work.later
        with stage("muon::launch_scatter"):
            work.launch_scatter()
        yield None
        with stage("muon::wait_scatter"):
            work.wait_scatter()
    # p <- p - decay p - rate u, with one rounding.
    with stage("muon::update_params"):
        work.update(rate)


def _iteration(options: MuonOptions) -> Callable[..., Tensor]:
    """Directions (B, m, n) -> updates (B, m, n); the directions may be written over."""
    if options.row_equilibration or options.renormalize:
        return functools.partial(_rescaled, options)
    return _orthogonalization(options)


def _rescaled(options: MuonOptions, directions: Tensor, out: Tensor | None = None) -> Tensor:
    """The iteration between the scalings of MuonEq (of rows) and of Muon+ (of matrices)."""
    iteration = _orthogonalization(options)
    if options.row_equilibration and options.transposed:
        directions = directions.mT.contiguous()
        equilibrate_rows(directions)
        updates = iteration(directions).mT.contiguous()
    else:
        if options.row_equilibration:
            equilibrate_rows(directions)
        updates = iteration(directions)
    if options.renormalize:
        renormalize(updates)
    return updates if out is None else out.copy_(updates)


def _orthogonalization(options: MuonOptions) -> Callable[..., Tensor]:
    rule: dict[str, Any] = {"steps": options.ns_steps, "dtype": options.dtype}
    if options.ns_coefficients == POLAR_EXPRESS:
        return functools.partial(orthogonalize, method=options.method, **rule)
    rows = rows_for(options.ns_coefficients, options.ns_steps)
    return functools.partial(newton_schulz, coefficients=rows, **rule)


def run_alone(phases: Phases) -> None:
    """Run a chunk that waits for nobody."""
    for _ in phases:
        raise RuntimeError("a chunk of one rank waits for another")


class Local:
    """Matrices that this process has whole, in one step: nothing travels."""

    prepares, communicates = "momentum", False

    def __init__(
        self,
        chunk: Chunk,
        work: Chunk,  # those of its matrices that have a gradient
        options: MuonOptions,
        state: OnDevice | InHostMemory,
        of_optimizer: Mapping[Tensor, Mapping[str, Tensor]],
    ) -> None:
        self.chunk, self.work, self.options = chunk, work, options
        self.state, self.of_optimizer = state, of_optimizer

    def prepare(self) -> None:
        self.state.enter(self.chunk)
        work, options = self.work, self.options
        self.directions = momentum(
            work.views([param.grad for param in work.params]),
            self.state.pieces(work, "momentum_buffer"),
            work.matrix,
            **options.momentum_rule,
            whole=work.whole,
        )  # (B, m, n)

    def orthogonalize(self, iteration: Callable[..., Tensor]) -> None:
        self.updates = iteration(self.directions)  # (B, m, n)

    def update(self, rate: Rate) -> None:
        work, options, state = self.work, self.options, self.state
        second_moments = None
        if options.beta2 is not None:
            second_moments = work.statistics(STATISTICS)
        rounding = rounding_of(
            options,
            self.chunk.params,
            self.of_optimizer,
            lambda: [(m.param, m.number, m.piece.first) for m in work.members],
            lambda k: state.piece(work.members[k], RESIDUAL),
        )
        pieces = work.views(work.params)
        update(pieces, self.updates, second_moments, rate, options, rounding, whole=work.whole)
        state.leave(self.chunk)


class MuonBase(OffloadingOptimizer):
    """The step over Muon and AdamW groups; its subclasses differ in names and defaults."""

    _timer: StepTimer | None = None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        debug: bool,
        clip_config: Any,
        ranks: Ranks,
    ) -> None:
        self.debug = debug
        self.clip_config = parse_clip_config(clip_config)
        self._ranks = ranks
        self._plan: Plan | None = None
        self._known: list[KnownOptions] = []  # per group
        super().__init__(params, defaults)
        self._warn_of_unmatched()

    def __getstate__(self) -> dict[str, Any]:
        self._ranks.consistency.check()
        own = {"debug": self.debug, "clip_config": self.clip_config, "_ranks": self._ranks}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._known = None, []
        self._ranks.consistency.mend()

    def _check_group(
        self, options: MuonOptions | AdamWOptions, entries: Sequence[tuple[str, Tensor, str | None]]
    ) -> None:
        if self.clip_config is not None and isinstance(options, MuonOptions):
            added = self._targets_of(options, entries)
            plan_batches(self.clip_config, [*self._clip_targets(), *added])

    def _warn_of_unmatched(self) -> None:
        """Say which expert_keys, and whether clip_config, no parameter's name matches."""
        groups = [self.format.options(group) for group in self.param_groups]
        for key in unmatched_keys(zip(groups, self._names, strict=True)):
            say_once(
                "expert_keys %r is a component of no parameter's name; a stack of experts that it "
                "was meant for is not taken apart",
                key,
            )
        if self.clip_config is not None and self.clip_config.active and not self._clip_targets():
            say_once(
                "clip_config matches no parameter of a Muon group: QK-clip needs names such as "
                "layers.0.self_attn.q_proj.weight, which parameters have where groups have names"
            )

    def _clip_targets(self) -> list[Target]:
        """The projections that QK-clip scales, in all groups."""
        found = []
        for number, group in enumerate(self.param_groups):
            options = self.format.options(group)
            if isinstance(options, MuonOptions):
                found += self._targets_of(options, self.labelled(number))
        return found

    def _targets_of(
        self, options: MuonOptions, entries: Sequence[tuple[str, Tensor, str | None]]
    ) -> list[Target]:
        keys, transposed = options.expert_keys, options.transposed
        return find_targets(self.clip_config, entries, keys, transposed=transposed)

    # A compiler would trace the planning for many seconds, and again for every value of an option.
    @torch.compiler.disable
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, qk_logits: dict[int, Tensor] | None = None
    ) -> Any:
        """Update every parameter that has a gradient; the others are left alone, decay included.

        All gradients and all options that changed are checked, and adjust_lr_fn is called, before
        anything is written: what raises there leaves everything as it was. What raises later
        leaves parameters of two steps; then neither a step nor state_dict nor any way of saving
        goes on until state is loaded. NaN and inf pass through to the parameters they belong to.

        The host does not wait for a device, but for the following. Of parameters that several ranks
        share, the first step of a plan waits until all have said whether they have the same options
        and layout: the very first, and the first after groups, options of the layout or loaded
        state changed. The first step with gradients waits where these are compared, of a
        `MuonAdamW` without `gradients` for the other ranks, at most 30 s. Shared parameters on the
        CPU are asked about in every step. QK-clip with CPU offload and rounding="residual" waits
        until the residuals are in host memory.

        Args:
            closure: computes the loss and the gradients, under `torch.enable_grad()`.
            qk_logits: layer number -> 1-D tensor of the largest attention logit (after the division
                by sqrt(head_dim), over all tokens) for every entry of `clip_config["q_indices"]`,
                for QK-clip. Layers that are missing are not clipped; layers without a projection
                here are ignored. Of ranks that share a layer the largest counts; give each what it
                measured. A sharded DTensor is put together, by all ranks of its mesh.

        The first step makes the state of every parameter; at rate 0 with zero gradients on all
        ranks, as torch.distributed.checkpoint calls it, it does nothing else.

        Returns:
            The closure's loss, or None.

        Raises:
            ValueError: a gradient is sparse, complex or misshapen, an option was set to a value
                that the constructor would refuse, or `qk_logits` does not fit or was given without
                `clip_config`.
            TypeError: a gradient is placed differently from its parameter or holds sums that are
                not made yet, or an option or an entry of `qk_logits` has a wrong type.
            RuntimeError: ranks disagree on options, layout or which parameters have gradients, in
                this step or, on a device, in the one before; the first gradients were not reduced,
                or were with gradients="unreduced"; an earlier step failed midway; or a CUDA graph
                is being captured, of shared parameters, state in host memory or a first step.
                With "p2p", a rank did not come to an exchange of an earlier step in time.
            CommUnavailable: under `strict`, the transport that was asked for cannot be taken.
        """
        self._ranks.consistency.check_unbroken()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options = self._current_options()
        first = not self.has_state()
        plan = self._current_plan(options)
        usual = [tensors.check_gradients() for tensors in plan.tensors]
        for group, tensors in zip(options, plan.tensors, strict=True):
            tensors.check_rate("lr", group.lr)
            tensors.check_rate("weight_decay", group.weight_decay)
        logits = check_logits(qk_logits, self.clip_config, plan.clips)
        if self.offloaded:
            self.check_offload()
        rates = self._current_rates(plan, options)
        state = self._state_of_step(plan, options)
        initial = first and qk_logits is None and self._only_makes_state(options)
        if not initial:
            self._ranks.compare_replicas(plan.labelled)
        fingerprints = [known.fingerprint for known in self._known]
        if self._ranks.compare(plan.shared, options, fingerprints, rates, initial=initial):
            self._drop_gradients()
            return loss

        self._ranks.settle(plan.shared, options)
        transports = [team.transport for team in plan.shared.teams_in_use]
        self._ranks.consistency.begin_writing(transports)
        for group, of_group in zip(self.param_groups, options, strict=True):
            count_step(group["params"], self.state, of_group)
        timed = untimed if self._timer is None else self._timer.begin()
        own_work = functools.partial(self._step_own, plan, options, rates, state, usual, timed)
        if plan.shared.empty:
            own_work()
        else:
            self._step_shared(plan.shared, options, rates, state, own_work)
        logits = largest_logits(plan.clips, logits, self._ranks.holders)
        if logits:
            with stage("muon::qk_clip"):
                self._clip(plan, logits)
        self._drop_gradients()
        self._ranks.consistency.end_writing()
        plan.shared.graphs.tell_failures()
        return loss

    def comm_report(self) -> list[dict[str, Any]]:
        """What the messages of the last step between ranks went by, and why.

        One dict per kind of message, of those that this rank takes part in: `ranks` of the group;
        `what` travels; `count` per step; `transport`, "p2p", "nccl_ce", "nccl" or "gloo"; `reason`;
        `bytes` of the largest here; `duty`, the predicted time of all transfers of the group over
        NVLink in units of that of Newton-Schulz, None without any; `ms` of the last one that ended,
        None where it is not measured; `arena_bytes` of memory that the group shares on this rank,
        and `setup_ms` of choosing and setting up. Empty before the first step, and if nothing
        travels.
        """
        return [] if self._plan is None else self._ranks.comm_report(self._plan.shared)

    @torch.no_grad()
    def report(self, *, verbose: bool = False) -> str:
        """What a step does with every parameter that has a gradient, as text.

        A table has a line for the parameters of one shape: the route (muon or adamw), how many they
        are, the matrices that each is cut into with the method and the dtype of the iteration, the
        bytes of their state (0 before the first step), and the time that an H200 takes for their
        operations and bytes at the least. The last line has the sums. Of what several ranks share,
        bytes and times are of what this rank holds and owns. After `measure_steps()` also the time
        that their batches took in the last step that is over; what ranks share is not timed. It can
        be asked for at any time and waits for no device and no rank.

        Args:
            verbose: a line per parameter instead, with its name or number, its batch, its
                floating-point operations with dense products, who computes it, the kernels, and the
                bytes that the elementwise stages move.

        Returns:
            The lines, without a newline at the end.

        Raises:
            ValueError, TypeError: a group or an option changed so that a step would be refused.
        """
        options = self._current_options()
        if self.has_state():
            return self._report_of(self._current_plan(options), options, verbose=verbose)
        # A plan keeps parameters alive, which a trainer may yet shard: this one goes at once.
        state: dict[Any, dict[str, Tensor]] = {
            param: {} for group in self.param_groups for param in group["params"]
        }
        self.adopt_all()
        plan = self._make_plan([*map(layout_of, options)], options, state)
        return self._report_of(plan, options, verbose=verbose)

    def measure_steps(self, on: bool = True) -> None:
        """Time every batch of the following steps, for `report`.

        By events on the current stream for CUDA, which are read only once they are over, and by the
        clock elsewhere. Steps that are captured in a CUDA graph are not timed.

        Args:
            on: False stops it.
        """
        self._timer = StepTimer() if on else None

    def state_dict(self) -> dict[str, Any]:
        """As torch's, but with a word for a function in adjust_lr_fn, and float32 state as it is.

        It waits for what the ranks had to say about the last step.

        Raises:
            RuntimeError: a step failed midway, or ranks had different gradients in the last one, so
                that parameters and state may not fit together, and nothing was loaded since.
        """
        self._ranks.consistency.check()
        if self._plan is not None and not self._plan.finds_all_state():
            self.fit_state()
        return super().state_dict()

    def check_whole(self) -> None:
        """Check that one process may save the state as that of the optimizer.

        Raises:
            TypeError: other ranks have parts of it.
            RuntimeError: a step went wrong, so that it may not fit the parameters.
        """
        self._ranks.consistency.check()
        parts = None
        if self._ranks.unreduced is not None:
            parts = "with gradients='unreduced' every rank keeps a part of the state"
        for number in range(len(self.param_groups)):
            for where, param, _ in self.labelled(number):
                if sharded_dims(param):
                    parts = parts or f"{where}: ranks share it out as {tuple(param.placements)}"
        if parts is not None:
            raise TypeError(f"{parts}; save it with torch.distributed.checkpoint, on all ranks")

    def _report_of(
        self, plan: Plan, options: Sequence[MuonOptions | AdamWOptions], *, verbose: bool = False
    ) -> str:
        measured = {} if self._timer is None else self._timer.milliseconds()
        groups = zip(plan.labelled, plan.chunks, plan.shared.of_groups(), options, strict=True)
        of_groups = list(groups)
        return report(of_groups, self.state, measured, offloaded=self.offloaded, verbose=verbose)

    def _state_of_step(
        self, plan: Plan, options: Sequence[MuonOptions | AdamWOptions]
    ) -> OnDevice | InHostMemory:
        """Where a step finds its state."""
        if self._host is None:
            return plan.on_device
        return self._host.begin(plan, self._adamw_params(options), self.state)

    def _adamw_params(
        self, options: Sequence[MuonOptions | AdamWOptions]
    ) -> list[Sequence[Tensor]]:
        """Per group the parameters that AdamW steps."""
        return [
            group["params"] if isinstance(of_group, AdamWOptions) else []
            for of_group, group in zip(options, self.param_groups, strict=True)
        ]

    def _step_own(
        self,
        plan: Plan,
        options: Sequence[MuonOptions | AdamWOptions],
        rates: Mapping[int, Rate],
        state: OnDevice | InHostMemory,
        usual: Sequence[bool],
        timed: Timed,
    ) -> None:
        """Everything that this process has alone. `usual`: every parameter has a plain gradient."""
        for number, group in enumerate(options):
            if isinstance(group, AdamWOptions) and self._ranks.unreduced is None:
                for batch in state.batches(number):
                    with timed(number, state.device_of(batch)):
                        self._step_adamw(batch, plan, group, state, usual=usual[number])
            for chunk in plan.chunks[number]:
                work = chunk if usual[number] else chunk.with_gradients()
                if work.members:
                    with timed(chunk, chunk.device):
                        local = Local(chunk, work, group, state, self.state)
                        run_alone(_step_chunk(local, rates[id(chunk)], group))

    def _step_shared(
        self,
        shared: Shared,
        options: Sequence[MuonOptions | AdamWOptions],
        rates: Mapping[int, Rate],
        state: OnDevice | InHostMemory,
        own_work: Callable[[], None],
    ) -> None:
        """What several ranks work on, with everything else under its first gathers."""
        run, unreduced = shared.begin(self.state, state), self._ranks.unreduced

        def phases(chunks: Iterable[tuple[int, Any]]) -> Iterator[Phases]:
            for number, chunk in chunks:
                group = options[number]
                if isinstance(chunk, SharedChunk):
                    work = Exchange(chunk, number, group, run)
                    yield _step_chunk(work, rates[id(chunk)], group)
                elif isinstance(chunk, Bands):
                    batch = Batch(chunk, number, unreduced.factor, group, run)
                    for band in range(len(chunk.parts)):
                        yield _step_chunk(ReduceScatter(batch, band), rates[id(chunk)], group)
                elif isinstance(chunk, SliceChunk):
                    yield step_slices(chunk, number, unreduced.factor, group, run)
                else:
                    yield step_small(chunk, unreduced.team, unreduced.factor, options, run)

        def meanwhile() -> None:
            own_work()
            run_pipeline(phases(in_turn(shared.home)))

        run_pipeline(phases(shared.order), ahead=shared.config.prefetch, meanwhile=meanwhile)

    def _step_adamw(
        self,
        batch: Any,
        plan: Plan,
        options: AdamWOptions,
        state: OnDevice | InHostMemory,
        *,
        usual: bool,
    ) -> None:
        state.enter(batch)
        with stage("muon::adamw"):
            adamw(state.adamw(batch, usual=usual), self.state, plan.numbers, options)
        state.leave(batch)

    def _clip(self, plan: Plan, logits: Mapping[int, Tensor]) -> None:
        """QK-clip of what this process holds, before the rounding where that is kept."""
        kept = {
            param: local(self.state[param][RESIDUAL])
            for param in plan.rows
            if RESIDUAL in self.state[param]
        }
        if kept and self._host is not None:
            self._host.wait()
        here = {param: residual.to(local(param).device) for param, residual in kept.items()}
        clip(plan.clips, logits, plan.rows, here)
        for param, residual in kept.items():
            if here[param] is not residual:
                residual.copy_(here[param])

    def check_offload(self) -> None:
        if self._ranks.unreduced is not None:
            raise ValueError(
                "CPU offload is not supported with gradients='unreduced', where the ranks keep a "
                "part of the state each; leave it off, or use gradients='reduced'"
            )

    def _current_options(self) -> list[MuonOptions | AdamWOptions]:
        """The options of all groups; those that changed since the last time are checked."""
        self._check_count()
        known = []
        for number, group in enumerate(self.param_groups):
            last = self._known[number] if number < len(self._known) else None
            others = {**group, "params": None}  # which a trainer may yet replace
            seen = [*others, *others.values()]
            if last is None or not same_objects(seen, last.seen):
                options = self.format.options(group, f"group {number}")
                values = fingerprint(options)
                if last is None or values != last.fingerprint:
                    options = self.format.recheck(group, f"group {number}")
                    values = fingerprint(options)
                last = KnownOptions(options, values, seen if all_plain(values) else [])
            known.append(last)
        self._known = known
        return [of_group.options for of_group in known]

    def _current_rates(
        self, plan: Plan, options: Sequence[MuonOptions | AdamWOptions]
    ) -> dict[int, Rate]:
        """id of a chunk -> its rate. Options with a Tensor or a function are new in every step."""
        rated_for, rates = plan.rated
        if not same_objects(options, rated_for):
            rates = rates_of(plan.shared, options)
            for group, chunks in zip(options, plan.chunks, strict=True):
                rates |= {id(c): rate_of(group, *c.matrix, c.device) for c in chunks}
            plan.rated[:] = options, rates
        return rates

    def _drop_gradients(self) -> None:
        """Let the gradients of groups with none_grad go."""
        for group in self.param_groups:
            if group["none_grad"]:
                for param in group["params"]:
                    param.grad = None

    def _only_makes_state(self, options: Sequence[MuonOptions | AdamWOptions]) -> bool:
        """Whether a first step has nothing to do on this rank: no rate, and zeros for gradients.

        So torch.distributed.checkpoint has optimizers make their state. Gradients are read on the
        host only where the rate is 0 there, and no further than the first that is not zero.
        """
        rates = [group.lr for group in options]
        if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
            return False
        if any(rate.tolist() if isinstance(rate, Tensor) else rate for rate in rates):
            return False
        return not any(
            bool(local(param.grad).any())
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        )

    def _current_plan(self, options: Sequence[MuonOptions | AdamWOptions]) -> Plan:
        """The plan; a new one where groups, parameters or the options of their layout changed."""
        layouts = [*map(layout_of, options)]
        params = [group["params"] for group in self.param_groups]
        if self._plan is None or not self._plan.fits(layouts, params, self.state):
            self._follow_params()
            self._plan = self._make_plan(layouts, options, self.state)
            if self.debug:
                logger.info("%s", self._report_of(self._plan, options))
        return self._plan

    def _follow_params(self) -> None:
        """Make or move the state of parameters that are new, moved or of another dtype.

        What the dtype before rounded off does not belong to the numbers of this one.

        Raises:
            ValueError: a parameter has no data, or state does not fit it any more. Module.to_empty
                puts new parameters in the place of those on "meta".
        """
        for number in range(len(self.param_groups)):
            for where, param, _ in self.labelled(number):
                if param.is_meta:
                    raise ValueError(
                        f"{where} is on the meta device and has no data; construct the optimizer "
                        "after the model got its memory (model.to_empty(device=...))"
                    )
        self.fit_state()
        for tensors in self._plan.tensors if self._plan is not None else ():
            for param, (_, dtype, *_) in zip(tensors.params, tensors.forms, strict=True):
                if param.dtype != dtype and RESIDUAL in self.state.get(param, ()):
                    local(self.state[param][RESIDUAL]).zero_()

    def _make_plan(
        self,
        layouts: list[tuple[Any, ...]],
        options: Sequence[MuonOptions | AdamWOptions],
        state: MutableMapping[Any, Any],
    ) -> Plan:
        """Cut, bucket and batch. `state` has an entry for every parameter, empty for a report."""
        labelled, cuts = [], []
        numbers: dict[Tensor, int] = {}
        for index, group in enumerate(options):
            entries = self.labelled(index)
            labelled.append([(where, param) for where, param, _ in entries])
            numbers |= {param: len(numbers) + k for k, (_, param, _) in enumerate(entries)}
            if isinstance(group, MuonOptions):
                blocks = [
                    (where, param, cut(tuple(param.shape), name, group, where))
                    for where, param, name in entries
                ]
                cuts.append((index, group, blocks))
        chunks, shared = self._divided(labelled, cuts, numbers, options, state)
        targets = self._clip_targets()
        self._warn_of_unmatched()
        filled = [state[param] for param in numbers]
        return Plan(
            layouts=layouts,
            tensors=[*map(GroupTensors.of, labelled)],
            keys=[*state],
            states=[*state.values()],
            filled=filled,
            sizes=[*map(len, filled)],
            numbers=numbers,
            chunks=chunks,
            clips=plan_batches(self.clip_config, targets),
            rows={target.param: rows_here(target.param) for target in targets},
            shared=shared,
            on_device=OnDevice(state, self._adamw_params(options)),
        )

    def _divided(
        self,
        labelled: list[list[tuple[str, Tensor]]],
        cuts: list[tuple[int, MuonOptions, list[tuple[str, Tensor, Blocks]]]],
        numbers: Mapping[Tensor, int],
        options: Sequence[MuonOptions | AdamWOptions],
        state: Mapping[Any, Any],
    ) -> tuple[list[list[Chunk]], Shared]:
        """The batches of this process, per group, and what several ranks work on."""
        chunks: list[list[Chunk]] = [[] for _ in labelled]
        self._ranks.begin_plan(self.clip_config)
        if self._ranks.unreduced is not None:
            with_muon = {index for index, _, _ in cuts}
            others = [(i, named) for i, named in enumerate(labelled) if i not in with_muon]
            return chunks, self._ranks.divide_unreduced(cuts, others, len(labelled))
        with_others = []
        for index, group, blocks in cuts:
            own, together = self._ranks.divide(blocks, group, index)
            numbered = [(numbers[param], param, of_param) for param, of_param in own]
            chunks[index] = plan_chunks(numbered, state, contiguous=group.rounding == "stochastic")
            with_others += together
        expert_keys = [key for _, group, _ in cuts for key in group.expert_keys or ()]
        for index, group in enumerate(options):
            if isinstance(group, AdamWOptions):
                self._ranks.divide_others(self.labelled(index), index, expert_keys)
        return chunks, self._ranks.plan(with_others, len(labelled))

    def adopt(self, groups: Sequence[tuple[str, dict[str, Any], Sequence[str | None]]]) -> None:
        if self._ranks.unreduced is None:
            # All ranks are here, which making a team may need; report() may come alone.
            for _, group, _ in groups:
                for param in group["params"]:
                    self._ranks.team_of(param)
            return
        entries = []
        for where, group, names in groups:
            options = self.format.options(group)
            for index, (param, name) in enumerate(zip(group["params"], names, strict=True)):
                here = label(where, index, name)
                check_unreduced(options, param, here)
                if isinstance(options, MuonOptions):
                    check_statistics(options, param, here)
                if is_dtensor(param):
                    raise TypeError(
                        f"{here}: gradients='unreduced' takes plain parameters that every rank has "
                        "whole, got a DTensor; its gradients are reduced, use gradients='reduced'"
                    )
                if isinstance(options, MuonOptions):
                    blocks = cut(tuple(param.shape), name, options, here)
                    entries.append((param, blocks, options))
            check_names(options, names, where)
        self._ranks.adopt(entries)  # behind everything that may raise

    def note_refused_load(self) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if self._ranks.unreduced is not None or any(map(sharded_dims, params)):
            self._ranks.consistency.note_refused_load()
            self._plan = None  # the first step of a plan waits for what the other ranks say

    def slots(self, param: Tensor, name: str | None, options: Any, where: str) -> dict[str, Slot]:
        return self._ranks.keeps(param, slots_of(param, name, options, where), options)
