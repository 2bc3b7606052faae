"""Whether ranks that step together have the same options, layout and gradients.

Each rank sends a hash of its options with this step's exchange; the comparison is read before the
next step writes, so that no step waits for it. It is one all-reduce of as many numbers on every
rank, whatever its parameters and options are: also ranks that disagree about these understand each
other's.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ...distributed import Team, Transport, exchange, extremes
from ..groups.options import AdamWOptions, MuonOptions, option_names
from ..groups.parameters import is_dtensor
from .buffers import DistributedConfig, lasting
from .chunks import SmallChunk, parts_of

logger = logging.getLogger(__name__)

OWNERS = "owners, which follow from the kind of GPU"
DIGESTED = ("shapes, dtypes and placements", "clip_config", OWNERS)
# Fields of DistributedConfig that ranks may have apart.
APART = frozenset({"cuda_graphs", "timeout", "strict", "timeout_ms"})
# What decides the messages between ranks, beside the options of groups.
LAYOUT = (
    "gradients",
    "reduce_op",
    *(name for name in DistributedConfig.__dataclass_fields__ if name not in APART),
    "number of groups",
    "number of parameters",
    *DIGESTED,
)
OPTIONS = (*dict.fromkeys((*option_names(MuonOptions), *option_names(AdamWOptions))),)
NUMBERS = ("lr", "weight_decay")  # options that may be Tensors


@dataclass(eq=False)
class Common:
    """What the ranks of a team must have in common."""

    team: Team
    # Parameters that have gradients on all ranks or on none, and the numbers of their groups.
    labelled: list[tuple[str, Tensor]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    layout: Mapping[str, str] = field(default_factory=dict)  # LAYOUT -> as text, or a digest of it
    unreduced: bool = False  # the first gradients must not be equal on all ranks

    def add(self, number: int, where: str, param: Tensor) -> None:
        """A parameter of group `number`, which must have a gradient on all ranks or on none."""
        self.labelled.append((where, param))
        if number not in self.groups:
            self.groups = sorted([*self.groups, number])

    def describe(
        self,
        chunks: Sequence[Sequence[Any]],
        settings: Mapping[str, Any],
        *,
        unreduced: bool,
    ) -> None:
        """Note the layout of a plan: its chunks per group, and settings of names in LAYOUT."""
        found = {
            **settings,
            "number of groups": len(self.groups),
            "number of parameters": len(self.labelled),
            "shapes, dtypes and placements": [_form(param) for _, param in self.labelled],
            OWNERS: [*_owners(self.team, chunks)],
        }
        self.unreduced = unreduced
        self.layout = {
            name: str(word(str(found[name])) if name in DIGESTED else found[name])
            for name in LAYOUT
        }


def _form(param: Tensor) -> tuple[Any, ...]:
    placing: tuple[Any, ...] = ()
    if is_dtensor(param):
        placing = tuple(param.placements), tuple(param.device_mesh.shape)
    return tuple(param.shape), param.dtype, param.device.type, *placing


def _owners(team: Team, chunks: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
    """What travels in every chunk of a team: matrices, owners, dtype."""
    for chunk in itertools.chain.from_iterable(chunks):
        if isinstance(chunk, SmallChunk):
            yield len(chunk.params), chunk.dtype
        for part in parts_of(chunk):
            if part.team is team:
                yield part.matrix, part.owners, part.wire


Options = Sequence[MuonOptions | AdamWOptions]

# Which parameters have gradients, as bits: 62 in each of so many numbers, and one digest of all.
MASKS, BITS = 64, 62
REFUSED = "how many state_dicts were refused since the last step"
DROPPED = "how often gradients that had left in backward were made anew"
# Where a rank says that it has nothing to do in its first step but make its state (1, else 0), and
# where that its plan is new. In both ranks may differ.
INITIAL = len(LAYOUT) + len(OPTIONS) + len(NUMBERS) + 2
NEW = INITIAL + 1
# The comparison: a digest of each of these, the numbers in Tensors on the device, how many
# state_dicts were refused, how often gradients left in vain, INITIAL, NEW, the gradients.
NAMED = (*LAYOUT, *OPTIONS, *NUMBERS, REFUSED, DROPPED)
RULE = OPTIONS.index("adjust_lr_fn")


@dataclass(frozen=True, eq=False)
class Comparison:
    """The largest and smallest numbers of all ranks, of a device, and what they would mean."""

    found: Tensor  # (2, n), on the CPU once `ready`
    ready: Any  # None, or the event after the copy to the CPU
    meaning: Callable[[Tensor], None]

    def check(self) -> None:
        self.wait()
        self.meaning(self.found)

    def wait(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()


@dataclass(frozen=True, eq=False)
class _Meaning:
    """What it means that numbers of a comparison differ."""

    common: Common
    options: Options  # of this rank, when it asked
    refused: int

    def __call__(self, found: Tensor) -> None:
        if torch.equal(*found):
            return
        self.check_layout(found)
        if torch.equal(*found[:, NEW + 1 :]):
            return
        largest, smallest = (numbers[NEW + 2 :] for numbers in found.tolist())
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
        if name == DROPPED:
            return name
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


class _OwnNumbers:
    """What this rank has to say to a team: the same from step to step, but for what changed."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.device = common.labelled[0][1].device
        self.present: list[bool] = []
        # Per group what its options were, and their texts; a word per option of all of them.
        self._seen: list[Any] = [None] * len(common.groups)
        self._texts: list[dict[str, str]] = [{} for _ in common.groups]
        self._words = dict.fromkeys(OPTIONS, word(""))
        self._layout = [word(common.layout[name]) for name in LAYOUT]
        self._said: list[int] = []
        self._gradients: list[int] = []
        self._numbers = torch.empty(0)

    def numbers(
        self,
        options: Options,
        fingerprints: Sequence[Any],
        rates: Sequence[float] | None,
        *flags: int,  # how often state was refused and gradients left in vain, INITIAL, NEW
    ) -> Tensor:
        """int64, on the device."""
        present = [param.grad is not None for _, param in self.common.labelled]
        if present != self.present:
            self.present, self._gradients = present, _bits(present)
        words = self._renew(options, fingerprints)
        if rates is not None:
            words[RULE] = word(f"{words[RULE]} {rates}")
        saying = [*self._layout, *words, *(0 for _ in NUMBERS), *flags, *self._gradients]
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

    def _renew(self, options: Options, fingerprints: Sequence[Any]) -> list[int]:
        """The words for the options of all groups as they are now: those that changed are new."""
        changed: set[str] = set()
        for k, number in enumerate(self.common.groups):
            group, texts = options[number], self._texts[k]
            rates = [value for value in (group.lr, group.weight_decay) if isinstance(value, Tensor)]
            # Numbers in Tensors of the host change without a new fingerprint.
            read = [value.item() for value in rates if not is_on_device(value)]
            seen, before = (*fingerprints[number], read), self._seen[k]
            if seen == before:
                continue
            names = option_names(type(group))
            if before is not None and before[0] == seen[0]:  # of the same types
                pairs = zip(names, seen[1], before[1], strict=True)
                names = (*NUMBERS, *(name for name, now, then in pairs if now != then))
            for name in names:
                text = canonical(name, getattr(group, name))
                if texts.get(name) != text:
                    texts[name] = text
                    changed.add(name)
            self._seen[k] = seen
        for name in changed:
            self._words[name] = word("; ".join(texts.get(name, "") for texts in self._texts))
        return [*self._words.values()]


