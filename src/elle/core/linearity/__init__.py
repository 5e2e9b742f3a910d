"""How far the loss is from linear inside a ball; a regulariser and a metric are the same function.

Every error is one value an image, [B]; its mean over the batch is a regulariser.
"""

from elle.core.linearity.error import Criterion, Linearity, triplet_error
from elle.core.linearity.gradients import (
    directional_curvature,
    finite_difference_misalignment,
    gradient_difference,
    gradient_misalignment,
    gradient_norm,
    input_gradient,
    taylor_gap,
)
from elle.core.linearity.points import Norm, cross_entropy, uniform_in_ball

__all__ = [
    "Criterion",
    "Linearity",
    "Norm",
    "cross_entropy",
    "directional_curvature",
    "finite_difference_misalignment",
    "gradient_difference",
    "gradient_misalignment",
    "gradient_norm",
    "input_gradient",
    "taylor_gap",
    "triplet_error",
    "uniform_in_ball",
]
