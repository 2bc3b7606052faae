"""Cases of `moe_lora.json`: whole layers with LoRA, forward and forward + backward.

Ours is `moe.experts_forward`, sort and combine included, with LoRA as PEFT's two matrices, which is
what `Experts` and models with PEFT's adapters hand on. The baseline is split LoRA through
torch.nn.functional.grouped_mm, its sort left out of the timed region. Both compute the gradients of
x, gates, A and B of both projections; the weights are frozen.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from . import compile_ahead
from .moe_problems import MODELS, Layer, listed, of_model, random_layers
from .package import Built, settle
from .package import module as package_module
from .progress import Progress
from .report import Measured, Row, failed, line, passed
from .timer import BURSTS, FEW_BURSTS, CudaStopwatch, cold_sets, times

SCALING = 2.0
BASELINE = "split LoRA, torch grouped_mm"
ERROR_FACTOR = 1.5  # of the baseline's error against float64
QUEUE_CYCLES = 60_000_000  # about 30 ms, in which the host queues a round of layers
ROUNDS = 15  # timed
DIRECTIONS = ("fwd", "fwd+bwd")


class Stopwatch(CudaStopwatch):
    """A layer is tens of launches: the host needs longer to run ahead than for one op."""

    def begin_round(self) -> None:
        """Occupy the device while the host queues the round."""
        self._torch.cuda._sleep(QUEUE_CYCLES)


class LayerCase:
    """One set of inputs on the device, ours and the baseline over the same values."""

    def __init__(self, layer: Layer, built: Built, seed: int, device: str = "cuda") -> None:
        import torch

        self.layer, self.moe = layer, built.package.moe
        self.peft_factors = package_module(built.package, "moe.lora").PeftFactors
        generator = torch.Generator(device).manual_seed(42 + seed)

        def normal(*shape: int, std: float = 1.0, dtype=torch.bfloat16):
            drawn = torch.randn(*shape, device=device, generator=generator)
            return drawn.mul_(std).to(dtype)

        e, h, i, r = layer.experts, layer.hidden, layer.intermediate, layer.rank
        self.w1, self.w2 = normal(e, 2 * i, h, std=0.02), normal(e, h, i, std=0.02)
        self.x = normal(layer.tokens, h).requires_grad_()
        logits = normal(layer.tokens, e, dtype=torch.float32)
        top = torch.topk(torch.softmax(logits, -1), layer.top_k, -1)
        gates = top.values / top.values.sum(-1, keepdim=True)
        self.gates, self.ids = gates.bfloat16().requires_grad_(), top.indices
        self.grad = normal(layer.tokens, h)
        flat = self.ids.flatten()
        self.slots = torch.sort(flat, stable=True).indices
        self.ends = torch.bincount(flat, minlength=e).cumsum(0).to(torch.int32)
        self.active = int((torch.bincount(flat, minlength=e) > 0).sum())
        dtype = torch.float32 if layer.fp32_lora else torch.bfloat16
        # (E, in, r) and (E, r, out) of the baseline; PEFT's (E r, in) and (out, r E) of ours
        self.factors = [
            normal(e, *size, std=0.01, dtype=dtype).requires_grad_()
            for size in ((h, r), (r, 2 * i), (i, r), (r, h))
            if r > 0
        ]
        self.peft = [
            (f.detach().mT.reshape(e * r, -1) if n % 2 == 0 else self._peft_b(f.detach()))
            .clone()
            .requires_grad_()
            for n, f in enumerate(self.factors)
        ]

    @staticmethod
    def _peft_b(factor):
        """(E, r, out) -> (out, r E), expert fastest."""
        return factor.permute(2, 1, 0).reshape(factor.shape[2], -1)

    def _lora(self):
        """PEFT's matrices as `Experts` and models with PEFT's adapters hand them on."""
        if self.layer.rank == 0:
            return None
        a1, b1, a2, b2 = self.peft
        pairs = [
            self.peft_factors(a, b, self.layer.experts, SCALING) for a, b in ((a1, b1), (a2, b2))
        ]
        return self.moe.ExpertsLora(*pairs)

    def ours(self):
        """What a user calls."""
        return self.moe.experts_forward(
            self.x,
            self.ids,
            self.gates,
            self.w1,
            self.w2,
            layout=self.moe.ExpertsLayout(),
            lora=self._lora(),
        )

    def baseline(self):
        """Split LoRA by grouped products of torch, the rows sorted beforehand."""
        import torch
        import torch.nn.functional as F

        token = self.slots // self.layer.top_k
        factors = [f.to(torch.bfloat16) for f in self.factors]

        def product(rows, weight, low):
            y = F.grouped_mm(rows, weight.mT, offs=self.ends)
            for a, b in low:
                inner = F.grouped_mm(rows, a, offs=self.ends)
                y = y + SCALING * F.grouped_mm(inner, b, offs=self.ends)
            return y

        gate, up = product(self.x[token], self.w1, [factors[:2]] if factors else []).chunk(2, -1)
        y = product(F.silu(gate) * up, self.w2, [factors[2:]] if factors else [])
        weighted = y * self.gates.flatten()[self.slots].unsqueeze(-1)
        return torch.zeros_like(self.x).index_add(0, token, weighted)

    def exact(self, leaves: Sequence[Any]):
        """The layer in float64 with W + s A B, one expert after the other."""
        import torch
        import torch.nn.functional as F

        x, gates, *factors = leaves
        factors = [f.unbind() for f in factors]  # each expert's gradient would fill a whole stack
        out = torch.zeros_like(x)
        starts = [0, *self.ends.tolist()]
        for e in range(self.layer.experts):
            mine = self.slots[starts[e] : starts[e + 1]]
            token = mine // self.layer.top_k
            w1, w2 = self.w1[e].double().mT, self.w2[e].double().mT
            if factors:
                w1 = w1 + SCALING * factors[0][e] @ factors[1][e]
                w2 = w2 + SCALING * factors[2][e] @ factors[3][e]
            gate, up = (x[token] @ w1).chunk(2, -1)
            y = (F.silu(gate) * up) @ w2
            out = out.index_add(0, token, y * gates.flatten()[mine].unsqueeze(-1))
        return out

    def with_gradients(self, run, leaves) -> list:
        """The result and the gradient of every leaf."""
        import torch

        y = run()
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grad.to(y.dtype))]

    def references(self) -> tuple[list, list]:
        """Results and gradients in float64, and those of the baseline."""
        wide = [t.detach().double().requires_grad_() for t in (self.x, self.gates, *self.factors)]
        right = self.with_gradients(lambda: self.exact(wide), wide)
        plain = self.with_gradients(self.baseline, [self.x, self.gates, *self.factors])
        return right, plain

    def compare(self) -> tuple[bool, float, float]:
        """(every error is at most 1.5 of the baseline's, the worst of ours, the baseline's)."""
        right, plain = self.references()
        ours = self.with_gradients(self.ours, [self.x, self.gates, *self.peft])
        e, r = self.layer.experts, self.layer.rank
        for n in range(3, len(ours)):  # back from PEFT's layout
            if n % 2:
                ours[n] = ours[n].view(e, r, -1).mT
            else:
                ours[n] = ours[n].view(-1, r, e).permute(2, 1, 0)
        errors = [
            tuple(((t.double() - exact).norm() / exact.norm()).item() for t in pair)
            for *pair, exact in zip(ours, plain, right, strict=True)
        ]
        good = all(mine <= ERROR_FACTOR * other for mine, other in errors)
        worst = max(errors)
        return good, *worst

    def step(self, run, leaves):
        """Forward and backward into gradients that are None before, as after zero_grad."""
        for leaf in leaves:
            leaf.grad = None
        run().backward(self.grad)

    def drop_gradients(self) -> None:
        """As before the first step, so that memory is counted from there."""
        for leaf in (self.x, self.gates, *self.factors, *self.peft):
            leaf.grad = None

    def change(self) -> None:
        """The trained factors in place, as an optimizer does."""
        import torch

        with torch.no_grad():
            for factor in (*self.factors, *self.peft):
                factor.mul_(1.01)  # 0.001 would round to nothing in bfloat16


def peak_mb(call, before_it=lambda: None) -> float:
    """Device memory that one call adds at its peak, in MB; `before_it` lets go of earlier ones."""
    import torch

    call()
    before_it()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def calls_of(case: LayerCase) -> dict[str, dict[str, Any]]:
    """{"fwd" | "fwd+bwd": {"ours" | "baseline": call}}."""
    import torch

    def forward(run):
        with torch.no_grad():
            return run()

    ours, baseline = [case.x, case.gates, *case.peft], [case.x, case.gates, *case.factors]
    return {
        "fwd": {
            "ours": lambda: forward(case.ours),
            "baseline": lambda: forward(case.baseline),
        },
        "fwd+bwd": {
            "ours": lambda: case.step(case.ours, ours),
            "baseline": lambda: case.step(case.baseline, baseline),
        },
    }


def cases_of(layer: Layer) -> list[str]:
    """Names of a layer's rows."""
    return [f"{layer.name}/{direction}" for direction in DIRECTIONS]


