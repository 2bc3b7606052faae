"""Cases of `elementwise.json`: momentum, apply_update and adamw over lists of tensors."""

from __future__ import annotations

import dataclasses
import math
import random

from .package import Built

OPS = ("momentum", "apply_update", "adamw")
BYTES = {"float32": 4, "bfloat16": 2}
MU, LR, DECAY, BETAS, EPS = 0.95, 1e-3, 0.1, (0.9, 0.95), 1e-8
MOST = 5 * 10**8  # elements of a random group: 14 GB for adamw


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


LISTED = (
    Group("momentum", ((1280, 5120),) * 24, "float32", "24x1280x5120"),
    Group("apply_update", ((1280, 5120),) * 24, "float32", "24x1280x5120"),
    Group("adamw", ((65536, 1280),), "float32", "65536x1280"),
)


def random_groups(seed: int, count: int = 20) -> list[Group]:
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
        dtype = "float32" if op == "adamw" else rng.choice(tuple(BYTES))
        label = f"random{number}-{tensors}-{sum(sizes)}"
        groups.append(Group(op, tuple((size,) for size in sizes), dtype, label))
    return groups


def random_cases(commit: str) -> set[str]:
    """Names of the rows that were drawn, not listed."""
    return {group.case for group in random_groups(int(commit[:8], 16))}


class _Lists:
    """The tensors of one call: a, b, ... as the op names them."""

    def __init__(self, group: Group, generator) -> None:
        import torch

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

    def clone(self) -> _Lists:
        """The same numbers in other memory."""
        other = object.__new__(_Lists)
        other.__dict__ = {name: [x.clone() for x in xs] for name, xs in self.__dict__.items()}
        return other

    @property
    def results(self) -> list:
        """What a user looks at: the directions, or the parameters."""
        return self.out if hasattr(self, "out") else self.params


def _ours(kernels, op: str, x: _Lists) -> None:
    if op == "momentum":
        options = {"mu": MU, "nesterov": True, "form": "heavy_ball"}
        kernels.momentum(x.grads, x.buffers, x.out, **options)
    elif op == "apply_update":
        factors = [1.0] * len(x.params)
        kernels.apply_update(x.params, x.grads, lr=LR, factors=factors, weight_decay=DECAY)
    else:
        state = (x.params, x.grads, x.averages, x.squares, x.steps)
        kernels.adamw(*state, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _baseline(op: str, x: _Lists) -> None:
    """torch's foreach operations, and its fused AdamW."""
    import torch

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


BASELINE = {
    "momentum": "torch foreach: mul, add, mul, add, copy, two norms",
    "apply_update": "torch foreach: mul, add",
    "adamw": "torch._fused_adamw_",
}


def _reference(package, op: str, x: _Lists, k: int, *, exact: bool):
    """Entry k by plain torch operations; `exact`: in float64 from the same numbers."""
    import torch

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


class StepCase:
    """Inputs on the device, ours and the baseline over them."""

    def __init__(self, group: Group, built: Built, sets: int) -> None:
        import torch

        self.group = group
        self.baseline_name = f"torch {torch.__version__}, {BASELINE[group.op]}"
        self.package = built.package
        self.kernels = built.package.kernels
        generator = torch.Generator("cuda").manual_seed(0)
        self.sets = [_Lists(group, generator) for _ in range(sets)]

    def ours(self, number: int) -> None:
        """What the optimizers call."""
        _ours(self.kernels, self.group.op, self.sets[number])

    def baseline(self, number: int) -> None:
        """torch over the same bytes."""
        _baseline(self.group.op, self.sets[number])

    def compare(self) -> tuple[bool, float, float]:
        """(ours has the reference's bits, relative errors of ours and of the baseline)."""
        import torch

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
