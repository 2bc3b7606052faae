"""What a call is, its tensors, and a maker of calls of every public function."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..moe._eager import Problem, predecessors
from ._problem import Run, Source, assert_unchanged


@dataclass
class Call:
    """One call of a public function.

    Args:
        name: of the function.
        function: the function.
        arguments: by keyword.
        check: gets the result and raises an AssertionError if it is wrong; None for none.
        written: names of the arguments that the function may write.
        also: documented errors besides ValueError and TypeError.
        words: what a message may name in place of an argument.
        exact: arguments that are left as they are, since only together they mean something.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[Any], None] | None = None
    written: tuple[str, ...] = ()
    also: tuple[type[BaseException], ...] = ()
    words: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    spoiled: list[str] = field(default_factory=list)


Made = dict[str, Any] | tuple[Any, ...]
CALLS: dict[str, Callable[[Package, random.Random], Call]] = {}
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
STEPPED = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss"]
BACKENDS = ["auto", "auto", "auto", "reference"]
CPU = torch.device("cpu")


class Package:
    """The loaded package, its inner modules and a folder to write to."""

    def __init__(self, opt: Any, folder: Any) -> None:
        self.opt, self.folder = opt, folder

    def __call__(self, name: str) -> Any:
        return importlib.import_module(f"{self.opt.__name__}.{name}")

    def function(self, path: str) -> Any:
        """Such as "moe.glu"; what only the inner modules hand out begins with "kernels."."""
        if path.startswith("kernels."):
            return getattr(self("kernels"), path.removeprefix("kernels."))
        return functools.reduce(getattr, path.split("."), self.opt)

    def new_path(self) -> Any:
        return self.folder / f"{len([*self.folder.iterdir()])}"