class Consistency:
    """Whether the ranks of an optimizer agree, and whether its last step was a whole one."""

    def __init__(self) -> None:
        self._broken = False
        self._refused = 0  # state_dicts, since ranks agreed that it was as many on all of them
        self._told = False  # the other ranks, of the last of those
        self._asked: list[Comparison] = []
        self._own: dict[int, _OwnNumbers] = {}
        self._compared = False  # the gradients themselves
        self._transports: list[Transport] = []  # that the last step used

    def begin_plan(self) -> None:
        """Teams are numbered anew."""
        self._own = {}

    def compare(
        self,
        teams: Sequence[Common],
        options: Options,
        fingerprints: Sequence[Any],
        rates: Sequence[Sequence[float] | None],
        *,
        initial: bool,
        new: bool,
        dropped: int = 0,
    ) -> tuple[bool, list[bool]]:
        """Compare options and gradients of all ranks, and read the last comparison.

        On the CPU the answer is waited for. On a device it is read at the next call, so that no
        step waits for it, but where the plan is `new`: nothing was chosen yet for its messages,
        which must have one layout. `initial`: this rank has nothing to do but make its state.

        Returns:
            Whether all ranks are `initial`; and per team, if this rank's plan is `new`, whether
            that of every rank is.

        Raises:
            RuntimeError: they differ.
        """
        self._check_arrivals()
        flags = self._refused, dropped, initial, new
        comparisons = self._ask(teams, options, fingerprints, rates, flags)
        self._told = True
        self._read()
        everywhere = self._settle(comparisons, initial, new)
        self._refused = 0
        return everywhere, [bool(one.found[1, NEW]) for one in comparisons] if new else []

    def check(self) -> None:
        """Read the last comparison now, since state goes out; RuntimeError as of `step`."""
        self.check_unbroken()
        self._read()

    def begin_writing(self, transports: Sequence[Transport] = ()) -> None:
        """From here on a step counts as failed, whatever may raise, until `end_writing`.

        `transports`: that it uses, of which the next step asks whether all has arrived.
        """
        self._broken, self._transports = True, [*transports]

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
        self._broken, self._asked, self._transports = False, [], []
        if self._told:
            self._refused, self._told = 0, False

    def _read(self) -> None:
        """Wait for the comparisons that are on their way. A bad one leaves a broken step."""
        self._check_arrivals()
        asked, self._asked = self._asked, []
        self._broken = True
        for comparison in asked:
            comparison.check()
        self._broken = False

    def _check_arrivals(self) -> None:
        """Wait until the messages of the last step are there. One that is not leaves it broken.

        Before anything else is asked of ranks that may be gone.
        """
        transports, self._transports = self._transports, []
        broken, self._broken = self._broken, True
        for transport in transports:
            transport.check()
        self._broken = broken

    def _ask(
        self,
        teams: Sequence[Common],
        options: Options,
        fingerprints: Sequence[Any],
        rates: Sequence[Sequence[float] | None],
        flags: Sequence[int],
    ) -> list[Comparison]:
        """Send what this rank has to every team."""
        comparisons = []
        for number, common in enumerate(teams):
            if number not in self._own:
                self._own[number] = _OwnNumbers(common)
            own = self._own[number]
            numbers = own.numbers(options, fingerprints, rates[number], *flags)
            found = extremes(common.team.transport, numbers)
            meaning = _Meaning(common, options, self._refused)
            comparisons.append(_comparison(found, own.device, meaning))
        return comparisons

    def _settle(self, comparisons: Sequence[Comparison], initial: bool, new: bool) -> bool:
        """Read the comparisons that a step must not go on without; the others are read later.

        On the CPU that is all of them. On a device it is, where the plan is new, whether ranks have
        the same layout and options, and everything before gradients are compared. Returns whether
        all ranks are `initial`. If one of them is bad, none is read later: this step writes
        nothing.
        """
        later: list[Comparison] = []
        compared = self._compared
        for number, comparison in enumerate(comparisons):
            own = self._own[number]
            if new and comparison.ready is not None:
                comparison.wait()
                comparison.meaning.check_layout(comparison.found)
            if initial:
                comparison.wait()
                initial = bool(comparison.found[1, INITIAL])
            # Zeros that every rank made for itself say nothing about who reduces gradients.
            compares = own.common.unreduced and not self._compared and not initial
            later += _pending(comparison, now=compares)
            if compares and any(own.present):
                later += _pending(_compare_gradients(own))
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


