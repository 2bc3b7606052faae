"""Calls of the experts' functions, layers and integrations, with what each must give."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..moe._eager import LayerProblem, Problem, eager, eager_layer, predecessors
from ._arguments import FLOATS, Call, draw, integers, restrided
from ._calls import STEPPED, Made, Package, bits, call, close, finite, rounding
from ._problem import DifferenceError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss")
BACKENDS = ("auto", "auto", "auto", "reference")


def problem_of(generator: random.Random, **fixed: Any) -> Problem:
    gates = generator.random() < 0.4
    options = {
        "tokens": generator.choice([0, 1, 5, 17]),
        "top_k": generator.choice([1, 2, 3]),
        "experts": generator.choice([3, 4]),
        "k": generator.choice([4, 7, 16]),
        "n": generator.choice([3, 8]),
        "rank": generator.choice([None, 1, 4]),
        "scaling": generator.choice([2.0, 0.5]),
        "dtype": generator.choice(FLOATS),
        "bias": generator.random() < 0.4,
        "gates": gates,
        "grouped_in": generator.random() < 0.4,
        "grouped_out": not gates and generator.random() < 0.4,
        "peft": generator.random() < 0.4,
        "routing": generator.choice(["random", "one", "gap", "sentinels", "all-sentinels"]),
    }
    return Problem(**options | fixed)


def detached(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if x is None else x.detach() for name, x in tensors.items()}


@call("moe.grouped_lora_linear")
def grouped_lora_linear(package: Package, generator: random.Random) -> Made:
    problem = problem_of(generator)
    ids = problem.ids(torch.device("cpu"), generator.randrange(100))
    order = package.opt.moe.expert_sort(ids, problem.experts)
    leaves = problem.inputs(torch.device("cpu"), generator.randrange(100))
    seen = problem.views(detached(leaves))

    def check(result: Tensor) -> None:
        expected = eager(problem, detached(leaves), ids, torch.float64)
        close(f"grouped_lora_linear {problem}", result, expected, 20 * rounding(problem.dtype))

    return {
        **seen,
        "order": order,
        "scaling": problem.scaling,
        "grouped_in": problem.grouped_in,
        "grouped_out": problem.grouped_out,
        "backend": generator.choice(BACKENDS),
    }, check


@call("moe.parallel_linear_lora", words=("lora_a", "lora_b", "weight", "order", "x must"))
def parallel_linear_lora(package: Package, generator: random.Random) -> Made:
    problem = problem_of(generator, routing="random", peft=False, bias=False, gates=False, tokens=6)
    ids = problem.ids(torch.device("cpu"), generator.randrange(100))
    order = package.opt.moe.expert_sort(ids, problem.experts)
    leaves = detached(problem.inputs(torch.device("cpu"), generator.randrange(100)))

    def check(result: Tensor) -> None:
        expected = eager(problem, leaves, ids, torch.float64)
        close(f"parallel_linear_lora {problem}", result, expected, 20 * rounding(problem.dtype))

    return predecessors(problem, leaves, ids, order.slots), check


@call("moe.expert_sort")
def expert_sort(package: Package, generator: random.Random) -> Made:
    experts = generator.choice([1, 3, 8, 300])
    shape = (generator.choice([0, 1, 5, 40]), generator.choice([1, 2, 4]))
    dtype = generator.choice([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
    high = min(experts + 2, 100)
    ids = restrided(generator, integers(generator, 0, high, shape).to(dtype))
    if dtype.is_signed and ids.numel() and generator.random() < 0.3:
        ids[0, 0] = -1

    def check(order: Any) -> None:
        expected = package("reference.moe").expert_sort(ids, experts, order.tile_rows)
        found = (order.slots, order.rows, order.offsets, order.tiles)
        for one, other in zip(found, expected, strict=True):
            if not torch.equal(one, other):
                raise DifferenceError("moe.expert_sort: another order than the reference")

    arguments = {"expert_ids": ids, "num_experts": experts, "backend": generator.choice(BACKENDS)}
    arguments["tile_rows"] = generator.choice([None, 16, 32, 64])
    return arguments, check


@call("kernels.combine")
def combine(package: Package, generator: random.Random) -> Made:
    tokens, k, n = generator.choice([1, 4, 9]), generator.choice([1, 2, 3]), 5
    ids = integers(generator, 0, 5, (tokens, k))  # 4 is a sentinel
    order = package.opt.moe.expert_sort(ids, 4)
    rows, offsets = order.rows, order.offsets
    y = draw(generator, (tokens * k, n), generator.choice(FLOATS))
    gates = draw(generator, (tokens, k)) if generator.random() < 0.7 else None

    def check(result: Tensor) -> None:
        wide = None if gates is None else gates.double()
        expected = package("reference.moe").combine(y.double(), wide, rows, offsets, k)
        close("combine", result, expected, 8 * rounding(y.dtype))

    return {"y": y, "gates": gates, "rows": rows, "offsets": offsets, "top_k": k}, check


@call("moe.glu")
def glu(package: Package, generator: random.Random) -> Made:
    x = draw(generator, (generator.choice([0, 1, 7]), 2 * generator.choice([1, 4, 9])))
    x = x.to(generator.choice(FLOATS))
    activation, interleaved = generator.choice(ACTIVATIONS), generator.random() < 0.5

    def check(result: Tensor) -> None:
        expected = package("reference.glu").glu(x.double(), activation, interleaved)
        close("glu", result, expected, 4 * rounding(x.dtype))

    arguments = {"gate_up": x, "activation": activation, "interleaved": interleaved}
    return arguments | {"backend": "auto"}, check


@call("moe.softmax_top_k")
def softmax_top_k(package: Package, generator: random.Random) -> Made:
    lead, experts = generator.choice([(), (3,), (2, 3), (0,)]), generator.choice([1, 4, 9])
    logits = draw(generator, (*lead, experts), generator.choice(FLOATS))
    k = generator.randint(1, experts)
    norm = generator.random() < 0.5

    def check(result: tuple[Tensor, Tensor]) -> None:
        index, weights = result
        probabilities = logits.double().softmax(-1).gather(-1, index)
        if norm:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        close("softmax_top_k", weights, probabilities, 1e-5)

    return {"router_logits": logits, "top_k": k, "norm_topk_prob": norm}, check


@call("moe.group_top_k")
def group_top_k(package: Package, generator: random.Random) -> Made:
    groups = generator.choice([1, 2, 4])
    logits = draw(generator, (5, 4 * groups), generator.choice(FLOATS))
    kept = generator.randint(1, groups)
    k = generator.randint(1, 4 * kept)
    arguments: dict[str, Any] = {
        "router_logits": logits,
        "top_k": k,
        "score": generator.choice(["sigmoid", "softmax"]),
        "correction_bias": draw(generator, (4 * groups,)) if generator.random() < 0.5 else None,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": generator.random() < 0.5,
        "routed_scaling_factor": generator.choice([1.0, 2.5]),
    }

    def check(result: tuple[Tensor, Tensor]) -> None:
        index, weights = result
        if index.shape != (5, k) or any(len(set(row)) != k for row in index.tolist()):
            raise DifferenceError(f"group_top_k chose {index.tolist()}")
        wide = logits.double()
        scores = wide.sigmoid() if arguments["score"] == "sigmoid" else wide.softmax(-1)
        expected = scores.gather(-1, index)
        if arguments["norm_topk_prob"]:
            expected = expected / expected.sum(-1, keepdim=True)
        expected = expected * arguments["routed_scaling_factor"]
        close("group_top_k", weights, expected, 1e-4)

    return dict(arguments), check


@call("moe.select_experts")
def select_experts(package: Package, generator: random.Random) -> Made:
    rule = package.opt.moe.RouterRule(generator.choice(["softmax", "sigmoid"]), 2)
    return {
        "router_logits": draw(generator, (5, 6)),
        "rule": rule,
        "correction_bias": None if generator.random() < 0.5 else draw(generator, (6,)),
    }, finite


def all_or_nothing(module: nn.Module, action: Callable[..., Any]) -> Callable[..., nn.Module]:
    """A call of `action` that returns the module; a refusal must leave no tensors behind."""
    before = sorted(module.state_dict())

    def act(**arguments: Any) -> nn.Module:
        try:
            action(**arguments)
        except (ValueError, TypeError, OSError):
            if sorted(module.state_dict()) != before:
                raise DifferenceError("a refusal left tensors behind") from None
            raise
        return module

    return act


def runs(*inputs: Tensor) -> Callable[[nn.Module], None]:
    """A check of a module: what it makes of the inputs is finite."""
    return lambda module: finite(module(*inputs))


# Always the same arguments.
FIXED: dict[str, dict[str, Any]] = {
    "moe.RouterRule": {
        "score": "softmax",
        "top_k": 2,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "moe.ExpertsLayout": {
        "activation": "silu",
        "transposed": True,
        "interleaved": False,
        "gated": True,
    },
    "moe.LoraProjection": {"num_experts": 3, "in_features": 4, "out_features": 5},
    "moe.choose_strategy": {
        "rows": 17,
        "num_experts": 8,
        "wanted": "auto",
        "fusable": True,
        "fast": True,
    },
    "moe.QuantizedExperts": {
        "shape": (3, 4, 64),
        "blocksize": 64,
        "quant_type": "nf4",
        "nested": False,
        "strategy": "auto",
        "device": torch.device("cpu"),
    },
}

for _name, _given in FIXED.items():
    call(_name)(lambda package, generator, given=_given: dict(given))


FORWARD_WORDS = ("gates", "weight", "bias", "x ", "expert_ids", "order", "lora_a")


@call("moe.experts_forward", words=FORWARD_WORDS)
def experts_forward(package: Package, generator: random.Random) -> Made:
    experts, hidden, inner, tokens, k = 3, generator.choice([4, 7]), 5, generator.choice([0, 6]), 2
    dtype = generator.choice(FLOATS)
    form = [generator.choice(ACTIVATIONS), generator.random() < 0.5, generator.random() < 0.5]
    layout = package.opt.moe.ExpertsLayout(*form)
    weights = [
        draw(generator, layout.stored(experts, *sizes), dtype, scale=0.3)
        for sizes in ((hidden, 2 * inner), (inner, hidden))
    ]
    x = draw(generator, (tokens, hidden), dtype)
    ids = integers(generator, -1, experts, (tokens, k))
    gates = draw(generator, (tokens, k)).abs()

    def check(result: Tensor) -> None:
        problem = LayerProblem(tokens, k, experts, hidden, inner, None, None, False, *form)
        leaves = {"x": x, "gates": gates, "gate_up_proj": weights[0], "down_proj": weights[1]}
        expected = eager_layer(problem, leaves, ids, torch.float64)
        close("experts_forward", result, expected, 60 * rounding(dtype))

    return {
        "hidden_states": x,
        "top_k_index": ids,
        "top_k_weights": gates,
        "gate_up": weights[0],
        "down": weights[1],
        "layout": layout,
        "lora": None,
        "gate_up_bias": None,
        "down_bias": None,
        "backend": generator.choice(BACKENDS),
    }, check


@call("moe.Experts")
def experts_module(package: Package, generator: random.Random) -> Made:
    arguments = {
        "num_experts": 3,
        "hidden": 4,
        "intermediate": 5,
        "layout": package.opt.moe.ExpertsLayout(),
        "bias": generator.random() < 0.5,
        "dtype": generator.choice(FLOATS),
        "device": torch.device("cpu"),
    }

    x = draw(generator, (2, 4), arguments["dtype"])
    return arguments, runs(x, torch.tensor([[0], [1]]), torch.ones(2, 1))


@call("moe.Experts.add_adapter")
def add_adapter(package: Package, generator: random.Random) -> Made:
    module = package.opt.moe.Experts(3, 4, 5)
    arguments = {
        "name": "one",
        "r": 2,
        "alpha": 4.0,
        "targets": ("gate_up", "down"),
        "train_base": False,
        "rslora": False,
        "dtype": torch.float32,
        "dropout": 0.0,
    }

    check = runs(draw(generator, (2, 4)), torch.tensor([[0], [1]]), torch.ones(2, 1))
    return arguments, check, all_or_nothing(module, module.add_adapter)


@call("moe.ExpertAdapters")
def expert_adapters(package: Package, generator: random.Random) -> Made:
    layout = package.opt.moe.ExpertsLayout()
    return {"num_experts": 3, "hidden": 4, "intermediate": 5, "layout": layout}


@call("moe.factor_views")
def factor_views(package: Package, generator: random.Random) -> Made:
    a, b = draw(generator, (6, 5)), draw(generator, (4, 6))

    def check(result: Any) -> None:
        if [tuple(x.shape) for x in result] != [(3, 2, 5), (3, 4, 2)]:
            raise DifferenceError("factor_views: wrong shapes")

    return {"lora_A": a, "lora_B": b, "num_experts": 3}, check


@call("moe.selective_lora_weights")
def selective_lora_weights(package: Package, generator: random.Random) -> Made:
    a, b = draw(generator, (6, 5)), draw(generator, (4, 6))
    ids = torch.tensor(generator.sample(range(3), generator.randint(0, 3)), dtype=torch.int64)

    def check(result: tuple[Tensor, Tensor]) -> None:
        expected = [a[2 * e : 2 * e + 2] for e in ids.tolist()]
        if expected and not torch.equal(result[0], torch.cat(expected)):
            raise DifferenceError("selective_lora_weights: other rows than asked for")

    return {"lora_A": a, "lora_B": b, "active_experts": ids, "num_experts": 3}, check


@call("moe.active_experts")
def active_experts(package: Package, generator: random.Random) -> Made:
    ids = integers(generator, 0, 5, (generator.choice([0, 4]), 2))
    order = package.opt.moe.expert_sort(ids, 5)

    def check(active: Any) -> None:
        used = sorted(set(ids.reshape(-1).tolist()))
        if active.ids[: len(used)].tolist() != used:
            raise DifferenceError(f"active_experts of {ids.tolist()}: {active.ids.tolist()}")

    return {"order": order}, check


@call("moe.selective_expert_weights")
def selective_expert_weights(package: Package, generator: random.Random) -> Made:
    order = package.opt.moe.expert_sort(integers(generator, 0, 4, (3, 2)), 4)
    active = package.opt.moe.active_experts(order)
    weight = draw(generator, (4, 8, 16), strided=False)
    quantized = generator.random() < 0.5
    stack: Any = weight
    if quantized:
        stack = package.opt.moe.QuantizedExperts.from_weight(weight, blocksize=32)
        stack = stack.quantized_weight()

    def check(result: Tensor) -> None:
        close("selective_expert_weights", result, weight[active.ids], 0.2 if quantized else 1e-2)

    return {"weight": stack, "active": active, "dtype": torch.float32}, check


@call("moe.expert_weight")
def expert_weight(package: Package, generator: random.Random) -> Made:
    module = package.opt.moe.Experts(3, 4, 5)
    return {"module": module, "name": "gate_up_proj", "shape": (3, 10, 4)}


def quantized(package: Package, generator: random.Random) -> tuple[Any, Tensor]:
    shape = generator.choice([(3, 8, 64), (2, 5, 32), (3, 7, 20)])
    weight = draw(generator, shape, generator.choice(STEPPED), strided=False)
    options = {"blocksize": generator.choice([32, 64]), "quant_type": "nf4"}
    nested = generator.random() < 0.3
    return package.opt.moe.QuantizedExperts.from_weight(weight, nested=nested, **options), weight


@call("moe.QuantizedExperts.from_weight", words=("shape", "experts", "expert"))
def from_weight(package: Package, generator: random.Random) -> Made:
    weight = draw(generator, (3, 4, 64), generator.choice(STEPPED))

    def check(module: Any) -> None:
        close("from_weight", module.quantized_weight().decode(dtype=torch.float32), weight, 0.2)

    return {"weight": weight, "blocksize": 64, "quant_type": "nf4", "nested": False}, check


@call("moe.QuantizedWeight", words=("shape", "stack"))
def quantized_weight(package: Package, generator: random.Random) -> Made:
    record = quantized(package, generator)[0].quantized_weight()
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}

    def check(made: Any) -> None:
        if bits(made.decode()) != bits(record.decode()):
            raise DifferenceError("QuantizedWeight: other values from the same fields")

    return fields, check


@call("moe.explain_quantized")
def explain_quantized(package: Package, generator: random.Random) -> Made:
    weight = quantized(package, generator)[0]
    return {"weight": weight, "rows": 8, "dtype": torch.bfloat16, "rank": 0, "backend": "auto"}


@call("moe.grouped_lora_linear, 4 bits")
def quantized_linear(package: Package, generator: random.Random) -> Made:
    module, _ = quantized(package, generator)
    experts, _, k = module.stored
    dtype = generator.choice(STEPPED)
    x = draw(generator, (5, k), dtype)
    order = package.opt.moe.expert_sort(integers(generator, -1, experts, (5, 2)), experts)
    record = module.quantized_weight().transpose(1, 2)

    def check(result: Tensor) -> None:
        weight = module.quantized_weight().decode(dtype=torch.float32).transpose(1, 2)
        expected = package.opt.moe.grouped_lora_linear(x.double(), weight.double(), order)
        close("4-bit grouped_lora_linear", result, expected, 40 * rounding(torch.bfloat16))

    return {"x": x, "weight": record, "order": order, "backend": generator.choice(BACKENDS)}, check


@call("moe.Router")
def router(package: Package, generator: random.Random) -> Made:
    rule = package.opt.moe.RouterRule("sigmoid", 2)
    arguments = {"hidden": 4, "num_experts": 5, "rule": rule, "correction": True, "bias": True}
    return arguments, runs(draw(generator, (3, 4)))


@call("moe.SharedExperts")
def shared_experts(package: Package, generator: random.Random) -> Made:
    arguments = {"hidden": 4, "intermediate": 5, "activation": "silu", "sigmoid_gate": True}
    return arguments, runs(draw(generator, (3, 4)))


@call("moe.MoEBlock", words=("hidden_states", "x ", "linear", "weight must have dtype"))
def moe_block(package: Package, generator: random.Random) -> Made:
    moe = package.opt.moe
    block = moe.MoEBlock(
        moe.Router(4, 3, moe.RouterRule("softmax", 2)),
        moe.Experts(3, 4, 5),
        moe.SharedExperts(4, 5) if generator.random() < 0.5 else None,
    )
    return (
        {"hidden_states": draw(generator, generator.choice([(2, 4), (2, 3, 4), (0, 4)]))},
        finite,
        block.forward,
    )


@call("layers.ScatterMoEExperts", words=("expert_ids", "gates", "x ", "gate_up", "weight must"))
def scatter_moe_experts(package: Package, generator: random.Random) -> Made:
    """Its forward in the place of that of a module with the names of transformers."""

    class Layer(package.opt.layers.ScatterMoEExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, -1)
            return nn.functional.silu(gate) * up

    layer = Layer()
    layer.gate_up_proj = nn.Parameter(draw(generator, (3, 10, 4), strided=False))
    layer.down_proj = nn.Parameter(draw(generator, (3, 4, 5), strided=False))
    layer.num_experts, layer.hidden_dim, layer.act_fn = 3, 4, nn.SiLU()
    arguments = {
        "hidden_states": draw(generator, (4, 4)),
        "top_k_index": integers(generator, 0, 3, (4, 2)),
        "top_k_weights": draw(generator, (4, 2)),
    }

    def forward(**given: Any) -> Tensor:
        with torch.no_grad():
            return layer(**given)

    return arguments, finite, forward


FAMILIES = ("qwen3_moe", "qwen3_moe_square")
WORDS = ("model", "expert", "adapter", "lora", "LoRA", "quantize")


def tiny(generator: random.Random) -> Any:
    from ..integrations import _models

    torch.manual_seed(generator.randrange(1000))
    return _models.model_of(generator.choice(FAMILIES))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]])).logits


@call("integrations.attach_lora", words=WORDS)
def attach_lora(package: Package, generator: random.Random) -> Made:
    model = tiny(generator)
    attach = package.opt.integrations.attach_lora
    arguments = {
        "model": model,
        "r": 2,
        "lora_alpha": 4.0,
        "target_parameters": ("gate_up_proj", "down_proj"),
        "use_rslora": False,
        "target_modules": generator.choice([None, None, ["q_proj", "o_proj"]]),
        "quantize": generator.choice([None, None, "nf4"]),
        "adapter_name": "default",
        "dtype": torch.float32,
    }
    return arguments, None, all_or_nothing(model, attach)


@call("integrations.use_in_transformers", words=WORDS)
def use_in_transformers(package: Package, generator: random.Random) -> Made:
    model = tiny(generator)

    def use(model: Any) -> Any:
        package.opt.integrations.use_in_transformers(model)
        return model

    return {"model": model}, lambda given: finite(logits(given)), use


@call("integrations.quantize_experts", words=WORDS)
def quantize_experts(package: Package, generator: random.Random) -> Made:
    model = tiny(generator)

    def quantize(**arguments: Any) -> Any:
        package.opt.integrations.quantize_experts(**arguments)
        package.opt.integrations.use_in_transformers(model)
        return model

    def check(given: Any) -> None:
        finite(logits(given))

    arguments = {"model": model, "quant_type": "nf4", "blocksize": 64}
    return arguments, check, quantize


@call("integrations.set_lora")
def switches(package: Package, generator: random.Random) -> Call:
    """The functions that take a model with adapters, in any order."""
    integrations, model = package.opt.integrations, tiny(generator)
    if generator.random() < 0.8:
        integrations.attach_lora(model, 2, 4.0)
    names = ["disable_lora", "enable_lora", "merge_lora", "unmerge_lora", "detach_lora", "set_lora"]
    names += ["lora_disabled", "save_peft_adapter", "load_peft_adapter", "save_quantized"]
    folder = package.folder / f"adapter{generator.random()}"
    chosen = [generator.choice(names) for _ in range(4)]

    def play(model: Any, adapter: Any) -> Any:
        for name in chosen:
            function = getattr(integrations, name)
            if name == "set_lora":
                function(model, adapter)
            elif name == "lora_disabled":
                with function(model):
                    logits(model)
            elif name in ("save_peft_adapter", "load_peft_adapter", "save_quantized"):
                function(model, folder)
            else:
                function(model)
        return model

    def check(given: Any) -> None:
        finite(logits(given))

    arguments = {"model": model, "adapter": "default"}
    words = (*WORDS, "merged", str(folder), "quantized", "quantised")
    return Call("integrations.set_lora", play, arguments, check, also=(OSError,), words=words)


@call("integrations.load_peft_adapter")
def load_peft_adapter(package: Package, generator: random.Random) -> Call:
    """Of a folder whose two files may be damaged."""
    integrations, model = package.opt.integrations, tiny(generator)
    integrations.attach_lora(model, 2, 4.0)
    folder = package.folder / f"peft{generator.random()}"
    integrations.save_peft_adapter(model, folder)
    integrations.detach_lora(model)
    file = generator.choice([*sorted(folder.iterdir())])
    data = file.read_bytes()
    if generator.random() < 0.7:
        place = generator.randrange(len(data))
        data = generator.choice(
            [data[:place], data[place:], b"", data[:place] + b"\x00" + data[place:]]
        )
        if file.suffix == ".json":
            text = file.read_text()
            old = generator.choice(
                ['"r": 2', '"lora_alpha": 4.0', '"LORA"', "gate_up_proj", "null"]
            )
            new = generator.choice(['"r": -1', '"lora_alpha": "x"', "[]", "nowhere", "{}", "1e999"])
            data = text.replace(old, new).encode()

    def load(model: Any, adapter: Any, content: bytes) -> None:
        file.write_bytes(content)
        integrations.load_peft_adapter(model, folder, adapter_name=adapter, local_files_only=True)

    arguments = {"model": model, "adapter": "default", "content": data}
    words = (*WORDS, str(folder), "json", "safetensors")
    name, load = "integrations.load_peft_adapter", all_or_nothing(model, load)
    return Call(name, load, arguments, None, (), (OSError,), words, ("content",))
