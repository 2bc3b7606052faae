"""Which cases of a result file are still to be measured, and the part that a cut-off leaves.

A file takes minutes, and a machine may be lent for fewer. So finished rows are written to
`<name>.partial.json` as they come, and the same command goes on behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .report import Row, difference, read

# What all rows of one file have in common.
SAME = ("gpu", "driver", "torch", "triton", "commit", "sources")


class Progress:
    """Says which cases an entry is to measure.

    Args:
        measured: cases that are there already.
        end: of the time in which cases may begin, by time.monotonic; None: there is enough.
        save: called where all rows so far are those of finished cases.

    Attributes:
        left: cases that could not begin in time.
    """

    def __init__(
        self,
        measured: Iterable[str] = (),
        end: float | None = None,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self.measured = frozenset(measured)
        self.left: list[str] = []
        self._end, self._save = end, save

    @property
    def is_over(self) -> bool:
        """Whether no case may begin any more, so that nothing needs to be prepared for one."""
        return self._end is not None and time.monotonic() >= self._end

    def begin(self, *cases: str) -> list[str]:
        """Those of the cases that are to be measured now.

        An entry asks before it sets anything up for them, and behind the last row of those before.
        Who sets something up for several cases asks for all of them, then for each.
        """
        self._save()
        missing = [case for case in cases if case not in self.measured]
        if not self.is_over:
            return missing
        self.left += missing
        return []


def partial_path(path: Path) -> Path:
    """Where the finished rows of a result file stand until it is complete."""
    return path.with_name(f"{path.stem}.partial.json")


def is_partial(path: Path) -> bool:
    """Whether a file is no result yet: nothing reads it but the command that goes on with it."""
    return path.name.endswith(".partial.json")


def continued(path: Path, head: dict, again: Iterable[str] = ()) -> tuple[dict, list[Row]]:
    """Header and rows of a file but those of `again`, or `head` and none without such a file.

    The header, ceilings included, stays that of the first rows.

    Raises:
        ValueError: its rows cannot stand in one file with those of `head`, or `again` names a case
            that it has no row of.
    """
    earlier, again = read(path), frozenset(again)
    if earlier is None:
        return head, []
    if why := difference(earlier, head, SAME):
        raise ValueError(f"{why}; finish it with what it has, or delete it to begin anew")
    if unknown := again - {entry["case"] for entry in earlier["rows"]}:
        raise ValueError(f"has no row of {', '.join(sorted(unknown))}")
    rows = [Row(**entry) for entry in earlier["rows"] if entry["case"] not in again]
    return {key: earlier[key] for key in head}, rows
