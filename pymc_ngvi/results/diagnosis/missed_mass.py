"""Posterior mass far from where q is: at other modes of log p, and at the ends of other fits."""

import warnings

from dataclasses import (
    dataclass,
)
from typing import (
    Any,
)

import numpy as np
import pymc as pm

from scipy.special import (
    expit,
)

from pymc_ngvi.core.linalg import (
    logsumexp,
)
from pymc_ngvi.core.seeds import seed_of
from pymc_ngvi.core.types import (
    Array,
    GaussianState,
    VariationalState,
)
from pymc_ngvi.density import (
    LogDensity,
    ModelDensity,
)
from pymc_ngvi.families import (
    FullState,
    traits_of,
)
from pymc_ngvi.fitting.begun import (
    make_rule,
)
from pymc_ngvi.fitting.defaults import (
    options_for,
)
from pymc_ngvi.fitting.outcome import (
    Outcome,
)
from pymc_ngvi.fitting.problem import (
    problem_of,
)
from pymc_ngvi.fitting.progress import (
    FitProgress,
)
from pymc_ngvi.fitting.record import (
    FitRecord,
)
from pymc_ngvi.fitting.session import (
    FitSession,
)
from pymc_ngvi.fitting.threads import (
    few_threads,
)
from pymc_ngvi.mixtures.finite.search import (
    modes,
)
from pymc_ngvi.results.posterior import (
    Distribution,
    Posterior,
)

# --- another fit of a model, by the same method and from another place ---

#: Backends that have names.
_BACKENDS = ("quick", "numba", "c", "jax")


def fitted_again(model: pm.Model, record: FitRecord, point: Array, seed: int, most_iterations: int) -> Outcome | None:
    """Fit a model once more."""
    given = {name: getattr(record, name) for name in ("family", "update", "estimator", "step", "reparam")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caller looks at how it ends
            density = LogDensity(model, record.backend if record.backend in _BACKENDS else "auto")
            options = options_for(given, density)
            problem = problem_of(density, options)
            start = density.layout.unflatten(point)
            with few_threads(density), FitProgress(enabled=False) as progress:
                mean, scales = problem.start(start, None)
                rule = make_rule(problem.target, options, seed)
                state = problem.first_state(rule, mean, scales, start)
                session = FitSession.begin(problem, rule, state, options, seed)
                session.run(most_iterations, progress)
                return session.outcome()
    except (ValueError, ArithmeticError):
        return None


# --- posterior mass far from where q is: at other modes of log p, and at the ends of other fits ---

#: How much wider than q the starting points of the search are.
_WIDER = 4.0
#: Modes that are looked at, points from the prior to climb from, and largest dimension of dense curvatures.
_N_MODES, _N_PRIOR, _MOST_DENSE = 12, 64, 500
#: Draws of each candidate, and log of the ratio to q from which on a draw counts as outside.
_N_DRAWS, _LOG_OUTSIDE = 512, 3.0
#: Part of the draws of a candidate that has to be outside.
_MOSTLY = 0.5
#: Slope of log p per root dimension, in units of a candidate, below which that is a mode.
_FLAT = 0.3
#: Iterations of another fit at most.
_MOST_ITERATIONS = 300


@dataclass(frozen=True)
class MissedMass:
    """A place outside q."""

    #: A mode of log p, or the end of another fit.
    kind: str
    #: Mass there as a part of that and the one that q stands for.
    share: float
    #: shape (n_dim,).
    location: Array
    #: Of the other fit; NaN for a mode.
    elbo: float = np.nan


def other_modes(density: ModelDensity, q: Distribution, elbo: float, rng: np.random.Generator) -> list[MissedMass]:
    """Climb log p from dispersed points and from draws of the prior, and return the modes outside q."""
    around = _around(q)
    prior = density.info.prior_draws(_N_PRIOR, seed_of(rng))
    prior = prior[np.isfinite(prior).all(axis=1)] if len(prior) else np.empty((0, q.n_dim))
    found, _ = modes(density, around, prior, rng, _N_MODES)
    found = [c for c in found if _is_mode(density, c)]
    result = [place for c in found if (place := outside(density, q, elbo, c, rng)) is not None]
    return sorted(result, key=lambda place: -place.share)


def _is_mode(density: ModelDensity, candidate: GaussianState) -> bool:
    """Tell whether log p is flat at the mean of a candidate, in its units: an ascent can end on a ridge."""
    slope = candidate.whiten(density.logp_grad(candidate.mean()[None])[1])
    return bool(np.sum(slope**2) < _FLAT**2 * candidate.n_dim)


def _around(distribution: Distribution) -> Any:
    """Return a wide Gaussian about the mean of q, of a form whose curvatures can be had."""
    mean, sd = distribution.mean(), distribution.sd()
    sd = _WIDER * np.where(np.isfinite(sd), sd, 1.0)
    if distribution.n_dim <= _MOST_DENSE:
        return FullState.from_scale(mean, sd)
    return distribution.gaussian.with_scale(mean, sd)


def outside(
    density: ModelDensity,
    q: Distribution,
    elbo: float,
    candidate: VariationalState,
    rng: np.random.Generator,
    kind: str = "mode",
) -> MissedMass | None:
    """Return the mass that a candidate covers and q does not; None where q is there, too, or that is not known."""
    base = rng.standard_normal((_N_DRAWS, q.n_dim))
    if candidate.n_uniform:
        base = np.concatenate([base, rng.random((_N_DRAWS, candidate.n_uniform))], axis=1)
    theta = candidate.draws(base)
    theta = theta[np.isfinite(theta).all(axis=1)]
    if not len(theta):
        return None
    log_p, log_q = density.logp(theta), q.rough_log_density(theta)
    if log_q is None:
        return None
    with np.errstate(invalid="ignore"):
        log_q = np.where(np.isfinite(log_q), log_q, -np.inf)
        outside = np.isfinite(log_p) & (log_q < log_p - elbo - _LOG_OUTSIDE)
    if outside.mean() < _MOSTLY:
        return None
    ratio = log_p[outside] - candidate.log_density(theta[outside])
    share = float(expit(logsumexp(ratio) - np.log(len(theta)) - elbo))
    return MissedMass(kind, share, np.asarray(candidate.mean()))


def other_fit(posterior: Posterior, elbo: float, rng: np.random.Generator) -> MissedMass | None:
    """Fit once more, from a dispersed start and with another seed."""
    record, q = posterior.record, posterior.distribution
    if record is None or record.step != "adaptive" or traits_of(record.family).options:
        return None  # the record does not tell the options of a family
    gaussian = q.gaussian
    point = q.mean() + _WIDER * (gaussian.draws(rng.standard_normal((1, q.n_dim)))[0] - gaussian.mean())
    other = fitted_again(posterior.model, record, point, seed_of(rng), _MOST_ITERATIONS)
    if other is None or not other.record.converged:
        return None
    place = outside(posterior.density, q, elbo, other.q, rng, "fit")
    share = 0.0 if place is None else place.share
    return MissedMass("fit", share, np.asarray(other.q.mean()), other.record.elbo.value)
