"""Cases of `elementwise.json`: ops whose time is their bytes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from . import step_ops
from .memory_bound import measure
from .package import Built
from .progress import Progress
from .report import Row

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BYTES_OUT = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Dequant:
    """nf4_dequant of every expert of a stack."""

    experts: int
    rows: int
    columns: int
    blocksize: int = 64
    dtype: str = "bfloat16"
    nested: bool = False

    @property
    def case(self) -> str:
        """Name in the result file; what is not the default is named behind the shape."""
        name = f"nf4_dequant/{self.experts}x{self.rows}x{self.columns}"
        extra = [f"b{self.blocksize}"] * (self.blocksize != 64)
        extra += [self.dtype] * (self.dtype != "bfloat16") + ["nested"] * self.nested
        return "/".join([name, *extra])

    @property
    def elements(self) -> int:
        """Elements of the stack."""
        return self.experts * self.rows * self.columns

    @property
    def blocks(self) -> int:
        """Absmax blocks of the stack."""
        return -(-self.elements // self.blocksize)

    @property
    def bytes_moved(self) -> int:
        """Each packed byte and each absmax read once, each element written once."""
        absmax = self.blocks + 4 * (self.blocks // 256 + 1) if self.nested else 4 * self.blocks
        return (self.elements + 1) // 2 + absmax + self.elements * BYTES_OUT[self.dtype]


LISTED = (Dequant(128, 1536, 2048),)


def random_problems(seed: int, count: int = 20) -> list[Dequant]:
    """Shapes that nobody tuned for: every second one with sizes of no particular divisibility."""
    rng = random.Random(seed)
    problems = []
    for number in range(count):
        step = 64 if number % 2 else 1
        rows, columns = (round(2 ** rng.uniform(8, 12) / step) * step for _ in range(2))
        elements = 2 ** rng.uniform(26, 29)
        problems.append(
            Dequant(
                experts=max(1, min(512, round(elements / (rows * columns)))),
                rows=rows,
                columns=columns,
                blocksize=rng.choice(BLOCKSIZES),
                dtype=rng.choice(tuple(BYTES_OUT)),
                nested=rng.random() < 0.25,
            )
        )
    return problems


class DequantCase:
    """Inputs on the device, ours and the baseline over them."""

    def __init__(self, problem: Dequant, built: Built, sets: int) -> None:
        import bitsandbytes
        import torch

        self.baseline_name = f"bitsandbytes {bitsandbytes.__version__} dequantize_4bit"
        self.problem = problem
        self.package = built.package
        self.dtype = getattr(torch, problem.dtype)
        self.ids = torch.arange(problem.experts, dtype=torch.int32, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        self.sets = [self._inputs(generator) for _ in range(sets)]
        self.states = [self._baseline_state(inputs) for inputs in self.sets]

    def _inputs(self, generator) -> dict[str, Any]:
        import torch

        def codes(count: int):
            return torch.randint(
                0, 256, (count,), dtype=torch.uint8, device="cuda", generator=generator
            )

        def values(count: int):
            return torch.rand(count, device="cuda", generator=generator) + 0.01

        p = self.problem
        inputs = {"packed": codes((p.elements + 1) // 2)}
        if not p.nested:
            return inputs | {"absmax": values(p.blocks)}
        return inputs | {
            "absmax": codes(p.blocks),
            "absmax_code": values(256).sort().values,
            "absmax_scale": values(-(-p.blocks // 256)),
            "absmax_offset": values(1),
        }

    def _baseline_state(self, inputs: dict[str, Any]):
        import torch
        from bitsandbytes.functional import QuantState, get_4bit_type

        p = self.problem
        inner = None
        if p.nested:
            inner = QuantState(
                inputs["absmax_scale"],
                code=inputs["absmax_code"],
                blocksize=256,
                dtype=torch.float32,
            )
        return QuantState(
            inputs["absmax"],
            shape=torch.Size((p.experts, p.rows, p.columns)),
            code=get_4bit_type("nf4", device="cuda"),
            blocksize=p.blocksize,
            quant_type="nf4",
            dtype=self.dtype,
            offset=inputs.get("absmax_offset"),
            state2=inner,
        )

    def ours(self, number: int):
        """What a user calls."""
        p = self.problem
        return self.package.nf4_dequant(
            active_experts=self.ids,
            expert_shape=(p.rows, p.columns),
            blocksize=p.blocksize,
            dtype=self.dtype,
            **self.sets[number],
        )

    def baseline(self, number: int):
        """bitsandbytes over the same bytes."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.sets[number]["packed"].reshape(-1, 1), self.states[number])

    def compare(self) -> tuple[bool, float, float]:
        """(ours has the reference's bits, relative errors of ours and of the baseline)."""
        import torch

        p = self.problem
        ours, baseline = self.ours(0), self.baseline(0)
        reference = self.package.reference.nf4
        same, squares = True, torch.zeros(3, dtype=torch.float64, device="cuda")
        wide = {
            name: tensor if tensor.dtype == torch.uint8 else tensor.double()
            for name, tensor in self.sets[0].items()
        }
        table = torch.tensor(reference.NF4_TABLE, dtype=torch.float64, device="cuda")
        bits = torch.int32 if self.dtype == torch.float32 else torch.int16
        for expert in range(p.experts):
            call = {
                "active_experts": self.ids[expert : expert + 1],
                "expert_shape": (p.rows, p.columns),
                "blocksize": p.blocksize,
            }
            expected = reference.nf4_dequant(**self.sets[0], **call, dtype=self.dtype)[0]
            exact = reference.nf4_dequant(**wide, **call, dtype=torch.float64, codebook=table)[0]
            same &= torch.equal(ours[expert].view(bits), expected.view(bits))
            squares += torch.stack(
                [(x.double() - exact).square().sum() for x in (ours[expert], baseline[expert])]
                + [exact.square().sum()]
            )
        error, error_baseline, norm = squares.sqrt().tolist()
        return same, error / norm, error_baseline / norm


def rows(built: Built, progress: Progress) -> Iterator[tuple[Row, str]]:
    """Every row of the file: the listed cases, then 20 shapes of either kind from the commit."""
    import torch

    seed = int(built.commit[:8], 16)
    dequants = (*LISTED, *random_problems(seed))
    groups = (*step_ops.LISTED, *step_ops.random_groups(seed))
    for problem in (*dequants, *groups):
        if not progress.begin(problem.case):
            continue
        kind = DequantCase if isinstance(problem, Dequant) else step_ops.StepCase
        yield measure(problem, built, kind)
        torch.cuda.empty_cache()


def random_cases(commit: str) -> set[str]:
    """Names of the rows that were drawn, not listed."""
    drawn = {problem.case for problem in random_problems(int(commit[:8], 16))}
    return drawn | step_ops.random_cases(commit)
