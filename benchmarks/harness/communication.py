"""Cases of `communication.json`: what one GPU can show of copies, signals and products that wait.

A row is one figure with its unit and target. It stands only if the results were right: `push` and
`progress_matmul` have the bits of what they are compared with. Both are timed on the device, by
turns with their baselines, over input sets that the L2 cache does not hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import report
from .built_package import Built, module
from .lazy import torch
from .progress import Progress
from .report import Goal, Line, Rows
from .timer import cold_sets, medians

HEADING = f"{'case':<52}{'value':>8}  unit"
TRANSPORT = "one GPU"  # source and destination lie in its own memory
figure = functools.partial(report.figure, transport=TRANSPORT)

# Name -> (number of pairs, rows, columns, columns of the destination's rows in memory).
PUSHES = {
    "push/1x8192x8192": (1, 8192, 8192, 8192),
    "push/32x4096x4096": (32, 4096, 4096, 4096),
    "push/8x4096x4096/columns": (8, 4096, 4096, 8192),
}
PUSH_SHARE = Goal(0.9, at_least=True)

# M, N, K, and chunks of M.
PRODUCTS = {
    "progress_matmul/4096x3584x8192": (4096, 3584, 8192, 4),
    "progress_matmul/16384x3584x8192": (16384, 3584, 8192, 8),
}
SIGNALLED, CUBLAS = Goal(1.03, at_least=False), Goal(1.05, at_least=False)
ERROR = 1.02  # of cuBLAS's distance from the product in float64

EXCHANGE = ("exchange/launches", "exchange/copies")
MATRICES = 16


def rows(built: Built, cases: Progress) -> Rows:
    """Each row and its printed line."""
    for case, shape in PUSHES.items():
        if cases.begin(case):
            yield push_share(built, case, *shape)
    for case, shape in PRODUCTS.items():
        if missing := cases.begin(f"{case}/signalled", f"{case}/cublas"):
            found = product_ratios(built, case, *shape)
            yield from (one for one in found if one[0].case in missing)
    if missing := cases.begin(*EXCHANGE):
        yield from (one for one in exchange_counts(built) if one[0].case in missing)
    cases.begin()


def push_share(built: Built, case: str, count: int, rows: int, columns: int, pitch: int) -> Line:
    """The rate of a push as a share of that of device copies of as many bytes."""
    push = module(built.package, "kernels.communication").push
    total = 4 * count * rows * columns  # bytes read and written
    sets = min(cold_sets(total), 8)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    srcs = [[torch.randn(rows, columns, **kind) for _ in range(count)] for _ in range(sets)]
    whole = [[torch.zeros(rows, pitch, **kind) for _ in range(count)] for _ in range(sets)]
    dsts = [[x[:, :columns] for x in one] for one in whole]
    plain = [[torch.zeros(rows, columns, **kind) for _ in range(count)] for _ in range(sets)]

    def copies(number: int) -> None:
        for dst, src in zip(plain[number], srcs[number], strict=True):
            dst.copy_(src)

    push(dsts[0], srcs[0])
    same = all(torch.equal(*pair) for pair in zip(dsts[0], srcs[0], strict=True))
    same = same and not any(x[:, columns:].any() for x in whole[0])
    value = None
    if same:
        calls = {"push": lambda number: push(dsts[number], srcs[number]), "copies": copies}
        found = medians(calls, sets=sets)
        value = found["copies"] / found["push"]
    return figure(case, value, "Tensor.copy_", PUSH_SHARE, unit="of a copy's rate")


def product_ratios(built: Built, case: str, m: int, n: int, k: int, chunks: int) -> list[Line]:
    """Times with all signals set over those without signals, and over cuBLAS's."""
    product = Product(built, m, n, k, chunks)
    times = {}
    if product.is_right():
        times = product.times()
        tflops = 2 * m * n * k / times["signalled"] / 1e9
        print(
            f"{case}: {times['signalled'] * 1e3:.1f} us signalled, {times['silent'] * 1e3:.1f} "
            f"without signals, {times['cublas'] * 1e3:.1f} cuBLAS; {tflops:.0f} TFLOP/s"
        )
        if product.status.item() != 0:
            times = {}
    del product
    torch.cuda.empty_cache()

    def over(name: str) -> float | None:
        return times["signalled"] / times[name] if times else None

    unit = "times the time"
    return [
        figure(
            f"{case}/signalled", over("silent"), "the same kernel, no signals", SIGNALLED, unit=unit
        ),
        figure(f"{case}/cublas", over("cublas"), "cuBLAS", CUBLAS, unit=unit),
    ]


