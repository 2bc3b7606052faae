"""Cases of `quant.json`: layers on packed experts, decoding alone, and experts in host memory.

Layers are those of `moe_lora`, their experts in NF4 at blocksize 64, in MXFP4 or in FP8. The
baseline decodes both projections, NF4 with bitsandbytes and the others with this package, and
multiplies by torch.nn.functional.grouped_mm, in this process. The gate is `moe_lora`'s against
float64, with the decoded weights. A row's variant is the strategy; "auto" stands for the one that
it takes, "triton" for Triton's path asked for by name. What fails gets a row that is not ok, and
costs no other row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from .. import compile_ahead
from ..built_package import Built, settle
from ..device import copy_call, peak_mb
from ..elementwise import Dequant, DequantCase
from ..lazy import torch
from ..progress import Progress
from ..report import Goal, Line, Rows, failed, floor_ms, judged, line, passed, said
from ..timer import BURSTS, FEW_BURSTS, cold_sets, times
from . import nf4_traffic
from .goals import COPY, COPY_FEW, packed_goals, triton_goals
from .moe_lora import LayerCase, calls_of
from .problems import GPT_OSS, MODELS, Layer, random_layers

BLOCKSIZE = 64
BYTES = 0.5 + 4 / BLOCKSIZE  # per weight
BYTES_OF = {"nf4": BYTES, "mxfp4": 0.5 + 1 / 32, "fp8": 1 + 4 / 128**2}
ROUNDS = 9  # timed: fewer than of `moe_lora`, since up to five variants take turns
BASELINE = "bitsandbytes dequantize_4bit, torch grouped_mm"
OWN_BASELINE = "the same experts decoded by this package, torch grouped_mm"
BOTH = ("fwd", "fwd+bwd")
# tokens -> what is timed, and the strategies that could be the right choice there
LISTED = {
    2048: (BOTH, ("fused", "chunked", "triton")),
    128: (("fwd",), ("fused", "chunked", "selective")),
    16: (("fwd",), ("fused", "chunked", "selective")),
}
OF_FORMS = "Qwen3-30B-A3B"  # the model whose layer is timed in every other form, too
RANDOM = (("fwd+bwd",), ())


class PackedCase(LayerCase):
    """One set of inputs; the weights exist packed alone, but for the gate."""

    def __init__(self, layer: Layer, built: Built, seed: int, device: str = "cuda") -> None:
        super().__init__(layer, built, seed, device)
        self.packed = [self._packed(weight) for weight in (self.w1, self.w2)]
        self.w1 = self.w2 = None
        self.backend = "auto"

    def _packed(self, weight):
        """MXFP4 as gpt-oss publishes it: outputs first, whatever the model's layout."""
        make, layer = self.moe.QuantizedExperts.from_weight, self.layer
        if layer.format == "nf4":
            return make(weight, blocksize=BLOCKSIZE, nested=layer.nested)
        turned = self.layout.transposed
        weight = weight.mT.contiguous() if turned else weight
        return make(weight, quant_type=layer.format, transposed=turned)

    def strategy(self) -> str:
        """What "auto" takes."""
        choose = self.moe.choose_strategy
        records = [stack.quantized_weight() for stack in self.packed]
        first, x = records[0], self.x
        stack = (list(first.tensors.values()), first.stored)
        refused = first.format.compiled_refusal(x.device, x, *stack)
        fusable = all(record.registers_refusal is None for record in records)
        options = {"fusable": fusable, "compiled": refused is None}
        return choose(self.layer.rows, self.layer.experts, **options).name

    def use(self, variant: str) -> None:
        """Choose the strategy of `ours`, or its path."""
        by_path = variant == "triton"
        self.backend = variant if by_path else "auto"
        for module in self.packed:
            module.strategy = "auto" if by_path else variant

    @property
    def weights(self) -> tuple[Any, Any]:
        """Of both projections, as ours takes them."""
        return tuple(self.packed)

    def ours(self, backend: str | None = None):
        """What a user calls, with the path that `use` chose."""
        return super().ours(backend or self.backend)

    def dequantized(self):
        """Both stacks in bfloat16, NF4 by bitsandbytes."""
        if self.layer.format != "nf4":
            yield from (module.decode() for module in self.packed)
            return
        from bitsandbytes import functional

        for module in self.packed:
            options = {"blocksize": BLOCKSIZE, "quant_type": "nf4", "dtype": torch.bfloat16}
            code = functional.get_4bit_type("nf4", device=module.device)
            state = functional.QuantState(module.absmax.data, module.shape, code, **options)
            if self.layer.nested:
                inner = {"code": module.absmax_code.data, "blocksize": 256, "dtype": torch.float32}
                state.state2 = functional.QuantState(module.absmax_scale.data, **inner)
                state.offset, state.nested = module.absmax_offset.data, True
            packed = module.packed.data.view(-1, 1)
            yield functional.dequantize_4bit(packed, state).view(module.shape)

    def baseline(self):
        """Decode everything, then the baseline of `moe_lora`."""
        self.w1, self.w2 = self.dequantized()
        try:
            return super().baseline()
        finally:
            self.w1 = self.w2 = None

    def exact(self, leaves):
        """float64 with the weights that decoding gives."""
        self.w1, self.w2 = (module.decode() for module in self.packed)
        try:
            return super().exact(leaves)
        finally:
            self.w1 = self.w2 = None