def measure(layer: Layer, names: Sequence[str], built: Built) -> Iterator[tuple[Row, str]]:
    """The rows of one layer that have these names, and their printed lines."""
    import torch

    weights = 6 * layer.experts * layer.hidden * layer.intermediate
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    cases = [LayerCase(layer, built, seed) for seed in range(cold_sets(weights, l2))]
    good, error, error_baseline = cases[0].compare()
    settle(built.package)
    torch.cuda.empty_cache()
    calls = [calls_of(case) for case in cases]
    floors = layer.floors(cases[0].active)
    for name, direction, floor in zip(cases_of(layer), DIRECTIONS, floors, strict=True):
        if name not in names:
            continue
        if not good:
            row = failed(name)
            yield row, line(row, gigabytes=0)
            continue
        here = [entry[direction] for entry in calls]
        turns = {
            who: lambda number, who=who, here=here: here[number][who]()
            for who in ("ours", "baseline")
        }
        found = times(
            turns,
            sets=len(cases),
            between=lambda: [case.change() for case in cases],
            bursts=BURSTS if layer.model in MODELS else FEW_BURSTS,
            rounds=ROUNDS,
            stopwatch=Stopwatch,
        )
        row = passed(
            name,
            Measured(
                times=found["ours"],
                floor_ms=floor,
                baseline=BASELINE,
                baseline_times=found["baseline"],
                error=error,
                error_baseline=error_baseline,
                peak_mb=peak_mb(here[0]["ours"], cases[0].drop_gradients),
                peak_baseline_mb=peak_mb(here[0]["baseline"], cases[0].drop_gradients),
            ),
        )
        memory = f"  peak {row.peak_mb:.0f} MB of {row.peak_baseline_mb:.0f}"
        yield row, line(row, gigabytes=weights / 1e9) + memory