class Product:
    """Inputs of a product of activations and a linear layer's weight, and ways to compute it."""

    def __init__(self, built: Built, m: int, n: int, k: int, chunks: int, sets: int = 4) -> None:
        communication = module(built.package, "kernels.communication")
        self.matmul = communication.progress_matmul
        self.ops = module(built.package, "_ops").ops
        self.chunks = chunks
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.sets = [
            (torch.randn(m, k, **kind), torch.randn(n, k, **kind).T, torch.empty(m, n, **kind))
            for _ in range(sets)
        ]
        self.words = torch.zeros(chunks, device="cuda", dtype=torch.uint32)
        communication.memset32(self.words, 0, 1, chunks)
        self.status = torch.zeros(1, device="cuda", dtype=torch.int32)

    def signalled(self, number: int) -> Any:
        a, b, out = self.sets[number]
        return self.matmul(a, b, self.words, 0, status=self.status, out=out)

    def silent(self, number: int) -> None:
        self.ops.progress_matmul(*self.sets[number], None, self.chunks, 0, 0, None, 0, None)

    def cublas(self, number: int) -> Any:
        a, b, out = self.sets[number]
        return torch.mm(a, b, out=out)

    def times(self) -> dict[str, float]:
        """Milliseconds of each way, behind a pause and on inputs that the call before did not read.

        Of three by turns on the same inputs the first took 4 to 7 us more, whichever it was.
        """
        sets = len(self.sets)
        calls = {
            "signalled": self.signalled,
            "silent": lambda number: self.silent((number - 1) % sets),
            "cublas": lambda number: self.cublas((number - 2) % sets),
        }
        return medians(calls, sets=sets, alone=True)

    def is_right(self) -> bool:
        """As near to the product in float64 as cuBLAS; the same bits without signals."""
        a, b, out = self.sets[0]
        rows = slice(len(a) - 2048, len(a))  # float64 of all rows would take longer than the timing
        exact = a[rows].double() @ b.double()

        def error(call: Callable[[int], object]) -> float:
            out.fill_(torch.nan)
            call(0)
            return ((out[rows].double() - exact).norm() / exact.norm()).item()

        theirs, ours = error(self.cublas), error(self.signalled)
        signalled = out.clone()
        self.silent(0)
        return torch.equal(signalled, out) and ours <= ERROR * theirs and self.status.item() == 0


def exchange_counts(built: Built) -> list[Line]:
    """What the device runs for momenta that go to their owner, and updates that come back."""
    communication = module(built.package, "kernels.communication")
    momentum = module(built.package, "kernels").momentum
    grads, buffers, updates, back = (
        [torch.randn(1024, 1024, device="cuda") for _ in range(MATRICES)] for _ in range(4)
    )
    slots = torch.empty(MATRICES, 1024, 1024, device="cuda", dtype=torch.float16)
    words = torch.zeros(2, device="cuda", dtype=torch.uint32)
    status = torch.zeros(1, device="cuda", dtype=torch.int32)

    def exchange() -> None:
        momentum(grads, buffers, list(slots), mu=0.95, nesterov=True, form="heavy_ball")
        communication.stream_write_value32(words, 0, 1)
        communication.wait_signals(words[:1], 1, 1000, status)
        communication.push(back, updates)

    kernels, copies = counted(exchange)
    same = all(torch.equal(*pair) for pair in zip(back, updates, strict=True))
    right = same and status.item() == 0
    baseline = "momentum's two, the wait, a copy per matrix"
    return [
        figure(case, value if right else None, baseline, Goal(bound, at_least=False), unit=unit)
        for case, value, unit, bound in zip(
            EXCHANGE, (kernels, copies), ("kernels", "copies"), (3, MATRICES), strict=True
        )
    ]


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """(kernels, copies and memsets) that one call runs on the device, after another one."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == on_device]
    moved = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return len(names) - moved, moved
