"""Launches that begin before their predecessor ended: each waits for it before it may touch it.

What is compiled for an H100 is read: a wait that is missing gives wrong numbers only where the
predecessor happens to be slow.
"""

import contextlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# tokens, experts per token, experts, hidden, intermediate, rank, rows per tile. Rank 16 is loaded
# before the sum over K, rank 24 after it; x A^T over 4096 is summed in parts.
PROBLEMS = {
    "ahead": (256, 2, 3, 64, 32, 16, 16),
    "after": (256, 2, 3, 4096, 32, 24, 16),
}
ORDERED = {
    "griddepcontrol.wait": "wait",
    "griddepcontrol.launch_dependents": "signal",
    "ld.global": "load",
    "cp.async.cg": "load",
    "cp.async.ca": "load",
    "st.global": "store",
}
WORDS = "|".join(re.escape(word) for word in ORDERED)
EARLY = {  # launches of a forward and a backward
    "_reorder": 2,
    "_low_rank": 2,
    "_gated_forward": 1,
    "_gated_backward": 1,
    "_grouped_product": 2,
}


class Streams:
    """The two streams of `beside`, by name."""

    def __init__(self) -> None:
        self.current = "first"

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        self.current = "second"
        yield
        self.current = "first"

    def there_waits(self) -> None:
        pass

    here_waits = there_waits


def catch(tool, streams: Streams, launches: list[dict]) -> None:
    """Note launches instead, with the code of those that are early or signal."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    made: dict[str, str] = {}

    def run(self, *arguments, grid, warmup, **options):
        del grid, warmup
        own = {p.name for p in self.params}
        compiler = {name: value for name, value in options.items() if name not in own}
        mine = {name: value for name, value in options.items() if name in own}
        found = tool.load("kernels.launch.triton_compile").specialization(self, arguments, mine)
        key = str((self.__name__, found, compiler))
        early = bool(compiler.get("launch_pdl"))
        if not (early or mine.get("EARLY") or mine.get("NEXT")):
            made[key] = ""
        if key not in made:
            source = ASTSource(self, found.signature, found.constants, found.attributes)
            target = GPUTarget("cuda", 90, 32)
            made[key] = triton.compile(source, target=target, options=compiler).asm["ptx"]
        ptx = made[key]
        launches.append(
            {
                "kernel": self.__name__,
                "stream": streams.current,
                "early": early,
                "order": [ORDERED[word] for word in re.findall(WORDS, ptx)],
            }
        )

    JITFunction.run = run


def main() -> None:
    """Prints as JSON what every launch of a gated layer on a GPU of capability 9.0 is, in order."""
    import torch

    path = ROOT / "tools" / "compile_triton.py"
    spec = importlib.util.spec_from_file_location("compile_triton", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    streams, launches = Streams(), []
    launch = tool.load("kernels.experts.grouped_launch_triton")
    launch.arch = lambda device: "sm90"
    launch.overlaps = lambda device: True
    launch._multiprocessors = lambda device: 132
    tool.load("kernels.experts.gated_launch_triton").beside = lambda x: contextlib.nullcontext(
        streams
    )
    catch(tool, streams, launches)
    for name, problem in PROBLEMS.items():
        tool.MODELS[name] = problem
        tokens, top_k, experts, *_, rows = problem
        ids = torch.zeros(tokens, top_k, dtype=torch.int64)
        order = tool.expert_order(ids, experts, rows)
        launches.clear()
        tool.gated_step(name, torch.bfloat16, torch.bfloat16, order)
        print(json.dumps({"problem": name, "launches": launches}), flush=True)


@pytest.fixture(scope="module")
def launches():
    """Every launch of a step by problem, of `main` in a process without the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("compiles with Triton, which is not here")
    from ..launch.test_triton_compile import run_compiling  # `main` runs outside of a package

    lines = run_compiling(__file__).splitlines()
    found = (json.loads(text) for text in lines if text.startswith("{"))
    return {one["problem"]: one["launches"] for one in found}


def early(launches: list[dict], kernel: str) -> list[list[str]]:
    """The order of signals, waits, loads and stores of a kernel's early launches."""
    return [one["order"] for one in launches if one["early"] and one["kernel"] == kernel]


@pytest.mark.parametrize("problem", ["ahead", "after"])
def test_early_launches_follow_one_that_signals(launches, problem):
    counts, before = dict.fromkeys(EARLY, 0), {}
    for one in launches[problem]:
        if one["early"]:
            counts[one["kernel"]] += 1
            assert "signal" in before[one["stream"]]["order"], (before[one["stream"]], one)
        else:
            assert "wait" not in one["order"], one
        before[one["stream"]] = one
    assert counts == EARLY


def test_intermediates_wait_before_they_load_and_before_the_next_begins(launches):
    """The next launch reads what was written before this one."""
    for order in early(launches["ahead"], "_low_rank") + early(launches["after"], "_low_rank"):
        assert order[0] == "wait"
        assert order.count("wait") == 1
    for one in launches["ahead"]:
        if one["kernel"] == "_low_rank":
            assert one["order"][one["early"]] == "signal"


def test_copies_end_after_their_predecessor(launches):
    """They read none of its results, but who waits for the copy must have waited for both."""
    for order in early(launches["ahead"], "_reorder"):
        assert order[-1] == "wait"


@pytest.mark.parametrize("kernel", ["_gated_forward", "_gated_backward", "_grouped_product"])
def test_products_wait_before_they_load_the_intermediates(launches, kernel):
    """Two waits where loads come ahead: for programs of the first wave, and for the others."""
    for order in early(launches["ahead"], kernel):
        first, second = (n for n, what in enumerate(order) if what == "wait")
        assert "load" in order[first:second]
        assert order[second + 1] == "load"
        assert "store" not in order[:second]
    for order in early(launches["after"], kernel):
        (at,) = (n for n, what in enumerate(order) if what == "wait")
        assert order[at + 1] == "load"
        assert "store" not in order[:at]


if __name__ == "__main__":
    main()
