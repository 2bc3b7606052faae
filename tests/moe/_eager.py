"""Problems of the grouped LoRA product, and the same product by plain eager torch with autograd."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

NAMES = ("x", "weight", "lora_a", "lora_b", "bias", "gates")


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
        changed = [
            f"{field.name}={getattr(self, field.name)}".replace("torch.", "")
            for field in dataclasses.fields(self)
            if field.name != "tokens" and getattr(self, field.name) != field.default
        ]
        return "-".join([f"T{self.tokens}", *changed])

    def ids(self, device: torch.device, seed: int = 0) -> Tensor:
        """Expert ids (T, k) of the named routing."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.tokens, self.top_k)

        def draw(low: int, high: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        drawn = {
            "random": lambda: draw(0, self.experts),
            "one": lambda: torch.full(shape, self.experts // 2),
            "no-ends": lambda: draw(1, max(self.experts - 1, 2)),
            "gap": lambda: draw(0, 2) * (self.experts - 1),
            "sentinels": lambda: draw(-1, self.experts + 2),
            "all-sentinels": lambda: torch.full(shape, self.experts),
        }[self.routing]()
        return drawn.to(device)

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor | None]:
        """The operands by name, as leaves that require gradients; views where `peft`."""
        generator = torch.Generator().manual_seed(seed + 1)

        def normal(*shape: int, dtype: torch.dtype, std: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * std
            return drawn.to(device, dtype).requires_grad_()

        rows = self.tokens * self.top_k if self.grouped_in else self.tokens
        weight_shape = (self.n, self.k) if self.peft else (self.k, self.n)
        leaves = {
            "x": normal(rows, self.k, dtype=self.dtype),
            "weight": normal(self.experts, *weight_shape, dtype=self.dtype, std=self.k**-0.5),
            "lora_a": None,
            "lora_b": None,
            "bias": None,
            "gates": None,
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


def eager(problem: Problem, leaves: dict, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The product by one expert after the other, all operands in `dtype`, on autograd.

    float64 forms W + s B A as the definition says; a narrow dtype takes the two small products,
    which is the more accurate of the two ways a user has.
    """
    seen = problem.views(leaves)
    op = {name: None if value is None else value.to(dtype) for name, value in seen.items()}
    flat = ids.reshape(-1)
    key = torch.where((flat >= 0) & (flat < problem.experts), flat, problem.experts)
    slots = torch.argsort(key, stable=True)
    pieces = []
    for expert in range(problem.experts + 1):
        mine = slots[key[slots] == expert]
        if expert == problem.experts:
            pieces.append(op["x"].new_zeros((mine.numel(), problem.n)))
            break
        first = int((key < expert).sum())
        in_order = slice(first, first + mine.numel())
        x = op["x"][in_order] if problem.grouped_in else op["x"][mine // problem.top_k]
        weight = op["weight"][expert]
        if problem.rank is None:
            y = x @ weight
        elif dtype == torch.float64:
            delta = op["lora_a"][expert].mT @ op["lora_b"][expert].mT
            y = x @ (weight + problem.scaling * delta)
        else:
            low = x @ op["lora_a"][expert].mT
            y = x @ weight + problem.scaling * (low @ op["lora_b"][expert].mT)
        pieces.append(y if op["bias"] is None else y + op["bias"][expert])
    grouped = torch.cat(pieces)
    if problem.grouped_out:
        return grouped
    y = grouped[torch.argsort(slots)]
    if not problem.gates:
        return y
    weighted = y.view(problem.tokens, problem.top_k, problem.n) * op["gates"][..., None]
    return weighted.sum(1)