def floors(layer: Layer, active: int) -> dict[str, float]:
    """Least milliseconds by direction: packed weights, read once forward and once back."""
    return dict(zip(BOTH, layer.floors(active, BYTES_OF[layer.format]), strict=True))


def layer_rows(
    layer: Layer, built: Built, directions: tuple[str, ...], others: tuple[str, ...]
) -> Rows:
    """Every direction of one layer: what "auto" takes, then the other strategies."""
    torch.cuda.empty_cache()  # of the layer before; here, so that a broken device costs a row only
    weights = BYTES_OF[layer.format] * 3 * layer.experts * layer.hidden * layer.intermediate
    cases = [PackedCase(layer, built, seed) for seed in range(cold_sets(int(weights)))]
    least = floors(layer, cases[0].active)
    calls = [calls_of(case) for case in cases]
    chosen = cases[0].strategy()
    variants = {"auto": "auto"} | {name: name for name in others if name != chosen}
    gates = {}
    for variant, strategy in variants.items():
        cases[0].use(strategy)
        gates[variant] = cases[0].compare()
    cases[0].forget()
    torch.cuda.empty_cache()

    def turn(variant: str, direction: str) -> Callable[[int], object]:
        def call(number: int) -> object:
            cases[number].use(variants[variant])
            return calls[number][direction]["ours"]()

        return call

    for direction in directions:
        wanted = packed_goals(layer, direction)
        baseline = [entry[direction]["baseline"] for entry in calls]
        turns = {v: turn(v, direction) for v, (good, *_) in gates.items() if good}
        turns["baseline"] = lambda number, baseline=baseline: baseline[number]()
        if "of_bf16" in wanted:
            turns["bf16"] = in_bfloat16(layer, built, direction, len(cases))
        numbers = range(len(cases))
        settle(
            built.package, [functools.partial(call, k) for call in turns.values() for k in numbers]
        )
        listed = {k: call for k, call in turns.items() if k in ("auto", "baseline", "bf16")}
        rest = {k: call for k, call in turns.items() if k not in listed}
        options = {
            "sets": len(cases),
            "between": lambda: [case.change() for case in cases],
            "rounds": ROUNDS,
            "warmup": 2,
            "alone": True,
        }
        found = times(listed, bursts=BURSTS if wanted else FEW_BURSTS, **options)
        found |= times(rest, bursts=FEW_BURSTS, **options) if rest else {}
        values = {}
        if "of_least_traffic" in wanted:
            values["of_least_traffic"] = nf4_traffic.measured()[layer.model]
        if "bf16" in turns and "auto" in found:
            values["of_bf16"] = found["auto"].wall_ms / found["bf16"].wall_ms
        turns.pop("bf16", None)
        drop = cases[0].drop_gradients
        most = peak_mb(lambda baseline=baseline: baseline[0](), drop)
        for variant, (good, *errors) in gates.items():
            name = f"{layer.name}/{direction}"
            if not good:
                row = failed(name, variant)
                yield row, line(row, gigabytes=0) + f"  {variants[variant]}"
                continue
            row = passed(
                name,
                {"ours": found[variant], "baseline": found["baseline"]},
                BASELINE if layer.format == "nf4" else OWN_BASELINE,
                least[direction],
                variant=variant,
                errors=errors,
                peak_mb=peak_mb(lambda v=variant, d=direction: turn(v, d)(0), drop),
                peak_baseline_mb=most,
            )
            goals = wanted if variant == "auto" else triton_goals(direction, variant)
            row = judged(row, goals, values)
            took = f"auto: {chosen}" if variant == "auto" else variant
            memory = f"  {took}, peak {row.peak_mb:.0f} MB of {row.peak_baseline_mb:.0f}"
            yield row, line(row, gigabytes=weights / 1e9) + memory + said(row)