def _pending(comparison: Comparison, *, now: bool = False) -> list[Comparison]:
    """The comparison, if it is to be read later: not on the CPU, and not where `now`."""
    if now or comparison.ready is None:
        comparison.check()
        return []
    return [comparison]


def _comparison(
    found: Tensor, device: torch.device, meaning: Callable[[Tensor], None]
) -> Comparison:
    if device.type == "cpu":
        return Comparison(found, None, meaning)
    there = torch.empty_like(found, device="cpu", pin_memory=True)
    there.copy_(found, non_blocking=True)
    ready = torch.get_device_module(device).Event()
    ready.record()
    return Comparison(there, ready, meaning)


def _compare_gradients(own: _OwnNumbers) -> Comparison:
    """Ask whether the gradients of the first step that has any are equal, bit for bit."""
    labelled, device = own.common.labelled, own.device
    sums = torch.stack([checksum(param.grad, device) for _, param in labelled])
    return _comparison(extremes(own.common.team.transport, sums), device, _not_yet_reduced)


def _bits(present: Sequence[bool]) -> list[int]:
    """Which parameters have gradients: a digest, and the bits themselves."""
    masks = [0] * MASKS
    for number, here in enumerate(present):
        if here:
            masks[number % MASKS] ^= 1 << number // MASKS % BITS
    return [word(str(present)), *masks]


def _not_yet_reduced(found: Tensor) -> None:
    # Gradients of zeros or without elements are equal whether something reduces them or not.
    if torch.equal(*found) and found.any():
        raise RuntimeError(
            "gradients='unreduced', but every rank has the same gradients, bit for bit: "
            "something reduces them already (DistributedDataParallel does; then use "
            "gradients='reduced'), or all ranks read the same data"
        )


