"""What a step works through: batches, and the state and tensors they were made for.

Matrices of a group that have one shape come in batches of bounded size, the unit of work of a step.
A step of hundreds of parameters must not call Python once per parameter: what tensors looked like
when the plan was made is compared in a few passes over lists by functions of C.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.step.tensor_lists import MAX_DIMS
from ..orthogonalize.arguments import default_dtype
from ..orthogonalize.slices import slice_for
from .groups.blocks import Blocks, Piece, equal_share
from .groups.options import FLOATING
from .groups.parameters import check_gradient, is_dtensor, is_plain, local, locals_of

if TYPE_CHECKING:
    from .qk_clip import Batch
    from .sharded.chunks import Held, SharedChunk
    from .sharded.shared_plan import Shared

# Upper bound of one batch of directions. At 256 MiB a 4096 x 14336 float32 matrix is alone, and
# 2048 x 2048 ones come sixteen at a time.
BATCH_BYTES = 256 * 2**20
# Upper bound of what a step needs at once beyond the state, unless one matrix needs more: a batch,
# the same orthogonalized, and what the iteration works in.
STEP_BYTES = 768 * 2**20

_form = operator.attrgetter("shape", "dtype", "device", "layout")
_grad = operator.attrgetter("grad")
# Of a DTensor, as its properties of these names give them, without a call of Python for each.
_placing = operator.attrgetter("_spec.placements", "_spec.mesh")


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; `==` would compare tensors by their elements."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclass(frozen=True, eq=False)
class GroupTensors:
    """The parameters of a group, and what they and their gradients are compared with."""

    named: list[tuple[str, Tensor]]  # (name for messages, parameter)
    params: list[Tensor]
    kinds: list[type]
    forms: list[tuple[Any, ...]]  # shape, dtype, device, layout
    devices: frozenset[torch.device]
    placements: list[tuple[Any, ...]]  # of those that are not plain
    usual: bool  # all are plain, dense and of a supported dtype
    placed: bool  # all are DTensors of a supported dtype

    @classmethod
    def of(cls, named: list[tuple[str, Tensor]]) -> GroupTensors:
        params = [param for _, param in named]
        return cls(
            named=named,
            params=params,
            kinds=[*map(type, params)],
            forms=[*map(_form, params)],
            devices=frozenset(param.device for param in params),
            placements=_placements(params),
            usual=all(
                is_plain(param) and param.layout is torch.strided and param.dtype in FLOATING
                for param in params
            ),
            placed=all(is_dtensor(param) and param.dtype in FLOATING for param in params),
        )

    def hold(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters, and still look as they did."""
        return (
            same_objects(params, self.params)
            and [*map(type, params)] == self.kinds
            and [*map(_form, params)] == self.forms
            and (self.usual or _placements(params) == self.placements)
        )

    def check_gradients(self) -> bool:
        """`check_gradient` of every parameter, fast where nothing is unusual.

        Returns:
            Whether every parameter is plain and has a plain gradient, float64 only where it is.
        """
        given, forms, places = [*map(_grad, self.params)], self.forms, self.placements
        kinds = {*map(type, given)}
        complete = NoneType not in kinds
        if not complete:
            present = [grad is not None for grad in given]
            of_each = (given, forms, places) if self.placed else (given, forms)
            given, forms, *rest = ([*compress(entries, present)] for entries in of_each)
            places = rest[0] if rest else places
            kinds.remove(NoneType)
        found = [*map(_form, given)]
        placed = self.placed and found == forms and kinds <= {*self.kinds}
        if placed and _placements(given) == places:
            return False
        if self.usual and kinds <= {Tensor}:
            if found == forms:
                return complete
            if all(map(_fits, found, forms)):
                return complete and not any(map(_widens, found, forms))
        for where, param in self.named:
            check_gradient(param, where)
        return False

    def check_rate(self, option: str, value: Any) -> None:
        """Raise ValueError if a Tensor option cannot be used on the devices of all parameters."""
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return
        if self.devices <= {value.device}:
            return
        for where, param in self.named:
            if value.device != param.device:
                raise ValueError(
                    f"{where}: {option} is on {value.device}, the parameter on {param.device}; "
                    f"move {option} there, or to the CPU, or put the parameters into one group per "
                    "device"
                )


