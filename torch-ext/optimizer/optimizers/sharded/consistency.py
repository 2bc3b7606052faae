"""Whether ranks that step together go by the same: asked in a step, heard in the next.

The question is one all-reduce of as many numbers on every rank, whatever its parameters and options
are: also ranks that disagree about these understand each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distributed import Future, extremes
from ..groups.options import AdamWOptions, MuonOptions
from .buffers import lasting
from .digest import NUMBERS, OPTIONS, OptionWords, is_on_device, on_device, word
from .shared_matrices import DIGESTED, LAYOUT, OWNERS, Common

Options = Sequence[MuonOptions | AdamWOptions]

# Which parameters have gradients, as bits: 62 in each of so many numbers, and one digest of all.
MASKS, BITS = 64, 62
REFUSED = "how many state_dicts were refused since the last step"
# 1 where a rank has nothing to do in its first step but make its state: ranks may differ in it.
INITIAL = len(LAYOUT) + len(OPTIONS) + len(NUMBERS) + 1
# The question: a digest of each of these, the numbers in Tensors on the device, how many
# state_dicts were refused, INITIAL, the gradients.
NAMED = (*LAYOUT, *OPTIONS, *NUMBERS, REFUSED)
RULE = OPTIONS.index("adjust_lr_fn")


@dataclass(frozen=True, eq=False)
class Question:
    """The largest and smallest numbers of all ranks, of a device, and what they would mean."""

    found: Tensor  # (2, n), on the CPU once `ready`
    ready: Any  # None, or the event after the copy to the CPU
    verdict: Callable[[Tensor], None]

    def check(self) -> None:
        self.wait()
        self.verdict(self.found)

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()


@dataclass(frozen=True, eq=False)
class _Verdict:
    """What it means that numbers of a question differ."""

    common: Common
    options: Options  # of this rank, when it asked
    refused: int

    def __call__(self, found: Tensor) -> None:
        if torch.equal(*found):
            return
        self.check_layout(found)
        if torch.equal(*found[:, INITIAL + 1 :]):
            return
        largest, smallest = (numbers[INITIAL + 2 :] for numbers in found.tolist())
        places = {
            mask + bit * MASKS
            for mask, (one, other) in enumerate(zip(largest, smallest, strict=True))
            for bit in range(BITS)
            if (one ^ other) >> bit & 1
        }
        names = [where for where, _ in self.common.labelled]
        which = [name for k, name in enumerate(names) if k % (MASKS * BITS) in places]
        named = "; ".join(which) or "some of very many"
        raise RuntimeError(
            f"ranks disagree on which parameters have gradients: {named}. Give zeros "
            "where a rank has none, or none on any rank, and load a state_dict before going on"
        )

    def check_layout(self, found: Tensor) -> None:
        """Raise if it is more than which parameters have gradients."""
        different = (found[0] != found[1]).tolist()
        which = dict.fromkeys(n for n, d in zip(NAMED, different, strict=False) if d)
        if len(which) > 1:  # from which owners follow
            which.pop(OWNERS, None)
        if which:
            raise RuntimeError(
                f"ranks disagree on {'; '.join(map(self._own, which))}. Give the optimizer the "
                "same parameters and options on every rank, and load a state_dict before going on"
            )

    def _own(self, name: str) -> str:
        """What differs, and what it is here."""
        if name == REFUSED:
            return f"{name} (here {self.refused})"
        if name in LAYOUT:
            return name if name in DIGESTED else f"{name} (here {self.common.layout[name]})"
        groups = [(k, self.options[k]) for k in self.common.groups]
        own = [
            f"{_shown(getattr(group, name))} in group {k}"
            for k, group in groups
            if hasattr(group, name)
        ]
        return f"{name} (here {', '.join(own) or 'none'})"


def _shown(value: Any) -> str:
    """A value of an option without waiting for a device."""
    if is_on_device(value):
        return f"a Tensor on {value.device}"
    return repr(value)


class _Sheet:
    """What this rank has to say to a team: the same from step to step, but for what changed."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.device = common.labelled[0][1].device
        self.present: list[bool] = []
        self.unheard = True  # no answer was read since the plan was made
        self._options = OptionWords(common.groups)
        self._layout = [word(common.layout[name]) for name in LAYOUT]
        self._said: list[int] = []
        self._gradients: list[int] = []
        self._numbers = torch.empty(0)

    def numbers(
        self,
        options: Options,
        fingerprints: Sequence[Any],
        rates: Sequence[float] | None,
        refused: int,
        initial: bool,
    ) -> Tensor:
        """int64, on the device."""
        present = [param.grad is not None for _, param in self.common.labelled]
        if present != self.present:
            self.present, self._gradients = present, _bits(present)
        words = self._options.renew(options, fingerprints)
        if rates is not None:
            words[RULE] = word(f"{words[RULE]} {rates}")
        saying = [*self._layout, *words, *(0 for _ in NUMBERS), refused, initial, *self._gradients]
        if saying != self._said:
            with lasting():
                pinned = self.device.type == "cuda"
                numbers = torch.tensor(saying, dtype=torch.int64, pin_memory=pinned)
                self._numbers = numbers.to(self.device, non_blocking=True)
            self._said = saying
        for place, name in enumerate(NUMBERS, len(LAYOUT) + len(OPTIONS)):
            values = [getattr(options[k], name) for k in self.common.groups]
            there = [value for value in values if is_on_device(value)]
            if there:
                self._numbers[place].copy_(on_device(there, self.device))
        return self._numbers


