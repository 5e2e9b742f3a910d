"""AutoAttack: four attacks written for speed, each success verified in float32, and the original behind an adapter."""

from elle.evaluation.autoattack.norms import Norm
from elle.evaluation.autoattack.registry import ORDER, Budget, adaptations, search

__all__ = ["ORDER", "Budget", "Norm", "adaptations", "search"]