def call(name: str, **options: Any) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Enter a maker of arguments, perhaps with a check of the result and another function."""

    def entered(made: Callable[..., Made]) -> Callable[..., Made]:
        def make(package: Package, generator: random.Random) -> Call:
            found = made(package, generator)
            arguments, check, *other = found if isinstance(found, tuple) else (found, None)
            function = other[0] if other else package.function(name.split(",")[0])
            return Call(name, function, arguments, check, **options)

        CALLS[name] = make
        return made

    return entered


def simple(name: str, check: Any = None, /, **values: Any) -> None:
    """A function of such arguments; of a list one is drawn, a function makes one."""

    @call(name)
    def made(package: Package, generator: random.Random) -> Made:
        def given(value: Any) -> Any:
            if isinstance(value, list):
                return generator.choice(value)
            return value(package, generator) if callable(value) else value

        return {key: given(value) for key, value in values.items()}, check


Maker = Callable[[Package, random.Random], Any]


def tensor(*shapes: tuple[int, ...], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> Maker:
    return lambda _, one: draw(one, one.choice(shapes), one.choice(dtypes))


def of_the_package(make: Callable[[Any], Any]) -> Maker:
    return lambda package, _: make(package.opt)


def draw(
    generator: random.Random,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    scale: float = 1.0,
    strided: bool = True,
) -> Tensor:
    numbers = torch.Generator().manual_seed(generator.randrange(2**31))
    x = (torch.randn(tuple(shape), generator=numbers, dtype=torch.float64) * scale).to(dtype)
    return restrided(generator, x) if strided else x


def integers(generator: random.Random, low: int, high: int, shape: Sequence[int]) -> Tensor:
    numbers = torch.Generator().manual_seed(generator.randrange(2**31))
    return torch.randint(low, high, tuple(shape), generator=numbers)


def restrided(generator: random.Random, x: Tensor) -> Tensor:
    """The same numbers: contiguous, transposed in memory, with gaps, or at an odd place."""
    kind = generator.choice(["as it is", "as it is", "transposed", "gaps", "offset"])
    if kind == "transposed" and x.ndim >= 2:
        return x.mT.contiguous().mT
    if kind == "gaps" and x.ndim:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if kind == "offset":
        flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    return x


def drawn(generator: random.Random, **choices: list[Any]) -> dict[str, Any]:
    return {name: generator.choice(values) for name, values in choices.items()}


def finite(result: Any) -> None:
    for tensor in result if isinstance(result, tuple) else (result,):
        floating = isinstance(tensor, Tensor) and tensor.is_floating_point()
        assert not floating or tensor.isfinite().all(), "finite arguments gave something infinite"


MATRICES = tensor(
    (1, 5), (8, 8), (17, 3), (3, 5, 8), (2, 2, 3, 33), (0, 4, 4), (0, 3), dtypes=FLOATS
)
ITERATED = {"x": MATRICES, "dtype": [None, None, *FLOATS]}
METHODS = ["auto", "polar_express", "gram_newton_schulz", "newton_schulz"]


@call("orthogonalize", written=("out",))
def orthogonalize(package: Package, generator: random.Random) -> Made:
    x = MATRICES(package, generator)
    given = {"x": x} | drawn(generator, dtype=[None, *FLOATS], steps=[1, 2, 5, 8], method=METHODS)
    if generator.random() < 0.3:
        given["out"] = restrided(generator, torch.zeros(x.shape, dtype=given["dtype"] or x.dtype))
    return given, finite


polynomial = {"x": MATRICES, "dtype": [None, torch.float32], "method": "gram_polynomial"}
simple("orthogonalize, by a polynomial", finite, **polynomial, steps=5)
# Of polar_express_coefficients; the room that rounding needs is 0.02 or more.
SCHEDULE = {"lower": [1e-3, 1e-2, 0.1, 1e-4], "safety": [0.02, 0.05], "cushion": [0.02, 0.1]}
simple("polar_express_coefficients", steps=[1, 2, 5, 9], **SCHEDULE)
simple("polar_express", finite, **ITERATED, steps=[1, 4, 7], **SCHEDULE)
ROWS = [[[1.5, -0.5, 0.0]] * 3, [(1.2, -0.3, 0.01)] * 3, "keller_jordan"]
SETS = ["gram_newton_schulz", "you", "cans", "polar_express"]
simple("gram_newton_schulz", **ITERATED, steps=5, coefficients=SETS, restarts=[None, [1, 2, 3, 4]])


@call("newton_schulz", words=("a coefficient",))
def newton_schulz(package: Package, generator: random.Random) -> Made:
    x, options = MATRICES(package, generator), {"dtype": [None, *FLOATS], "coefficients": ROWS}
    return {"x": x, "steps": 3, **drawn(generator, **options)}, finite


@call("kernels.symmetric_matmul", written=("out",))
def symmetric_matmul(package: Package, generator: random.Random) -> Made:
    dtype, lead = generator.choice(STEPPED), generator.choice([(), (2,), (2, 2)])
    a, c = (draw(generator, (*lead, 8, k), dtype) for k in (5, 8))
    options: dict[str, Any] = {"alpha": 0.5, "diag": generator.choice([0.0, 1.5])}
    if generator.random() < 0.5:
        options |= {"C": c + c.mT, "beta": -1.0}
    if generator.random() < 0.3:
        options["scale"] = draw(generator, lead)
    return {"A": a, **options}


def some_ids(generator: random.Random, high: int) -> Tensor:
    count = generator.randint(0, 4)
    return torch.tensor([generator.randrange(high) for _ in range(count)], dtype=torch.int64)


WEIGHTS = tensor((64,), (3, 65), (0,), (2, 32, 4), (1,), (7, 9), dtypes=STEPPED)
contiguous = lambda package, generator: WEIGHTS(package, generator).contiguous()  # noqa: E731
simple("nf4_quantize", weight=contiguous, blocksize=[32, 64, 128], quant_type=["nf4", "fp4"])


@call("nf4_dequant", also=(RuntimeError,))
def nf4_dequant(package: Package, generator: random.Random) -> Made:
    experts, shape = generator.randint(1, 4), generator.choice([(8, 16), (64,), (3, 32)])
    weight = draw(generator, (experts, *shape), strided=False)
    packed, absmax = package.opt.nf4_quantize(weight, 32)
    given: dict[str, Any] = {"packed": packed, "absmax": absmax, "expert_shape": shape}
    given |= {"active_experts": some_ids(generator, experts), "blocksize": 32}
    given["dtype"] = generator.choice(STEPPED)
    if generator.random() < 0.3:
        nested = package("reference.nf4").nest_absmax(absmax)
        names = ("absmax", "absmax_code", "absmax_scale", "absmax_offset")
        given |= dict(zip(names, nested, strict=True))
    return given


def dequant(name: str, **more: Any) -> None:
    @call(f"{name}_dequant", also=(IndexError,))  # of an id that names no expert
    def made(package: Package, generator: random.Random) -> Made:
        experts, shape = generator.randint(1, 4), generator.choice([(8, 32), (3, 64), (33, 96)])
        weight = draw(generator, (experts, *shape), generator.choice(STEPPED))
        packed, scales = getattr(package.opt, f"{name}_quantize")(weight)
        given = {"packed": packed, "scales": scales, "expert_shape": shape, **more}
        given |= {"active_experts": some_ids(generator, experts)}
        given["dtype"] = generator.choice(STEPPED)
        return given, finite


dequant("mxfp4")
dequant("fp8", block=(128, 128))
simple("mxfp4_quantize", weight=tensor((2, 32), (3, 5, 64), (96,)))
ODD = tensor((2, 32), (3, 5, 70), (2, 130, 150))
simple("fp8_quantize", weight=ODD, block=[(128, 128), (1, 0), (0, 0)])


@call("explain")
def explain(package: Package, generator: random.Random) -> Made:
    operations = [*package("explain").EXPLAINERS]
    given = drawn(generator, op=operations, device=["cpu", CPU])
    if given["op"] == "orthogonalize":
        given |= {"shape": (8, 5), "dtype": generator.choice(FLOATS), "steps": 5}
    elif given["op"] in ("expert_sort", "grouped_lora_linear", "combine", "glu"):
        given |= {"dtype": generator.choice(FLOATS), "backend": "auto"}
    return given


def some_model(package: Package, _: random.Random) -> nn.Module:
    """Parameters of every kind that groups tell apart."""
    parts = {"embed_tokens": nn.Embedding(7, 4), "layer": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    return nn.ModuleDict({**parts, "lm_head": nn.Linear(4, 7, bias=False)})


RULE_OF_NAMES = of_the_package(lambda opt: opt.default_is_muon)
simple("get_default_muon_param_groups", model=some_model, is_muon_func=RULE_OF_NAMES)
SOME_NAMES = ["layers.0.q_proj.weight", "lm_head.weight", "norm.bias", "", "a" * 999]
simple("default_is_muon", name=SOME_NAMES, param=tensor((3, 4), (3,), (), (2, 3, 4), (0, 2)))
simple(
    "DistributedConfig",
    wire_dtype=[None, torch.float16, torch.float32],
    prefetch=[1, 2, 3, 4],
    chunk_size=[-1, 1, 8],
    in_flight_bytes=[1, 2**20],
    cuda_graphs=[True, False],
    timeout=[1, 0.5],
)


def constructor(front: str) -> None:
    @call(front, words=("group", "parameter"))
    def made(package: Package, generator: random.Random) -> Made:
        source = Source(generator)
        groups = [
            given.make(front, [nn.Parameter(one.value()) for one in given.params])
            for given in (source.group(muon=True), source.group(muon=False))
        ]
        given: dict[str, Any] = {"distributed": None, "debug": False, "clip_config": None}
        if front == "MuonAdamW":
            return {"param_groups": groups, **given}
        given |= {"lr": 0.01, "momentum": 0.9, "ns_steps": 5, "adamw_eps": 1e-8, "params": groups}
        given |= {"method": "auto", "split_sizes": None, "adamw_betas": (0.9, 0.95)}
        return given | {"warmup_step": 1, "chunk_size": -1}


constructor("Muon")
constructor("MuonAdamW")


def stepped(package: Package, generator: random.Random) -> Run:
    source, front = Source(generator), generator.choice(["Muon", "MuonAdamW"])
    given = [source.group(muon=True), source.group(muon=False)]
    given[0].options["adjust_lr_fn"] = "original"
    values = {one.name: one.value() for group in given for one in group.params}
    run = Run(package.opt, front, given, {}).make(values, [{} for _ in given])
    for param in run.params.values():
        param.grad = torch.ones_like(param)
    run.optimizer.step()
    return run


@call("step", words=("gradient", "layers."))
def step(package: Package, generator: random.Random) -> Made:
    run = stepped(package, generator)
    param = generator.choice([*run.params.values()])
    for one in run.params.values():
        one.grad = torch.ones_like(one)

    def call_step(grad: Any, qk_logits: Any = None) -> None:
        try:
            param.grad = grad
        except (RuntimeError, TypeError) as error:  # torch's own check of the attribute
            raise ValueError(f"grad: {error}") from error
        run.optimizer.step(qk_logits=qk_logits)

    return {"grad": torch.ones_like(param), "qk_logits": None}, None, call_step


LOADED = ("group", "state", "loaded", "params", "saved", "zip()", "dictionary update")


@call("load_state_dict", words=LOADED)
def load_state_dict(package: Package, generator: random.Random) -> Made:
    run = stepped(package, generator)
    saved, before = run.optimizer.state_dict(), run.snapshot()
    number = generator.choice([*saved["state"]])

    def load(groups: Any, state: Any) -> None:
        states = {**saved["state"], number: state}
        try:
            run.optimizer.load_state_dict({"param_groups": groups, "state": states})
        except (ValueError, TypeError):
            assert_unchanged(run, before, "after a refused load")
            raise

    groups = [{**group} for group in saved["param_groups"]]
    return {"groups": groups, "state": dict(saved["state"][number])}, None, load


@call("save_optimizer", also=(OSError,), words=("path",))
def save_optimizer(package: Package, generator: random.Random) -> Made:
    save = getattr(package.opt, generator.choice(["save_optimizer", "save_optimizer_async"]))

    def saved(optimizer: Any, folder: Any) -> None:
        pending = save(optimizer, folder)
        if pending is not None:
            pending.wait()

    optimizer = stepped(package, generator).optimizer
    return {"optimizer": optimizer, "folder": package.new_path()}, None, saved


FILES = {"written": ("content",), "also": (OSError,), "exact": ("content",)}
CHECKPOINT = ("safetensors", "checkpoint", "path", "folder")


def damaged(generator: random.Random, data: bytes) -> bytes:
    at = generator.randrange(len(data))
    wholes = [data[at:], data + b"x", b"", data[:8] + data[9:], data[:at] + b"\x00" + data[at:]]
    return generator.choice([data[:at], *wholes])


@call("load_optimizer", words=CHECKPOINT, **FILES)
def load_optimizer(package: Package, generator: random.Random) -> Made:
    optimizer, folder = stepped(package, generator).optimizer, package.new_path()
    package.opt.save_optimizer(optimizer, folder)
    path = folder / "optimizer.safetensors"

    def load(optimizer: Any, content: Any, folder: Any) -> None:
        path.write_bytes(content)
        package.opt.load_optimizer(optimizer, folder)

    data = path.read_bytes()
    data = damaged(generator, data) if generator.random() < 0.6 else data
    return {"optimizer": optimizer, "content": data, "folder": folder}, None, load


@call("convert_state_dict", words=("state", "group", "param"))
def convert_state_dict(package: Package, generator: random.Random) -> Made:
    matrix, vector = (nn.Parameter(draw(generator, shape)) for shape in ((5, 3), (4,)))
    theirs = torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW([vector], lr=0.1)
    for param, optimizer in zip((matrix, vector), theirs, strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
    kinds = {"muon": matrix, "adamw": vector}
    ours = package.opt.MuonAdamW([{"kind": k, "params": [p], "lr": 0.1} for k, p in kinds.items()])
    saved = [optimizer.state_dict() for optimizer in theirs]
    return {"optimizer": ours, "saved": saved, "source": "torch"}, ours.load_state_dict


@call("profile_steps", also=(ImportError,))
def profile_steps(package: Package, generator: random.Random) -> Made:
    """The callback is only made: profiling takes seconds."""
    given = {"start": 1, "count": 2, "out": package.new_path()}
    return given, None, package.opt.ProfileCallback


def product(generator: random.Random, **fixed: Any) -> tuple[Problem, dict, Tensor]:
    """A problem of the grouped product, its operands and its ids."""
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
    return problem, {name: None if x is None else x.detach() for name, x in leaves.items()}, ids


@call("moe.grouped_lora_linear")
def grouped_lora_linear(package: Package, generator: random.Random) -> Made:
    problem, leaves, ids = product(generator)
    order = package.opt.moe.expert_sort(ids, problem.experts)
    names = ("scaling", "grouped_in", "grouped_out")
    given = {**problem.views(leaves), "order": order, "backend": generator.choice(BACKENDS)}
    return given | {name: getattr(problem, name) for name in names}, finite


@call("moe.parallel_linear_lora", words=("lora_a", "lora_b", "weight", "order", "x must"))
def parallel_linear_lora(package: Package, generator: random.Random) -> Made:
    fixed = {"routing": "random", "peft": False, "bias": False, "gates": False, "tokens": 6}
    problem, leaves, ids = product(generator, **fixed)
    order = package.opt.moe.expert_sort(ids, problem.experts)
    return predecessors(problem, leaves, ids, order.slots), finite


sorted_ids = {"num_experts": [3, 8, 300], "tile_rows": [None, 16, 32, 64], "backend": BACKENDS}


@call("moe.expert_sort")
def expert_sort(package: Package, generator: random.Random) -> Made:
    dtype = generator.choice([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
    shape = generator.choice([(0, 1), (1, 2), (5, 2), (40, 1)])
    found = integers(generator, -1 if dtype.is_signed else 0, 5, shape).to(dtype)
    return {"expert_ids": restrided(generator, found), **drawn(generator, **sorted_ids)}


WIDE = tensor((0, 8), (1, 2), (7, 18), dtypes=FLOATS)
LOGITS = tensor((4,), (3, 9), (2, 3, 4), (0, 4), dtypes=FLOATS)
EITHER = [True, False]
simple("moe.glu", finite, gate_up=WIDE, activation=ACTIVATIONS, interleaved=EITHER, backend="auto")
simple("moe.softmax_top_k", finite, router_logits=LOGITS, top_k=[1, 2, 4], norm_topk_prob=EITHER)
simple(
    "moe.group_top_k",
    finite,
    router_logits=tensor((5, 16), dtypes=FLOATS),
    top_k=[1, 2, 8],
    score=["sigmoid", "softmax"],
    norm_topk_prob=EITHER,
    routed_scaling_factor=[1.0, 2.5],
    n_group=4,
    topk_group=[2, 4],
    correction_bias=[None, torch.arange(16.0)],
)


def all_or_nothing(module: nn.Module, action: Callable[..., Any]) -> Callable[..., nn.Module]:
    """A call of `action` that returns the module; a refusal must leave no tensors behind."""
    before = sorted(module.state_dict())

    def act(**arguments: Any) -> nn.Module:
        try:
            action(**arguments)
        except (ValueError, TypeError, OSError):
            assert sorted(module.state_dict()) == before, "a refusal left tensors behind"
            raise
        return module

    return act


def runs(*inputs: Tensor) -> Callable[[nn.Module], None]:
    """A check of a module: what it makes of the inputs is finite."""
    return lambda module: finite(module(*inputs))


def rule(package: Package, generator: random.Random) -> Any:
    return package.opt.moe.RouterRule(generator.choice(["softmax", "sigmoid"]), 2)


def quantized(package: Package, generator: random.Random) -> Any:
    shape = generator.choice([(3, 8, 64), (2, 5, 32), (3, 7, 20)])
    weight = draw(generator, shape, generator.choice(STEPPED), strided=False)
    options = {"blocksize": generator.choice([32, 64]), "nested": generator.random() < 0.3}
    return package.opt.moe.QuantizedExperts.from_weight(weight, **options)


def runs_in_its_dtype(made: nn.Module) -> None:
    finite(made(TWO_TOKENS[0].to(made.down_proj.dtype), *TWO_TOKENS[1:]))


TWO_TOKENS = (torch.ones(2, 4), torch.tensor([[0], [1]]), torch.ones(2, 1))
RULE = {"score": "softmax", "top_k": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
LAYOUT = of_the_package(lambda opt: opt.moe.ExpertsLayout())
LAYER = {"num_experts": 3, "hidden": 4, "intermediate": 5, "layout": LAYOUT}
STACK = {"shape": (3, 4, 64), "blocksize": 64, "quant_type": "nf4", "nested": False}
GATED = {"hidden": 4, "intermediate": 5, "activation": "silu", "sigmoid_gate": True}
ROUTER = {"hidden": 4, "num_experts": 5, "rule": rule, "correction": True, "bias": True}
ROUTED = {"router_logits": tensor((5, 6)), "correction_bias": [None, torch.arange(6.0)]}
PACKED = {"weight": quantized, "rows": 8, "dtype": torch.bfloat16, "backend": "auto"}
simple("moe.RouterRule", **RULE, routed_scaling_factor=1.0)
simple("moe.ExpertsLayout", activation="silu", transposed=True, interleaved=False, gated=True)
simple("moe.LoraProjection", num_experts=3, in_features=4, out_features=5)
simple("moe.choose_strategy", rows=17, num_experts=8, wanted="auto", fusable=True, fast=True)
simple("moe.QuantizedExperts", **STACK, strategy="auto", device=CPU)
simple("moe.select_experts", finite, **ROUTED, rule=rule)
simple("moe.Experts", runs_in_its_dtype, **LAYER, bias=EITHER, dtype=[*FLOATS], device=CPU)
simple("moe.ExpertAdapters", **LAYER)
simple("moe.Router", runs(torch.ones(3, 4)), **ROUTER)
simple("moe.SharedExperts", runs(torch.ones(3, 4)), **GATED)
EXPERTS = of_the_package(lambda opt: opt.moe.Experts(3, 4, 5))
simple("moe.expert_weight", module=EXPERTS, name="gate_up_proj", shape=(3, 10, 4))
simple("moe.explain_quantized", **PACKED)

FORWARD_WORDS = ("gates", "weight", "bias", "x ", "expert_ids", "order", "lora_a")


@call("moe.experts_forward", words=FORWARD_WORDS)
def experts_forward(package: Package, generator: random.Random) -> Made:
    hidden, tokens = generator.choice([4, 7]), generator.choice([0, 6])
    dtype = generator.choice(FLOATS)
    form = [generator.choice(ACTIVATIONS), generator.random() < 0.5, generator.random() < 0.5]
    layout = package.opt.moe.ExpertsLayout(*form)
    sizes = {"gate_up": (hidden, 10), "down": (5, hidden)}
    given: dict[str, Any] = {
        name: draw(generator, layout.stored(3, *size), dtype, scale=0.3)
        for name, size in sizes.items()
    }
    given["hidden_states"] = draw(generator, (tokens, hidden), dtype)
    given["top_k_index"] = integers(generator, -1, 3, (tokens, 2))
    given["top_k_weights"] = draw(generator, (tokens, 2)).abs()
    given |= {"layout": layout, "lora": None, "backend": generator.choice(BACKENDS)}
    return given | {"gate_up_bias": None, "down_bias": None}, finite


@call("moe.Experts.add_adapter")
def add_adapter(package: Package, generator: random.Random) -> Made:
    module = package.opt.moe.Experts(3, 4, 5)
    given = {"name": "one", "r": 2, "alpha": 4.0, "targets": ("gate_up", "down"), "dropout": 0.0}
    given |= {"train_base": False, "rslora": False, "dtype": torch.float32}
    return given, runs(*TWO_TOKENS), all_or_nothing(module, module.add_adapter)


FACTORS = {"lora_A": tensor((6, 5)), "lora_B": tensor((4, 6)), "num_experts": 3}
simple("moe.factor_views", finite, **FACTORS)
SOME = [torch.tensor(chosen, dtype=torch.int64) for chosen in ([], [2], [0, 1, 2], [2, 0])]
simple("moe.selective_lora_weights", finite, **FACTORS, active_experts=SOME)


@call("moe.active_experts")
def active_experts(package: Package, generator: random.Random) -> Made:
    found = integers(generator, 0, 5, (generator.choice([0, 4]), 2))
    return {"order": package.opt.moe.expert_sort(found, 5)}


@call("moe.selective_expert_weights")
def selective_expert_weights(package: Package, generator: random.Random) -> Made:
    moe = package.opt.moe
    active = moe.active_experts(moe.expert_sort(integers(generator, 0, 4, (3, 2)), 4))
    weight = draw(generator, (4, 8, 16), strided=False)
    packed = moe.QuantizedExperts.from_weight(weight, blocksize=32).quantized_weight()
    stack = generator.choice([weight, packed])
    return {"weight": stack, "active": active, "dtype": torch.float32}, finite


@call("moe.QuantizedExperts.from_weight", words=("shape", "experts", "expert"))
def from_weight(package: Package, generator: random.Random) -> Made:
    weight = draw(generator, (3, 4, 64), generator.choice(STEPPED))
    return {"weight": weight, "blocksize": 64, "quant_type": "nf4", "nested": False}


@call("moe.QuantizedWeight", words=("shape", "stack"))
def quantized_weight(package: Package, generator: random.Random) -> Made:
    record = quantized(package, generator).quantized_weight()
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


@call("moe.grouped_lora_linear, 4 bits")
def quantized_linear(package: Package, generator: random.Random) -> Made:
    module = quantized(package, generator)
    experts, _, k = module.stored
    order = package.opt.moe.expert_sort(integers(generator, -1, experts, (5, 2)), experts)
    given = {"x": draw(generator, (5, k), generator.choice(STEPPED)), "order": order}
    given["weight"] = module.transpose(1, 2)
    return given | {"backend": generator.choice(BACKENDS)}, finite


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
    return given, finite, torch.no_grad()(layer.forward)


WORDS = ("model", "expert", "adapter", "lora", "LoRA", "quantize", "quantised", "merged", "folder")


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
    model = tiny(generator)
    return {"model": model}, lambda _: still_runs(model)


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


@call("integrations.set_lora", also=(OSError,), words=WORDS)
def switches(package: Package, generator: random.Random) -> Made:
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

    return {"model": model, "adapter": "default"}, still_runs, play


# What stands in an adapter's configuration, and what may be put there instead.
STANDING = ('"r": 2', '"lora_alpha": 4.0', '"LORA"', "gate_up_proj", "null")
INSTEAD = ('"r": -1', '"lora_alpha": "x"', "[]", "nowhere", "{}", "1e999")


@call("integrations.load_peft_adapter", words=(*WORDS, "json", "safetensors"), **FILES)
def load_peft_adapter(package: Package, generator: random.Random) -> Made:
    """Of a folder whose two files may be damaged."""
    integrations, model, folder = package.opt.integrations, tiny(generator), package.new_path()
    integrations.attach_lora(model, 2, 4.0)
    integrations.save_peft_adapter(model, folder)
    integrations.detach_lora(model)
    file = generator.choice([*sorted(folder.iterdir())])
    data = file.read_bytes()
    if generator.random() < 0.7:
        data = damaged(generator, data)
        if file.suffix == ".json":
            old, new = generator.choice(STANDING), generator.choice(INSTEAD)
            data = file.read_text().replace(old, new).encode()

    def load(model: Any, adapter: Any, content: bytes) -> None:
        file.write_bytes(content)
        integrations.load_peft_adapter(model, folder, adapter_name=adapter, local_files_only=True)

    given = {"model": model, "adapter": "default", "content": data}
    return given, None, all_or_nothing(model, load)
