"""Problems of symmetric_matmul whose answers are exact, in every layout of memory."""

from __future__ import annotations

import dataclasses

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands in {-3 .. 2}; every sum is exact in float32, so there is one right answer."""

    batch: tuple[int, ...]
    m: int
    k: int
    alpha: float = 1.0
    beta: float = 0.0
    diag: float = 0.0
    other: bool = False  # B given: A with its columns scaled by -2 .. 2, so that A B^T is symmetric

    def __str__(self) -> str:
        flags = f"-alpha{self.alpha:g}" * (self.alpha != 1) + f"-beta{self.beta:g}" * bool(
            self.beta
        )
        flags += f"-diag{self.diag:g}" * bool(self.diag) + "-B" * self.other
        return f"{'x'.join(map(str, (*self.batch, self.m, self.k)))}{flags}"

    def operands(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict:
        generator = torch.Generator(device).manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> torch.Tensor:
            shape = (*self.batch, *shape)
            return torch.randint(low, high, shape, device=device, generator=generator).to(dtype)

        A = integers(-3, 3, self.m, self.k)
        C = integers(-3, 3, self.m, self.m)
        return {
            "A": A,
            "B": A * integers(-2, 3, 1, self.k) if self.other else None,
            "C": C.triu() + C.triu(1).mT if self.beta else None,
            "alpha": self.alpha,
            "beta": self.beta,
            "diag": self.diag,
        }


def exact(arguments: dict, dtype: torch.dtype) -> torch.Tensor:
    """The float64 result rounded once, computed the plain way on the operands' device.

    `scale` in the arguments must hold powers of two.
    """
    A, C = arguments["A"].double(), arguments["C"]
    B = A if arguments["B"] is None else arguments["B"].double()
    value = arguments["alpha"] * (A @ B.mT)
    if C is not None:
        value = value + arguments["beta"] * C.double()
    if arguments.get("scale") is not None:
        value = value * arguments["scale"].double()[..., None, None]
    value = value + arguments["diag"] * torch.eye(A.shape[-2], dtype=A.dtype, device=A.device)
    assert torch.equal(value.float().double(), value)  # so the next line rounds once
    return value.float().to(dtype)


def laid_out(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """x (..., r, c) with the same values in another layout of memory."""
    r, c = x.shape[-2:]
    lead = x.shape[:-2]
    if pattern == "contiguous":
        view = x.new_empty(x.shape)
    elif pattern == "transposed":
        view = x.new_empty(*lead, c, r).mT
    elif pattern == "padded":  # rows start on 16 bytes whatever c is
        view = x.new_empty(*lead, r, -(-c // 8) * 8 + 8)[..., :c]
    elif pattern == "transposed-padded":
        view = x.new_empty(*lead, c, -(-r // 8) * 8 + 8)[..., :r].mT
    elif pattern == "shifted":  # no row starts on 16 bytes
        view = x.new_empty(*lead, r, -(-c // 8) * 8 + 8)[..., 1 : c + 1]
    elif pattern == "every-third":
        view = x.new_empty(*lead, r, 3 * c)[..., ::3]
    elif pattern == "batch-inside":
        view = x.new_empty(r, c, *lead).permute(*range(2, x.ndim), 0, 1)
    else:
        raise ValueError(pattern)
    return view.copy_(x)


PATTERNS = (
    "contiguous",
    "transposed",
    "padded",
    "transposed-padded",
    "shifted",
    "every-third",
    "batch-inside",
)
