"""Problems of matmul_add whose answers are exact, and the op as a function of them."""

from __future__ import annotations

import dataclasses

import torch

TILES = ("auto", "sm90_128x256", "sm90_256x128", "sm90_128x128")  # from -1 on


@dataclasses.dataclass(frozen=True)
class Dense:
    """Operands in {-3 .. 2}; every sum is exact in float32, so there is one right answer."""

    batch: tuple[int, ...]
    m: int
    k: int
    n: int
    alpha: float = 1.0
    beta: float = 0.0
    scaled: bool = False  # powers of two as scale

    def __str__(self) -> str:
        flags = f"-alpha{self.alpha:g}" * (self.alpha != 1)
        flags += f"-beta{self.beta:g}" * bool(self.beta) + "-scale" * self.scaled
        return f"{'x'.join(map(str, (*self.batch, self.m, self.k, self.n)))}{flags}"

    def operands(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict:
        generator = torch.Generator(device).manual_seed(seed)

        def integers(*shape: int, low: int = -3, high: int = 3) -> torch.Tensor:
            return torch.randint(low, high, shape, device=device, generator=generator)

        arguments = {
            "A": integers(*self.batch, self.m, self.k).to(dtype),
            "B": integers(*self.batch, self.k, self.n).to(dtype),
            "C": integers(*self.batch, self.m, self.n).to(dtype) if self.beta else None,
            "alpha": self.alpha,
            "beta": self.beta,
        }
        if self.scaled:
            arguments["scale"] = 2.0 ** integers(*self.batch).float()
        return arguments


def exact_dense(arguments: dict, dtype: torch.dtype) -> torch.Tensor:
    """The float64 result rounded once."""
    A, B, C = (None if arguments[name] is None else arguments[name].double() for name in "ABC")
    value = arguments["alpha"] * (A @ B)
    if C is not None:
        value = value + arguments["beta"] * C
    if arguments.get("scale") is not None:
        value = value * arguments["scale"].double()[..., None, None]
    assert torch.equal(value.float().double(), value)  # so the next line rounds once
    return value.float().to(dtype)


def run_dense(
    ops,
    A: torch.Tensor,  # (B, m, k)
    B: torch.Tensor,  # (B, k, n)
    *,
    C: torch.Tensor | None = None,  # (B, m, n)
    alpha: float = 1.0,
    beta: float = 0.0,
    scale: torch.Tensor | None = None,  # (B,)
    out: torch.Tensor | None = None,  # (B, m, n)
    tile: str = "auto",
) -> torch.Tensor:
    """The compiled op by a tile's name."""
    if out is None:
        out = A.new_empty((*A.shape[:2], B.shape[2]))
    ops.matmul_add(A, B, C, out, alpha, beta, TILES.index(tile) - 1, scale)
    return out