@dataclass(frozen=True, eq=False)
class Plan:
    """The work of a step, per group where it is a list, and the groups and the state it is for."""

    layouts: list[tuple[Any, ...]]  # options that decide what is cut how
    tensors: list[GroupTensors]
    keys: list[Any]  # of the optimizer's state
    states: list[Any]
    filled: list[Mapping[str, Tensor]]  # those of parameters
    sizes: list[int]  # entries of each of these
    numbers: dict[Tensor, int]  # of every parameter in the optimizer, over all groups
    chunks: list[list[Chunk]]  # none for AdamW
    clips: list[Batch]  # what QK-clip scales
    rows: dict[Tensor, Tensor | None]  # of each of its parameters, those that are here
    shared: Shared  # what several ranks work on
    on_device: OnDevice
    rated: list[Any] = field(default_factory=lambda: [[], {}])  # options, and rates by them

    @property
    def labelled(self) -> list[list[tuple[str, Tensor]]]:
        """(name for messages, parameter), per group."""
        return [group.named for group in self.tensors]

    def fits(
        self,
        layouts: list[tuple[Any, ...]],
        params: Sequence[Sequence[Tensor]],
        state: Mapping[Any, Any],
    ) -> bool:
        """Whether groups, parameters, the options of their layout and the state are the same."""
        return (
            layouts == self.layouts
            and same_objects([*state.values()], self.states)
            and same_objects([*state], self.keys)
            and self.finds_all_state()
            and all(
                tensors.hold(of_group)
                for tensors, of_group in zip(self.tensors, params, strict=True)
            )
        )

    def finds_all_state(self) -> bool:
        """Whether no entry of a parameter's state was taken away."""
        return [*map(len, self.filled)] == self.sizes


def _fits(grad: tuple[Any, ...], param: tuple[Any, ...]) -> bool:
    """Whether a gradient differs from its parameter in its dtype at most."""
    return grad[0] == param[0] and grad[1] in FLOATING and grad[2:] == param[2:]


def _widens(grad: tuple[Any, ...], param: tuple[Any, ...]) -> bool:
    """Whether a gradient is float64 and its parameter is not, or the other way round."""
    return (grad[1] is torch.float64) is not (param[1] is torch.float64)


