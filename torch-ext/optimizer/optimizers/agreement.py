"""Whether ranks that step together have the same gradients: asked in a step, heard in the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import Future, Team, agreement
from .staging import lasting


@dataclass(frozen=True, eq=False)
class Question:
    """Which numbers differ between the ranks, asked of a device, and what that would mean."""

    different: Tensor  # bool, on the CPU once `ready`
    ready: Any  # None, or the event after the copy to the CPU
    verdict: Callable[[Tensor], None]

    def check(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()
        self.verdict(self.different)


class Agreement:
    """The questions of an optimizer.

    Args:
        unreduced: gradients that are equal on all ranks were reduced by mistake.
    """

    def __init__(self, unreduced: bool) -> None:
        self._unreduced = unreduced
        self._asked: list[Question] = []
        self._presence: dict[int, tuple[list[int], Tensor]] = {}
        self._doubted = False

    def begin_plan(self) -> None:
        """Teams are numbered anew."""
        self._presence = {}

    def forget(self) -> None:
        """Nobody wants to hear an answer any more."""
        self._asked = []

    def hear(self) -> None:
        """Wait for the answers that are on their way.

        Raises:
            RuntimeError: one of them is bad.
        """
        asked, self._asked = self._asked, []
        for question in asked:
            question.check()

    def ask(self, teams: Sequence[tuple[Team, Sequence[tuple[str, Tensor]]]]) -> Sequence[Question]:
        """Ask about the labelled parameters of every team.

        On the CPU the answer is waited for. On a device it is to be heard at the next call, but
        for that of unreduced gradients until there are some.

        Returns:
            The questions of the last call.

        Raises:
            RuntimeError: a bad answer that was waited for.
        """
        heard, self._asked = self._asked, []
        for number, (team, labelled) in enumerate(teams):
            device = labelled[0][1].device
            values = [int(param.grad is not None) for _, param in labelled]
            if self._presence.get(number, (None, None))[0] != values:
                with lasting():
                    self._presence[number] = (values, torch.tensor(values).to(device))
            future = agreement(team.transport, self._presence[number][1])
            presence = _question(future, device, _same_presence(labelled))
            if not self._unreduced or self._doubted:
                self._asked.append(presence)
                continue
            # Waited for, until there are gradients for the first time: what is asked next hangs on
            # it, on all ranks alike.
            presence.check()
            if any(values):
                sums = torch.stack([_checksum(param.grad, device) for _, param in labelled])
                future = agreement(team.transport, sums)
                self._asked.append(_question(future, device, _not_yet_reduced))
                self._doubted = True
        now = [question for question in self._asked if question.ready is None]
        self._asked = [question for question in self._asked if question.ready is not None]
        for question in now:
            question.check()
        return heard


def check_not_captured(devices: Iterable[torch.device]) -> None:
    """Raise RuntimeError if the caller captures what is queued on one of the devices."""
    for device in devices:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step of parameters that several ranks share cannot be captured in a CUDA graph: "
                "whether the ranks have the same gradients is read on the host; capture the rest, "
                "and call step() between replays (it replays graphs of its own)"
            )


def _question(future: Future, device: torch.device, verdict: Callable[[Tensor], None]) -> Question:
    different = future.wait()
    if device.type == "cpu":
        return Question(different, None, verdict)
    there = torch.empty_like(different, device="cpu", pin_memory=True)
    there.copy_(different, non_blocking=True)
    ready = torch.get_device_module(device).Event()
    ready.record()
    return Question(there, ready, verdict)


def _same_presence(labelled: Sequence[tuple[str, Tensor]]) -> Callable[[Tensor], None]:
    names = [where for where, _ in labelled]

    def verdict(different: Tensor) -> None:
        if not different.any():
            return
        which = [name for name, differs in zip(names, different.tolist(), strict=True) if differs]
        raise RuntimeError(
            f"ranks disagree on which parameters have gradients: {'; '.join(which)}. Give zeros "
            "where a rank has none, or none on any rank, and load a state_dict before going on"
        )

    return verdict


def _not_yet_reduced(different: Tensor) -> None:
    if not different.any():
        raise RuntimeError(
            "gradients='unreduced', but every rank has the same gradients, bit for bit: "
            "something reduces them already (DistributedDataParallel does; then use "
            "gradients='reduced'), or all ranks read the same data"
        )


def _checksum(grad: Tensor | None, device: torch.device) -> Tensor:
    """The sum of a gradient's bits; 0 without one."""
    if grad is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[grad.dtype.itemsize]
    return grad.detach().contiguous().reshape(-1).view(words).sum(dtype=torch.int64)
