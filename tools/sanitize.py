"""Run the compiled kernels under compute-sanitizer: memcheck and racecheck clean, a bug caught.

Needs a CUDA device and compute-sanitizer; `make sanitize` calls it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOUND = 9  # exit status that compute-sanitizer is told to give for a finding


def run(tool: str, case: str) -> subprocess.CompletedProcess[str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "tests.kernels.sanitizer_cases", case]
    # Freed blocks go back to the driver, so that every address outside a tensor is invalid.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def main() -> int:
    failures = 0
    for tool, case, expected in (
        ("memcheck", "planted", FOUND),
        ("memcheck", "kernels", 0),
        ("racecheck", "kernels", 0),
        ("memcheck", "chain", 0),
        ("racecheck", "chain", 0),
        ("memcheck", "experts", 0),
        ("racecheck", "experts", 0),
    ):
        result = run(tool, case)
        right = result.returncode == expected
        failures += not right
        print(f"{tool:<10}{case:<9}exit {result.returncode}, {'as it must' if right else 'WRONG'}")
        print("\n".join(f"    {line}" for line in result.stdout.splitlines()[-2:]))
        if not right:
            print(result.stdout[-4000:], result.stderr[-4000:], sep="\n", file=sys.stderr)
    return failures


if __name__ == "__main__":
    sys.exit(main())
