"""Cases of `elementwise.json`: ops whose time is their bytes.

`nf4_dequant` over stacks of experts; momentum, apply_update and adamw over lists of tensors. A row
has the right bits first, then is timed beside its baseline and a copy of as many bytes.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from .built_package import Built
from .device import added_mb, copy_call
from .lazy import torch
from .progress import Progress
from .report import Line, Rows, failed, floor_ms, line, passed
from .timer import cold_sets, times

MOST_SETS = 64  # of inputs; thousands of small tensors would take longer to make than to time
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
OPS = ("momentum", "apply_update", "adamw")
# In the order in which a commit's digits draw them.
DEQUANT_DTYPES, GROUP_DTYPES = ("bfloat16", "float16", "float32"), ("float32", "bfloat16")
MU, LR, DECAY, BETAS, EPS = 0.95, 1e-3, 0.1, (0.9, 0.95), 1e-8
MOST = 5 * 10**8  # elements of a random group: 14 GB for adamw


def measure(problem: Dequant | Group, built: Built) -> Line:
    """The row of one problem and its printed line."""
    kind = DequantCase if isinstance(problem, Dequant) else GroupCase
    case = kind(problem, built, min(cold_sets(problem.bytes_moved), MOST_SETS))
    same, *errors = case.compare()
    if not same:
        row = failed(problem.case)
        return row, line(row, gigabytes=0)
    peak_mb = added_mb(lambda: case.ours(0))
    calls = {"ours": case.ours, "baseline": case.baseline, "copy": copy_call(problem.bytes_moved)}
    found = times(calls, sets=len(case.sets))
    least = floor_ms(bytes_moved=problem.bytes_moved)
    row = passed(problem.case, found, case.baseline_name, least, errors=errors, peak_mb=peak_mb)
    return row, line(row, gigabytes=problem.bytes_moved / 1e9, copy_ms=found["copy"].ms)


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
        return (self.elements + 1) // 2 + absmax + self.elements * BYTES[self.dtype]


LISTED_DEQUANTS = (Dequant(128, 1536, 2048),)


def random_dequants(seed: int, count: int = 10) -> list[Dequant]:
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
                dtype=rng.choice(DEQUANT_DTYPES),
                nested=rng.random() < 0.25,
            )
        )
    return problems


class DequantCase:
    """Inputs on the device, ours and the baseline over them."""

    def __init__(self, problem: Dequant, built: Built, sets: int) -> None:
        import bitsandbytes

        self.baseline_name = f"bitsandbytes {bitsandbytes.__version__} dequantize_4bit"
        self.problem = problem
        self.package = built.package
        self.dtype = getattr(torch, problem.dtype)
        self.ids = torch.arange(problem.experts, dtype=torch.int32, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        self.sets = [self._inputs(generator) for _ in range(sets)]
        self.states = [self._baseline_state(inputs) for inputs in self.sets]

    def _inputs(self, generator) -> dict[str, Any]:
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


@dataclasses.dataclass(frozen=True)
class Group:
    """One call of an op. `dtype` is that of parameters and gradients; directions are float16."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    label: str

    @property
    def case(self) -> str:
        """Name in the result file."""
        return f"{self.op}/{self.label}/{self.dtype}"

    @property
    def elements(self) -> int:
        """Elements of all tensors of one list."""
        return sum(map(math.prod, self.shapes))

    @property
    def bytes_moved(self) -> int:
        """Each operand read or written once; momentum and averages are float32."""
        size = BYTES[self.dtype]
        each = {"momentum": size + 8 + 2, "apply_update": 2 * size + 2, "adamw": 3 * size + 16}
        return self.elements * each[self.op]


LISTED_GROUPS = (
    Group("momentum", ((1280, 5120),) * 24, "float32", "24x1280x5120"),
    Group("apply_update", ((1280, 5120),) * 24, "float32", "24x1280x5120"),
    Group("adamw", ((65536, 1280),), "float32", "65536x1280"),
)


def random_groups(seed: int, count: int = 10) -> list[Group]:
    """1 to 400 tensors of 1 to 10^8 elements each, sizes of no particular divisibility."""
    rng = random.Random(seed)
    groups = []
    for number in range(count):
        op = OPS[number % len(OPS)]
        tensors = round(2 ** rng.uniform(0, math.log2(400)))
        sizes = [round(10 ** rng.uniform(0, 8)) for _ in range(tensors)]
        while sum(sizes) > MOST:
            sizes[sizes.index(max(sizes))] //= 2
        # torch's fused AdamW wants one dtype for everything, so its groups are float32.
        dtype = "float32" if op == "adamw" else rng.choice(GROUP_DTYPES)
        label = f"random{number}-{tensors}-{sum(sizes)}"
        groups.append(Group(op, tuple((size,) for size in sizes), dtype, label))
    return groups


class TensorLists:
    """The tensors of one call: a, b, ... as the op names them."""

    def __init__(self, group: Group, generator) -> None:
        dtype = getattr(torch, group.dtype)

        def normal(kind: torch.dtype) -> list:
            return [
                torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(kind)
                for shape in group.shapes
            ]

        self.grads = normal(dtype if group.op != "apply_update" else torch.float16)
        if group.op == "momentum":
            self.buffers = normal(torch.float32)
            self.out = [torch.empty_like(g, dtype=torch.float16) for g in self.grads]
            return
        self.params = normal(dtype)
        if group.op == "adamw":
            self.averages = normal(torch.float32)
            self.squares = [x.square() for x in normal(torch.float32)]
            self.steps = [torch.zeros((), device="cuda") for _ in group.shapes]

    def clone(self) -> TensorLists:
        """The same numbers in other memory."""
        other = object.__new__(TensorLists)
        other.__dict__ = {name: [x.clone() for x in xs] for name, xs in self.__dict__.items()}
        return other

    @property
    def results(self) -> list:
        """What a user looks at: the directions, or the parameters."""
        return self.out if hasattr(self, "out") else self.params


