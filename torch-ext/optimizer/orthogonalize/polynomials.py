"""The two polynomials of `gram_polynomial`, as squares.

A polynomial s q(s^2) that stays in (0, 2) and rises from 0 as steeply as its degree allows is
almost s h(s^2)^2. Squares, each with one earlier matrix and the identity added in the accumulation,
come near it with few products.

This module imports nothing of the package, so `tools/derive_gram_polynomials.py` loads it by path.
"""

from __future__ import annotations

from typing import NamedTuple


class Square(NamedTuple):
    """M_j+1 = alpha M_j M_j^T + beta M_operand + delta I."""

    operand: int
    alpha: float
    beta: float
    delta: float


# Smallest largest error over s in [1e-4, 1], relative to what five steps of Polar Express leave at
# 0.84 s, or to 0.06 from s = 0.35 on and 0.12 below where those are better; found by
# tools/derive_gram_polynomials.py, which checks this table too. On [1.2e-3, 1] the result lies in
# [0.942, 1.102], and its slope at 0 is 1010. It holds while rounding lifts no value between the two
# polynomials by more than 8 % of the largest; float16 was seen to lift 3 %.
POLYNOMIALS: tuple[tuple[Square, ...], ...] = (
    (
        Square(0, 8.446316005, -9.197353865, 1.422843692),
        Square(0, 2.580577243, 0.1319180251, -2.2754039),
        Square(1, 0.8260958358, -0.263842373, -2.367149489),
        Square(2, 1.142156889, -1.184707264, -3.626039718),
        Square(2, 0.3483385531, 0.108198553, 0.9522234725),
    ),
    (
        Square(0, 0.6461986994, -2.607949117, 1.954754848),
        Square(0, 1.026488635, -0.7729084059, 0.4792040928),
        Square(1, 0.3247564715, -0.5760478737, -0.8121485809),
        Square(2, 0.3859239998, -0.6043995974, 1.196098765),
        Square(2, 0.2450347352, 0.7051488222, 0.5433943303),
    ),
)
SQUARES = sum(map(len, POLYNOMIALS))

# Beyond 1 the polynomials leave every bound at once, and a matrix of rank 1 sits at 1 / safety.
SAFETY = 1.01
