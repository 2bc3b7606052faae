"""How a parameter is cut into the matrices that are orthogonalized, each on its own.

Legend: E experts, r rows, c columns of a parameter; B matrices of shape (m, n) in a piece.

    2-D (r, c)                       one matrix (r, c)
    3-D (E, r, c) of experts         E matrices (r, c)
    other N-D (r, ...)               one matrix (r, c), the trailing dimensions flattened into c
    with split_sizes (r1, r2, ...)   the rows of each of these matrices, cut into r1, r2, ...
    with num_heads H                 the rows of each of these matrices, cut into H equal parts
    transposed (in, out)             the same of its columns, which are the rows of W = (out, in)

Each cut is made on the live tensor at every step, as a view: nothing here keeps one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .options import AdamWOptions, MuonOptions, by_name, tidy
from .parameters import components, has_component


@dataclass(frozen=True)
class Piece:
    """A run of equal blocks of one parameter, (start, length) along its rows and its experts."""

    rows: tuple[int, int]
    experts: tuple[int, int] | None  # None: the parameter is not a stack
    matrices: int  # B
    matrix: tuple[int, int]  # (m, n)
    first: int  # number of its first element in the parameter, row-major
    statistics: tuple[int, int]  # (start, length) in the flattened second_momentum_buffer
    uncut: bool = False  # it is all of a parameter that is one matrix, and has all its statistics
    columns: tuple[int, int] | None = None  # (start, length), of a transposed parameter

    def view(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor shaped like the parameter, as a view of any strides or itself."""
        rows = 0 if self.experts is None else 1
        if self.experts is not None and self.experts[1] < tensor.shape[0]:
            tensor = tensor.narrow(0, *self.experts)
        if self.columns is not None and self.columns[1] < tensor.shape[-1]:
            tensor = tensor.narrow(-1, *self.columns)
        return tensor.narrow(rows, *self.rows) if self.rows[1] < tensor.shape[rows] else tensor

    def statistics_view(self, second_moment: Tensor) -> Tensor:
        """The piece's part of second_momentum_buffer: (B, m, 1) or (B, 1, n)."""
        flat = second_moment.view(-1).narrow(0, *self.statistics)
        kept = kept_shape(*self.matrix, transposed=self.columns is not None)
        return flat.view(self.matrices, *kept)


def kept_shape(m: int, n: int, *, transposed: bool) -> tuple[int, int]:
    """The shape of a matrix's second moment: of its longer side, of the outputs if it is square."""
    return (1, n) if n > m or (transposed and n == m) else (m, 1)


