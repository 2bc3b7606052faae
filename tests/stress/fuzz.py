"""`make fuzz`: random valid and invalid calls of every public function, and plans on random meshes.

A call may give what the reference gives, or raise ValueError, TypeError or what its documentation
lists, with a message that names an argument; nothing that it only reads may change. All else is a
finding: another error, a crash, a call that takes longer than LIMIT.

    python -m tests.stress.fuzz --calls 10000 --meshes 1000 --seed 0 --out fuzz.json
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from . import _cases, _meshes
from ._workers import Report, Workers

BATCH = 25  # calls, or meshes, that a process is asked for at a time
LIMIT = 120.0  # seconds of a batch; one that takes longer is played again one by one
SINGLE_LIMIT = 60.0


def fuzz(calls: int, meshes: int, seed: int, *, only: str | None = None) -> Report:
    report = Report("fuzz", seed)
    workers = Workers(1)
    for play, wanted in ((_cases.play, calls), (_meshes.play, meshes)):
        for start in range(0, wanted, BATCH):
            numbers = [seed * 10**6 + k for k in range(start, min(start + BATCH, wanted))]
            if not _taken(report, workers, play, numbers, LIMIT, only):
                for number in numbers:
                    if not _taken(report, workers, play, [number], SINGLE_LIMIT, only):
                        how, text = workers.last_failure
                        report.add(how, f"{play.__module__.split('.')[-1]} {number}", text)
    workers.close()
    return report


def _taken(
    report: Report, workers: Workers, play: Any, numbers: list[int], limit: float, only: str | None
) -> bool:
    """Enter the result of a batch; False if the process did not survive it."""
    ((how, answer),) = workers.run(play, numbers, only, limit=limit)
    if how != "done":
        workers.last_failure = how, answer
        return False
    report.counts += Counter(answer["counts"])
    for kind, number, text, happened in answer["findings"]:
        report.add(kind, f"{play.__module__.split('.')[-1]} {number}", text, happened)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--meshes", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="calls of functions whose name contains this")
    parser.add_argument("--out", type=Path, help="write the counts and all findings as JSON")
    given = parser.parse_args(arguments)
    report = fuzz(given.calls, given.meshes, given.seed, only=given.only)
    return report.finish(given.out)


if __name__ == "__main__":
    sys.exit(main())
