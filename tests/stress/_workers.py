"""Processes that play a case each and may crash or hang without ending the run."""

from __future__ import annotations

import os
from collections.abc import Callable
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
        """Per process ("done", result), ("difference", traceback), ("crash", how) or ("hang", …).

        A process that waits for one that crashed is no hang of its own.
        """
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
