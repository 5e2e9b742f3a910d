"""Training losses: (model, x, y, x_adv, eps, when) -> loss, logits at the points the method trains on.

`when` is (steps done, share of the training done), as tensors. Some losses solve an inner problem of their own and do
not use the caller's `x_adv`: their points do not fit an attack that knows nothing of the loss, as they lie inside the
network (SLAT), carry a gradient of their own (Fast-BAT), or maximise the penalty (LLR) or what it is made of (GAT,
NuAT). These are defined for the l-infinity ball.
"""

from elle.core.losses.at_points import CrossEntropy, Penalised, Trades, VertexMix
from elle.core.losses.bilevel import Bilevel
from elle.core.losses.common import When
from elle.core.losses.guided import Guided, nuclear_norm
from elle.core.losses.latent import LatentStep
from elle.core.losses.worst_gap import WorstGap

__all__ = [
    "Bilevel",
    "CrossEntropy",
    "Guided",
    "LatentStep",
    "Penalised",
    "Trades",
    "VertexMix",
    "When",
    "WorstGap",
    "nuclear_norm",
]
