"""Which parameters several ranks work on together, and their matrices in chunks with owners.

A matrix that one rank holds entirely stays there. Every other one is sent to an owner, which
orthogonalizes it for all: the pieces of a sharded one are gathered, and a replicated one is
orthogonalized by one replica instead of by all. A parameter that is a stack of experts, sharded
along them alone, is a local stack and never gets here. For gradients that nobody has reduced see
`partition.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...dispatch import say_once
from ...distributed import (
    CommUnavailable,
    Planned,
    Team,
    Teams,
    Traffic,
    alone,
    in_flight,
)
from ...orthogonalize.choose import choose, predicted_ms
from ..groups.blocks import Blocks
from ..groups.options import AdamWOptions, MuonOptions
from ..groups.parameters import has_component, is_dtensor
from ..plan import OnDevice
from ..state.in_host_memory import InHostMemory
from ..state.slots import Slot, check_rounding
from ..update_rules import Rate, rate_of
from .buffers import DistributedConfig, Staging
from .chunks import Bands, SharedChunk, SharedMatrix, SliceChunk, SmallChunk, parts_of
from .consistency import Common, Consistency, check_not_captured, compare_replicas
from .cuda_graphs import BESIDE, POOL_BYTES, Graphs, State, StepRun
from .in_backward import InBackward, sent_first
from .partition import (
    REDUCE_OPS,
    Owners,
    SharedGroup,
    check_statistics,
    layout_on,
    local_blocks,
    matrices_of,
    plan_shared,
    spread,
    stays,
)

# Matrices of a shape that an owner is taken to orthogonalize together when work is shared out: a
# model of some dozens of layers on some ranks. How many it is depends on the owners themselves.
COST_BATCH = 8
# Optimizers that compare the gradients of replicas, in the order in which a process makes them.
_NUMBERS = itertools.count()


class Ranks:
    """Which ranks share what of an optimizer, and how.

    Made once per optimizer; plans are made anew when groups change.
    """

    def __init__(
        self,
        process_group: Any,
        config: DistributedConfig,
        unreduced: Owners | None = None,
        *,
        assumed: bool = False,
    ) -> None:
        """`assumed`: nobody said that gradients are reduced."""
        self.config = config
        self.unreduced = unreduced
        self.assumed = assumed
        self._group = process_group
        self._number = next(_NUMBERS) if assumed else 0
        self._teams = Teams()
        self._of_group: Team | None = None
        self.consistency = Consistency()
        self._settled: Shared | None = None
        self._interrupted = False  # what left in backward is of a plan that is no more
        self.begin_plan()

    def __reduce__(self) -> Any:
        arguments = self._group, self.config, self.unreduced
        return functools.partial(Ranks, assumed=self.assumed), arguments

    def __deepcopy__(self, memo: Any) -> Ranks:
        copied = copy.deepcopy(self.unreduced, memo)
        ranks = Ranks(self._group, self.config, copied, assumed=self.assumed)
        ranks._teams = Teams(self._teams)
        return ranks

    def team_of(self, param: Tensor) -> Team | None:
        """The ranks that share the work on a parameter; None if this process has it alone."""
        if is_dtensor(param):
            return self._teams.of_mesh(param.device_mesh)
        if self._of_group is None and self._group is not None:
            self._of_group = self._teams.of_group(self._group)
        if self._of_group is None and self.config.wire_dtype == torch.float16:
            self._of_group = alone()
        return self._of_group

    def holders(self, param: Tensor) -> Team | None:
        """The ranks that hold a parameter, whole or in parts; None if only this one is known to."""
        return self.team_of(param) if self.unreduced is None else self.unreduced.team

    def keeps(
        self, param: Tensor, slots: dict[str, Slot], options: MuonOptions | AdamWOptions
    ) -> dict[str, Slot]:
        """The slots of a parameter that this rank keeps, of all those that it has."""
        if self.unreduced is None:
            return slots
        if isinstance(options, MuonOptions):
            return slots if self.unreduced.owns(param) else {}
        if not self.unreduced.sliced(param):
            return slots
        make = self.unreduced.zeros_of_slice
        return {
            key: replace(slot, make=make) if slot.like_param else slot
            for key, slot in slots.items()
        }

    def adopt(self, entries: Sequence[tuple[Tensor, Blocks, MuonOptions]]) -> None:
        """Give owners to the matrices of a group, if ranks keep state apart."""
        if self.unreduced is None:
            return
        costs = []
        for param, blocks, options in entries:
            predicted, wide = _cost(options), torch.promote_types(param.dtype, torch.float32)
            pieces = blocks.pieces(param.numel())
            each = (p.matrices * predicted(*p.matrix, wide, param.device) for p in pieces)
            costs.append(sum(each))
        self.unreduced.adopt([param for param, _, _ in entries], costs)

    def begin_plan(self, clip_config: Any = None) -> None:
        """Nothing is divided yet. `clip_config` decides what QK-clip sends."""
        self._close_backward()
        self._commons: dict[int, Common] = {}  # by team, as they are found
        self._empty = True
        self._settled = None
        self._together: set[Team] = set()  # whose ranks all have a plan that is not settled
        self._clip_config = clip_config
        self.consistency.begin_plan()

    def _common(self, team: Team) -> Common:
        return self._commons.setdefault(id(team), Common(team))

    def divide_unreduced(
        self,
        muon: Sequence[tuple[int, MuonOptions, Sequence[tuple[str, Tensor, Blocks]]]],
        others: Sequence[tuple[int, Sequence[tuple[str, Tensor]]]],
        count: int,
    ) -> Shared:
        """The chunks of `count` groups, for gradients that are not reduced.

        `muon` and `others` have the number of each group and what it has of (label, parameter,
        blocks) or, for AdamW, (label, parameter).
        """
        owners = self.unreduced
        assert owners is not None
        team = owners.team
        wire = self.config.wire_dtype or torch.float32
        chunks: list[list[Any]] = [[] for _ in range(count)]
        small: dict[Any, list[tuple[int, Tensor]]] = {}
        for number, options, entries in muon:
            matrices: list[SharedMatrix] = []
            for where, param, _ in entries:
                self._common(team).add(number, where, param)
            # What backward comes to first leaves first.
            for _, param, blocks in entries[:: -1 if self.config.reduce_in_backward else 1]:
                if param.numel():
                    layout = layout_on(param, team)
                    dtype = options.momentum_dtype
                    matrices += matrices_of(param, blocks, layout, team, dtype)
            made = owners.matrix_chunks(matrices, wire, self.config)
            if self.config.reduce_in_backward:
                place = {param: k for k, (_, param, _) in enumerate(entries)}
                made.sort(key=lambda bands: -min(place[p] for p in bands.whole.params))
            chunks[number] += made
        for number, named in others:
            for where, param in named:
                self._common(team).add(number, where, param)
                if owners.sliced(param):
                    chunks[number] += owners.slice_chunks(param, wire, self.config)
                else:
                    dtype = torch.promote_types(param.dtype, torch.float32)
                    small.setdefault((dtype, param.device), []).append((number, param))
        for (dtype, device), params in small.items():
            chunks[params[0][0]].append(SmallChunk(tuple(params), dtype, device))
        return self._planned(chunks, [[] for _ in range(count)], spread(chunks))

    def divide(
        self, entries: Sequence[tuple[str, Tensor, Blocks]], options: MuonOptions, number: int
    ) -> tuple[list[tuple[Tensor, Blocks]], list[SharedGroup]]:
        """The parameters of a group that this rank steps by itself, and the shared ones.

        Raises:
            ValueError: this combination of options and placements is not supported.
        """
        own: list[tuple[Tensor, Blocks]] = []
        shared: dict[int, tuple[Team, list[SharedMatrix]]] = {}
        for where, param, blocks in entries:
            team = self.team_of(param)
            if team is None:
                own.append((param, blocks))
                continue
            self._empty = False
            if not param.numel():
                continue
            layout = layout_on(param, team)
            kept_here = local_blocks(blocks, layout, team)
            if kept_here is not None and self.config.wire_dtype != torch.float16:
                if kept_here.experts != 0:  # the shard of a stack may be empty
                    own.append((param, kept_here))
                continue
            if kept_here is None:
                self._common(team).add(number, where, param)
            check_rounding(options, param, where)
            check_statistics(options, param, where)
            matrices = matrices_of(param, blocks, layout, team, options.momentum_dtype)
            shared.setdefault(id(team), (team, []))[1].extend(matrices)
        return own, [
            SharedGroup(
                number=number,
                team=team,
                matrices=matrices,
                wire=self._wire(matrices, options),
                cost=_cost(options),
                keeps_statistics=options.beta2 is not None,
            )
            for team, matrices in shared.values()
        ]

    def divide_others(
        self,
        entries: Sequence[tuple[str, Tensor, str | None]],
        number: int,
        expert_keys: Sequence[str],
    ) -> None:
        """Note which parameters of a group for AdamW other ranks step too.

        Not those of experts that are sharded along themselves: a rank whose experts got no token
        may have no gradient.
        """
        for where, param, name in entries:
            team = self.team_of(param)
            if team is None or team.size == 1 or not param.numel():
                continue
            stacked = name is not None and any(has_component(name, key) for key in expert_keys)
            if not stays(layout_on(param, team), stacked=stacked):
                self._common(team).add(number, where, param)

    def plan(self, groups: Sequence[SharedGroup], count: int) -> Shared:
        """Owners and chunks; `count` is the number of parameter groups."""
        chunks, home = plan_shared(groups, count, self.config)
        return self._planned(chunks, home, in_turn(chunks))

    def _planned(
        self,
        chunks: list[list[Any]],
        home: list[list[SharedChunk]],
        order: list[tuple[int, Any]],
    ) -> Shared:
        """All that ranks share, with the memory that it takes, of what was divided."""
        settings = {
            "gradients": "reduced" if self.unreduced is None else "unreduced",
            "reduce_op": REDUCE_OPS[0] if self.unreduced is None else self.unreduced.reduce_op,
            "clip_config": self._clip_config,
            **vars(self.config),
        }
        teams = [*self._commons.values()]
        for common in teams:
            common.describe(chunks, settings, unreduced=self.unreduced is not None)
        empty = not teams if self.unreduced is not None else self._empty
        shared = Shared(chunks, home, teams, empty, self.config, order)
        reserve(shared)
        return shared

    def compare_replicas(self, groups: Sequence[Sequence[tuple[str, Tensor]]]) -> None:
        """Ask in the first step with gradients if they are reduced, where nobody said so."""
        if self.assumed:
            timeout = self.config.timeout
            self.assumed = not compare_replicas(groups, self._number, timeout, self._group)

    def compare(
        self,
        shared: Shared,
        options: Sequence[MuonOptions | AdamWOptions],
        fingerprints: Sequence[Any],
        rates: dict[int, Rate],
        *,
        initial: bool,
    ) -> bool:
        """Compare options and gradients with the other ranks; see `Consistency.compare`.

        Of `rates` those count that functions in adjust_lr_fn returned.
        """
        if shared.empty and not shared.teams:
            return initial
        check_not_captured(shared.asked)
        rules = any(isinstance(o, MuonOptions) and callable(o.adjust_lr_fn) for o in options)
        returned = [
            _returned(shared, rates, common.team) if rules else None for common in shared.teams
        ]
        new, early = self._settled is not shared, shared.in_backward
        if early is not None:
            early.take_back_captured()
            for common in shared.teams:
                early.check(common.labelled)
        everywhere, together = self.consistency.compare(
            shared.teams,
            options,
            fingerprints,
            returned,
            initial=initial,
            new=new,
            dropped=0 if early is None else early.dropped,
        )
        pairs = zip(shared.teams, together, strict=False)
        self._together = {common.team for common, all_new in pairs if all_new}
        return everywhere

    def settle(self, shared: Shared, options: Sequence[MuonOptions | AdamWOptions]) -> None:
        """Choose what the messages of a new plan go by, with the other ranks if theirs is new, too.

        Raises:
            CommUnavailable: not as asked for, under `strict`; behind the last team, since ranks of
                other teams may wait for this one.
            RuntimeError: other ranks go on with their plan, and this one cannot.
        """
        if self._settled is shared:
            return
        errors: list[RuntimeError] = []
        for team, traffic in traffic_of(shared, options).items():
            together = team in self._together
            try:
                if self._interrupted and not together:
                    raise RuntimeError(
                        "gradients left in backward, and then this rank alone got a new plan: load "
                        "a state_dict or change groups on all ranks, or between step and backward"
                    )
                team.transport.settle(traffic, self.config.transport_options, together=together)
            except RuntimeError as error:
                errors.append(error)
        if not errors and self.config.reduce_in_backward:
            errors += self._open_backward(shared)
        if errors:
            raise errors[0]
        self._settled, self._interrupted = shared, False

    def _open_backward(self, shared: Shared) -> list[RuntimeError]:
        """Let contributions of a settled plan leave in backward; an error where none can."""
        chunks = []
        if self.unreduced is not None:
            chunks = sent_first(shared.order, self.config.prefetch)
        if chunks:
            backwards = self.config.reduce_in_backward
            shared.in_backward = InBackward(chunks, backwards, shared)
            return []
        reason = (
            "reduce_in_backward sends nothing: it takes gradients='unreduced' on several ranks, "
            "transport='p2p', messages of min_bytes, wire_dtype of float32, and parameters that "
            "train in the first chunks"
        )
        if self.config.strict:
            return [CommUnavailable(reason)]
        say_once("%s", reason)
        return []

    def _close_backward(self) -> None:
        """No more contributions of the last plan leave."""
        early = None if self._settled is None else self._settled.in_backward
        if early is not None:
            self._interrupted = self._interrupted or early.run is not None
            early.close()

    def comm_report(self, shared: Shared) -> list[dict[str, Any]]:
        """What was chosen for the messages of a plan, and why."""
        rows = [row for team in shared.teams_in_use for row in team.transport.report()]
        return [dict(row.as_dict()) for row in rows]

    def _wire(self, matrices: Sequence[SharedMatrix], options: MuonOptions) -> torch.dtype:
        """float16 where the iteration would round to it or to bfloat16 anyway."""
        if self.config.wire_dtype is not None:
            return self.config.wire_dtype
        first = matrices[0]
        placed = {"dtype": first.dtype, "device": first.param.device}
        picked = choose(*first.matrix, **placed, **options.iteration).dtype
        return torch.float16 if picked in (torch.float16, torch.bfloat16) else torch.float32


def rates_of(shared: Shared, options: Sequence[MuonOptions | AdamWOptions]) -> dict[int, Rate]:
    """id of a chunk of matrices that ranks share -> its rate."""
    rates = {}
    for group, chunks in zip(options, shared.of_groups(), strict=True):
        for chunk in chunks:
            whole = chunk.whole if isinstance(chunk, Bands) else chunk
            if isinstance(whole, SharedChunk):
                rates[id(chunk)] = rate_of(group, *whole.matrix, whole.device)
    return rates


def _returned(shared: Shared, rates: dict[int, Rate], team: Team) -> list[float]:
    """What functions in adjust_lr_fn say of the chunks of a team, but for Tensors."""
    return [
        rates[id(chunk)].factor
        for _, chunk in shared.order
        if id(chunk) in rates and parts_of(chunk)[0].team is team
    ]


def _cost(options: MuonOptions) -> Callable[[int, int, torch.dtype, torch.device], float]:
    """Predicted milliseconds of one of COST_BATCH equal matrices, the same on every rank."""

    @functools.cache
    def cost(m: int, n: int, dtype: torch.dtype, device: torch.device) -> float:
        return predicted_ms(m, n, COST_BATCH, dtype, device, **options.iteration) / COST_BATCH

    return cost


@dataclass(eq=False)
class Shared:
    """The part of a plan that ranks share."""

    chunks: list[list[Any]]  # per group; the same on every rank
    home: list[list[SharedChunk]]  # per group; this rank's own, without communication
    teams: list[Common]
    empty: bool  # no matrix is on more ranks than this one
    config: DistributedConfig  # of the chunks
    order: list[tuple[int, Any]]  # (number of the group, chunk) as a step begins them
    staging: Staging = field(default_factory=Staging)
    graphs: Graphs = field(default_factory=Graphs)
    in_backward: InBackward | None = None
    _last: StepRun | None = None
    _streams: Sequence[torch.cuda.Stream] = ()

    def of_groups(self) -> list[list[Any]]:
        """All chunks, per group."""
        return [of_all + own for of_all, own in zip(self.chunks, self.home, strict=True)]

    def begin(self, state: State, kept: OnDevice | InHostMemory) -> StepRun:
        """Start a step: all memory is free. `kept`: where it finds the state."""
        run = None if self.in_backward is None else self.in_backward.taken()
        if run is None:
            self._free_memory(early=False)
        # One rank alone is bound by its device: launches cost it nothing.
        several = any(self.chunks)
        self.graphs.begin(on=self.config.cuda_graphs and several and isinstance(kept, OnDevice))
        if self.in_backward is not None:
            devices = (d for d in self.staging.devices() if d.type == "cuda")
            self._streams = [torch.cuda.current_stream(device) for device in devices]
        begun = {} if run is None else run.begun
        self._last = StepRun(state, kept, self.staging, self.graphs, begun)
        return self._last

    def begin_in_backward(self) -> StepRun | None:
        """Start the next step before it is called; None before the first one."""
        if self._last is None:
            return None
        for stream in self._streams:  # of the last step, whose memory is written now
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._free_memory(early=True)
        self.graphs.begin(on=False)  # a capture in a thread of autograd would see its kernels
        return replace(self._last, begun={})

    def _free_memory(self, *, early: bool) -> None:
        self.staging.begin()
        for team in self.teams_in_use:
            team.transport.begin(early=early)

    @cached_property
    def teams_in_use(self) -> list[Team]:
        """The teams of all chunks, in the order in which a step meets them."""
        return [*dict.fromkeys(part.team for _, chunk in self.order for part in parts_of(chunk))]

    @cached_property
    def asked(self) -> frozenset[torch.device]:
        """Where the parameters are that must agree on their gradients."""
        return frozenset(param.device for common in self.teams for _, param in common.labelled)

    def in_order(self, own: Sequence[Any]) -> list[Any]:
        """All chunks, and other work of this rank, in the order in which a step begins them."""
        of_all, home = ([c for of_group in g for c in of_group] for g in (self.chunks, self.home))
        ahead = self.config.prefetch + 1  # that many chunks are open before other work
        gathers = itertools.accumulate(chunk.communicates for chunk in of_all)
        first = next((i for i, count in enumerate(gathers, 1) if count == ahead), len(of_all))
        return [*of_all[:first], *own, *home, *of_all[first:]]


def traffic_of(
    shared: Shared, options: Sequence[MuonOptions | AdamWOptions]
) -> dict[Team, Traffic]:
    """What the ranks of every team exchange in a step, and compute beside it."""
    found: dict[Team, list[Planned]] = {team: [] for team in shared.teams_in_use}
    computing = dict.fromkeys(found, 0.0)
    devices = {}
    for number, chunk in shared.order:
        group = options[number]
        for part in parts_of(chunk):
            route, what = part.route, f"{len(part.members)} x {part.matrix}"
            found[part.team].append(Planned(f"{what} to owners", route.sent, route.gathered))
            found[part.team].append(Planned(f"{what} back", route.answered, route.scattered))
            devices[part.team] = part.device
        whole = chunk.whole if isinstance(chunk, Bands) else chunk
        if isinstance(whole, SharedChunk) and isinstance(group, MuonOptions):
            owned = len(whole.route.owned)
            placed = {"dtype": whole.dtype, "device": whole.device}
            if owned:
                computing[whole.team] += predicted_ms(
                    *whole.matrix, owned, **placed, **group.iteration
                )
    # Two messages of every chunk that is alive: to the owners and back.
    alive = in_flight(shared.config.prefetch) * 2
    return {
        team: Traffic(tuple(planned), devices[team], computing[team], alive)
        for team, planned in found.items()
    }


def in_turn(chunks: Sequence[Sequence[Any]]) -> list[tuple[int, Any]]:
    """(number of the group, chunk), group by group."""
    return [(number, chunk) for number, of_group in enumerate(chunks) for chunk in of_group]


def reserve(shared: Shared) -> None:
    """Say how much memory the chunks of a plan will ask for."""
    staging, graphs = shared.staging, shared.graphs
    for chunk in (chunk for of_group in shared.of_groups() for chunk in of_group):
        if isinstance(chunk, SmallChunk):
            staging.reserve("message", chunk.device, 0)
        for part in parts_of(chunk):
            route = part.route
            messages = route.sent, route.gathered, route.answered, route.scattered
            staging.reserve("message", part.device, max(message.size for message in messages))
            if isinstance(chunk, (Bands, SliceChunk)):
                # Wide where the wire rounds, before they leave or when they have arrived.
                contributions = max(message.size for message in messages[:2])
                wide = 0 if part.wire == part.dtype else part.dtype.itemsize
                graphs.reserve(part.device, contributions // part.wire.itemsize * wide)
            else:
                staging.reserve("directions", part.device, part.wide_bytes)
                # The batch may have to be put together, and its result goes into messages.
                owned = len(route.owned) * math.prod(part.matrix)
                graphs.reserve(part.device, (POOL_BYTES + 2 * part.wire.itemsize) * owned)
        if isinstance(chunk, Bands):
            whole = chunk.whole
            elements = len(whole.route.owned) * math.prod(whole.matrix)
            staging.reserve("directions", whole.device, elements * whole.dtype.itemsize)
            staging.reserve("updates", whole.device, elements * whole.wire.itemsize)
            graphs.reserve(whole.device, POOL_BYTES * elements, BESIDE)
