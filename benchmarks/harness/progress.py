"""Which cases of a result file are still to be measured, and who measures them.

A file takes minutes, and a machine may be lent for fewer. So finished rows are written to
`<name>.partial.json` as they come, and the same command goes on behind them. Commands that run at
the same time, one on each GPU of a machine, share the cases of one file: each takes the next one
that nobody has begun, and the last to end makes the file of all rows.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .report import Row, difference, name_of, read, write

# What all rows of one file have in common.
SAME = ("gpu", "driver", "torch", "triton", "commit", "sources")


class Claims:
    """Names that processes of this machine share out: a name is one process's until it ends.

    The subject is what the names belong to, the same in all processes.
    """

    def __init__(self, subject: object) -> None:
        digest = hashlib.sha256(str(subject).encode()).hexdigest()
        folder = Path(tempfile.gettempdir()) / f"optimizer-benchmarks-{os.getuid()}"
        self._folder, self._held = folder / digest, {}
        self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> bool:
        """Whether the name is this process's now."""
        if name not in self._held:
            file = (self._folder / quote(name, safe="")).open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            self._held[name] = file
        return True

    def release(self, names: Iterable[str] | None = None) -> None:
        """Leave these names to others; None: all."""
        for name in list(self._held) if names is None else names:
            self._held.pop(name).close()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Between other processes that read and write what the names belong to."""
        with (self._folder / "alone").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class PartialFile:
    """The finished rows of a result file, of this command and of others that measure it now.

    Args:
        path: of the complete file.
        head: its header.
        again: cases to be measured once more, in the complete file if there is no partial one.

    Attributes:
        head: that of the first rows, ceilings included.
        rows: all finished ones that are known here; this command appends its own.
        done: finished cases, those without a row included.

    Raises:
        ValueError: as `continued`.
    """

    def __init__(self, path: Path, head: dict, again: Iterable[str] = ()) -> None:
        self.path, self._partial = path, partial_path(path)
        self.source = path if again and not self._partial.is_file() else self._partial
        self.head, self.rows, self.done = continued(self.source, head, again)
        self._claims, self._again = Claims(path.resolve()), bool(again)
        if again and self._partial.is_file():
            self._write()

    @property
    def is_written(self) -> bool:
        """Whether the complete file is there already, of the same machine and sources."""
        whole = None if self._again or self._partial.is_file() else read(self.path)
        if whole is None or "missing" in whole:
            return False
        return difference(whole, self.head, SAME) is None

    def turn(self, finished: Iterable[str], asked: Iterable[str]) -> list[str]:
        """Write what has been finished; this command takes those of `asked` that nobody has."""
        with self._claims.alone():
            if self.is_written:  # by another command, meanwhile
                return []
            self._exchange(finished)
            return [case for case in asked if case not in self.done and self._claims.take(case)]

    def release(self, cases: Iterable[str] | None = None) -> None:
        """Leave cases to others; None: all."""
        self._claims.release(cases)

    def complete(self, finished: Iterable[str], cases: Sequence[str]) -> bool:
        """Whether all cases are finished, by whomever: then the file is written, in their order."""
        with self._claims.alone():
            if self.is_written:
                return False
            self._exchange(finished)
            if not self.done.issuperset(cases):
                return False
            place = {case: number for number, case in enumerate(cases)}
            last = len(place)
            self.rows.sort(key=lambda row: place.get(name_of(row), place.get(row.case, last)))
            write(self.path, self.head, self.rows)
            self._partial.unlink(missing_ok=True)
            return True

    def _exchange(self, finished: Iterable[str]) -> None:
        self.done.update(finished)
        if earlier := read(self._partial):
            mine = {(row.case, row.variant) for row in self.rows}
            found = (Row(**entry) for entry in earlier["rows"])
            self.rows += [row for row in found if (row.case, row.variant) not in mine]
            self.done.update(earlier["done"])
        if self.rows:
            self._write()

    def _write(self) -> None:
        kept = {"partial": True, "done": sorted(self.done)}
        write(self._partial, self.head | kept, self.rows)


class Progress:
    """Says which cases an entry is to measure.

    Args:
        measured: cases that are there already.
        end: of the time in which cases may begin, by time.monotonic; None: there is enough.
        file: where finished cases stand, beside `measured`; None: nowhere.

    Attributes:
        cases: all that were asked for, in their order.
        left: cases that could not begin in time.
        begun: those that the entry is measuring now.
    """

    def __init__(
        self,
        measured: Iterable[str] = (),
        end: float | None = None,
        file: PartialFile | None = None,
    ) -> None:
        self.cases: dict[str, None] = {}
        self.left: list[str] = []
        self.begun: list[str] = []
        self._measured, self._end, self._file = frozenset(measured), end, file

    @property
    def measured(self) -> frozenset[str]:
        """Cases that nobody is to measure any more."""
        return self._measured | (self._file.done if self._file else frozenset())

    @property
    def is_over(self) -> bool:
        """Whether no case may begin any more, so that nothing needs to be prepared for one."""
        return self._end is not None and time.monotonic() >= self._end

    def begin(self, *cases: str) -> list[str]:
        """Those of the cases that are to be measured now.

        An entry asks before it sets anything up for them, and behind the last row of those before.
        """
        self.begun = self.upcoming(*cases)
        return self.begun

    def upcoming(self, *cases: str) -> list[str]:
        """Those of the cases for which something is to be set up; `begin` then asks for each."""
        self.cases |= dict.fromkeys(cases)
        finished, self.begun = self.begun, []
        missing = [case for case in cases if case not in self._measured]
        if self._file:
            missing = self._file.turn(finished, missing)
        if not self.is_over:
            return missing
        self.left += missing
        if self._file:
            self._file.release(missing)
        return []


def partial_path(path: Path) -> Path:
    """Where the finished rows of a result file stand until it is complete."""
    return path.with_name(f"{path.stem}.partial.json")


def is_partial(path: Path) -> bool:
    """Whether a file is no result yet: nothing reads it but the command that goes on with it."""
    return path.name.endswith(".partial.json")


def header_of(result: dict) -> dict[str, Any]:
    """The header of a file, partial or not."""
    return {key: value for key, value in result.items() if key not in ("partial", "done", "rows")}


def continued(
    path: Path, head: dict, again: Iterable[str] = ()
) -> tuple[dict, list[Row], set[str]]:
    """Header, rows and finished cases of a file without `again`; `head` where there is no file.

    The header, ceilings included, stays that of the first rows.

    Raises:
        ValueError: its rows cannot stand in one file with those of `head`, or `again` names a case
            that it has no row of.
    """
    earlier, again = read(path), frozenset(again)
    if earlier is None:
        return head, [], set()
    if why := difference(earlier, head, SAME):
        raise ValueError(f"{why}; finish it with what it has, or delete it to begin anew")
    if unknown := again - {entry["case"] for entry in earlier["rows"]}:
        raise ValueError(f"has no row of {', '.join(sorted(unknown))}")
    rows = [Row(**entry) for entry in earlier["rows"] if entry["case"] not in again]
    done = {*earlier.get("done", ()), *(key for row in rows for key in (row.case, name_of(row)))}
    return {key: earlier[key] for key in head}, rows, done - again
