"""Cases of `moe_lora.json`: whole layers with LoRA, forward and forward + backward.

Ours is `moe.experts_forward`, sort and combine included, with LoRA as PEFT's two matrices, which is
what `Experts` and models with PEFT's adapters hand on. The baseline is split LoRA through
torch.nn.functional.grouped_mm, its sort left out of the timed region. Both compute the gradients of
x, gates, A and B of both projections; the weights are frozen. The variant "triton" is the path that
GPUs other than Hopper's take, asked for by name on this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from .. import compile_ahead, other_projects
from ..built_package import Built, settle
from ..built_package import module as package_module
from ..device import peak_mb
from ..lazy import torch
from ..progress import Progress
from ..report import Rows, failed, judged, line, passed, said
from ..timer import BURSTS, FEW_BURSTS, cold_sets, times
from . import goals, projections
from .problems import Layer, listed, of_model, random_layers

SCALING = 2.0
BASELINE = "split LoRA, torch grouped_mm"
ERROR_FACTOR = 1.5  # of the baseline's error against float64
PEER_FACTOR = 4.0  # the same of a peer
PEERS = ("axolotl",)
PEER_SECONDS = 120  # for a layer of a peer
ROUNDS = 15  # timed
DIRECTIONS = ("fwd", "fwd+bwd")
ALIGNED = 8  # elements: grouped_mm takes no other rows of 16 bits
GPT_OSS_SLOPE, GPT_OSS_LIMIT = 1.702, 7.0  # of its activation


class LayerCase:
    """One set of inputs on the device, ours and the baseline over the same values."""

    def __init__(self, layer: Layer, built: Built, seed: int, device: str = "cuda") -> None:
        self.layer, self.package, self.moe = layer, built.package, built.package.moe
        self.peft_factors = package_module(built.package, "moe.lora").PeftFactors
        generator = torch.Generator(device).manual_seed(42 + seed)

        def normal(*shape: int, std: float = 1.0, dtype=torch.bfloat16):
            drawn = torch.randn(*shape, device=device, generator=generator)
            return drawn.mul_(std).to(dtype)

        e, h, i, r = layer.experts, layer.hidden, layer.intermediate, layer.rank
        gpt_oss = {"activation": "gpt_oss", "transposed": True, "interleaved": True}
        self.layout = self.moe.ExpertsLayout(**(gpt_oss if layer.is_gpt_oss else {}))
        self.w1, self.w2 = (
            normal(*self.layout.stored(e, *sides), std=0.02) for sides in ((h, 2 * i), (i, h))
        )
        self.biases = None
        if layer.is_gpt_oss:
            self.biases = normal(e, 2 * i, std=0.02), normal(e, h, std=0.02)
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
        # (E, in, r) and (E, r, out) of the baseline, whose rank is filled up with zeros; PEFT's
        # (E r, in) and (out, r E) of ours
        drawn = [
            normal(e, *size, std=0.01, dtype=dtype)
            for size in ((h, r), (r, 2 * i), (i, r), (r, h))
            if r > 0
        ]
        missing = -r % ALIGNED
        self.factors = [
            torch.nn.functional.pad(f, (0, 0, 0, missing) if n % 2 else (0, missing))
            .contiguous()
            .requires_grad_()
            for n, f in enumerate(drawn)
        ]
        self.peft = [
            (f.mT.reshape(e * r, -1) if n % 2 == 0 else self._peft_b(f)).clone().requires_grad_()
            for n, f in enumerate(drawn)
        ]
        self._right: tuple[list, list] | None = None

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

    @property
    def weights(self) -> tuple[Any, Any]:
        """Of both projections, as ours takes them."""
        return self.w1, self.w2

    def ours(self, backend: str = "auto"):
        """What a user calls."""
        bias = dict(zip(("gate_up_bias", "down_bias"), self.biases or (), strict=False))
        return self.moe.experts_forward(
            self.x,
            self.ids,
            self.gates,
            *self.weights,
            layout=self.layout,
            lora=self._lora(),
            backend=backend,
            **bias,
        )

    def peer(self, peer: other_projects.Peer):
        """The same layer by a peer, over PEFT's matrices."""
        options = {"rank": self.layer.rank, "scaling": SCALING}
        return peer.call(self.x, self.ids, self.gates, self.weights, self.peft, **options)

    def baseline(self):
        """Split LoRA by grouped products of torch, the rows sorted beforehand."""
        import torch.nn.functional as F

        token = self.slots // self.layer.top_k
        factors = [f.to(torch.bfloat16) for f in self.factors]
        expert = None if self.biases is None else self.ids.flatten()[self.slots]

        def product(rows, number, weight):
            y = F.grouped_mm(rows, self.layout.operand(weight), offs=self.ends)
            if factors:
                a, b = factors[2 * number : 2 * number + 2]
                inner = F.grouped_mm(rows, a, offs=self.ends)
                y = y + SCALING * F.grouped_mm(inner, b, offs=self.ends)
            return y if expert is None else y + self.biases[number][expert]

        y = product(self.activated(product(self.x[token], 0, self.w1)), 1, self.w2)
        weighted = y * self.gates.flatten()[self.slots].unsqueeze(-1)
        return torch.zeros_like(self.x).index_add(0, token, weighted)

    def activated(self, wide):
        """(M, 2I) -> (M, I) by torch."""
        import torch.nn.functional as F

        if not self.layer.is_gpt_oss:
            gate, up = wide.chunk(2, -1)
            return F.silu(gate) * up
        gate = wide[:, ::2].clamp(max=GPT_OSS_LIMIT)
        up = wide[:, 1::2].clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
        return gate * torch.sigmoid(GPT_OSS_SLOPE * gate) * (up + 1)

    def exact(self, leaves: Sequence[Any]):
        """The layer in float64 with W + s A B, one expert after the other."""
        x, gates, *factors = leaves
        factors = [f.unbind() for f in factors]  # each expert's gradient would fill a whole stack
        biases = [b.double() for b in self.biases] if self.biases else None
        stacks = [self.layout.operand(weight) for weight in (self.w1, self.w2)]
        out = torch.zeros_like(x)
        starts = [0, *self.ends.tolist()]
        for e in range(self.layer.experts):
            mine = self.slots[starts[e] : starts[e + 1]]
            token = mine // self.layer.top_k
            y = x[token]
            for number, stack in enumerate(stacks):
                weight = stack[e].double()
                if factors:
                    a, b = factors[2 * number : 2 * number + 2]
                    weight = weight + SCALING * a[e] @ b[e]
                y = y @ weight
                y = y if biases is None else y + biases[number][e]
                y = self.activated(y) if number == 0 else y
            out = out.index_add(0, token, y * gates.flatten()[mine].unsqueeze(-1))
        return out

    def with_gradients(self, run, leaves) -> list:
        """The result and the gradient of every leaf."""
        y = run()
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grad.to(y.dtype))]

    def references(self) -> tuple[list, list]:
        """Results and gradients in float64, and those of the baseline; computed once."""
        self._right = self._right or self._references()
        return self._right

    def forget(self) -> None:
        """Drop the references."""
        self._right = None

    def _references(self) -> tuple[list, list]:
        wide = [t.detach().double().requires_grad_() for t in (self.x, self.gates, *self.factors)]
        right = self.with_gradients(lambda: self.exact(wide), wide)
        plain = self.with_gradients(self.baseline, [self.x, self.gates, *self.factors])
        r = self.layer.rank
        for found in (right, plain):  # without what the rank is filled up with
            found[3:] = [t[:, :, :r] if n % 2 == 0 else t[:, :r] for n, t in enumerate(found[3:])]
        return right, plain

    def compare(self, run=None, factor: float = ERROR_FACTOR) -> tuple[bool, float, float]:
        """(every error is at most `factor` of the baseline's, the worst of ours, the baseline's).

        Compares what `run` gives, without it `ours`.
        """
        right, plain = self.references()
        ours = self.with_gradients(run or self.ours, [self.x, self.gates, *self.peft])
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
        good = all(mine <= factor * other for mine, other in errors)
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
        """The trained factors in place, as an optimizer does; references were of the old ones."""
        self.forget()
        with torch.no_grad():
            for factor in (*self.factors, *self.peft):
                factor.mul_(1.01)  # 0.001 would round to nothing in bfloat16


