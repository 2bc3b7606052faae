"""Processes that play a case each and may crash or hang without ending the run; what they found."""

import json
import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from ..conftest import ROOT
from ..distributed._ranks import Ranks

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


KINDS = ("difference", "crash", "hang")
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
        lines.append(", ".join(f"{self.found(kind)} {NAMES[kind]}" for kind in KINDS))
        return "\n".join(lines)

    def finish(self, out: Path | None) -> int:
        """Print the table, write the file, and give the exit status."""
        import torch

        print(self.table())
        if out is not None:
            found = {NAMES[kind]: self.found(kind) for kind in KINDS}
            setting = {"torch": torch.__version__, "machine": platform.machine()}
            content = {"tool": self.tool, "seed": self.seed, **setting, **found}
            content |= {"counts": dict(sorted(self.counts.items())), "findings": self.findings}
            out.write_text(json.dumps(content, indent=1, default=str) + "\n")
        return 1 if self.findings else 0


NAMES = {"difference": "undocumented differences", "crash": "crashes", "hang": "hangs"}
