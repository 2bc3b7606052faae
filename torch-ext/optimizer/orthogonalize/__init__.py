"""A batch of matrices -> the nearest semi-orthogonal matrices.

coefficients, restarts      which polynomials, and where the Gram form starts afresh
choose                      which method in which dtype, and why
newton_schulz, polar_express, gram_newton_schulz, gram_polynomial        the methods
cost                        what each takes
dispatch                    orthogonalize: choose, then run
"""

from .choose import Choice, choose, predicted_ms
from .coefficients import COEFFICIENT_SETS, CoefficientSet, polar_express_coefficients
from .dispatch import orthogonalize
from .gram_newton_schulz import gram_newton_schulz
from .gram_polynomial import gram_polynomial
from .newton_schulz import newton_schulz
from .polar_express import polar_express
from .restarts import restart_positions

__all__ = [
    "COEFFICIENT_SETS",
    "Choice",
    "CoefficientSet",
    "choose",
    "gram_newton_schulz",
    "gram_polynomial",
    "newton_schulz",
    "orthogonalize",
    "polar_express",
    "polar_express_coefficients",
    "predicted_ms",
    "restart_positions",
]
