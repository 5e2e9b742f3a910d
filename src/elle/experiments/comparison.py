"""Our numbers beside the paper's: the difference, and whether chance explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elle.experiments.collected import TIMES, Collected, Score, Setting
from elle.experiments.recipe import Expected, matches

_ROUNDING = 0.005
"""The paper prints two decimals."""


@dataclass(frozen=True)
class Comparison:
    """One number of the paper and ours."""

    setting: Setting
    expected: Expected
    score: Score

    @property
    def difference(self) -> float:
        return self.score.mean - self.expected.value

    @property
    def joint_error(self) -> float | None:
        """The standard error of the difference."""
        return joint_error(self.score.std, self.score.count, _of_sample(self.expected), self.expected.seeds)

    @property
    def inside(self) -> bool | None:
        """Within two joint standard errors; None without a std, or where a collapse or the machine decides it."""
        error = self.joint_error
        if error is None or self.score.collapsed or self.expected.collapsed or self.expected.metric in TIMES:
            return None
        return abs(self.difference) <= 2 * error + _ROUNDING

    @property
    def verdict(self) -> str:
        if self.expected.metric in TIMES:
            return "time"
        if self.score.collapsed or self.expected.collapsed:
            who = {(True, True): "both", (True, False): "ours", (False, True): "paper's"}
            return f"{who[self.score.collapsed, self.expected.collapsed]} collapsed"
        return {True: "inside", False: "outside", None: "no std"}[self.inside]


def joint_error(ours: float | None, count: int, theirs: float | None, their_count: int) -> float | None:
    """The standard error of a difference; one side's std stands for the other's where that is not known."""
    # A printed 0.00 is a constant classifier's, or of one run (PGD-10's at 24 and 26/255): not how much ours vary.
    ours = ours if ours is not None else theirs or None
    theirs = theirs if theirs is not None else ours
    if ours is None or theirs is None:
        return None
    return math.sqrt(ours**2 / count + theirs**2 / their_count)


def _of_sample(expected: Expected) -> float | None:
    """The paper's std as ours is computed, by n - 1: the paper divides by n.

    Table 2 shows it where one of three runs collapsed: of a, a and 0 the std is 0.71 of the mean by n and 0.87 by
    n - 1, of a, 0 and 0 1.41 and 1.73; printed are 13.67 +- 9.69, 4.52 +- 3.20, and 1.55 +- 2.18, 1.17 +- 1.65.
    """
    if expected.std is None:
        return None
    return expected.std * math.sqrt(expected.seeds / (expected.seeds - 1))


def compare(collected: Collected) -> list[Comparison]:
    """Every number of the recipe that our runs have an answer to, in the paper's order."""
    if collected.recipe is None:
        return []
    return [
        Comparison(setting, expected, score)
        for expected in collected.recipe.expected
        for setting in collected.settings
        if matches(setting.config, expected.where) and (score := setting.score(expected.metric)) is not None
    ]
