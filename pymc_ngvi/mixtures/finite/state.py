"""What one iteration of the step rule `trust_region` hands to the next."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, GaussianState
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.steps import MixtureSteps
from pymc_ngvi.steps.adaptive.state import AdaptiveState

Stage = Literal["gaussian", "search", "solve", "grow", "average"]


@stored("mixture.accepted")
@dataclass(frozen=True)
class Accepted:
    """The best mixture so far, and its ELBO on fresh draws with the standard error.

    Parameters
    ----------
    q : MixtureState
    elbo, se : float
    spread : float
        Variance of log p - log q under q.
    lost : float
        Part of q at which log p is not finite.
    """

    q: MixtureState
    elbo: float
    se: float
    spread: float
    lost: float


@stored("mixture.fit")
@dataclass(frozen=True)
class MixtureFit:
    """What one iteration hands to the next.

    Parameters
    ----------
    stage : {"gaussian", "search", "solve", "grow", "average"}
        What the next step does.
    start : GaussianState
        The start, from which modes are looked for.
    of_gaussian : AdaptiveState
        Of the single Gaussian.
    of_mixture : MixtureSteps or None
        Of the mixture under way: a candidate, before it is known whether it pays, or the accepted one at the end.
    gaussian : GaussianState or None
        The single Gaussian, once it is fitted.
    accepted : Accepted or None
        The best mixture so far.
    level : int
        Names the random stream of the current draws.
    n_steps, n_failed, n_collapsed : int
        Steps of the single Gaussian, candidates in a row that did not pay, and those of which a component collapsed or
        ran away.
    n_lost : int
        Draws left out in earlier parts of the fit.
    tried : tuple of ndarray
        Where components were added to the accepted mixture.
    status : Status or None
        Why to stop.
    """

    stage: Stage
    start: GaussianState
    of_gaussian: AdaptiveState
    of_mixture: MixtureSteps | None = None
    gaussian: GaussianState | None = None
    accepted: Accepted | None = None
    level: int = 0
    n_steps: int = 0
    n_failed: int = 0
    n_collapsed: int = 0
    n_lost: int = 0
    tried: tuple[Array, ...] = ()
    status: Status | None = None

    @property
    def q(self) -> MixtureState:
        """The approximation if the fit ended here: no candidate that may not pay."""
        if self.accepted is not None and self.stage != "average":
            return self.accepted.q
        return MixtureState.of([self.of_gaussian.q]) if self.of_mixture is None else self.of_mixture.q

    @property
    def elbo(self) -> float:
        """ELBO of ``q``: on the current draws, or, where a candidate is on trial, as measured when it was accepted."""
        if self.accepted is not None and self.stage != "average":
            return self.accepted.elbo
        return self._under_way.elbo

    @property
    def gap(self) -> float:
        """Estimated nats that ``q`` still lacks; NaN where a candidate is on trial."""
        return self._under_way.gap if self.stage in ("gaussian", "search", "average") else np.nan

    @property
    def n_draws(self) -> int:
        """Draws in use, of all components together."""
        of = self.of_mixture
        return self.of_gaussian.n_draws if of is None else of.n_draws * of.q.n_components

    @property
    def step_size(self) -> float:
        """The last step size."""
        return self._under_way.step_size

    @property
    def n_dropped(self) -> int:
        """Draws left out so far because log p or its gradient was not finite."""
        return self.n_lost + self._under_way.n_dropped

    @property
    def growing(self) -> NDArray[np.intp]:
        """Coordinates in which the standard deviations of the single Gaussian grow without end."""
        return self.of_gaussian.growing

    @property
    def _under_way(self) -> AdaptiveState | MixtureSteps:
        return self.of_gaussian if self.of_mixture is None else self.of_mixture