def _placements(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What a plan depends on besides the form, of tensors that are not plain."""
    try:
        return [*map(_placing, params)]  # all are DTensors
    except AttributeError:
        pass
    return [
        (param.placements, param.device_mesh) if is_dtensor(param) else ()
        for param in params
        if not is_plain(param)
    ]


@dataclass(frozen=True, eq=False)
class Member:
    """A piece of a parameter in a chunk. Its tensors are looked up anew at every step."""

    param: Tensor
    number: int  # of the parameter in the optimizer
    piece: Piece
    state: Mapping[str, Tensor]  # of the parameter

    def view(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor that is shaped and placed like the parameter."""
        return self.piece.view(local(tensor))


@dataclass(frozen=True, eq=False)
class Chunk:
    """A batch of matrices of one shape, dtype and device."""

    members: tuple[Member, ...]
    matrix: tuple[int, int]  # (m, n)
    whole: bool  # every member is a whole plain matrix: nothing to cut, nothing to reshape

    @cached_property
    def device(self) -> torch.device:
        return self.members[0].param.device

    @cached_property
    def params(self) -> list[Tensor]:
        """The parameter of every member."""
        return [member.param for member in self.members]

    @property
    def matrices(self) -> int:
        return sum(member.piece.matrices for member in self.members)

    def with_gradients(self) -> Chunk:
        """The chunk without the members that have no gradient."""
        present = tuple(member for member in self.members if member.param.grad is not None)
        return replace(self, members=present)

    def views(self, tensors: list[Tensor]) -> list[Tensor]:
        """The pieces of tensors that are shaped and placed like the parameters of the members."""
        if self.whole:
            return tensors
        return [member.view(tensor) for member, tensor in zip(self.members, tensors, strict=True)]

    def statistics(self, key: str) -> list[Tensor]:
        """The pieces' parts of a factored second moment; those of whole matrices as they are."""
        if self.whole:
            return [member.state[key] for member in self.members]
        return [member.piece.statistics_view(local(member.state[key])) for member in self.members]


def plan_chunks(
    parameters: Iterable[tuple[int, Tensor, Blocks]],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    *,
    contiguous: bool,
) -> list[Chunk]:
    """Bucket all blocks, of (number, parameter, blocks), by shape and fill equal batches, in order.

    `contiguous`: as of `Blocks.pieces`.
    """
    buckets: dict[tuple, list[Member]] = {}
    for number, param, blocks in parameters:
        if param.numel() == 0:
            continue
        dtype = torch.promote_types(param.dtype, torch.float32)
        limit = min(m * n * matrices_at_once(m, n, dtype, param.device) for m, n in blocks.shapes())
        for piece in blocks.pieces(limit, contiguous=contiguous):
            key = (piece.matrix, dtype, param.device)
            buckets.setdefault(key, []).append(Member(param, number, piece, state[param]))
    batches = [
        (matrix, batch)
        for (matrix, dtype, device), members in buckets.items()
        for batch in _batches(members, matrices_at_once(*matrix, dtype, device))
    ]
    return [
        Chunk(
            members=tuple(batch),
            matrix=matrix,
            whole=all(
                is_plain(m.param) and m.piece.uncut and m.param.shape == matrix for m in batch
            ),
        )
        for matrix, batch in batches
    ]


def matrices_at_once(m: int, n: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many m x n directions a batch may have, by BATCH_BYTES and STEP_BYTES.

    Where slices have any length (`orthogonalize/slices.py`), a matrix of one needs up to X and five
    m x m matrices, or X, its successor and one of those. Elsewhere slices are short.
    """
    most = max(1, BATCH_BYTES // max(1, m * n * dtype.itemsize))
    iterate = default_dtype(dtype, device)
    shape = slice_for(m, n, iterate, device)
    if shape.full:
        return most
    side, area = min(m, n), m * n
    each = iterate.itemsize * max(area + 5 * side * side, 2 * area + side * side)
    kept = area * (dtype.itemsize + iterate.itemsize)
    if kept * most + each * shape.at_once(most) <= STEP_BYTES:
        return most
    for slices in range(-(-most // shape.matrices), 0, -1):
        fitting = slices * (STEP_BYTES // (kept * slices + each))
        if (slices - 1) * shape.matrices < fitting:
            return min(fitting, most)
    return 1


def _batches(members: list[Member], most: int) -> list[list[Member]]:
    """Members in batches of at most `most` matrices: as few as in order, equal if that is so few.

    A last batch of a few matrices would take nearly as long as a whole one.
    """
    few = _filled(members, most)
    equal = _filled(members, equal_share(sum(m.piece.matrices for m in members), most))
    return min(equal, few, key=len)


def _filled(members: list[Member], most: int) -> list[list[Member]]:
    batches: list[list[Member]] = []
    room = -1
    for member in members:
        size = member.piece.matrices
        if size > room:
            batches.append([])
            room = most
        batches[-1].append(member)
        room -= size
    return batches


State = MutableMapping[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class AdamWWork:
    """What AdamW steps together, of one tensor per entry; state may be that of a DTensor."""

    params: list[Tensor]  # of the optimizer
    tensors: list[Tensor]  # what is here of them, or rows of that
    grads: list[Tensor]
    states: list[Mapping[str, Tensor]]
    first: list[int]  # number of each tensor's first element in its parameter
    uniform: bool = False  # plain, of few dimensions, on one device, all or none float64

    def part(self, members: Sequence[int]) -> AdamWWork:
        """The entries with these numbers."""
        lists = (self.params, self.tensors, self.grads, self.states, self.first)
        return AdamWWork(*([entries[k] for k in members] for entries in lists))


@dataclass(frozen=True, eq=False)
class Together:
    """Parameters of a group on one device, all or none float64: one call unless some are odd."""

    params: list[Tensor]
    states: list[Mapping[str, Tensor]]
    flat: bool  # none has more dimensions than a kernel takes


class OnDevice:
    """State beside its parameters: a batch finds it there. Made for a plan, and kept with it.

    It remembers the dict of every parameter, and no tensor: these are looked up at every step.
    """

    def __init__(self, state: State, adamw: Sequence[Sequence[Tensor]]) -> None:
        """For the parameters that AdamW steps, per group."""
        self._state = state
        self._together = [_together(params, state) for params in adamw]

    def batches(self, number: int) -> list[Any]:
        """What AdamW steps together of group `number`."""
        return self._together[number]

    def device_of(self, batch: Together) -> torch.device:
        return batch.params[0].device

    def enter(self, work: Any) -> None:
        """Before the first use of a batch's state."""

    def leave(self, work: Any) -> None:
        """After its last use."""

    def piece(self, member: Member, key: str) -> Tensor:
        """The part of a state tensor that belongs to a piece of its parameter."""
        return member.view(member.state[key])

    def pieces(self, chunk: Chunk, key: str) -> list[Tensor]:
        """`piece` of every member."""
        return chunk.views([member.state[key] for member in chunk.members])

    def boxes(self, chunk: SharedChunk, here: Sequence[Held], key: str) -> list[Tensor]:
        """What this rank has of matrices, in state tensors that are placed like the parameters."""
        params = chunk.params_of(here)
        return chunk.views(here, locals_of([self._state[param][key] for param in params]))

    def adamw(self, batch: Together, *, usual: bool) -> AdamWWork:
        """The parameters of a batch that have a gradient: `usual`, if all have one of their form"""
        if usual and batch.flat:
            params = batch.params
            grads = [param.grad for param in params]
            return AdamWWork(params, params, grads, batch.states, [0] * len(params), uniform=True)
        params = [param for param in batch.params if param.grad is not None]
        return AdamWWork(
            params=params,
            tensors=[local(param) for param in params],
            grads=[local(param.grad) for param in params],
            states=[self._state[param] for param in params],
            first=[0] * len(params),
        )


def _together(params: Sequence[Tensor], state: State) -> list[Together]:
    parts: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for param in params:
        parts.setdefault((param.device, param.dtype is torch.float64), []).append(param)
    return [
        Together(
            params=part,
            states=[state[param] for param in part],
            flat=all(param.ndim <= MAX_DIMS for param in part),
        )
        for part in parts.values()
    ]
