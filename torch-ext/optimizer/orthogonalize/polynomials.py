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

# M_2 of x is x^(-1/2) within 2.1 % on [0.1026, 1.0255] and exactly at 1, for eigenvalues x of X X^T
# over t (1 + d)^2, with t their mean and d their standard deviation over t: the upper end of a
# Gaussian's. Up to there M_1 lies in [-0.07, 1.6] and M_2 in [0.99, 4.4]. Two squares are every
# quartic that rises in the end, and this is the best one, found by the same tool.
WELL_CONDITIONED: tuple[Square, ...] = (
    Square(0, 3.438196018, -4.765096027, 1.584740357),
    Square(0, 1, -0.9380639953, 1.87158235),
)

# The largest d that it is tried for: that of Gaussian matrices of aspect 1:2.37.
SPREAD = 0.65

# The largest mean of (s^2 - 1)^2 over the result's singular values s that is accepted. The mean of
# (s - 1)^2 is then at most that; five steps of Polar Express leave 0.0086 on wide Gaussians.
RESIDUAL = 0.004

# M_6 of x is nearly x^(-1/2) for eigenvalues x of X X^T over t (1 + d)^2 where matrices are square
# or nearly so, whose smallest singular values reach down to 0. Least squares of s M_6(s^2) - 1 over
# the quarter circle that the singular values s of a large square Gaussian fill: 0.108 in the root
# mean square, where five steps of Polar Express leave 0.118 (m = 512) to 0.17 (8192) and values of
# any size; at most 1.15, and 1.2 up to x = 1.036. Found by tools/derive_gram_polynomials.py, too.
QUARTER_CIRCLE: tuple[Square, ...] = (
    Square(0, 6.613872002, -7.13893842, 1.211253037),
    Square(0, 1.910452125, -0.6073158735, -0.1757578296),
    Square(0, 0.6395980916, -1.589851499, -0.5018468848),
    Square(1, 0.5328581738, -0.672112037, -1.304730387),
    Square(3, 0.4142032589, -1.12583606, 1.091097795),
    Square(3, 0.238786926, 2.226301123, 2.654266047),
)
