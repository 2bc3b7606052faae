"""Random problems for several ranks: mesh, placements, shapes, options, missing gradients."""

import functools
import os
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

CASES = {1: 6, 2: 14, 3: 14, 4: 24, 8: 40}
MESHES = {
    1: [(1,)],
    2: [(2,), (2, 1)],
    3: [(3,)],
    4: [(4,), (2, 2), (2, 2), (1, 4), (2, 1, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
STEPS = 3

# name -> shape; the names decide what a group does with them.
MATRICES = {
    "square": (8, 8),
    "wide": (5, 13),
    "tall": (12, 7),
    "one_row": (1, 6),
    "three_rows": (3, 9),
    "heads": (12, 6),
    "fused": (10, 4),
    "filters": (6, 3, 2, 2),
    "layers.0.experts.up": (6, 4, 5),
    "layers.0.experts.down": (5, 7, 3),
    "same_as_square": (8, 8),
    "same_again": (8, 8),
    "nothing": (0, 4),
}
OTHERS = {"table": (11, 4), "norm": (7,), "bias": (2,)}


@dataclass(frozen=True)
class Case:
    """One problem. Placements are given as text, since ranks build them on their own mesh."""

    seed: int
    mesh: tuple[int, ...]
    placements: tuple[tuple[str, ...], ...]  # per parameter
    names: tuple[str, ...]
    front: str  # "Muon" or "MuonAdamW"
    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    wire: torch.dtype | None
    missing: tuple[tuple[int, str], ...]  # (step, name): no gradient, on all ranks

    @classmethod
    def random(cls, generator: random.Random, world: int, device: str) -> "Case":
        # On a GPU the iteration is in float16: without a word, shared directions are rounded to it
        # and those of one rank are not.
        wires = [torch.float32, torch.float16] + ([None] if device == "cpu" else [])
        mesh = generator.choice(MESHES[world])
        names = tuple(
            generator.sample(sorted(MATRICES), generator.randint(3, 7))
            + generator.sample(sorted(OTHERS), generator.randint(1, 3))
        )
        front = generator.choice(["Muon", "MuonAdamW"])
        options: dict[str, Any] = {
            "ns_steps": generator.choice([2, 5]),
            "none_grad": generator.random() < 0.5,
            "nesterov": generator.random() < 0.7,
            "beta2": generator.choice([None, 0.9]),
            "rounding": generator.choice(["nearest", "residual"]),
            "momentum_dtype": generator.choice([None, None, None, torch.bfloat16, torch.float64]),
            "row_equilibration": generator.random() < 0.3,
            "renormalize": generator.random() < 0.3,
        }
        if any("experts" in name for name in names):
            options["expert_keys"] = ("experts",)
        return cls(
            seed=generator.randrange(10**6),
            mesh=mesh,
            placements=tuple(_placements(generator, mesh, name) for name in names),
            names=names,
            front=front,
            options=tuple(options.items()),
            dtype=generator.choice([torch.float32, torch.float32, torch.bfloat16]),
            wire=generator.choice(wires),
            missing=tuple(
                (step, name) for step in range(STEPS) for name in names if generator.random() < 0.1
            ),
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return MATRICES[name] if name in MATRICES else OTHERS[name]


def _placements(generator: random.Random, mesh: tuple[int, ...], name: str) -> tuple[str, ...]:
    ndim = len(MATRICES[name] if name in MATRICES else OTHERS[name])
    choices = ["R", "S0", "S0", *(f"S{k}" for k in range(1, min(ndim, 3)))]
    chosen = [generator.choice(choices) for _ in mesh]
    if len(mesh) == 2 and chosen[1] == "S0" and generator.random() < 0.6:
        chosen[0] = f"T{mesh[1]}"  # fully sharded over tensor parallel
    return tuple(chosen)


def placement(text: str) -> Any:
    if text == "R":
        return Replicate()
    if text[0] == "T":
        return _StridedShard(0, split_factor=int(text[1:]))
    return Shard(int(text[1:]))


def device() -> str:
    """Where the ranks work: "cpu" or "cuda"."""
    return os.environ["RANKS_DEVICE"]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, for which all ranks ask; any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values_of(case: Case) -> dict[str, list[Tensor]]:
    """Per name the parameter and the gradients of all steps."""
    generator = torch.Generator().manual_seed(case.seed)
    made = {}
    for name in case.names:
        shape = case.shape(name)
        made[name] = [
            (torch.randn(shape, generator=generator) * scale).to(device(), case.dtype)
            for scale in [0.1] + [10.0**-step for step in range(STEPS)]
        ]
    return made


def optimizer_of(opt: Any, case: Case, params: dict[str, nn.Parameter], **arguments: Any) -> Any:
    matrices = [(name, param) for name, param in params.items() if name in MATRICES]
    others = [(name, param) for name, param in params.items() if name in OTHERS]
    options = dict(case.options)
    if any(name == "heads" for name, _ in matrices):
        options["num_heads"] = {"heads": 4}
    elif any(name == "fused" for name, _ in matrices):
        options["split_sizes"] = {"fused": (3, 3, 4)}
    rounding = options["rounding"]
    config = opt.DistributedConfig(case.wire)
    if case.front == "Muon":
        groups = [
            {"params": matrices, "use_muon": True, "weight_decay": 0.1, **options},
            {"params": others, "use_muon": False, "rounding": rounding},
        ]
        return opt.Muon(groups, lr=0.05, distributed=config, **arguments)
    groups = [
        {"kind": "muon", "params": matrices, "lr": 0.05, "weight_decay": 0.1, **options},
        {"kind": "adamw", "params": others, "lr": 0.05, "rounding": rounding},
    ]
    return opt.MuonAdamW(groups, distributed=config, **arguments)


def train(case: Case, optimizer: Any, params: dict[str, nn.Parameter], place: Any) -> None:
    values = values_of(case)
    for step in range(STEPS):
        for name, param in params.items():
            missing = (step, name) in case.missing
            param.grad = None if missing else place(name, values[name][1 + step])
        optimizer.step()


def tensors_of(optimizer: Any, params: dict[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {"param": param.detach(), **optimizer.state[param]} for name, param in params.items()
    }


def run_alone(opt: Any, case: Case) -> dict[str, dict[str, Tensor]]:
    """The case with plain tensors on one rank."""
    params = {name: nn.Parameter(value[0].clone()) for name, value in values_of(case).items()}
    optimizer = optimizer_of(opt, case, params)
    train(case, optimizer, params, lambda name, grad: grad.clone())
    return tensors_of(optimizer, params)


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """One mesh per shape and process: gloo keeps threads for every group it was ever asked for."""
    return init_device_mesh(device(), shape)


def spread(tensor: Tensor, mesh: Any, *texts: str) -> Tensor:
    """A tensor that every rank has whole, with a placement such as "S0" per mesh dimension."""
    placements = [placement(text) for text in texts]
    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)


def placed_like(param: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every rank has whole, as a parameter is held."""
    if not hasattr(param, "placements"):
        return tensor
    return distribute_tensor(tensor, param.device_mesh, param.placements, src_data_rank=None)


def run_together(opt: Any, case: Case, *, offload: bool = False) -> dict[str, dict[str, Tensor]]:
    """The case with DTensors on all ranks, their state in host memory if asked for."""
    mesh = mesh_of(case.mesh)
    places = dict(zip(case.names, case.placements, strict=True))

    def place(name: str, tensor: Tensor) -> Tensor:
        return spread(tensor, mesh, *places[name])

    params = {name: nn.Parameter(place(name, value[0])) for name, value in values_of(case).items()}
    optimizer = optimizer_of(opt, case, params)
    if offload:
        optimizer.turn_on_cpu_offload()
    train(case, optimizer, params, place)
    optimizer.turn_off_cpu_offload()
    return tensors_of(optimizer, params)


def held_like(placed: Tensor, whole: Tensor) -> Tensor:
    """What this rank has of a whole tensor that is placed like another one."""
    assert tuple(placed.shape) == tuple(whole.shape)
    return local(placed_like(placed, whole))


def assert_tensors_equal(
    found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]], what: str
) -> int:
    """The same bits, of what is whole or placed alike; returns how many tensors were compared."""
    compared = 0
    for name, tensors in found.items():
        for key, tensor in tensors.items():
            here, other = local(tensor), expected[name][key]
            other = local(other) if hasattr(other, "to_local") else held_like(tensor, other)
            assert here.shape == other.shape, f"{what}: {name} {key}"
            difference = (here - other).abs().amax() if here.numel() else 0
            assert bits(here) == bits(other), f"{what}: {name} {key} by {difference}"
            compared += 1
    return compared