def word(text: str) -> int:
    """A number in [0, 2^63), whose negative fits into an int64 too."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def canonical(option: str, value: Any) -> str:
    """One text for all values of an option that mean the same, such as 1, 1.0 and np.int64(1).

    Of a Tensor on a device it has the form, and of a function that it is one.
    """
    kind = type(value)
    if kind is float:
        return str(int(value)) if value.is_integer() else value.hex()
    if kind is str or kind is bool or value is None:
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.dtype} {'on a device' if is_on_device(value) else value.item()}"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return canonical(option, float(value))
    if isinstance(value, Mapping):
        entries = ((str(name), canonical(option, entry)) for name, entry in value.items())
        return str(sorted(entries))
    if isinstance(value, Sequence):
        entries = [canonical(option, entry) for entry in value]
        # A set was given, perhaps, whose order differs between processes.
        return str(sorted(entries) if option == "expert_keys" else entries)
    return "a function" if callable(value) else str(value)


def is_on_device(value: Any) -> bool:
    """Whether a value is a Tensor that the host cannot read without waiting."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def on_device(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The bits of some numbers folded into one, by their device: 0-D int64."""
    wide = torch.stack([t.detach().reshape(()).to(device, torch.float64) for t in tensors])
    odd = torch.arange(1, 2 * len(tensors), 2, device=device)  # so that their order counts
    return (wide.view(torch.int64) * odd).sum()


def compare_replicas(
    groups: Sequence[Sequence[tuple[str, Tensor]]],
    number: int,
    timeout: float,
    process_group: Any = None,
) -> bool:
    """Compare the gradients of this rank with those of ranks that hold the same parameters.

    Replicas are ranks whose plain parameters are equal, bit for bit, at their first step. Others
    are no business of this one, unless they are in its `process_group`, whose ranks must be
    replicas; nor are ranks that do not step an optimizer of this kind. There
    is no collective: a rank that never comes is not waited for longer than `timeout`, and one that
    comes after that does not count: it is told what the others found.

    Args:
        groups: (name for messages, parameter) of all groups.
        number: of the optimizer, as on the ranks that hold the same one.
        timeout: in seconds.
        process_group: whose ranks share the work; None where each steps by itself.

    Returns:
        Whether there is nothing more to compare; there is as long as no replica has a gradient.

    Raises:
        RuntimeError: parameters differ in `process_group`, or gradients of replicas do.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    params = [param for named in groups for _, param in named if not is_dtensor(param)]
    if not params or distributed.get_world_size() == 1:
        return True
    captured = any(param.is_cuda for param in params) and torch.cuda.is_current_stream_capturing()
    if captured:
        return False
    forms = [(tuple(param.shape), param.dtype) for param in params]
    own = " ".join(
        str(word(str(said)))
        for said in (forms, _sums(params), _sums([param.grad for param in params]))
    )
    try:
        found = exchange(f"optimizer/gradients/{number}", own, timedelta(seconds=timeout))
    except RuntimeError as error:
        logger.warning(
            "MuonAdamW was not told whether gradients are reduced, and the ranks could not be "
            "asked whether theirs are equal (%s); pass gradients='reduced' or 'unreduced'",
            error,
        )
        return True
    complete = len(found) == distributed.get_world_size()
    if not complete:
        logger.warning(
            "MuonAdamW was not told whether gradients are reduced, and only ranks %s stepped one "
            "within %g s, so others were not asked; pass gradients='reduced' or 'unreduced'",
            sorted(found),
            timeout,
        )
    held = {rank: tuple(other.split()[:2]) for rank, other in found.items()}
    ranks = [] if process_group is None else distributed.get_process_group_ranks(process_group)
    together = [rank for rank in ranks if rank in held]
    # Ranks with other shapes or numbers of parameters hear more from the comparison of layouts.
    if len({held[rank][0] for rank in together}) < len({held[rank] for rank in together}):
        raise RuntimeError(
            f"ranks {', '.join(map(str, together))} of process_group hold different parameters, "
            "though they share the work on replicas: each would take updates that another one "
            "made from its own gradients. Broadcast the parameters of one rank to the others "
            "before step(), as DistributedDataParallel does, which also reduces the gradients; or "
            "leave process_group out if each rank trains on its own"
        )
    replicas = [rank for rank, other in held.items() if other == tuple(own.split()[:2])]
    if len({found[rank] for rank in replicas}) > 1:  # this one may have come too late to count
        raise RuntimeError(
            f"ranks {', '.join(map(str, replicas))} hold the same parameters with different "
            "gradients, which nothing has reduced: the replicas would drift apart. Pass "
            "gradients='unreduced' to MuonAdamW, which then reduces them; or reduce them before "
            "step(), as DistributedDataParallel does; or pass gradients='reduced' if each rank "
            "trains on its own"
        )
    return not complete or any(param.grad is not None for param in params)


def _sums(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Checksums of the bits of tensors; it waits for their devices."""
    sums = [None if tensor is None else checksum(tensor, tensor.device) for tensor in tensors]
    return [None if found is None else int(found.item()) for found in sums]