def calls_of(case: LayerCase, run: Callable | None = None) -> dict[str, dict[str, Any]]:
    """{"fwd" | "fwd+bwd": {"ours" | "baseline": call}}; `run` instead of the case's `ours`."""
    run = run or case.ours

    def forward(run):
        with torch.no_grad():
            return run()

    ours, baseline = [case.x, case.gates, *case.peft], [case.x, case.gates, *case.factors]
    return {
        "fwd": {"ours": lambda: forward(run), "baseline": lambda: forward(case.baseline)},
        "fwd+bwd": {
            "ours": lambda: case.step(run, ours),
            "baseline": lambda: case.step(case.baseline, baseline),
        },
    }


def cases_of(layer: Layer) -> list[str]:
    """Names of a layer's rows."""
    return [f"{layer.name}/{direction}" for direction in DIRECTIONS]


def input_sets(layer: Layer, built: Built) -> list[LayerCase]:
    """Enough of them that none is in the cache at its turn."""
    return [LayerCase(layer, built, seed) for seed in range(cold_sets(layer.weight_bytes))]


def measure(layer: Layer, names: Sequence[str], built: Built) -> Rows:
    """The rows of one layer that have these names, and their printed lines."""
    cases = input_sets(layer, built)
    yield from variant_rows(layer, names, cases, "auto", LayerCase.ours)
    if goals.is_judged(layer):
        yield from variant_rows(layer, names, cases, "triton", lambda c: c.ours("triton"))


def peer_rows(layer: Layer, built: Built, peer: other_projects.Peer) -> Rows:
    """The rows of a peer over a layer of ours."""

    def run(case: LayerCase):
        return case.peer(peer)

    cases = input_sets(layer, built)
    return variant_rows(layer, cases_of(layer), cases, peer.name, run, PEER_FACTOR)


