"""Problems of the grouped product and of a layer of experts, and both by plain eager torch."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .._compare import assert_same_bits, assert_same_tensors, capture, relative_error

NAMES = ("x", "weight", "lora_a", "lora_b", "bias", "gates")


def changed_fields(problem) -> list[str]:
    return [
        f"{field.name}={getattr(problem, field.name)}".replace("torch.", "")
        for field in dataclasses.fields(problem)
        if getattr(problem, field.name) != field.default
        and field.default is not dataclasses.MISSING
    ]


def routed(problem, seed: int) -> Tensor:
    """Expert ids (T, k) of the named routing; a token may visit an expert twice."""
    generator = torch.Generator().manual_seed(seed)
    shape, experts = (problem.tokens, problem.top_k), problem.experts

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    return {
        "random": lambda: draw(0, experts),
        "one": lambda: torch.full(shape, experts // 2),
        "no-ends": lambda: draw(1, max(experts - 1, 2)),
        "gap": lambda: draw(0, 2) * (experts - 1),
        "sentinels": lambda: draw(-1, experts + 2),
        "all-sentinels": lambda: torch.full(shape, experts),
    }[problem.routing]()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes, options and routing of one product; `inputs` draws its tensors."""

    tokens: int
    top_k: int = 2
    experts: int = 4
    k: int = 24
    n: int = 40
    rank: int | None = 4
    scaling: float = 2.0
    dtype: torch.dtype = torch.float32
    lora_dtype: torch.dtype = torch.float32
    bias: bool = False
    gates: bool = False
    grouped_in: bool = False
    grouped_out: bool = False
    peft: bool = False  # weight (E, N, K) and B (N, r E), seen through views
    routing: str = "random"

    def __str__(self) -> str:
        return "-".join([f"T{self.tokens}", *changed_fields(self)])

    def ids(self, device: torch.device, seed: int = 0) -> Tensor:
        return routed(self, seed).to(device)

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor | None]:
        """The operands by name, as leaves that require gradients; views where `peft`."""
        generator = torch.Generator().manual_seed(seed + 1)

        def normal(*shape: int, dtype: torch.dtype, std: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * std
            return drawn.to(device, dtype).requires_grad_()

        rows = self.tokens * self.top_k if self.grouped_in else self.tokens
        weight_shape = (self.n, self.k) if self.peft else (self.k, self.n)
        leaves = dict.fromkeys(NAMES) | {
            "x": normal(rows, self.k, dtype=self.dtype),
            "weight": normal(self.experts, *weight_shape, dtype=self.dtype, std=self.k**-0.5),
        }
        if self.rank is not None:
            narrow = {"dtype": self.lora_dtype, "std": 0.3}
            leaves["lora_a"] = normal(self.experts, self.rank, self.k, **narrow)
            shape = (self.n, self.rank * self.experts)
            shape = shape if self.peft else (self.experts, self.n, self.rank)
            leaves["lora_b"] = normal(*shape, **narrow)
        if self.bias:
            leaves["bias"] = normal(self.experts, self.n, dtype=self.dtype)
        if self.gates:
            leaves["gates"] = normal(self.tokens, self.top_k, dtype=torch.float32)
        return leaves

    def views(self, leaves: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The operands as `grouped_lora_linear` takes them."""
        seen = dict(leaves)
        if self.peft:
            seen["weight"] = leaves["weight"].transpose(1, 2)
            if leaves["lora_b"] is not None:
                stored = leaves["lora_b"].view(self.n, self.rank, self.experts)
                seen["lora_b"] = stored.permute(2, 0, 1)
        return seen

    def grad_shape(self) -> tuple[int, int]:
        return (self.tokens if self.gates else self.tokens * self.top_k, self.n)


def product(moe, problem: Problem, leaves: dict, ids: Tensor, weight=None, **options) -> Tensor:
    """`grouped_lora_linear` of a problem with its graph, perhaps over another weight."""
    sort_backend = "triton" if options.get("backend") == "triton" else "auto"
    order = moe.expert_sort(ids, problem.experts, backend=sort_backend)
    seen = problem.views(leaves) | ({} if weight is None else {"weight": weight})
    options |= {"grouped_in": problem.grouped_in, "grouped_out": problem.grouped_out}
    return moe.grouped_lora_linear(order=order, scaling=problem.scaling, **seen, **options)


def predecessors(problem: Problem, leaves: dict, ids: Tensor, slots=None, **options) -> dict:
    """The arguments of `parallel_linear_lora`; slots of an expert may come in any order."""
    seen, flat = problem.views(leaves), ids.reshape(-1)
    if slots is None:
        slots = flat.numel() - 1 - torch.argsort(flat.flip(0), stable=True)
    a, b = seen["lora_a"], seen["lora_b"]
    given = {
        "inputs": seen["x"],
        "expert_weights": seen["weight"],
        "k": problem.top_k,
        "sorted_expert_idxs": flat[slots],
        "sorted_scattered_idxs": slots,
        "expert_offsets": torch.bincount(flat, minlength=problem.experts).cumsum(0),
        "lora_A": None if a is None else a.flatten(0, 1),
        "lora_B": None if b is None else b.transpose(0, 1).reshape(problem.n, -1),
        "scaling": problem.scaling,
        "grouped_in": problem.grouped_in,
        "grouped_out": problem.grouped_out,
    }
    return given | options


def lora_product(x, weight, a, b, bias, scaling: float) -> Tensor:
    """Of one expert: float64 forms W + s B A, a narrow dtype two small products."""
    if a is None:
        y = x @ weight
    elif x.dtype == torch.float64:
        y = x @ (weight + scaling * (a.mT @ b.mT))
    else:
        y = x @ weight + scaling * ((x @ a.mT) @ b.mT)
    return y if bias is None else y + bias


def eager(problem: Problem, leaves: dict, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Expert by expert in `dtype`."""
    seen = problem.views(leaves)
    op = {name: None if value is None else value.to(dtype) for name, value in seen.items()}
    flat = ids.reshape(-1)
    key = torch.where((flat >= 0) & (flat < problem.experts), flat, problem.experts)
    slots = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=problem.experts + 1).tolist()
    x = op["x"] if problem.grouped_in else op["x"][slots // problem.top_k]
    *rows, invalid = x.split(counts)
    operands = [op[name] for name in ("weight", "lora_a", "lora_b", "bias")]
    pieces = [
        lora_product(mine, *(x if x is None else x[e] for x in operands), problem.scaling)
        for e, mine in enumerate(rows)
    ]
    grouped = torch.cat([*pieces, invalid.new_zeros((len(invalid), problem.n))])
    if problem.grouped_out:
        return grouped
    y = grouped[torch.argsort(slots)]
    if not problem.gates:
        return y
    weighted = y.view(problem.tokens, problem.top_k, problem.n) * op["gates"][..., None]
    return weighted.sum(1)


# What eager torch may reach by luck where a result has few elements. float32: 16 units of rounding,
# for the sums of a chain of products run in another order here; the narrow dtypes: a quarter of a
# unit, since one rounding to them outweighs all float32 sums.
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1.3e-4, torch.float64: 1e-15}
LORA = "expert_lora.{}.lora_{}.default.weight"


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """Sizes, layout, adapters and routing of one layer."""

    tokens: int = 21
    top_k: int = 2
    experts: int = 5
    hidden: int = 24
    intermediate: int = 20
    rank: int | None = 4  # of gate_up
    rank_down: int | None = 4
    rslora: bool = False
    activation: str = "silu"
    transposed: bool = False
    interleaved: bool = False
    gated: bool = True
    bias: bool = False
    train_base: bool = False
    dtype: torch.dtype = torch.float32
    lora_dtype: torch.dtype = torch.float32
    routing: str = "random"

    def __str__(self) -> str:
        return "-".join(changed_fields(self)) or "plain"

    def module(self, moe, device: torch.device, seed: int = 0):
        """`moe.Experts` with adapters named default, every number random."""
        layout = moe.ExpertsLayout(self.activation, self.transposed, self.interleaved, self.gated)
        sizes, new = (self.experts, self.hidden, self.intermediate), {"dtype": self.dtype}
        layer = moe.Experts(*sizes, layout=layout, bias=self.bias, device=device, **new)
        options = {"rslora": self.rslora, "dtype": self.lora_dtype, "train_base": self.train_base}
        for target, rank in (("gate_up", self.rank), ("down", self.rank_down)):
            if rank is not None:
                layer.add_adapter(r=rank, alpha=2 * rank, targets=(target,), **options)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                scale = 0.4 if parameter.ndim == 2 else self.hidden**-0.5
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(drawn * scale)
        return layer

    def ids(self, device: torch.device, seed: int = 0) -> Tensor:
        return routed(self, seed + 1).to(device)

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H) and gates (T, k) as leaves, and the output's gradient (T, H)."""
        generator = torch.Generator().manual_seed(seed + 2)

        def normal(width: int, dtype: torch.dtype) -> Tensor:
            drawn = torch.randn(self.tokens, width, generator=generator, dtype=torch.float64)
            return drawn.to(device, dtype)

        x = normal(self.hidden, self.dtype).requires_grad_()
        gates = normal(self.top_k, torch.float32).requires_grad_()
        return x, gates, normal(self.hidden, self.dtype)

    def drawn(self, moe, device: torch.device, backend: str | None = None) -> tuple:
        """The module, on the path of a name if one is given, x, ids, gates, and the gradient."""
        layer = self.module(moe, device)
        if backend is not None:
            layer.backend = backend
        x, gates, grad = self.inputs(device)
        return layer, x, self.ids(device), gates, grad