@dataclass(frozen=True)
class Blocks:
    """The matrices of one parameter. Of a transposed one rows are columns here, and the reverse."""

    experts: int | None
    row_sizes: tuple[int, ...]  # the rows of each run
    heads: int  # equal blocks in each run
    columns: int
    split: bool  # runs may differ in shape
    transposed: bool = False

    def second_moment_shape(self) -> tuple[int, ...]:
        """(r, 1) if r >= c else (1, c), after the batch dimensions E and H where there are any.

        Under split_sizes the runs may differ in orientation, so that their statistics stand one
        after another in one dimension.
        """
        if self.split:
            return (sum(self._statistics(rows) for rows in self.row_sizes) * (self.experts or 1),)
        kept = kept_shape(*self._stored(self.row_sizes[0]), transposed=self.transposed)
        batch = () if self.experts is None else (self.experts,)
        return (*batch, *((self.heads,) if self.heads > 1 else ()), *kept)

    def shapes(self) -> set[tuple[int, int]]:
        """(m, n) of the blocks."""
        return {(rows // self.heads, self.columns) for rows in self.row_sizes}

    def pieces(self, limit: int, *, contiguous: bool = False) -> Iterator[Piece]:
        """All blocks, in equal pieces of at most `limit` elements (or of a single matrix).

        With `contiguous`, the elements of a piece have consecutive numbers in the parameter: runs
        of rows out of several experts are pieces of their own. Of a transposed parameter, whose
        runs of columns have none, a piece is one head, or the same columns of several experts.
        """
        start, offset, experts = 0, 0, self.experts or 1
        total, transposed = sum(self.row_sizes), self.transposed
        for size in self.row_sizes:
            m, per_block = size // self.heads, self._statistics(size) // self.heads
            stacked = limit // max(size * self.columns, 1)  # experts that fit, all heads of each
            if self.heads > 1 if transposed else contiguous and size < total:
                stacked = min(stacked, 1)
            heads = self.heads if stacked else max(limit // max(m * self.columns, 1), 1)
            heads = equal_share(self.heads, 1 if transposed else heads)
            stacked = equal_share(experts, max(stacked, 1))
            for e in range(0, experts, stacked):
                taken = min(stacked, experts - e)
                for h in range(0, self.heads, heads):
                    blocks, at = min(heads, self.heads - h), start + h * m
                    first = e * total * self.columns
                    yield Piece(
                        rows=(0, self.columns) if transposed else (at, blocks * m),
                        experts=None if self.experts is None else (e, taken),
                        matrices=taken * blocks,
                        matrix=self._stored(size),
                        first=first + (at if transposed else at * self.columns),
                        statistics=(
                            offset + (e * self.heads + h) * per_block,
                            taken * blocks * per_block,
                        ),
                        uncut=self.experts is None and self.heads == 1 and not self.split,
                        columns=(at, m) if transposed else None,
                    )
            start, offset = start + size, offset + experts * self.heads * per_block

    def _stored(self, rows: int) -> tuple[int, int]:
        """(m, n) of a block of a run, as the parameter holds it."""
        shape = rows // self.heads, self.columns
        return shape[::-1] if self.transposed else shape

    def _statistics(self, rows: int) -> int:
        m = rows // self.heads
        return self.heads * (m if m >= self.columns else self.columns)


def equal_share(count: int, most: int) -> int:
    """How many things in each part but the last, of the fewest parts of at most `most` things."""
    return -(-count // -(-count // most)) if count else most


def cut(shape: tuple[int, ...], name: str | None, options: MuonOptions, where: str) -> Blocks:
    """The blocks of a parameter of this shape and name.

    Raises:
        ValueError: the parameter is not a matrix, a known stack or something to flatten, or
            split_sizes or num_heads do not fit its rows.
    """
    experts = None
    if len(shape) < 2:
        raise ValueError(
            f"{where}: Muon needs at least 2 dimensions, got shape {shape}; put the parameter into "
            "a group for AdamW (get_default_muon_param_groups(model) does)"
        )
    if len(shape) == 3 and options.expert_keys:
        if name is None:
            raise ValueError(
                f"{where}: expert_keys needs the names of the parameters; give `names` in the group"
            )
        if any(has_component(name, key) for key in options.expert_keys):
            experts, shape = shape[0], shape[1:]
    if len(shape) == 3 and not options.flatten:
        raise ValueError(
            f"{where}: shape {shape} is 3-D; name a stack of experts in expert_keys (now "
            f"{options.expert_keys!r}), or set flatten=True to take it as one matrix "
            f"{(shape[0], math.prod(shape[1:]))}"
        )
    rows, columns = shape[0], math.prod(shape[1:])
    side = "rows"
    if options.transposed:
        if len(shape) != 2:
            raise ValueError(
                f"{where}: transposed takes matrices (in, out) and stacks of them, got {shape}; "
                "put the parameter into a group without it"
            )
        rows, columns, side = columns, rows, "columns"
    heads, sizes = _of(options.num_heads, name), _of(options.split_sizes, name)
    if heads is not None and rows % heads:
        raise ValueError(f"{where}: num_heads={heads} does not divide the {rows} {side} of {shape}")
    if sizes is not None and sum(sizes) != rows:
        raise ValueError(
            f"{where}: split_sizes={sizes} add up to {sum(sizes)}, but {shape} has {rows} {side}"
        )
    split = sizes is not None
    if options.transposed and (split or heads) and options.rounding == "stochastic":
        raise ValueError(
            f"{where}: rounding='stochastic' numbers elements along rows, which split_sizes and "
            "num_heads of a transposed parameter cut; use rounding='residual' or 'nearest'"
        )
    return Blocks(experts, sizes or (rows,), heads or 1, columns, split, options.transposed)


def check_names(
    options: MuonOptions | AdamWOptions, names: Sequence[str | None], where: str
) -> None:
    """Raise ValueError if split_sizes or num_heads name what no parameter of the group is called.

    A group without parameters may have any.
    """
    if isinstance(options, AdamWOptions) or not names:
        return
    for option in ("split_sizes", "num_heads"):
        for name, _ in by_name(getattr(options, option)):
            if name and name not in {f"[{known!r}]" for known in names}:
                raise ValueError(f"{where}: {option}{name} names no parameter of the group")


def with_own_names(
    saved: dict[str, Any], group: Mapping[str, Any], names: Sequence[str | None], where: str
) -> dict[str, Any]:
    """Saved options with the present names in split_sizes and num_heads, without wrappers' parts.

    The model may be wrapped now and was not when its optimizer was saved, or the reverse.

    Raises:
        ValueError: they say something else of the same parameters, or the group has no names.
    """
    own = {tuple(components(name)): name for name in names if name is not None}
    for option in ("split_sizes", "num_heads"):
        by_names = saved[option] if isinstance(saved.get(option), Mapping) else {}
        if not names or set(by_names) <= set(names):
            continue
        if not own:
            raise ValueError(
                f"{where}: {option} was saved by names, {dict(by_names)}, and this group has none; "
                "construct the optimizer with names, as of model.named_parameters()"
            )
        renamed = {own.get(tuple(components(key)), key): by_names[key] for key in by_names}
        if not set(renamed) <= set(names):
            continue  # check_names refuses what names no parameter at all
        if tidy(option, renamed) != group[option]:
            raise ValueError(
                f"{where}: {option} was saved as {dict(by_names)} and is here {group[option]}; "
                f"construct the optimizer with the saved {option} under the present names"
            )
        saved = {**saved, option: group[option]}
    return saved


def unmatched_keys(
    groups: Iterable[tuple[MuonOptions | AdamWOptions, Sequence[str | None]]],
) -> list[str]:
    """The expert_keys that no name has, in any group whose keys they are."""
    asked: dict[str, bool] = {}
    for options, names in groups:
        if isinstance(options, MuonOptions):
            known = [name for name in names if name is not None]
            for key in options.expert_keys or ():
                found = any(has_component(name, key) for name in known)
                asked[key] = asked.get(key, False) or found
    return [key for key, found in asked.items() if not found]


def _of(option: Any, name: str | None) -> Any:
    return option.get(name) if isinstance(option, Mapping) else option
