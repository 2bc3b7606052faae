"""What a run found: counts of what was tried, and every difference, crash and hang."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
