"""`make soak`: random events happen to optimizers for thousands of steps, and no bit may be lost.

Nine tenths of the steps are of one process, a tenth of four ranks over gloo. Every episode runs in
processes of its own kind that can be killed: a crash or a hang is counted with its seed.

    python -m tests.stress.soak --steps 10000 --seed 0 --out soak.json
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from . import _episode, _together
from ._workers import Report, Workers

RANKS = 4
EPISODE = 50  # steps
LIMIT = 300.0  # seconds of an episode, on a machine that does other things too


def soak(steps: int, seed: int, *, ranks: int = RANKS, shared: int | None = None) -> Report:
    """So many steps, `shared` of them (a tenth) on several ranks."""
    report = Report("soak", seed)
    shared = steps // 10 if shared is None else shared
    for world, wanted, play in (
        (1, steps - shared, _episode.play),
        (ranks, shared, _together.play),
    ):
        workers = Workers(world)
        done, number = 0, 0
        while done < wanted:
            length = min(EPISODE, wanted - done)
            of_episode = seed * 10**6 + number
            answers = workers.run(play, of_episode, length, limit=LIMIT)
            kind = f"{world} rank{'s' * (world > 1)}, seed {of_episode}"
            done += _taken(report, kind, answers, length)
            number += 1
        workers.close()
        report.counts[f"steps of {world} rank{'s' * (world > 1)}"] = done
        report.counts[f"episodes of {world} rank{'s' * (world > 1)}"] = number
    return report


def _taken(report: Report, kind: str, answers: list[tuple[str, Any]], length: int) -> int:
    """Enter what the ranks answered; how many steps they took."""
    failed = [(how, text) for how, text in answers if how != "done"]
    for how, text in failed:
        report.add(how, kind, text)
    if failed:
        return length
    first = answers[0][1]
    report.counts += Counter(first["counts"])
    for rank, (_, answer) in enumerate(answers):
        if answer["difference"]:
            where = kind if len(answers) == 1 else f"{kind}, rank {rank}"
            report.add("difference", where, answer["difference"], answer["happened"])
            return max(answer["steps"], 1)
    return first["steps"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the counts and all findings as JSON")
    given = parser.parse_args(arguments)
    report = soak(given.steps, given.seed)
    return report.finish(given.out)


if __name__ == "__main__":
    sys.exit(main())
