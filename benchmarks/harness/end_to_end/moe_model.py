"""Steps of a transformers model with experts: ours beside torch's grouped_mm and PEFT.

The model has eight layers of Qwen3-30B-A3B's shapes. Both sides have the same weights, and the same
adapters: PEFT's files are what ours loads. With LoRA a step is forward, backward and fused AdamW;
with frozen experts, whose input still needs a gradient, it is forward and backward.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..built_package import Built, settle
from ..device import peak_mb
from ..lazy import torch
from ..report import Goal, Line, Row, Rows, failed, judged, said
from ..timer import LEAST_SETS, clock

RANK, SCALE = 16, 2.0
B_STD = 0.05  # of the adapters' B, which PEFT starts at zero: an adapter that is lost must show
BURSTS, CALLS = 4, 12
WARM_STEPS = 2 * LEAST_SETS  # before the clock
# Of ours against the baseline: of each block of experts on the same input, and of the whole model,
# where roundings of bfloat16 send some tokens to other experts.
BLOCK, LOSS, GRADIENT = 0.03, 5e-3, 0.05
TARGETS = ("gate_up_proj", "down_proj")
# (tokens, kind, mode) -> tokens a second over those of the eager baseline, at least.
FACTORS = {
    (2048, "lora", "eager"): 1.75,
    (2048, "lora", "compile"): 2.3,
    (8192, "lora", "eager"): 2.05,
    (2048, "frozen", "eager"): 1.15,
    (8192, "frozen", "eager"): 1.55,
}
QWEN3_30B = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
}


@dataclass(frozen=True)
class Problem:
    """A model, how its experts train, and how it runs."""

    tokens: int  # of a step
    kind: str  # "lora", "frozen", or "nf4": LoRA over experts in 4 bits
    mode: str  # "eager" or "compile", of ours; the baseline is eager
    layers: int = 8  # of the model
    sequence: int = 2048  # tokens of a sequence at most
    sizes: tuple[tuple[str, int], ...] = tuple(QWEN3_30B.items())  # of the model's configuration

    @property
    def case(self) -> str:
        """Name in the result file."""
        return f"qwen3-moe-{self.layers}l/{self.tokens}/{self.kind}/{self.mode}"

    @property
    def goals(self) -> dict[str, Goal]:
        """Name -> goal of the row."""
        factor = FACTORS.get((self.tokens, self.kind, self.mode))
        return {} if factor is None else {"speedup": Goal(factor, True)}

    @property
    def baseline(self) -> str:
        """Name of what it is timed against."""
        name = {"lora": "PEFT", "nf4": "bitsandbytes nf4 + PEFT"}.get(self.kind)
        return "transformers grouped_mm" + (f" + {name}" if name else "") + ", eager"


LISTED = [
    Problem(tokens, kind, mode)
    for mode in ("eager", "compile")
    for kind in ("lora", "frozen", "nf4")
    for tokens in (2048, 8192)
]
CASES = {problem.case: problem for problem in LISTED}


@dataclass(frozen=True)
class ModelRow(Row):
    """A step of a model; host and memory are those of a whole step."""

    tokens_per_s: float | None = None  # by the clock
    # of the baseline under torch.compile, where that runs.
    baseline_compiled_wall_ms: float | None = None


class Side:
    """A model, what it trains, and its step."""

    def __init__(self, problem: Problem, model: Any, device: str) -> None:
        self.model = self.run = model
        if problem.kind == "frozen":
            model.requires_grad_(False)
            model.get_input_embeddings().weight.requires_grad_(True)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        lora = problem.kind != "frozen"
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True) if lora else None
        generator = torch.Generator(device).manual_seed(1)
        sequence = min(problem.tokens, problem.sequence)
        size = (problem.tokens // sequence, sequence)
        top = dict(problem.sizes)["vocab_size"]
        self.batches = [
            torch.randint(0, top, size, device=device, generator=generator)
            for _ in range(LEAST_SETS)
        ]

    def compile(self) -> None:
        """Run the model under torch.compile from here on."""
        self.run = torch.compile(self.model, dynamic=False)

    def step(self, number: int) -> None:
        """Forward, backward and, with LoRA, AdamW."""
        ids = self.batches[number]
        self.run(input_ids=ids, labels=ids).loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """As zero_grad(set_to_none=True)."""
        for parameter in self.trained:
            parameter.grad = None

    def outcome(self) -> tuple[float, float]:
        """(loss, norm of the gradient of all that trains) of the first batch."""
        ids = self.batches[0]
        loss = self.run(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.stack([p.grad.float().norm() for p in self.trained]).norm().item()
        self.drop_gradients()
        return loss.item(), norm

    def blocks(self) -> list[Any]:
        """Router and experts of every layer."""
        return [module for name, module in self.model.named_modules() if name.endswith(".mlp")]


def compare(ours: Side, baseline: Side) -> tuple[bool, float]:
    """(whether blocks, loss and gradient agree, the largest relative distance of a block)."""
    distance = max(block_distances(ours, baseline))
    (loss, norm), (base_loss, base_norm) = ours.outcome(), baseline.outcome()
    good = (
        distance <= BLOCK
        and abs(loss / base_loss - 1) <= LOSS
        and abs(norm / base_norm - 1) <= GRADIENT
    )
    print(
        f"  blocks apart {distance:.1e}; loss {loss:.4f}, baseline's {base_loss:.4f}; "
        f"gradient {norm:.4g}, baseline's {base_norm:.4g}",
        flush=True,
    )
    return good, distance


def block_distances(ours: Side, baseline: Side) -> list[float]:
    """Relative distance of every block's output on the input that the baseline gives it."""
    seen = []
    hooks = [
        block.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], first(out))))
        for block in baseline.blocks()
    ]
    with torch.no_grad():
        baseline.model(input_ids=baseline.batches[0])
        for hook in hooks:
            hook.remove()
        pairs = zip(ours.blocks(), seen, strict=True)
        found = [(first(block(x)) - y, y) for block, (x, y) in pairs]
    return [(apart.float().norm() / y.float().norm()).item() for apart, y in found]