def in_bfloat16(layer: Layer, built: Built, direction: str, sets: int) -> Callable[[int], object]:
    """Our own layer over the same experts in bfloat16."""
    calls = [calls_of(LayerCase(layer, built, seed))[direction]["ours"] for seed in range(sets)]
    return lambda number: calls[number]()


def guarded(make: Callable[[], Rows], cases: Sequence[str]) -> Rows:
    """The rows of `make`; if it raises, rows that are not ok for the cases that are missing."""
    missing = dict.fromkeys(cases)
    try:
        for row, printed in make():
            missing.pop(row.case, None)
            yield row, printed
    except Exception as error:  # of any kind: the other rows are still wanted
        # Where every case has its row already, another strategy's is what failed.
        for name, variant in [(n, "auto") for n in missing] or [(cases[-1], "others")]:
            row = failed(name, variant)
            said_last = " ".join(str(error).split())[-100:]
            yield row, f"{line(row, gigabytes=0)}  {type(error).__name__}: {said_last}"


def dequant_row(name: str, sizes, active: int, built: Built) -> Line:
    """Decoding so many experts of both projections, beside a copy of as many bytes.

    bitsandbytes decodes whole stacks, of which it then takes the named experts, if these are not
    all.
    """
    experts, hidden, intermediate, _ = sizes
    shapes = (2 * intermediate, hidden), (hidden, intermediate)
    moved = int(sum(active * rows * columns for rows, columns in shapes) * (BYTES + 2))
    count = cold_sets(moved)
    stacks = [DequantCase(Dequant(experts, *shape), built, count) for shape in shapes]
    copies = [copy_call(moved) for _ in range(count)]
    ids = None
    if active < experts:
        ids = torch.randperm(experts, device="cuda")[:active]
        for stack in stacks:
            stack.ids = ids

    def ours(number: int) -> list:
        return [stack.ours(number) for stack in stacks]

    def baseline(number: int) -> list:
        whole = [stack.baseline(number) for stack in stacks]
        return whole if ids is None else [stack[ids] for stack in whole]

    pairs = zip(ours(0), baseline(0), strict=True)
    if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs):
        row = failed(name)
        return row, line(row, gigabytes=0)
    turns = {"ours": ours, "baseline": baseline, "copy": lambda number: copies[number](number)}
    found = times(turns, sets=count)
    least, most = floor_ms(bytes_moved=moved), peak_mb(lambda: ours(0))
    row = passed(name, found, stacks[0].baseline_name, least, peak_mb=most)
    bound = COPY if ids is None else COPY_FEW
    rate = found["copy"].ms / found["ours"].ms
    row = judged(row, {"of_copy": Goal(bound, True)}, {"of_copy": rate})
    return row, line(row, gigabytes=moved / 1e9, copy_ms=found["copy"].ms) + said(row)