class Agreement:
    """The questions of an optimizer."""

    def __init__(self) -> None:
        self._asked: list[Question] = []
        self._sheets: dict[int, _Sheet] = {}
        self._compared = False  # the gradients themselves

    def begin_plan(self) -> None:
        """Teams are numbered anew."""
        self._sheets = {}

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

    def ask(
        self,
        teams: Sequence[Common],
        options: Options,
        fingerprints: Sequence[Any],
        rates: Sequence[Sequence[float] | None],
        *,
        refused: int = 0,
        initial: bool = False,
    ) -> list[Question]:
        """Ask every team whether its ranks have the same layout, options and gradients.

        Args:
            teams: of a plan.
            options: of all groups.
            fingerprints: of these.
            rates: per team what functions in adjust_lr_fn returned, if there are any.
            refused: how many state_dicts this rank has refused.
            initial: it has nothing to do but make its state.
        """
        questions = []
        for number, common in enumerate(teams):
            if number not in self._sheets:
                self._sheets[number] = _Sheet(common)
            sheet = self._sheets[number]
            numbers = sheet.numbers(options, fingerprints, rates[number], refused, initial)
            future = extremes(common.team.transport, numbers)
            questions.append(_question(future, sheet.device, _Verdict(common, options, refused)))
        return questions

    def settle(self, questions: Sequence[Question], *, initial: bool = False) -> bool:
        """Hear the answers that a step must not go on without; the others are heard later.

        On the CPU that is all of them. On a device it is, when a plan is new, whether ranks have
        the same layout and options, and everything before gradients are compared.

        Returns:
            Whether all ranks are `initial`.

        Raises:
            RuntimeError: one of them is bad. Then none is heard later: this step writes nothing.
        """
        later: list[Question] = []
        compared = self._compared
        for number, question in enumerate(questions):
            sheet = self._sheets[number]
            if sheet.unheard and question.ready is not None:
                question.wait()
                question.verdict.check_layout(question.found)
            sheet.unheard = False
            if initial:
                question.wait()
                initial = bool(question.found[1, INITIAL])
            # Zeros that every rank made for itself say nothing about who reduces gradients.
            compares = sheet.common.alike is not None and not self._compared and not initial
            later += _unheard(question, now=compares)
            if compares and any(sheet.present):
                later += _unheard(_compare_gradients(sheet))
                compared = True
        self._compared = compared
        self._asked += later
        return initial


def check_not_captured(devices: Iterable[torch.device]) -> None:
    """Raise RuntimeError if the caller captures what is queued on one of the devices."""
    for device in devices:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step of parameters that several ranks share cannot be captured in a CUDA graph: "
                "whether the ranks have the same gradients is read on the host; capture the rest, "
                "and call step() between replays (it replays graphs of its own)"
            )


def checksum(tensor: Tensor | None, device: torch.device) -> Tensor:
    """The sum of a tensor's bits; 0 without one."""
    if tensor is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().contiguous().reshape(-1).view(words).sum(dtype=torch.int64)


def _unheard(question: Question, *, now: bool = False) -> list[Question]:
    """The question, if its answer is to be heard later: not on the CPU, and not where `now`."""
    if now or question.ready is None:
        question.check()
        return []
    return [question]


def _question(future: Future, device: torch.device, verdict: Callable[[Tensor], None]) -> Question:
    found = future.wait()
    if device.type == "cpu":
        return Question(found, None, verdict)
    there = torch.empty_like(found, device="cpu", pin_memory=True)
    there.copy_(found, non_blocking=True)
    ready = torch.get_device_module(device).Event()
    ready.record()
    return Question(there, ready, verdict)


def _compare_gradients(sheet: _Sheet) -> Question:
    """Ask whether the gradients of the first step that has any are equal, bit for bit."""
    labelled, device = sheet.common.labelled, sheet.device
    sums = torch.stack([checksum(param.grad, device) for _, param in labelled])
    verdict = _reduced if sheet.common.alike else _not_yet_reduced
    return _question(extremes(sheet.common.team.transport, sums), device, verdict)


def _bits(present: Sequence[bool]) -> list[int]:
    """Which parameters have gradients: a digest, and the bits themselves."""
    masks = [0] * MASKS
    for number, here in enumerate(present):
        if here:
            masks[number % MASKS] ^= 1 << number // MASKS % BITS
    return [word(str(present)), *masks]


def _not_yet_reduced(found: Tensor) -> None:
    if torch.equal(*found):
        raise RuntimeError(
            "gradients='unreduced', but every rank has the same gradients, bit for bit: "
            "something reduces them already (DistributedDataParallel does; then use "
            "gradients='reduced'), or all ranks read the same data"
        )


def _reduced(found: Tensor) -> None:
    if not torch.equal(*found):
        raise RuntimeError(
            "the ranks of process_group have different gradients, which nothing has reduced: the "
            "replicas would drift apart. Pass gradients='unreduced' to MuonAdamW, which then "
            "reduces them, or reduce them before step(), as DistributedDataParallel does"
        )