def first(out: Any) -> Any:
    """A block's hidden states, which some releases return beside the router's logits."""
    return out[0] if isinstance(out, tuple) else out


def random_model(problem: Problem, device: str, dtype: Any) -> Any:
    """The model; equal calls give equal weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_hidden_layers=problem.layers,
        norm_topk_prob=True,
        max_position_embeddings=2 * problem.sequence,
        decoder_sparse_step=1,
        **dict(problem.sizes),
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def pair(problem: Problem, built: Built, device: str, dtype: Any) -> tuple[Side, Side]:
    """Ours and the baseline."""
    integrations = built.package.integrations
    theirs = random_model(problem, device, dtype)
    theirs.set_experts_implementation("grouped_mm")
    ours = random_model(problem, device, dtype)
    if problem.kind == "frozen":
        integrations.use_in_transformers(ours)
        return Side(problem, ours, device), Side(problem, theirs, device)
    if problem.kind == "nf4":
        integrations.quantize_experts(ours, "nf4")
    theirs = _with_peft(theirs)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        integrations.load_peft_adapter(ours, folder, trainable=True)
    if problem.kind == "nf4":
        _into_nf4(theirs)
    return Side(problem, ours, device), Side(problem, theirs, device)


def _with_peft(model: Any) -> Any:
    """LoRA of PEFT on the experts, none of whose factors is zero."""
    from peft import LoraConfig, get_peft_model

    names = [f"mlp.experts.{target}" for target in TARGETS]
    config = LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules=[], target_parameters=names)
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=B_STD)
    return wrapped


def _into_nf4(wrapped: Any) -> None:
    """Keep every stack of experts below PEFT's wrappers in bitsandbytes' 4 bits.

    A stack is decoded before its layer's forward and let go of behind it. bitsandbytes'
    parametrization would do the same, but PEFT 0.21 loses one of two adapters on it.
    """
    from bitsandbytes import functional

    def keep(experts: Any, target: str) -> tuple[Any, Any]:
        weight = getattr(experts, target)
        packed = functional.quantize_4bit(weight.data, blocksize=64, quant_type="nf4")
        weight.data = weight.data.new_empty(0)
        return packed

    def decode(wrapper: Any, *_: Any) -> None:
        for target, (packed, state) in kept[wrapper].items():
            weight = getattr(wrapper.get_base_layer(), target)
            weight.data = functional.dequantize_4bit(packed, state)

    def let_go(wrapper: Any, *_: Any) -> None:
        for target in kept[wrapper]:
            weight = getattr(wrapper.get_base_layer(), target)
            weight.data = weight.data.new_empty(0)

    kept = {}
    for name, module in wrapped.named_modules():
        if name.endswith("mlp.experts"):
            kept[module] = {target: keep(module.get_base_layer(), target) for target in TARGETS}
            module.register_forward_pre_hook(decode)
            module.register_forward_hook(let_go)


def why_not(problem: Problem) -> str | None:
    """Why a case cannot run here."""
    if problem.kind == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    return None


def rows(built: Built, cases: Sequence[str]) -> Rows:
    """The rows of these cases; one that cannot run is said, and has none."""
    for case in cases:
        problem = CASES[case]
        if reason := why_not(problem):
            print(f"{case:<36} not run: {reason}", flush=True)
            continue
        try:
            measured = measure(problem, built)
        except Exception as error:  # such as a release that does not compile: go on with the next
            print(f"  {type(error).__name__}: {str(error)[:600]}", flush=True)
            measured = failed(case), f"{case:<36} FAILED, not timed"
        yield measured
        gc.collect()
        torch.cuda.empty_cache()


def measure(problem: Problem, built: Built) -> Line:
    """The row of one case and its printed line."""
    ours, baseline = pair(problem, built, "cuda", torch.bfloat16)
    if problem.mode == "compile":
        ours.compile()
    good, error = compare(ours, baseline)
    if not good:
        return failed(problem.case), f"{problem.case:<36} WRONG RESULTS, not timed"
    calls = {"ours": ours.step, "baseline": baseline.step}
    compiled = None
    if problem.mode == "compile" and (compiled := compiled_step(baseline)):
        calls["compiled baseline"] = compiled
    warm_up(calls, built)
    times = clock(calls, sets=LEAST_SETS, bursts=BURSTS, calls=CALLS)
    (wall, host), (base_wall, base_host) = times["ours"], times["baseline"]
    row = ModelRow(
        case=problem.case,
        variant="auto",
        ok=True,
        wall_ms=wall,
        host_ms=host,
        baseline_wall_ms=base_wall,
        baseline_host_ms=base_host,
        baseline=problem.baseline,
        speedup=base_wall / wall,
        error=error,
        peak_mb=peak_mb(lambda: ours.step(0), ours.drop_gradients),
        peak_baseline_mb=peak_mb(lambda: baseline.step(0), baseline.drop_gradients),
        tokens_per_s=problem.tokens / wall * 1e3,
        baseline_compiled_wall_ms=times["compiled baseline"][0] if compiled else None,
    )
    shown = f"{row.case:<36}{wall:>9.2f}{host:>9.2f}{row.speedup:>8.2f}x"
    shown += f"{row.tokens_per_s / 1e3:>12.1f}  peak {row.peak_mb:.0f} MB of"
    shown += f" {row.peak_baseline_mb:.0f}, blocks apart {error:.1e}"
    if compiled:
        shown += f", compiled baseline {row.baseline_compiled_wall_ms:.2f} ms"
    row = judged(row, problem.goals, {})
    return row, shown + said(row)


def warm_up(calls: Mapping[str, Callable[[int], object]], built: Built) -> None:
    """Bring all sides into the state that they train in: what a training's first steps compile,
    allocate and import is neither in the clock nor beside it."""
    for number in range(WARM_STEPS):
        for call in calls.values():
            call(number % LEAST_SETS)
        settle(built.package)


def compiled_step(baseline: Side):
    """The baseline's step under torch.compile, by the same parameters; None where that fails."""
    run = torch.compile(baseline.model, dynamic=False)
    eager = baseline.run

    def step(number: int) -> None:
        baseline.run = run
        baseline.step(number)
        baseline.run = eager

    try:
        step(0)
    except Exception as error:
        baseline.run = eager
        baseline.drop_gradients()
        print(f"  the baseline does not compile: {str(error).splitlines()[0]}", flush=True)
        return None
    return step