def problems(commit: str) -> Iterator[tuple[Layer, tuple[str, ...], tuple[str, ...]]]:
    """(layer, directions, strategies beside "auto"): the listed ones, then 20 at random."""
    for tokens, (directions, others) in LISTED.items():
        for model, sizes in MODELS.items():
            both = BOTH if model == OF_FORMS and tokens == 16 else directions
            yield Layer(model, *sizes, tokens=tokens), both, others
    base = Layer(OF_FORMS, *MODELS[OF_FORMS])
    forms = ({"tokens": 8192}, {"rank": 12}, {"fp32_lora": True}, {"nested": True})
    for layer in (*(dataclasses.replace(base, **form) for form in forms), Layer(*GPT_OSS)):
        yield layer, BOTH, ()
    for layer in (Layer(*GPT_OSS, format="mxfp4"), dataclasses.replace(base, format="fp8")):
        yield layer, BOTH, ("chunked", "triton")
        yield dataclasses.replace(layer, tokens=16), BOTH, ("selective",)
        for form in forms[:3]:
            yield dataclasses.replace(layer, **form), BOTH, ()
    for layer in random_layers(int(commit[:8], 16)):
        yield layer, *RANDOM


def cases_of(layer: Layer, directions: Sequence[str]) -> dict[str, str]:
    """Names of a layer's rows -> directions."""
    return {f"{layer.name}/{direction}": direction for direction in directions}


def compile_jobs(built: Built, measured: Collection[str] = ()) -> compile_ahead.Jobs:
    """A call per layer and strategy, and per layer in bfloat16 beside it, for `compile_ahead`."""

    def job(layer: Layer, direction: str, strategy: str) -> None:
        if strategy == "bf16":
            in_bfloat16(layer, built, direction, 1)(0)
            return
        case = PackedCase(layer, built, 0)
        case.use(strategy)
        calls_of(case)[direction]["ours"]()

    jobs = {}
    for layer, directions, others in problems(built.commit):
        if not cases_of(layer, directions).keys() - {*measured}:
            continue
        direction = directions[-1]
        beside = ("bf16",) if "of_bf16" in packed_goals(layer, direction) else ()
        for strategy in ("auto", *others, *beside):
            jobs[f"{layer.name} {strategy}"] = functools.partial(job, layer, direction, strategy)
    return jobs


def rows(built: Built, progress: Progress) -> Rows:
    """Decoding alone, the layers, and the model in host memory; none is missing, whatever fails."""
    from .nf4_offload import MODEL, offload_row

    if not progress.is_over:
        compile_ahead.run(__name__, built, progress.measured)
    stacks = [(f"dequant/{model}", sizes, sizes[0]) for model, sizes in MODELS.items()]
    stacks.append(("dequant/8of256", MODELS["Qwen3.5-35B-A3B"], 8))
    for stack in stacks:
        if names := progress.begin(stack[0]):
            yield from guarded(lambda stack=stack: iter([dequant_row(*stack, built)]), names)
    for layer, directions, others in problems(built.commit):
        cases = cases_of(layer, directions)
        if names := progress.begin(*cases):
            arguments = (layer, built, tuple(map(cases.get, names)), others)
            yield from guarded(lambda arguments=arguments: layer_rows(*arguments), names)
    if names := progress.begin(f"offload/{MODEL}"):
        yield from guarded(lambda: iter([offload_row(built)]), names)


def random_cases(commit: str) -> set[str]:
    """Names of the rows that were drawn, not listed."""
    drawn = random_layers(int(commit[:8], 16))
    return {case for layer in drawn for case in cases_of(layer, RANDOM[0])}