def pack(moe, layer, names=("gate_up_proj", "down_proj"), **options) -> None:
    """Packed experts take the place of the layer's weights of these names."""
    for name in names:
        weight = layer._parameters.pop(name).data
        layer.add_module(name, moe.QuantizedExperts.from_weight(weight, **options))


LEAVES = ("x", "gates", "gate_up.a", "gate_up.b", "down.a", "down.b")


@dataclasses.dataclass(frozen=True)
class PackedProblem(LayerProblem):
    """A layer whose stacks have blocks that stay in their rows; small, for the interpreter."""

    tokens: int = 7
    experts: int = 3
    hidden: int = 64
    intermediate: int = 32
    strategy: str = "fused"
    quant_type: str = "nf4"
    blocksize: int = 32  # of nf4
    nested: bool = False
    wanted: tuple[str, ...] = LEAVES


class PackedLayer:
    """A layer over packed experts, and one step's tensors."""

    def __init__(self, moe, device: torch.device, problem: PackedProblem) -> None:
        self.problem, self.module = problem, problem.module(moe, device)
        options = {"blocksize": problem.blocksize} if problem.quant_type == "nf4" else {}
        options |= {"nested": True} if problem.nested else {}
        options |= {"quant_type": problem.quant_type, "strategy": problem.strategy}
        pack(moe, self.module, **options)
        self.leaves = {}
        self.draw(device)
        for name, factor in self.module.expert_lora.named_parameters():
            target, part, *_ = name.split(".")
            factor.data /= 8  # else LoRA would hide errors of the packed weights
            self.leaves[f"{target}.{part[-1].lower()}"] = factor
        for name, leaf in self.leaves.items():
            leaf.requires_grad_(name in problem.wanted)

    def draw(self, device: torch.device, seed: int = 0) -> None:
        """Other inputs."""
        x, gates, self.grad = self.problem.inputs(device, seed)
        self.leaves |= {"x": x, "gates": gates}
        self.ids = self.problem.ids(device, seed)

    def forward(self, backend: str = "triton") -> Tensor:
        self.module.backend = backend
        return self.module(self.leaves["x"], self.ids, self.leaves["gates"])

    def step(self, backend: str = "triton") -> dict[str, Tensor]:
        """The result and every wanted gradient, by name."""
        return gradients(self.forward(backend), self.leaves, self.grad)