def variant_rows(
    layer: Layer,
    names: Sequence[str],
    cases: Sequence[LayerCase],
    variant: str,
    run: Callable[[LayerCase], Any],
    factor: float = ERROR_FACTOR,
) -> Rows:
    """Every direction of one way to compute the layer, by turns with the baseline."""
    good, *errors = cases[0].compare(lambda: run(cases[0]), factor)
    if not goals.is_judged(layer):
        cases[0].forget()
    torch.cuda.empty_cache()
    calls = [calls_of(case, functools.partial(run, case)) for case in cases]
    settle(cases[0].package, [here[way]["ours"] for way in DIRECTIONS for here in calls])
    floors = layer.floors(cases[0].active)
    for name, direction, floor in zip(cases_of(layer), DIRECTIONS, floors, strict=True):
        if name not in names:
            continue
        if not good:
            row = failed(name, variant)
            yield row, line(row, gigabytes=0)
            continue
        here = [entry[direction] for entry in calls]
        turns = {
            who: lambda number, who=who, here=here: here[number][who]()
            for who in ("ours", "baseline")
        }
        wanted = goals.bf16_goals(layer, direction, variant)
        found = times(
            turns,
            sets=len(cases),
            between=lambda: [case.change() for case in cases],
            bursts=BURSTS if wanted else FEW_BURSTS,
            rounds=ROUNDS,
        )
        row = passed(
            name,
            found,
            BASELINE,
            floor,
            variant=variant,
            errors=errors,
            peak_mb=peak_mb(here[0]["ours"], cases[0].drop_gradients),
            peak_baseline_mb=peak_mb(here[0]["baseline"], cases[0].drop_gradients),
        )
        row = judged(row, wanted, {})
        memory = f"  peak {row.peak_mb:.0f} MB of {row.peak_baseline_mb:.0f}"
        yield row, line(row, gigabytes=layer.weight_bytes / 1e9) + memory + said(row)


def file_layers(commit: str) -> list[Layer]:
    """What the file holds: the listed layers and 20 random ones."""
    return [*listed(), *random_layers(int(commit[:8], 16))]


def compile_jobs(built: Built, measured: Collection[str] = ()) -> compile_ahead.Jobs:
    """A call per layer that is not measured yet, for `compile_ahead`."""

    def job(layer: Layer) -> None:
        case = LayerCase(layer, built, 0)
        runs = [case.ours]
        if goals.is_judged(layer):
            runs.append(lambda: case.ours("triton"))
        for run in runs:
            for calls in calls_of(case, run).values():
                calls["ours"]()

    layers = file_layers(built.commit)
    missing = [one for one in layers if {*cases_of(one)} - {*measured}]
    return {layer.name: functools.partial(job, layer) for layer in missing}


def peer_jobs(built: Built, measured: Collection[str] = ()) -> compile_ahead.Jobs:
    """Calls of peers' layers, each with a part of the configurations that the peer tries."""

    def job(layer: Layer, peer: other_projects.Peer, number: int) -> None:
        case = LayerCase(layer, built, 0)
        with other_projects.slice_of_tuning(number):
            calls_of(case, lambda: case.peer(peer))["fwd+bwd"]["ours"]()

    return {
        f"{layer.name} {peer.name} {number}": functools.partial(job, layer, peer, number)
        for peer in other_projects.offered(*PEERS)
        for layer, units in peer_units(peer)
        if {*units} - {*measured}
        for number in range(other_projects.SLICES)
    }


def peer_units(peer: other_projects.Peer) -> Iterator[tuple[Layer, list[str]]]:
    """Layers that a peer is measured on, and what their rows are called in the file's progress."""
    for layer in filter(goals.is_judged, listed()):
        yield layer, [other_projects.unit(case, peer) for case in cases_of(layer)]


def rows(
    built: Built,
    progress: Progress,
    models: Sequence[str] = (),
    ranks: Sequence[int] = (16,),
    tokens: int = 2048,
) -> Rows:
    """The file's layers, then peers'; or the models, ranks and tokens that were asked for."""
    layers = [of_model(model, tokens, rank) for model in models for rank in ranks]
    if not progress.is_over:
        print(built.package.explain("grouped_lora_linear", device="cuda"))
    if not models and not progress.is_over:
        compile_ahead.run(__name__, built, progress.measured)
    for layer in layers or file_layers(built.commit):
        names = progress.begin(*cases_of(layer))
        if not names:
            continue
        if models and layer.rank > 0:
            print(*projections.lines(layer, built), sep="\n", flush=True)
        yield from measure(layer, names, built)
        torch.cuda.empty_cache()
    if models:
        return
    progress.begin()
    for peer in other_projects.offered(*PEERS):
        if not progress.is_over:
            compile_ahead.run(__name__, built, progress.measured, "peer_jobs")
        for layer, units in peer_units(peer):
            if progress.begin(*units):
                make = functools.partial(peer_rows, layer, built, peer)
                yield from other_projects.rows(peer, make, PEER_SECONDS)
                torch.cuda.empty_cache()


def random_cases(commit: str) -> set[str]:
    """Names of the rows that were drawn, not listed."""
    return {case for layer in random_layers(int(commit[:8], 16)) for case in cases_of(layer)}
