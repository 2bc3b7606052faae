"""The launches of a gated layer on a GPU of compute capability 9.0, compiled where none is.

Run by `test_early_launches.py`, apart from the interpreter of the other tests. Prints as JSON what
every launch is, in order.
"""

import contextlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

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


def load_tool():
    """tools/compile_triton.py as a module."""
    path = ROOT / "tools" / "compile_triton.py"
    spec = importlib.util.spec_from_file_location("compile_triton", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


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
    tool, streams, launches = load_tool(), Streams(), []
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


if __name__ == "__main__":
    main()