def _ours(kernels, op: str, x: TensorLists) -> None:
    if op == "momentum":
        options = {"mu": MU, "nesterov": True, "form": "heavy_ball"}
        kernels.momentum(x.grads, x.buffers, x.out, **options)
    elif op == "apply_update":
        factors = [1.0] * len(x.params)
        kernels.apply_update(x.params, x.grads, lr=LR, factors=factors, weight_decay=DECAY)
    else:
        state = (x.params, x.grads, x.averages, x.squares, x.steps)
        kernels.adamw(*state, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _baseline(op: str, x: TensorLists) -> None:
    """torch's foreach operations, and its fused AdamW."""
    if op == "momentum":
        torch._foreach_mul_(x.buffers, MU)
        torch._foreach_add_(x.buffers, x.grads)
        directions = torch._foreach_mul(x.buffers, MU)
        torch._foreach_add_(directions, x.grads)
        torch._foreach_copy_(x.out, directions)
        torch._foreach_norm(directions)
        torch._foreach_norm(directions, math.inf)
    elif op == "apply_update":
        torch._foreach_mul_(x.params, 1 - LR * DECAY)
        torch._foreach_add_(x.params, x.grads, alpha=-LR)
    else:
        torch._foreach_add_(x.steps, 1)
        torch._fused_adamw_(
            x.params,
            x.grads,
            x.averages,
            x.squares,
            [],
            x.steps,
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=DECAY,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )


GROUP_BASELINE = {
    "momentum": "torch foreach: mul, add, mul, add, copy, two norms",
    "apply_update": "torch foreach: mul, add",
    "adamw": "torch._fused_adamw_",
}


def _reference(package, op: str, x: TensorLists, k: int, *, exact: bool):
    """Entry k by plain torch operations; `exact`: in float64 from the same numbers."""
    update = package.reference.update
    wide = (lambda t: t.double()) if exact else (lambda t: t.clone())
    if op == "momentum":
        direction = update.momentum(wide(x.grads[k]), wide(x.buffers[k]), MU)
        return direction if exact else direction.to(x.out[k].dtype)
    param = wide(x.params[k])
    if op == "apply_update":
        lr, decay = (torch.tensor(value, dtype=torch.float32) for value in (LR, DECAY))
        update.apply_update(param, x.grads[k], lr=lr * 1.0, decay=lr * decay)
        return param
    state = [wide(tensors[k]) for tensors in (x.grads, x.averages, x.squares)]
    lr = torch.tensor(LR, dtype=torch.float32)
    options = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    update.adamw(param, *state, x.steps[k].clone(), **options)
    return param


class GroupCase:
    """Inputs on the device, ours and the baseline over them."""

    def __init__(self, group: Group, built: Built, sets: int) -> None:
        self.group = group
        self.baseline_name = f"torch {torch.__version__}, {GROUP_BASELINE[group.op]}"
        self.package = built.package
        self.kernels = built.package.kernels
        generator = torch.Generator("cuda").manual_seed(0)
        self.sets = [TensorLists(group, generator) for _ in range(sets)]

    def ours(self, number: int) -> None:
        """What the optimizers call."""
        _ours(self.kernels, self.group.op, self.sets[number])

    def baseline(self, number: int) -> None:
        """torch over the same bytes."""
        _baseline(self.group.op, self.sets[number])

    def compare(self) -> tuple[bool, float, float]:
        """(ours has the reference's bits, relative errors of ours and of the baseline)."""
        op, start = self.group.op, self.sets[0]
        ours, baseline = start.clone(), start.clone()
        _ours(self.kernels, op, ours)
        _baseline(op, baseline)
        same, squares = True, torch.zeros(3, dtype=torch.float64, device="cuda")
        for k in range(len(self.group.shapes)):
            expected = _reference(self.package, op, start, k, exact=False)
            exact = _reference(self.package, op, start, k, exact=True)
            same &= torch.equal(ours.results[k], expected)
            results = (ours.results[k], baseline.results[k])
            squares += torch.stack(
                [(x.double() - exact).square().sum() for x in results] + [exact.square().sum()]
            )
        error, error_baseline, norm = squares.sqrt().tolist()
        return same, error / norm, error_baseline / norm


def rows(built: Built, progress: Progress) -> Rows:
    """Every row of the file: the listed cases, then 10 shapes of either kind from the commit."""
    seed = int(built.commit[:8], 16)
    dequants = (*LISTED_DEQUANTS, *random_dequants(seed))
    groups = (*LISTED_GROUPS, *random_groups(seed))
    for problem in (*dequants, *groups):
        if not progress.begin(problem.case):
            continue
        yield measure(problem, built)
        torch.cuda.empty_cache()


def random_cases(commit: str) -> set[str]:
    """Names of the rows that were drawn, not listed."""
    seed = int(commit[:8], 16)
    return {problem.case for problem in (*random_dequants(seed), *random_groups(seed))}