def eager_activation(problem: LayerProblem, wide: Tensor) -> Tensor:
    """The activation from its definition, in wide's dtype."""
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x) ** 2,
    }
    if not problem.gated:
        return functions[problem.activation](wide)
    gate, up = (wide[:, 0::2], wide[:, 1::2]) if problem.interleaved else wide.chunk(2, 1)
    if problem.activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    return functions[problem.activation](gate) * up


def eager_layer(
    problem: LayerProblem, leaves: dict[str, Tensor], ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same of a whole layer, by `eager`'s rule."""
    op = {name: value.to(dtype) for name, value in leaves.items()}

    def project(x: Tensor, target: str, expert: int) -> Tensor:
        weight, bias = op[f"{target}_proj"][expert], op.get(f"{target}_proj_bias")
        weight = weight if problem.transposed else weight.mT  # (in, out)
        bias = None if bias is None else bias[expert]
        rank = problem.rank if target == "gate_up" else problem.rank_down
        if rank is None:
            return lora_product(x, weight, None, None, bias, 0.0)
        a = op[LORA.format(target, "A")][expert * rank : (expert + 1) * rank]
        stored = op[LORA.format(target, "B")]
        b = stored.reshape(stored.shape[0], rank, problem.experts)[:, :, expert]
        scaling = 2 * rank / (rank**0.5 if problem.rslora else rank)
        return lora_product(x, weight, a, b, bias, scaling)

    out = torch.zeros_like(op["x"])
    for expert in range(problem.experts):
        token, choice = torch.where(ids == expert)
        wide = project(op["x"][token], "gate_up", expert)
        y = project(eager_activation(problem, wide), "down", expert)
        out = out.index_add(0, token, y * op["gates"][token, choice, None])
    return out


def gradients(out: Tensor, leaves: dict[str, Tensor | None], grad: Tensor) -> dict[str, Tensor]:
    """The output, and the gradient of every leaf that asks for one (zeros where it is unused)."""
    wanted = {k: leaf for k, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    found = torch.autograd.grad(out, [*wanted.values()], grad, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(wanted, found, strict=True))}


def step(layer, x: Tensor, ids: Tensor, gates: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """What `gradients` gives of a layer."""
    leaves = {"x": x, "gates": gates, **dict(layer.named_parameters())}
    return gradients(layer(x, ids, gates), leaves, grad)


def assert_first_order_alone(out: Tensor, leaf: Tensor) -> None:
    """The graph serves twice, and a gradient of the gradient is refused."""
    (first,) = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)
    (second,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    assert_same_bits(first, second)
    refused = r"no autograd formula|once_differentiable|does not require grad"
    with pytest.raises(RuntimeError, match=refused):
        second.square().sum().backward()


def kept_for_backward(run) -> list[Tensor]:
    """What autograd saves during `run()`."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return kept


def in_float64(leaves: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        name: leaf if leaf is None else leaf.detach().double().requires_grad_(leaf.requires_grad)
        for name, leaf in leaves.items()
    }


def assert_layer_close_to_eager(
    moe, device, problem, seed=0, call=None, floor=None, backend="auto"
) -> None:
    """Each error is at most 1.5 times eager's in the dtype, or `floor`, which is luck."""
    floor = FLOOR[problem.dtype] if floor is None else floor
    layer = problem.module(moe, device, seed)
    layer.backend = backend
    x, gates, grad = problem.inputs(device, seed)
    ids = problem.ids(device, seed)
    leaves = {"x": x, "gates": gates, **dict(layer.named_parameters())}
    out = layer(x, ids, gates) if call is None else call(layer, x, ids, gates)
    actual, wide = gradients(out, leaves, grad), in_float64(leaves)
    exact = gradients(eager_layer(problem, wide, ids, torch.float64), wide, grad.double())
    plain = gradients(eager_layer(problem, leaves, ids, problem.dtype), leaves, grad)
    assert_no_worse(actual, plain, exact, 1.5, dict.fromkeys(exact, floor))


def assert_no_worse(actual, plain, exact, factor, floors) -> None:
    """Results by name: each error is at most `factor` times that of `plain`, or its floor."""
    assert actual.keys() == exact.keys()
    for name, expected in exact.items():
        assert (actual[name].dtype, actual[name].shape) == (plain[name].dtype, expected.shape), name
        if expected.numel() == 0 or expected.norm() == 0:
            assert_same_bits(actual[name] + 0.0, torch.zeros_like(actual[name]))
            continue
        error = relative_error(actual[name], expected)
        allowed = max(factor * relative_error(plain[name], expected), floors[name])
        assert error <= allowed, f"{name}: relative error {error:.2e} exceeds {allowed:.2e}"


def assert_graph_follows(run, redraw, warm_up: int = 3) -> None:
    """A captured `run`, which gives tensors by name, is a new one after every `redraw`.

    `redraw(seed, routing)` writes other operands where the old ones lie. Routings differ in which
    experts get tokens, so that a captured decision of the host would show.
    """
    graph, captured = capture(run, warm_up)
    for seed, routing in enumerate(("random", "one", "gap", "sentinels", "all-sentinels")):
        with torch.no_grad():
            redraw(seed, routing)
        expected = run()
        for value in captured.values():
            value.fill_(torch.nan)
        graph.replay()
        assert_same_tensors(captured, expected)


def together(plans, tensors: list[Tensor]) -> Tensor:
    """Copies, as a plan lays out what it joins."""
    most = sum(x.untyped_storage().nbytes() + 512 for x in tensors)
    joined = torch.empty(most, dtype=torch.uint8, device=tensors[0].device)
    described = [(x.shape, x.stride(), x.dtype) for x in tensors]
    for x, place in zip(tensors, plans.apart(joined, described), strict=True):
        place.copy_(x)
    return joined


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, and under each of them the same strides and bits."""
    assert_same_tensors(found, expected)
    for name, value in expected.items():
        assert found[name].stride() == value.stride(), name
