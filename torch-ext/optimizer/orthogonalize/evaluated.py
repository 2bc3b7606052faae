"""Polynomials of a symmetric matrix, as squares (`polynomials.Square`)."""

from __future__ import annotations

import torch

from ..kernels.square_chain import square_chain
from .polynomials import Square
from .products import square


def evaluated(
    R: torch.Tensor,
    squares: tuple[Square, ...],
    factors: torch.Tensor | None = None,
    chain: bool = False,
    *,
    keep: bool = False,
    subset: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last M of R (G, m, m), which may be overwritten unless `keep`.

    `factors` (G,): M_0 is R times these; no product of its own is spent on that. `chain`: in one
    launch (`runs_chain`), R and the result in upper storage. Else an M that is not needed any more
    is let go. `subset`: as for `symmetric`, where `batch_is_free`. `zeros`: as for `square_chain`.
    """
    if chain:
        return square_chain(R, squares, factors, keep=keep, subset=subset, zeros=zeros)
    terms: dict[int, torch.Tensor] = {0: R}
    del R
    for j, (operand, alpha, beta, delta) in enumerate(squares):
        scale = factors if j == 0 or operand == 0 else None
        powers = (2 if j == 0 else 0, 1 if operand == 0 else 0)
        options = {} if scale is None else {"scale": scale, "powers": powers}
        M = square(
            terms[j], terms[operand], alpha=alpha, beta=beta, delta=delta, subset=subset, **options
        )
        needed = {later.operand for later in squares[j + 1 :]}
        terms = {i: term for i, term in terms.items() if i in needed} | {j + 1: M}
    return M
