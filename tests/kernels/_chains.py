"""Chains of squares whose values stay finite, their definition, and the op as a function."""

from __future__ import annotations

import torch

# Those of gram_polynomial in their pattern of operands, with rounder numbers; a bare square; one
# that adds nothing; as many squares as there may be, with every operand.
CHAINS = {
    "first": [
        *((0, 8.4375, -9.1875, 1.421875), (0, 2.578125, 0.1328125, -2.28125)),
        *((1, 0.828125, -0.265625, -2.359375), (2, 1.140625, -1.1875, -3.625)),
        (2, 0.34765625, 0.107421875, 0.953125),
    ],
    "second": [
        *((0, 0.6484375, -2.609375, 1.953125), (0, 1.0234375, -0.7734375, 0.478515625)),
        *((1, 0.32421875, -0.576171875, -0.8125), (2, 0.38671875, -0.60546875, 1.1953125)),
        (2, 0.24609375, 0.703125, 0.54296875),
    ],
    "one": [(0, 0.5, 2.0, 3.0)],
    "no-sum": [(0, 1.0, 0.0, 0.0), (1, -1.0, 0.0, 1.0)],
    "eight": [(j // 2, 0.75, 0.25, -0.375) for j in range(8)],
}


def operand(
    batch: int, m: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """X (batch, m, m), symmetric to the bit, and factors that bring its values into [0, 1]."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(batch, m, m + 3, device=device, generator=generator)
    gram = (x @ x.mT).to(dtype)
    gram = gram.triu() + gram.triu(1).mT
    norm = torch.linalg.matrix_norm(gram.float())
    return gram, 1 / (1.02 * norm)


def definition(
    x: torch.Tensor, squares: list[tuple], scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """In float64, every M rounded to `dtype`."""
    first = x.double() if scale is None else x.double() * scale.double()[:, None, None]
    terms = [first]
    for i, alpha, beta, delta in squares:
        identity = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
        value = alpha * terms[-1] @ terms[-1].mT + beta * terms[i] + delta * identity
        terms.append(value.to(dtype).double())
    return terms[-1]


def run_chain(
    module,  # kernels.products.square_chain
    ops,
    x: torch.Tensor,  # (batch, m, m) float16, contiguous, m in eights
    squares: list[tuple],
    scale: torch.Tensor | None = None,
    groups: int = 0,
    *,
    zeros: torch.Tensor | None = None,  # (1 + squares * batch,) int32 zeros, which are used up
) -> torch.Tensor:
    """The last M in upper storage, maybe in x's memory."""
    places, count = module.places_of([square[0] for square in squares])
    buffers = [x, *(torch.empty_like(x) for _ in range(count - 1))]
    columns = ([square[k] for square in squares] for k in range(4))
    ops.square_chain(buffers, places, *columns, scale, groups, zeros)
    return buffers[places[-1]]
