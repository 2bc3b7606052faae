"""Seconds of the first calls of a layer of experts, in a fresh process, nothing compiled before.

The process finds an empty folder for what Triton compiles and no compiler on the PATH. If it cannot
do without one, the row says so and is measured with the PATH as it is. A variant brings the code of
the layers that `tools/prebuild.py` lists: one of them is measured, and one that is not listed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..lazy import torch
from ..report import Row
from ..sources import ROOT

LAYER, OTHER = "layer", "other_tokens"
TARGETS = {LAYER: 2.0, OTHER: 0.3}  # seconds
SIZES = {  # experts, hidden, intermediate, experts per token
    "first_use": (64, 2048, 1024, 8),  # OLMoE-1B-7B
    "first_use/unlisted": (48, 1920, 1152, 5),  # of no model that is known
}
CASES = tuple(f"{layer}/{call}" for layer in SIZES for call in TARGETS)
FIRST, OTHERS = 2048, (16, 200, 400, 700, 8192)  # tokens
RANK, ALPHA = 16, 32
LONGEST = 300  # seconds
BENCHMARKS = ROOT / "benchmarks"


@dataclass(frozen=True)
class FirstCalls(Row):
    """First calls: `value` is the slowest of those in its case, at most `target` is wanted."""

    compiler: bool | None = None  # whether the process needed a C compiler
    parts: dict[str, float] | None = None  # value by number of tokens


def rows(cases: Sequence[str]) -> Iterator[tuple[FirstCalls, str]]:
    """The rows of these cases, of one process for each layer."""
    for layer, sizes in SIZES.items():
        asked = [case for case in cases if case.rpartition("/")[0] == layer]
        if not asked:
            continue
        found, compiler = measure(sizes), False
        if found is None:
            found, compiler = measure(sizes, compiler=True), True
        for case in asked:
            yield figure(case, found, compiler=compiler)


def figure(case: str, found: dict[str, float] | None, *, compiler: bool) -> tuple[FirstCalls, str]:
    """The row of a case and its line; `found` are seconds by number of tokens."""
    if found is None:
        return FirstCalls(case, "auto", ok=False), f"{case:<36} FAILED, not timed"
    call = case.rpartition("/")[2]
    parts = {key: s for key, s in found.items() if (key == str(FIRST)) == (call == LAYER)}
    slowest = max(parts.values())
    needs = ", needs a compiler" if compiler else ""
    measured = {"value": slowest, "unit": "s", "target": TARGETS[call]}
    row = FirstCalls(case, "auto", ok=True, **measured, compiler=compiler, parts=parts)
    return row, f"{case:<36}{slowest:>8.2f}s  of {TARGETS[call]} s{needs}"


def measure(sizes: Sequence[int], *, compiler: bool = False) -> dict[str, float] | None:
    """Seconds of forward and backward by number of tokens, in a fresh process; None if it fails.

    Sizes are those of SIZES; for a `compiler` the PATH is left as it is.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"}
        if not compiler:
            os.mkdir(f"{folder}/bin")
            environment["PATH"] = f"{folder}/bin"
            environment.pop("CC", None)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "harness.end_to_end.first_use", *map(str, sizes)],
                cwd=BENCHMARKS,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired:
            print(f"first_use: not done within {LONGEST} s", flush=True)
            return None
    if done.returncode:
        print("first_use:", done.stderr.strip()[-1500:], flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main(sizes: Sequence[int], device: str = "cuda") -> None:
    """In the fresh process: print seconds by number of tokens as JSON."""
    from .. import built_package

    moe = built_package.load(ROOT, device).package.moe
    experts, hidden, intermediate, top_k = sizes
    kind = {"device": device, "dtype": torch.bfloat16}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    layer = moe.Experts(experts, hidden, intermediate, **kind)
    layer.add_adapter(r=RANK, alpha=ALPHA, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    found = {}
    for tokens in (FIRST, *OTHERS):
        x = torch.randn(tokens, hidden, **kind, requires_grad=True)
        top = torch.topk(torch.rand(tokens, experts, device=device), top_k, -1)
        gates, grad = top.values.bfloat16().requires_grad_(), torch.randn(tokens, hidden, **kind)
        wait()
        start = time.perf_counter()
        out = layer(x, top.indices, gates)
        out.backward(grad)
        wait()
        found[str(tokens)] = time.perf_counter() - start
        if not (torch.isfinite(out).all() and torch.isfinite(x.grad).all()):
            raise RuntimeError(f"{tokens} tokens: results are not finite")
        again = layer(x, top.indices, gates)
        if not torch.equal(out, again):
            raise RuntimeError(f"{tokens} tokens: a second call gives other bits")
    print(json.dumps(found))


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
