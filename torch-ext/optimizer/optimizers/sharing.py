"""An optimizer's dealings with other ranks: which parameters are shared, do all agree, the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import Future, Team, Teams, agreement, alone, run_pipeline
from ..orthogonalize.choose import choose, flop
from .blocks import Blocks
from .options import AdamWOptions, MuonOptions
from .parameters import is_dtensor
from .rounding import check_rounding
from .shared import (
    AHEAD,
    Shared,
    SharedGroup,
    SharedMatrix,
    layout_on,
    local_blocks,
    matrices_of,
    plan_shared,
)
from .shared_step import step_shared
from .update import Rate, rate_of

WIRE_DTYPES = (None, torch.float32, torch.float16)


@dataclass(frozen=True, eq=False)
class _Question:
    """Whether all ranks have the same gradients, asked of a device."""

    labelled: list[tuple[str, Tensor]]
    different: Tensor  # (parameters,) bool, on the CPU once `ready`
    ready: Any  # None, or the event after the copy to the CPU

    def check(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()
        if not self.different.any():
            return
        names = [
            where
            for (where, _), differs in zip(self.labelled, self.different.tolist(), strict=True)
            if differs
        ]
        raise RuntimeError(
            f"ranks disagree on which parameters have gradients: {'; '.join(names)}. Give zeros "
            "where a rank has none, or none on any rank, and load a state_dict before going on"
        )


class Sharing:
    """Made once per optimizer; plans are made anew when groups change."""

    def __init__(self, process_group: Any = None, wire_dtype: torch.dtype | None = None) -> None:
        if wire_dtype not in WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype must be None, torch.float32 or torch.float16, got {wire_dtype!r}"
            )
        self.wire_dtype = wire_dtype
        self._group = process_group
        self._teams = Teams()
        self._of_group: Team | None = None
        self._asked: list[_Question] = []
        self._presence: dict[int, tuple[list[int], Tensor]] = {}
        self._broken = False

    def __reduce__(self) -> Any:
        return Sharing, (self._group, self.wire_dtype)

    def __deepcopy__(self, memo: Any) -> Sharing:
        return Sharing(self._group, self.wire_dtype)  # a copy talks over the same group

    def team_of(self, param: Tensor) -> Team | None:
        """The ranks that share the work on a parameter; None if this process has it alone."""
        if is_dtensor(param):
            return self._teams.of_mesh(param.device_mesh)
        if self._of_group is None and self._group is not None:
            self._of_group = self._teams.of_group(self._group)
        if self._of_group is None and self.wire_dtype == torch.float16:
            self._of_group = alone()
        return self._of_group

    def divide(
        self,
        entries: Sequence[tuple[int, str, Tensor, Blocks]],  # number in the optimizer, label, ...
        options: MuonOptions,
        number: int,
    ) -> tuple[list[tuple[int, Tensor, Blocks]], list[SharedGroup]]:
        """The parameters of a group that this rank steps by itself, and the shared ones.

        Raises:
            ValueError: this combination of options and placements is not supported.
        """
        own: list[tuple[int, Tensor, Blocks]] = []
        shared: dict[int, tuple[Team, list[SharedMatrix]]] = {}
        for position, where, param, blocks in entries:
            team = self.team_of(param)
            if team is None:
                own.append((position, param, blocks))
                continue
            layout = layout_on(param, team)
            kept_here = local_blocks(blocks, layout, team)
            if kept_here is not None and self.wire_dtype != torch.float16:
                if kept_here.experts != 0:  # the shard of a stack may be empty
                    own.append((position, param, kept_here))
                continue
            check_rounding(options, param, where)
            matrices = matrices_of(param, where, blocks, layout, team)
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

    def plan(self, groups: Sequence[SharedGroup], count: int) -> Shared:
        """Owners and chunks; `count` is the number of parameter groups."""
        self._presence = {}
        return plan_shared(groups, count)

    def ask(self, shared: Shared) -> None:
        """Ask all ranks whether they have the same gradients, and hear the last answer.

        On the CPU the answer is waited for. On a device it is heard at the next call, so that no
        step waits for it.

        Raises:
            RuntimeError: they differ, or a step failed and no state was loaded since.
        """
        if self._broken:
            raise RuntimeError(
                "an earlier step failed midway, so that parameters and state may not fit together; "
                "load a state_dict of parameters and optimizer first"
            )
        heard, self._asked = self._asked, []
        for number, (team, labelled) in enumerate(shared.teams):
            device = labelled[0][1].device
            values = [int(param.grad is not None) for _, param in labelled]
            if self._presence.get(number, (None, None))[0] != values:
                self._presence[number] = (values, torch.tensor(values).to(device))
            future = agreement(team.transport, self._presence[number][1])
            self._asked.append(_question(labelled, future, device))
        now = [question for question in self._asked if question.ready is None]
        self._asked = [question for question in self._asked if question.ready is not None]
        for question in now:
            question.check()
        self._broken = True
        for question in heard:
            question.check()
        self._broken = False

    def step(
        self,
        shared: Shared,
        options: Sequence[MuonOptions | AdamWOptions],
        params_of_groups: Sequence[Sequence[Tensor]],
        state: Any,
        meanwhile: Callable[[], None],
    ) -> None:
        """Step the shared matrices, with everything else under their first gathers."""
        rates: dict[int, Rate] = {}
        remaining: Counter[Tensor] = Counter()
        for per_group in (shared.chunks, shared.home):
            for group, chunks in zip(options, per_group, strict=True):
                for chunk in chunks:
                    rates[id(chunk)] = rate_of(group, *chunk.matrix, chunk.device)
                    remaining.update(chunk.params)

        def phases(per_group: Any) -> Any:
            for group, chunks in zip(options, per_group, strict=True):
                for chunk in chunks:
                    yield step_shared(chunk, rates[id(chunk)], group, state, remaining)

        def under_the_first_gathers() -> None:
            meanwhile()
            run_pipeline(phases(shared.home))

        self._broken = bool(shared.teams)
        run_pipeline(phases(shared.chunks), ahead=AHEAD, meanwhile=under_the_first_gathers)
        for number, params in enumerate(params_of_groups):
            if options[number].none_grad:  # also where this rank had nothing to do for them
                for param in params:
                    if is_dtensor(param) or self._group is not None:
                        param.grad = None
        self._broken = False

    def mend(self) -> None:
        """State was loaded: a failed step is forgotten."""
        self._broken = False
        self._asked = []

    def _wire(self, matrices: Sequence[SharedMatrix], options: MuonOptions) -> torch.dtype:
        """float16 where the iteration would round to it or to bfloat16 anyway."""
        if self.wire_dtype is not None:
            return self.wire_dtype
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


def _question(labelled: Any, future: Future, device: torch.device) -> _Question:
    different = future.wait()
    if device.type == "cpu":
        return _Question(labelled, different, None)
    there = torch.empty_like(different, device="cpu", pin_memory=True)
    there.copy_(different, non_blocking=True)
    ready = torch.get_device_module(device).Event()
    ready.record()
    return _Question(labelled, there, ready)


def _cost(options: MuonOptions) -> Callable[[int, int, torch.dtype, torch.device], float]:
    def cost(m: int, n: int, dtype: torch.dtype, device: torch.device) -> float:
        choice = choose(
            m,
            n,
            dtype=dtype,
            device=device,
            steps=options.ns_steps,
            method=options.method,
            iterate_dtype=options.dtype,
        )
        return float(
            flop(
                choice.method,
                m,
                n,
                steps=options.ns_steps,
                restarts=choice.restarts,
                symmetric=False,
            )
        )

    return cost
