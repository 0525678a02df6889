"""What one iteration of the step rule `trust_region` hands to the next."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pymc_ngvi.core.status import Status
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import Array, BaseDraws
from pymc_ngvi.families.mixture import MixtureState
from pymc_ngvi.mixtures.finite.evaluation import MixtureEvaluation

#: No draws.
NOTHING = MixtureEvaluation(BaseDraws(np.empty((0, 0)), 1), (), np.empty((0, 0)), np.empty((0, 0)), np.empty(0))


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
    working : MixtureState
        Under way: a candidate, before it is known whether it pays.
    stage : {"gaussian", "search", "solve", "decide", "grow", "average"}
        What the next step does.
    start : GaussianState
        The start, from which modes are looked for.
    inner : AdaptiveState or None
        Of the single Gaussian, while that is fitted.
    gaussian : GaussianState or None
        The single Gaussian, once it is fitted.
    accepted : Accepted or None
        The best mixture so far.
    evaluation : MixtureEvaluation
        On the current draws; without parts while the single Gaussian is fitted.
    moments : MixtureMoments or None
        There, while steps are averaged.
    gap, last_elbo, step_size : float
        What the loop shows.
    left : float
        Nats that may be left to gain, with the noise of their measurement.
    radius : float
        Of the trust region, nats.
    n_each : int
        Draws of each component in the current set.
    n_draws : int
        Draws in use, of all components together.
    n_pooled : int
        Draws of each component behind ``q``, while steps are averaged.
    level : int
        Names the random stream of the current draws.
    n_steps, idle, n_averaged, n_failed : int
        Steps on this set, those in a row that gained nothing, averaged sets, candidates in a row that did not pay.
    n_refused, n_collapsed : int
        Averaged steps that would have lowered the ELBO, and candidates of which a component collapsed or ran away.
    n_dropped : int
        Draws left out so far because log p or its gradient was not finite.
    tried : tuple of ndarray
        Where components were added to the accepted mixture.
    status : Status or None
        Why to stop.
    """

    working: MixtureState
    stage: str
    start: Any
    inner: Any = None
    gaussian: Any = None
    accepted: Any = None
    evaluation: MixtureEvaluation = NOTHING
    moments: Any = None
    gap: float = float("inf")
    last_elbo: float = float("-inf")
    left: float = float("inf")
    step_size: float = 1.0
    radius: float = 1.0
    n_each: int = 0
    n_draws: int = 0
    n_pooled: int = 0
    level: int = 0
    n_steps: int = 0
    idle: int = 0
    n_averaged: int = 0
    n_failed: int = 0
    n_refused: int = 0
    n_collapsed: int = 0
    n_dropped: int = 0
    tried: tuple[Array, ...] = ()
    status: Status | None = None

    @property
    def q(self) -> MixtureState:
        """The approximation if the fit ended here: no candidate that may not pay."""
        return self.accepted.q if self._on_trial else self.working

    @property
    def elbo(self) -> float:
        """ELBO of ``q``: on the current draws, or, where a candidate is on trial, as measured when it was accepted."""
        return float(self.accepted.elbo) if self._on_trial else self.last_elbo

    @property
    def _on_trial(self) -> bool:
        return self.accepted is not None and self.stage in ("solve", "decide", "grow")
