"""Calls of the experts' functions, layers and integrations, with what each must give."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..moe._eager import LayerProblem, Problem, eager, eager_layer, predecessors
from ._calls import (
    FLOATS,
    STEPPED,
    Call,
    Made,
    Package,
    bits,
    call,
    close,
    draw,
    drawn,
    finite,
    holds,
    integers,
    near,
    restrided,
    rounding,
)
from ._problem import DifferenceError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss")
BACKENDS = ("auto", "auto", "auto", "reference")
CPU = torch.device("cpu")


def product(
    generator: random.Random, **fixed: Any
) -> tuple[Problem, dict[str, Tensor | None], Tensor, Callable[[Tensor], None]]:
    """A problem of the grouped product, its operands, its ids and the check of a result."""
    options = drawn(
        generator,
        tokens=[0, 1, 5, 17],
        top_k=[1, 2, 3],
        experts=[3, 4],
        k=[4, 7, 16],
        n=[3, 8],
        rank=[None, 1, 4],
        scaling=[2.0, 0.5],
        dtype=FLOATS,
        routing=["random", "one", "gap", "sentinels", "all-sentinels"],
    )
    for flag in ("bias", "gates", "grouped_in", "grouped_out", "peft"):
        options[flag] = generator.random() < 0.4
    options["grouped_out"] &= not options["gates"]
    problem = Problem(**options | fixed)
    ids = problem.ids(CPU, generator.randrange(100))
    leaves = problem.inputs(CPU, generator.randrange(100))
    leaves = {name: None if x is None else x.detach() for name, x in leaves.items()}
    right = near(lambda: eager(problem, leaves, ids, torch.float64), 20 * rounding(problem.dtype))
    return problem, leaves, ids, right


@call("moe.grouped_lora_linear")
def grouped_lora_linear(package: Package, generator: random.Random) -> Made:
    problem, leaves, ids, right = product(generator)
    order = package.opt.moe.expert_sort(ids, problem.experts)
    names = ("scaling", "grouped_in", "grouped_out")
    given = {**problem.views(leaves), "order": order, "backend": generator.choice(BACKENDS)}
    return given | {name: getattr(problem, name) for name in names}, right


@call("moe.parallel_linear_lora", words=("lora_a", "lora_b", "weight", "order", "x must"))
def parallel_linear_lora(package: Package, generator: random.Random) -> Made:
    fixed = {"routing": "random", "peft": False, "bias": False, "gates": False, "tokens": 6}
    problem, leaves, ids, right = product(generator, **fixed)
    order = package.opt.moe.expert_sort(ids, problem.experts)
    return predecessors(problem, leaves, ids, order.slots), right


@call("moe.expert_sort")
def expert_sort(package: Package, generator: random.Random) -> Made:
    given = drawn(
        generator,
        num_experts=[1, 3, 8, 300],
        backend=BACKENDS,
        tile_rows=[None, 16, 32, 64],
    )
    experts, shape = (
        given["num_experts"],
        (generator.choice([0, 1, 5, 40]), generator.choice([1, 2])),
    )
    dtype = generator.choice([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
    ids = integers(generator, 0, min(experts + 2, 100), shape).to(dtype)
    if dtype.is_signed and ids.numel() and generator.random() < 0.3:
        ids[0, 0] = -1
    ids = restrided(generator, ids)

    def check(order: Any) -> None:
        expected = package("reference.moe").expert_sort(ids, experts, order.tile_rows)
        found = (order.slots, order.rows, order.offsets, order.tiles)
        if not all(map(torch.equal, found, expected)):
            raise DifferenceError("another order than the reference")

    return {"expert_ids": ids, "backend": generator.choice(BACKENDS), **given}, check


@call("moe.glu")
def glu(package: Package, generator: random.Random) -> Made:
    x = draw(generator, (generator.choice([0, 1, 7]), 2 * generator.choice([1, 4, 9])))
    x = x.to(generator.choice(FLOATS))
    options = drawn(generator, activation=ACTIVATIONS, interleaved=[True, False])
    slow = package("reference.glu").glu
    right = near(lambda: slow(x.double(), *options.values()), 4 * rounding(x.dtype))
    return {"gate_up": x, "backend": "auto", **options}, right


@call("moe.softmax_top_k")
def softmax_top_k(package: Package, generator: random.Random) -> Made:
    lead, experts = generator.choice([(), (3,), (2, 3), (0,)]), generator.choice([1, 4, 9])
    logits = draw(generator, (*lead, experts), generator.choice(FLOATS))
    norm = generator.random() < 0.5

    def check(result: tuple[Tensor, Tensor]) -> None:
        expected = logits.double().softmax(-1).gather(-1, result[0])
        close(result[1], expected / expected.sum(-1, keepdim=True) if norm else expected, 1e-5)

    given = {"router_logits": logits, "top_k": generator.randint(1, experts)}
    return given | {"norm_topk_prob": norm}, check


@call("moe.group_top_k")
def group_top_k(package: Package, generator: random.Random) -> Made:
    groups = generator.choice([1, 2, 4])
    kept = generator.randint(1, groups)
    given: dict[str, Any] = drawn(
        generator,
        score=["sigmoid", "softmax"],
        norm_topk_prob=[True, False],
        routed_scaling_factor=[1.0, 2.5],
        top_k=[*range(1, 4 * kept + 1)],
    )
    given |= {"n_group": groups, "topk_group": kept}
    given["router_logits"] = draw(generator, (5, 4 * groups), generator.choice(FLOATS))
    given["correction_bias"] = draw(generator, (4 * groups,)) if generator.random() < 0.5 else None
    return given


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


def _simple(name: str, check: Any = None, /, **values: Any) -> None:
    """A function of such arguments; of a list one is drawn, a function makes one."""

    @call(name)
    def made(package: Package, generator: random.Random) -> Made:
        def given(value: Any) -> Any:
            if isinstance(value, list):
                return generator.choice(value)
            return value(package, generator) if callable(value) else value

        return {key: given(value) for key, value in values.items()}, check


def _layout(package: Package, _: random.Random) -> Any:
    return package.opt.moe.ExpertsLayout()


def _rule(package: Package, generator: random.Random) -> Any:
    return package.opt.moe.RouterRule(generator.choice(["softmax", "sigmoid"]), 2)


def _experts(package: Package, _: random.Random) -> Any:
    return package.opt.moe.Experts(3, 4, 5)


def quantized(package: Package, generator: random.Random) -> Any:
    shape = generator.choice([(3, 8, 64), (2, 5, 32), (3, 7, 20)])
    weight = draw(generator, shape, generator.choice(STEPPED), strided=False)
    options = {"blocksize": generator.choice([32, 64]), "nested": generator.random() < 0.3}
    return package.opt.moe.QuantizedExperts.from_weight(weight, **options)


def _tensor(*shape: int) -> Callable[[Package, random.Random], Tensor]:
    return lambda _, generator: draw(generator, shape)


def _runs_in_its_dtype(made: nn.Module) -> None:
    finite(made(TWO_TOKENS[0].to(made.down_proj.dtype), *TWO_TOKENS[1:]))


TWO_TOKENS = (torch.ones(2, 4), torch.tensor([[0], [1]]), torch.ones(2, 1))
VIEWS = holds(lambda views: [tuple(x.shape) for x in views] == [(3, 2, 5), (3, 4, 2)])
RULE = {"score": "softmax", "top_k": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
LAYER = {"num_experts": 3, "hidden": 4, "intermediate": 5, "layout": _layout}
STACK = {"shape": (3, 4, 64), "blocksize": 64, "quant_type": "nf4", "nested": False}
GATED = {"hidden": 4, "intermediate": 5, "activation": "silu", "sigmoid_gate": True}
ROUTER = {"hidden": 4, "num_experts": 5, "rule": _rule, "correction": True, "bias": True}
ROUTED = {
    "router_logits": _tensor(5, 6),
    "rule": _rule,
    "correction_bias": [None, torch.arange(6.0)],
}
PACKED = {"weight": quantized, "rows": 8, "dtype": torch.bfloat16, "backend": "auto"}
_simple("moe.RouterRule", **RULE, routed_scaling_factor=1.0)
_simple("moe.ExpertsLayout", activation="silu", transposed=True, interleaved=False, gated=True)
_simple("moe.LoraProjection", num_experts=3, in_features=4, out_features=5)
_simple("moe.choose_strategy", rows=17, num_experts=8, wanted="auto", fusable=True, fast=True)
_simple("moe.QuantizedExperts", **STACK, strategy="auto", device=CPU)
_simple("moe.select_experts", finite, **ROUTED)
_simple("moe.Experts", _runs_in_its_dtype, **LAYER, bias=[True, False], dtype=[*FLOATS], device=CPU)
_simple("moe.ExpertAdapters", **LAYER)
_simple("moe.Router", runs(torch.ones(3, 4)), **ROUTER)
_simple("moe.SharedExperts", runs(torch.ones(3, 4)), **GATED)
_simple("moe.expert_weight", module=_experts, name="gate_up_proj", shape=(3, 10, 4))
_simple("moe.factor_views", VIEWS, lora_A=_tensor(6, 5), lora_B=_tensor(4, 6), num_experts=3)
_simple("moe.explain_quantized", **PACKED)

FORWARD_WORDS = ("gates", "weight", "bias", "x ", "expert_ids", "order", "lora_a")


@call("moe.experts_forward", words=FORWARD_WORDS)
def experts_forward(package: Package, generator: random.Random) -> Made:
    experts, hidden, inner, tokens, k = 3, generator.choice([4, 7]), 5, generator.choice([0, 6]), 2
    dtype = generator.choice(FLOATS)
    form = [generator.choice(ACTIVATIONS), generator.random() < 0.5, generator.random() < 0.5]
    layout = package.opt.moe.ExpertsLayout(*form)
    gate_up, down = (
        draw(generator, layout.stored(experts, *sizes), dtype, scale=0.3)
        for sizes in ((hidden, 2 * inner), (inner, hidden))
    )
    x = draw(generator, (tokens, hidden), dtype)
    ids = integers(generator, -1, experts, (tokens, k))
    gates = draw(generator, (tokens, k)).abs()
    problem = LayerProblem(tokens, k, experts, hidden, inner, None, None, False, *form)
    leaves = {"x": x, "gates": gates, "gate_up_proj": gate_up, "down_proj": down}
    right = near(lambda: eager_layer(problem, leaves, ids, torch.float64), 60 * rounding(dtype))
    given = {"hidden_states": x, "top_k_index": ids, "top_k_weights": gates, "layout": layout}
    given |= {"gate_up": gate_up, "down": down, "lora": None, "backend": generator.choice(BACKENDS)}
    return given | {"gate_up_bias": None, "down_bias": None}, right


@call("moe.Experts.add_adapter")
def add_adapter(package: Package, generator: random.Random) -> Made:
    module = package.opt.moe.Experts(3, 4, 5)
    given = {"name": "one", "r": 2, "alpha": 4.0, "targets": ("gate_up", "down"), "dropout": 0.0}
    given |= {"train_base": False, "rslora": False, "dtype": torch.float32}
    return given, runs(*TWO_TOKENS), all_or_nothing(module, module.add_adapter)


@call("moe.selective_lora_weights")
def selective_lora_weights(package: Package, generator: random.Random) -> Made:
    a, b = draw(generator, (6, 5)), draw(generator, (4, 6))
    ids = torch.tensor(generator.sample(range(3), generator.randint(0, 3)), dtype=torch.int64)
    expected = torch.cat([a[:0], *(a[2 * e : 2 * e + 2] for e in ids.tolist())])
    given = {"lora_A": a, "lora_B": b, "active_experts": ids, "num_experts": 3}
    return given, holds(lambda result: torch.equal(result[0], expected))


@call("moe.active_experts")
def active_experts(package: Package, generator: random.Random) -> Made:
    ids = integers(generator, 0, 5, (generator.choice([0, 4]), 2))
    used = ids.unique().tolist()
    order = package.opt.moe.expert_sort(ids, 5)
    return {"order": order}, holds(lambda active: active.ids[: len(used)].tolist() == used)


@call("moe.selective_expert_weights")
def selective_expert_weights(package: Package, generator: random.Random) -> Made:
    moe = package.opt.moe
    active = moe.active_experts(moe.expert_sort(integers(generator, 0, 4, (3, 2)), 4))
    weight = draw(generator, (4, 8, 16), strided=False)
    stack, slack = weight, 1e-2
    if generator.random() < 0.5:
        stack = moe.QuantizedExperts.from_weight(weight, blocksize=32).quantized_weight()
        slack = 0.2
    right = near(lambda: weight[active.ids], slack)
    return {"weight": stack, "active": active, "dtype": torch.float32}, right


@call("moe.QuantizedExperts.from_weight", words=("shape", "experts", "expert"))
def from_weight(package: Package, generator: random.Random) -> Made:
    weight = draw(generator, (3, 4, 64), generator.choice(STEPPED))
    given = {"weight": weight, "blocksize": 64, "quant_type": "nf4", "nested": False}
    return given, lambda made: close(made.decode(dtype=torch.float32), weight, 0.2)


@call("moe.QuantizedWeight", words=("shape", "stack"))
def quantized_weight(package: Package, generator: random.Random) -> Made:
    record = quantized(package, generator).quantized_weight()
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return fields, holds(lambda made: bits(made.decode()) == bits(record.decode()))


@call("moe.grouped_lora_linear, 4 bits")
def quantized_linear(package: Package, generator: random.Random) -> Made:
    module, product = quantized(package, generator), package.opt.moe.grouped_lora_linear
    experts, _, k = module.stored
    x = draw(generator, (5, k), generator.choice(STEPPED))
    order = package.opt.moe.expert_sort(integers(generator, -1, experts, (5, 2)), experts)
    record, decoded = module.transpose(1, 2), module.decode(dtype=torch.float32).double()
    expected = product(x.double(), decoded.transpose(1, 2), order)
    given = {"x": x, "weight": record, "order": order, "backend": generator.choice(BACKENDS)}
    return given, near(lambda: expected, 40 * rounding(torch.bfloat16))


@call("moe.MoEBlock", words=("hidden_states", "x ", "linear", "weight must have dtype"))
def moe_block(package: Package, generator: random.Random) -> Made:
    moe = package.opt.moe
    shared = moe.SharedExperts(4, 5) if generator.random() < 0.5 else None
    router = moe.Router(4, 3, moe.RouterRule("softmax", 2))
    block = moe.MoEBlock(router, moe.Experts(3, 4, 5), shared)
    x = draw(generator, generator.choice([(2, 4), (2, 3, 4), (0, 4)]))
    return {"hidden_states": x}, finite, block.forward


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
    given = {"hidden_states": draw(generator, (4, 4)), "top_k_weights": draw(generator, (4, 2))}
    given["top_k_index"] = integers(generator, 0, 3, (4, 2))

    def forward(**given: Any) -> Tensor:
        with torch.no_grad():
            return layer(**given)

    return given, finite, forward


WORDS = ("model", "expert", "adapter", "lora", "LoRA", "quantize")


def tiny(generator: random.Random) -> Any:
    from ..integrations import _models

    torch.manual_seed(generator.randrange(1000))
    return _models.model_of(generator.choice(("qwen3_moe", "qwen3_moe_square")))


def still_runs(model: Any) -> None:
    """A check: its logits are finite."""
    with torch.no_grad():
        finite(model(torch.tensor([[1, 2, 3]])).logits)


@call("integrations.attach_lora", words=WORDS)
def attach_lora(package: Package, generator: random.Random) -> Made:
    model = tiny(generator)
    given = {"model": model, "r": 2, "lora_alpha": 4.0, "use_rslora": False}
    given |= {"target_parameters": ("gate_up_proj", "down_proj"), "dtype": torch.float32}
    given |= {"adapter_name": "default", "quantize": generator.choice([None, None, "nf4"])}
    given["target_modules"] = generator.choice([None, None, ["q_proj", "o_proj"]])
    return given, None, all_or_nothing(model, package.opt.integrations.attach_lora)


@call("integrations.use_in_transformers", words=WORDS)
def use_in_transformers(package: Package, generator: random.Random) -> Made:
    def use(model: Any) -> Any:
        package.opt.integrations.use_in_transformers(model)
        return model

    return {"model": tiny(generator)}, still_runs, use


@call("integrations.quantize_experts", words=WORDS)
def quantize_experts(package: Package, generator: random.Random) -> Made:
    model = tiny(generator)

    def quantize(**arguments: Any) -> Any:
        package.opt.integrations.quantize_experts(**arguments)
        package.opt.integrations.use_in_transformers(model)
        return model

    return {"model": model, "quant_type": "nf4", "blocksize": 64}, still_runs, quantize


SWITCHES = ("disable_lora", "enable_lora", "merge_lora", "unmerge_lora", "detach_lora", "set_lora")
SAVERS = ("save_peft_adapter", "load_peft_adapter")


@call("integrations.set_lora")
def switches(package: Package, generator: random.Random) -> Call:
    """The functions that take a model with adapters, in any order."""
    integrations, model, folder = package.opt.integrations, tiny(generator), package.new_path()
    if generator.random() < 0.8:
        integrations.attach_lora(model, 2, 4.0)
    chosen = [generator.choice((*SWITCHES, "lora_disabled", *SAVERS)) for _ in range(4)]

    def play(model: Any, adapter: Any) -> Any:
        for name in chosen:
            function = getattr(integrations, name)
            if name == "lora_disabled":
                with function(model):
                    still_runs(model)
            else:
                more = [folder] if name in SAVERS else [adapter] if name == "set_lora" else []
                function(model, *more)
        return model

    words = (*WORDS, "merged", str(folder), "quantized", "quantised")
    given = {"model": model, "adapter": "default"}
    return Call("integrations.set_lora", play, given, still_runs, also=(OSError,), words=words)


# What stands in an adapter's configuration, and what may be put there instead.
STANDING = ('"r": 2', '"lora_alpha": 4.0', '"LORA"', "gate_up_proj", "null")
INSTEAD = ('"r": -1', '"lora_alpha": "x"', "[]", "nowhere", "{}", "1e999")


@call("integrations.load_peft_adapter")
def load_peft_adapter(package: Package, generator: random.Random) -> Call:
    """Of a folder whose two files may be damaged."""
    integrations, model, folder = package.opt.integrations, tiny(generator), package.new_path()
    integrations.attach_lora(model, 2, 4.0)
    integrations.save_peft_adapter(model, folder)
    integrations.detach_lora(model)
    file = generator.choice([*sorted(folder.iterdir())])
    data = file.read_bytes()
    if generator.random() < 0.7:
        at = generator.randrange(len(data))
        data = generator.choice([data[:at], data[at:], b"", data[:at] + b"\x00" + data[at:]])
        if file.suffix == ".json":
            old, new = generator.choice(STANDING), generator.choice(INSTEAD)
            data = file.read_text().replace(old, new).encode()

    def load(model: Any, adapter: Any, content: bytes) -> None:
        file.write_bytes(content)
        integrations.load_peft_adapter(model, folder, adapter_name=adapter, local_files_only=True)

    given = {"model": model, "adapter": "default", "content": data}
    words = (*WORDS, str(folder), "json", "safetensors")
    name, load = "integrations.load_peft_adapter", all_or_nothing(model, load)
    return Call(name, load, given, None, (), (OSError,), words, ("content",))
