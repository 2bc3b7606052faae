"""An optimizer's dealings with other ranks: which parameters are shared, do all agree, the step."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...distributed import Team, Teams, alone, run_pipeline
from ...orthogonalize.choose import choose, predicted_ms
from ..groups.blocks import Blocks
from ..groups.options import AdamWOptions, MuonOptions
from ..groups.param_groups import has_component
from ..groups.parameters import is_dtensor
from ..stages.update import Rate, rate_of
from ..state.device_state import OnDevice
from ..state.host_state import InHostMemory
from ..state.rounding import check_rounding
from ..state.state import Slot
from .buffers import DistributedConfig
from .chunks import Bands, SharedChunk, SharedMatrix, SliceChunk, SmallChunk, parts_of
from .consistency import Agreement, Members, check_not_captured, compare_replicas
from .cuda_graphs import StepRun
from .plan import (
    REDUCE_OPS,
    Shared,
    SharedGroup,
    Unreduced,
    check_statistics,
    in_turn,
    layout_on,
    local_blocks,
    matrices_of,
    plan_shared,
    reserve,
    spread,
    stays,
)
from .shared_step import step_shared
from .unreduced_step import step_bands, step_slices, step_small

# Matrices of a shape that an owner is taken to orthogonalize together when work is shared out: a
# model of some dozens of layers on some ranks. How many it is depends on the owners themselves.
COST_BATCH = 8
# Optimizers whose ranks meet without a group, in the order in which a process makes them.
_NUMBERS = itertools.count()


class Sharing:
    """Made once per optimizer; plans are made anew when groups change."""

    def __init__(
        self,
        process_group: Any,
        config: DistributedConfig,
        unreduced: Unreduced | None = None,
        *,
        assumed: bool = False,
    ) -> None:
        """`assumed`: nobody said that gradients are reduced."""
        self.config = config
        self.unreduced = unreduced
        self.assumed = assumed
        self._group = process_group
        self._number = next(_NUMBERS) if assumed and process_group is None else None
        self._teams = Teams()
        self._of_group: Team | None = None
        self._agreement = Agreement()
        self._broken = False
        self._refused = 0  # state_dicts, since ranks agreed that it was as many on all of them
        self._told = False  # the other ranks, of the last of those
        self.begin_plan()

    def __reduce__(self) -> Any:
        arguments = self._group, self.config, self.unreduced
        return functools.partial(Sharing, assumed=self.assumed), arguments

    def __deepcopy__(self, memo: Any) -> Sharing:
        copied = copy.deepcopy(self.unreduced, memo)
        # It talks over the same groups.
        sharing = Sharing(self._group, self.config, copied, assumed=self.assumed)
        sharing._teams = self._teams
        return sharing

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
            predicted = _cost(options)
            wide = torch.promote_types(param.dtype, torch.float32)
            costs.append(
                sum(
                    piece.matrices * predicted(*piece.matrix, wide, param.device)
                    for piece in blocks.pieces(param.numel())
                )
            )
        self.unreduced.adopt([param for param, _, _ in entries], costs)

    def begin_plan(self, clip_config: Any = None) -> None:
        """Nothing is divided yet. `clip_config` decides what QK-clip sends."""
        self._members, self._empty = Members(), True
        self._clip_config = clip_config
        self._agreement.begin_plan()

    def divide_unreduced(
        self,
        muon: Sequence[tuple[int, MuonOptions, Sequence[tuple[str, Tensor, Blocks]]]],
        others: Sequence[tuple[int, Sequence[tuple[str, Tensor]]]],
        count: int,
    ) -> Shared:
        """The chunks of all groups, for gradients that are not reduced.

        Args:
            muon: number of a group of matrices, its options, and (label, parameter, blocks).
            others: number of a group for AdamW, and (label, parameter).
            count: how many groups there are.
        """
        owners = self.unreduced
        assert owners is not None
        wire = self.config.wire_dtype or torch.float32
        chunks: list[list[Any]] = [[] for _ in range(count)]
        small: dict[Any, list[tuple[int, Tensor]]] = {}
        for number, options, entries in muon:
            matrices = [
                matrix
                for where, param, blocks in entries
                if param.numel()
                for matrix in matrices_of(
                    param,
                    where,
                    blocks,
                    layout_on(param, owners.team),
                    owners.team,
                    options.momentum_dtype,
                )
            ]
            chunks[number] += owners.matrix_chunks(matrices, wire, self.config)
        for number, named in others:
            for where, param in named:
                if owners.sliced(param):
                    chunks[number] += owners.slice_chunks(param, where, wire, self.config)
                else:
                    dtype = torch.promote_types(param.dtype, torch.float32)
                    small.setdefault((dtype, param.device), []).append((number, param))
        for (dtype, device), params in small.items():
            chunks[params[0][0]].append(SmallChunk(tuple(params), dtype, device))
        for number, _, entries in muon:
            for where, param, _ in entries:
                self._members.add(owners.team, number, where, param)
        for number, named in others:
            for where, param in named:
                self._members.add(owners.team, number, where, param)
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
                self._members.add(team, number, where, param)
            check_rounding(options, param, where)
            check_statistics(options, param, where)
            matrices = matrices_of(param, where, blocks, layout, team, options.momentum_dtype)
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
                self._members.add(team, number, where, param)

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
            "wire_dtype": self.config.wire_dtype,
            "prefetch": self.config.prefetch,
            "chunk_size": self.config.chunk_size,
            "in_flight_bytes": self.config.in_flight_bytes,
            "clip_config": self._clip_config,
        }
        alike = {}
        if self.unreduced is not None:
            alike[id(self.unreduced.team)] = False
        elif self.assumed and self._of_group is not None:
            alike[id(self._of_group)] = True
        teams = self._members.commons(chunks, settings, alike)
        empty = not teams if self.unreduced is not None else self._empty
        shared = Shared(chunks, home, teams, empty, self.config, order)
        reserve(shared)
        return shared

    def compare_replicas(self, groups: Sequence[Sequence[tuple[str, Tensor]]]) -> None:
        """In the first step that has gradients, of whom nobody said whether they are reduced.

        Raises:
            RuntimeError: they are not, on ranks that hold replicas of these parameters.
        """
        if self.assumed and self._number is not None:
            self.assumed = not compare_replicas(groups, self._number, self.config.timeout)

    def ask(
        self,
        shared: Shared,
        options: Sequence[MuonOptions | AdamWOptions],
        fingerprints: Sequence[Any],
        rates: dict[int, Rate],
    ) -> None:
        """Ask all ranks whether they have the same options and gradients; hear the last answer.

        On the CPU the answer is waited for. On a device it is heard at the next call, so that no
        step waits for it, but for the first one of a plan, whose messages must have one layout.

        Args:
            shared: what ranks share.
            options: of all groups.
            fingerprints: of these.
            rates: from `rates`.

        Raises:
            RuntimeError: they differ, or the caller captures a CUDA graph.
        """
        if shared.empty and not shared.teams:
            return
        check_not_captured(shared.asked)
        rules = any(isinstance(o, MuonOptions) and callable(o.adjust_lr_fn) for o in options)
        returned = [
            _returned(shared, rates, common.team) if rules else None for common in shared.teams
        ]
        questions = self._agreement.ask(
            shared.teams, options, fingerprints, returned, refused=self._refused
        )
        self._told = True
        self._broken = True
        self._agreement.hear()
        self._broken = False
        self._agreement.settle(questions)
        self._refused = 0

    def rates(
        self, shared: Shared, options: Sequence[MuonOptions | AdamWOptions]
    ) -> dict[int, Rate]:
        """The rates of shared chunks, before anything is written: a function may raise."""
        return _rates(shared, options)

    def step(
        self,
        shared: Shared,
        options: Sequence[MuonOptions | AdamWOptions],
        params_of_groups: Sequence[Sequence[Tensor]],
        state: Any,
        kept: OnDevice | InHostMemory,
        meanwhile: Callable[[], None],
        rates: dict[int, Rate],
    ) -> None:
        """Step the shared matrices, with everything else under their first gathers.

        `kept` is where a step finds the `state`; `rates` are from `rates`.
        """
        if shared.empty:
            meanwhile()
            return
        # One rank alone is bound by its device: launches cost it nothing.
        several = any(shared.chunks)
        shared.begin(on=self.config.cuda_graphs and several and isinstance(kept, OnDevice))
        run = StepRun(state, kept, Counter(), shared.staging, shared.graphs)
        self._run_chunks(shared, options, run, meanwhile, rates)
        for number, params in enumerate(params_of_groups):
            if options[number].none_grad:  # also where this rank had nothing to do for them
                for param in params:
                    if is_dtensor(param) or self._group is not None:
                        param.grad = None

    def _run_chunks(
        self,
        shared: Shared,
        options: Sequence[MuonOptions | AdamWOptions],
        run: StepRun,
        meanwhile: Callable[[], None],
        rates: dict[int, Rate],
    ) -> None:
        """Chunk by chunk."""
        for per_group in (shared.chunks, shared.home):
            for group, chunks in zip(options, per_group, strict=True):
                for chunk in chunks:
                    if group.none_grad:
                        for part in parts_of(chunk):
                            run.remaining.update(part.params)

        def phases(chunks: Iterable[tuple[int, Any]]) -> Iterator[Any]:
            for number, chunk in chunks:
                group = options[number]
                if self.unreduced is None:
                    yield step_shared(chunk, number, rates[id(chunk)], group, run)
                    continue
                team, factor = self.unreduced.team, self.unreduced.factor
                if isinstance(chunk, SliceChunk):
                    yield step_slices(chunk, number, factor, group, run)
                elif isinstance(chunk, SmallChunk):
                    yield step_small(chunk, team, factor, options, run)
                else:
                    rate = rates[id(chunk)]
                    yield from step_bands(chunk, number, factor, rate, group, run)

        def other_work() -> None:
            meanwhile()
            run_pipeline(phases(in_turn(shared.home)))

        ahead = self.config.prefetch
        run_pipeline(phases(shared.order), ahead=ahead, meanwhile=other_work)

    def tell(self, shared: Shared) -> None:
        """Warn of what went wrong in a step without any harm to it, now that it is over."""
        shared.graphs.tell_failures()

    def hear(self) -> None:
        """Hear the last answer now, since state goes out.

        Raises:
            RuntimeError: it is bad, or a step went wrong and no state was loaded since.
        """
        self.check_unbroken()
        self._broken = True
        self._agreement.hear()
        self._broken = False

    def begin_writing(self) -> None:
        """From here on a step counts as failed, whatever may raise, until `end_writing`."""
        self._broken = True

    def end_writing(self) -> None:
        """All of a step was done."""
        self._broken = False

    def check_unbroken(self) -> None:
        """Raise RuntimeError if a step went wrong and no state was loaded since."""
        if self._broken:
            raise RuntimeError(
                "an earlier step failed midway, so that parameters and state may not fit together; "
                "load a state_dict of parameters and optimizer first. What asks for a state_dict "
                "to load into, as torch.distributed.checkpoint does, needs an optimizer that is "
                "constructed anew"
            )

    def note_refused_load(self) -> None:
        """A part of a state_dict was refused here, which others may have loaded: tell them.

        A collective here would wait for ranks that load nothing, or for one that has died.
        """
        self._refused, self._told = self._refused + 1, False

    def mend(self) -> None:
        """State was loaded: a failed step is forgotten.

        A refused state_dict is not, unless a step has told the other ranks: they may have loaded
        it, and this rank another one in its place.
        """
        self._broken = False
        self._agreement.forget()
        if self._told:
            self._refused, self._told = 0, False

    def _wire(self, matrices: Sequence[SharedMatrix], options: MuonOptions) -> torch.dtype:
        """float16 where the iteration would round to it or to bfloat16 anyway."""
        if self.config.wire_dtype is not None:
            return self.config.wire_dtype
        first = matrices[0]
        picked = choose(
            *first.matrix,
            dtype=first.dtype,
            device=first.param.device,
            steps=options.ns_steps,
            method=options.method,
            iterate_dtype=options.dtype,
        ).dtype
        return torch.float16 if picked in (torch.float16, torch.bfloat16) else torch.float32


def _rates(shared: Shared, options: Sequence[MuonOptions | AdamWOptions]) -> dict[int, Rate]:
    """id of a chunk of matrices -> its rate."""
    rates = {}
    for per_group in (shared.chunks, shared.home):
        for group, chunks in zip(options, per_group, strict=True):
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
        together = predicted_ms(
            m,
            n,
            COST_BATCH,
            dtype,
            device,
            steps=options.ns_steps,
            method=options.method,
            iterate_dtype=options.dtype,
        )
        return together / COST_BATCH

    return cost
