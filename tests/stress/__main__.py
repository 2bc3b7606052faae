"""Random events and calls, in processes that may crash or hang without ending the run.

`make soak`: random events happen to optimizers for thousands of steps, and no bit may be lost. Nine
tenths of the steps are of one process, a tenth of four ranks over gloo.

    python -m tests.stress soak --steps 10000 --seed 0 --out soak.json

`make fuzz`: random valid and invalid calls of every public function, and plans on random meshes. A
call may give what the reference gives, or raise ValueError, TypeError or what its documentation
lists, with a message that names an argument; nothing that it only reads may change. All else is a
finding: another error, a crash, a call that takes too long.

    python -m tests.stress fuzz --calls 10000 --meshes 1000 --seed 0 --out fuzz.json
"""

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib
import torch

from ..conftest import ROOT
from ..distributed._ranks import Ranks
from . import _cases, _episode, _meshes, _together

GONE, LATE = "the process is gone", "no answer in time"


class Workers:
    """`world` processes in one gloo group, started when first needed and again after a failure."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.repo_id = tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]["repo-id"]
        self.ranks: Ranks | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, limit: float
    ) -> list[tuple[str, Any]]:
        """Per process ("done", result), ("difference", text), ("crash", how) or ("hang", how)."""
        if self.ranks is None or not self.ranks.alive:
            self.close()
            os.environ.setdefault("TRITON_INTERPRET", "1")  # the processes take it over
            self.ranks = Ranks(self.world, self.repo_id, str(ROOT), "cpu")
        found = self.ranks.outcomes(function, *arguments, timeout=limit, patience=20)
        answers = [self._named(number, *one, limit) for number, one in enumerate(found)]
        if any(how != "done" for how, _ in answers):
            self.close()
        if any(how == "crash" for how, _ in answers):
            answers = [one for one in answers if one[0] != "hang"]
        return answers

    def _named(self, number: int, done: bool, value: Any, limit: float) -> tuple[str, Any]:
        if done:
            return "done", value
        if value == GONE:
            process = self.ranks.processes[number]
            process.join(5)
            return "crash", f"rank {number} ended with code {process.exitcode}"
        if value == LATE:
            return "hang", f"rank {number} did not answer in {limit:.0f} s"
        return "difference", f"rank {number}: {value}"

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None


NAMES = {"difference": "undocumented differences", "crash": "crashes", "hang": "hangs"}
SHOWN = 40


@dataclass
class Report:
    """Of one run of a tool with a seed."""

    tool: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, where: str, text: str, happened: Any = ()) -> None:
        self.findings.append(
            {"kind": kind, "where": where, "text": text, "happened": list(happened)}
        )

    def found(self, kind: str) -> int:
        return sum(finding["kind"] == kind for finding in self.findings)

    def table(self) -> str:
        width = max(map(len, self.counts), default=0)
        lines = [f"{self.tool}, seed {self.seed}"]
        lines += [f"  {name:{width}} {count:7,}" for name, count in sorted(self.counts.items())]
        for finding in self.findings[:SHOWN]:
            lines.append(f"{finding['kind']} in {finding['where']}: {finding['text']}")
            lines += [f"    {line}" for line in finding["happened"]]
        if len(self.findings) > SHOWN:
            lines.append(f"and {len(self.findings) - SHOWN} more, in the file of --out")
        lines.append(", ".join(f"{self.found(kind)} {NAMES[kind]}" for kind in NAMES))
        return "\n".join(lines)

    def finish(self, out: Path | None) -> int:
        """Print the table, write the file, and give the exit status."""
        print(self.table())
        if out is not None:
            found = {NAMES[kind]: self.found(kind) for kind in NAMES}
            setting = {"torch": torch.__version__, "machine": platform.machine()}
            content = {"tool": self.tool, "seed": self.seed, **setting, **found}
            content |= {"counts": dict(sorted(self.counts.items())), "findings": self.findings}
            out.write_text(json.dumps(content, indent=1, default=str) + "\n")
        return 1 if self.findings else 0


BATCH = 25  # calls, or meshes, that a process is asked for at a time
BATCH_LIMIT = 120.0  # seconds of a batch; one that takes longer is played again one by one
SINGLE_LIMIT = 60.0


def fuzz(calls: int, meshes: int, seed: int, *, only: str | None = None) -> Report:
    report = Report("fuzz", seed)
    workers = Workers(1)
    for play, wanted in ((_cases.play, calls), (_meshes.play, meshes)):
        for start in range(0, wanted, BATCH):
            numbers = [seed * 10**6 + k for k in range(start, min(start + BATCH, wanted))]
            if not _batch_taken(report, workers, play, numbers, BATCH_LIMIT, only):
                for number in numbers:
                    if not _batch_taken(report, workers, play, [number], SINGLE_LIMIT, only):
                        how, text = workers.last_failure
                        report.add(how, f"{play.__module__.split('.')[-1]} {number}", text)
    workers.close()
    return report


def _batch_taken(
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


RANKS = 4
EPISODE = 50  # steps
EPISODE_LIMIT = 300.0  # seconds of an episode, on a machine that does other things too


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
            answers = workers.run(play, of_episode, length, limit=EPISODE_LIMIT)
            kind = f"{world} rank{'s' * (world > 1)}, seed {of_episode}"
            done += _episode_taken(report, kind, answers, length)
            number += 1
        workers.close()
        report.counts[f"steps of {world} rank{'s' * (world > 1)}"] = done
        report.counts[f"episodes of {world} rank{'s' * (world > 1)}"] = number
    return report


def _episode_taken(report: Report, kind: str, answers: list[tuple[str, Any]], length: int) -> int:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=("soak", "fuzz"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--meshes", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="calls of functions whose name contains this")
    parser.add_argument("--out", type=Path, help="write the counts and all findings as JSON")
    given = parser.parse_args()
    if given.tool == "soak":
        report = soak(given.steps, given.seed)
    else:
        report = fuzz(given.calls, given.meshes, given.seed, only=given.only)
    return report.finish(given.out)


if __name__ == "__main__":
    sys.exit(main())