def file_layers(commit: str) -> list[Layer]:
    """What the file holds: the listed layers and 20 random ones."""
    return [*listed(), *random_layers(int(commit[:8], 16))]


def compile_jobs(built: Built, measured: Collection[str] = ()) -> list[Callable[[], object]]:
    """A call per layer that is not measured yet, for `compile_ahead`."""

    def job(layer: Layer) -> None:
        for calls in calls_of(LayerCase(layer, built, 0)).values():
            calls["ours"]()

    layers = file_layers(built.commit)
    return [functools.partial(job, one) for one in layers if {*cases_of(one)} - {*measured}]


def rows(
    built: Built,
    progress: Progress,
    models: Sequence[str] = (),
    ranks: Sequence[int] = (16,),
    tokens: int = 2048,
) -> Iterator[tuple[Row, str]]:
    """The file's layers; or the models, ranks and tokens that were asked for."""
    import torch

    from . import moe_projections

    print(built.package.explain("grouped_lora_linear", device="cuda"))
    layers = [of_model(model, tokens, rank) for model in models for rank in ranks]
    if not layers:
        layers = file_layers(built.commit)
        start = time.perf_counter()
        count = compile_ahead.run("moe_lora", built, progress.measured)
        print(f"[{time.perf_counter() - start:.0f} s] compiled by {count} processes", flush=True)
    for layer in layers:
        names = progress.begin(*cases_of(layer))
        if not names:
            continue
        if models and layer.rank > 0:
            print(*moe_projections.lines(layer, built), sep="\n", flush=True)
        yield from measure(layer, names, built)
        torch.cuda.empty_cache()


def random_cases(commit: str) -> set[str]:
    """Names of the rows that were drawn, not listed."""
    return {case for layer in random_layers(int(commit[:8], 16)) for case in cases_of(layer)}
