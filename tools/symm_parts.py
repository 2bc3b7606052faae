"""Run the tests of symmetric memory in parts, two beside each other per GPU; `make test-symm` does.

A part has its own processes and sees one GPU: its ranks share it, whatever the machine has. What
needs a GPU per rank is a part that sees all of them. Arguments go to pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from pathlib import Path

# Of the marks `part(name)`: long ones first, faults once kernels that they must not wait for are in
# Triton's cache. Two GPUs begin with the first and third, and the second and fourth.
EVERY_GPU = "several GPUs"
PARTS = ("random cases of four ranks", "two ranks", "products", "four ranks", "faults", EVERY_GPU)
BESIDE = 2  # parts per GPU: more take each other's time slices
COUNTS = re.compile(r"\d+ (random cases|passed|failed|skipped|deselected|errors?)\b")
NO_TESTS = 5  # exit status of pytest whose -k takes all tests of a part away


class Runs:
    """The parts that ran, and what their tests counted."""

    def __init__(
        self, parts: deque[str], gpus: list[str], folder: Path, options: list[str]
    ) -> None:
        self.parts, self.gpus, self.folder, self.options = parts, gpus, folder, options
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.printing = threading.Lock()

    def run(self, part: str, gpu: str) -> None:
        log = self.folder / f"{part.replace(' ', '_')}.log"
        seen = ",".join(self.gpus) if part == EVERY_GPU else gpu
        environment = {**os.environ, "SYMM_PART": part, "SYMM_PARTS": ",".join(PARTS)}
        start = time.monotonic()
        with log.open("w") as out:
            status = subprocess.run(
                [sys.executable, "-m", "pytest", *self.options],
                env=environment | {"CUDA_VISIBLE_DEVICES": seen},
                stdout=out,
                stderr=subprocess.STDOUT,
            ).returncode
        text = log.read_text()
        with self.printing:
            print(f"{text}== {part}: {time.monotonic() - start:.0f} s on GPU {seen}", flush=True)
            for line in text.splitlines():
                if COUNTS.match(line):
                    for number, what in re.findall(r"(\d+) ([a-z ]*[a-z])", line.split(" in ")[0]):
                        self.counts[what] += int(number)
            if status not in (0, NO_TESTS):
                self.failed.append(part)

    def run_many(self, part: str | None, gpu: str) -> None:
        while part is not None:
            self.run(part, gpu)
            part = self.parts.popleft() if self.parts else None


def visible_gpus() -> list[str]:
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def main(options: list[str]) -> int:
    gpus = visible_gpus()
    if not gpus:
        print("there is no GPU")
        return 1
    parts, start = deque(PARTS), time.monotonic()
    folder = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(parts, gpus, folder, options)
    workers = [
        threading.Thread(target=runs.run_many, args=(parts.popleft(), gpus[k % len(gpus)]))
        for k in range(min(BESIDE * len(gpus), len(parts)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    del runs.counts["deselected"]
    counted = ", ".join(f"{number} {what}" for what, number in sorted(runs.counts.items()))
    print(f"{counted or 'no tests'}; {time.monotonic() - start:.0f} s, logs in {folder}")
    if runs.failed:
        print("failed:", ", ".join(runs.failed))
    return int(bool(runs.failed) or not runs.counts["passed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
