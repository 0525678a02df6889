"""Ranks of the values that data were simulated with, among draws."""

from collections.abc import Mapping

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.simulated import Simulated

#: Name of the log density of parameters and data, which is ranked beside the variables.
LOG_DENSITY = "log_density"


class Ranks:
    """Ranks variables and log p(theta, y): the latter sees errors that no variable shows alone."""

    def __init__(self, truth: Simulated, rng: np.random.Generator) -> None:
        self._truth, self._rng = truth, rng

    def among(self, draws: Mapping[str, AnyArray], theta: Array, density: ModelDensity) -> dict[str, AnyArray]:
        """Return ranks by name."""
        result = {name: self._of(values, self._truth.values[name]) for name, values in draws.items()}
        at = density.layout.flatten(self._truth.unconstrained)
        logp = density.logp(np.vstack([at[None], theta]))
        return {**result, LOG_DENSITY: self._of(logp[1:], logp[0])}

    def _of(self, draws: AnyArray, truth: AnyArray) -> AnyArray:
        """Return how many draws are below the truth; where some are equal to it, a random part of these."""
        below, equal = (draws < truth).sum(axis=0), (draws == truth).sum(axis=0)
        return np.asarray(below + self._rng.integers(0, equal + 1))
