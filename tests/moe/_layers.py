"""Problems of a whole layer of experts, and the same layer by plain eager torch with autograd."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from .._compare import assert_same_bits, relative_error

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
        changed = [
            f"{field.name}={getattr(self, field.name)}".replace("torch.", "")
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "-".join(changed) or "plain"

    def module(self, moe, device: torch.device, seed: int = 0):
        """`moe.Experts` with adapters named default, every number random."""
        layout = moe.ExpertsLayout(self.activation, self.transposed, self.interleaved, self.gated)
        layer = moe.Experts(
            self.experts,
            self.hidden,
            self.intermediate,
            layout=layout,
            bias=self.bias,
            device=device,
            dtype=self.dtype,
        )
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
        """Expert ids (T, k) of the named routing; a token may visit an expert twice."""
        generator = torch.Generator().manual_seed(seed + 1)
        shape = (self.tokens, self.top_k)

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        drawn = {
            "random": lambda: draw(0, self.experts),
            "one": lambda: torch.full(shape, self.experts // 2),
            "no-ends": lambda: draw(1, max(self.experts - 1, 2)),
            "sentinels": lambda: draw(-1, self.experts + 2),
            "all-sentinels": lambda: torch.full(shape, self.experts),
        }[self.routing]()
        return drawn.to(device)

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H) and gates (T, k) as leaves, and the output's gradient (T, H)."""
        generator = torch.Generator().manual_seed(seed + 2)

        def normal(width: int, dtype: torch.dtype) -> Tensor:
            drawn = torch.randn(self.tokens, width, generator=generator, dtype=torch.float64)
            return drawn.to(device, dtype)

        x = normal(self.hidden, self.dtype).requires_grad_()
        gates = normal(self.top_k, torch.float32).requires_grad_()
        return x, gates, normal(self.hidden, self.dtype)


def _split(problem: LayerProblem, wide: Tensor) -> tuple[Tensor, Tensor]:
    if problem.interleaved:
        return wide[:, 0::2], wide[:, 1::2]
    half = wide.shape[1] // 2
    return wide[:, :half], wide[:, half:]


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
    gate, up = _split(problem, wide)
    if problem.activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    return functions[problem.activation](gate) * up


def eager_layer(
    problem: LayerProblem, leaves: dict[str, Tensor], ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """Expert after expert, everything in `dtype`, on autograd.

    float64 forms W + s B A; a narrow dtype takes the two small products, the more accurate of the
    two ways that a user has.
    """
    op = {name: value.to(dtype) for name, value in leaves.items()}

    def project(x: Tensor, target: str, expert: int) -> Tensor:
        weight = op[f"{target}_proj"][expert]
        weight = weight.mT if problem.transposed else weight  # (out, in)
        bias = op.get(f"{target}_proj_bias")
        bias = 0 if bias is None else bias[expert]
        rank = problem.rank if target == "gate_up" else problem.rank_down
        if rank is None:
            return x @ weight.mT + bias
        a = op[LORA.format(target, "A")][expert * rank : (expert + 1) * rank]
        stored = op[LORA.format(target, "B")]
        b = stored.reshape(stored.shape[0], rank, problem.experts)[:, :, expert]
        scaling = 2 * rank / (rank**0.5 if problem.rslora else rank)
        if dtype == torch.float64:
            return x @ (weight + scaling * (b @ a)).mT + bias
        return x @ weight.mT + scaling * ((x @ a.mT) @ b.mT) + bias

    out = torch.zeros_like(op["x"])
    for expert in range(problem.experts):
        token, choice = torch.where(ids == expert)
        wide = project(op["x"][token], "gate_up", expert)
        y = project(eager_activation(problem, wide), "down", expert)
        out = out.index_add(0, token, y * op["gates"][token, choice, None])
    return out


def gradients(out: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The output, and the gradient of every leaf that asks for one (zeros where it is unused)."""
    wanted = [name for name, leaf in leaves.items() if leaf.requires_grad]
    found = torch.autograd.grad(
        out, [leaves[name] for name in wanted], grad, materialize_grads=True
    )
    return {"out": out.detach(), **dict(zip(wanted, found, strict=True))}


def assert_layer_close_to_eager(
    moe, device, problem, factor=1.5, seed=0, call=None, floor=None
) -> None:
    """Each error against float64 is at most `factor` times that of eager torch in the dtype.

    `call(layer, x, ids, gates)` runs the layer; default: plainly. Up to `floor`, the dtype's of
    `FLOOR` by default, an error counts as eager's luck.
    """
    floor = FLOOR[problem.dtype] if floor is None else floor
    layer = problem.module(moe, device, seed)
    x, gates, grad = problem.inputs(device, seed)
    ids = problem.ids(device, seed)
    leaves = {"x": x, "gates": gates, **dict(layer.named_parameters())}
    out = layer(x, ids, gates) if call is None else call(layer, x, ids, gates)
    actual = gradients(out, leaves, grad)
    wide = {
        name: leaf.detach().double().requires_grad_(leaf.requires_grad)
        for name, leaf in leaves.items()
    }
    exact = gradients(eager_layer(problem, wide, ids, torch.float64), wide, grad.double())
    plain = gradients(eager_layer(problem, leaves, ids, problem.dtype), leaves, grad)
    assert actual.keys() == exact.keys()
    for name, expected in exact.items():
        dtype = problem.dtype if name == "out" else leaves[name].dtype
        assert (actual[name].dtype, actual[name].shape) == (dtype, expected.shape), name
        if expected.numel() == 0 or expected.norm() == 0:
            assert_same_bits(actual[name] + 0.0, torch.zeros_like(actual[name]))
            continue
        error = relative_error(actual[name], expected)
        allowed = max(factor * relative_error(plain[name], expected), floor)
        assert error <= allowed, f"{name}: relative error {error:.2e} exceeds {allowed:.2e}"
