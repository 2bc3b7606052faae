"""A batch of matrices -> the nearest semi-orthogonal matrices.

choose                      orthogonalize: which method in which dtype, why, and what it costs
newton_schulz               Newton-Schulz and Polar Express
gram_newton_schulz          the same on the Gram matrix, and where it starts afresh
gram_polynomial             two polynomials of the Gram matrix (polynomials)
coefficients                the schedules
batch, products, arguments  slices of a batch, the products of an iteration, checks and calls
"""

from .choose import Choice, choose, orthogonalize, predicted_ms
from .coefficients import COEFFICIENT_SETS, CoefficientSet, polar_express_coefficients
from .gram_newton_schulz import gram_newton_schulz, restart_positions
from .gram_polynomial import gram_polynomial
from .newton_schulz import newton_schulz, polar_express

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
