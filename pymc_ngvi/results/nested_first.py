"""Latent Gaussian models whose log density is no sum over rows but for given hyperparameters: the nested posterior.

A Gaussian process with an unknown kernel is one. A Gaussian fit of all coordinates would take draws, and minutes, for a
result that is further from the posterior.
"""

import dataclasses
import time

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import GaussianState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DENSE, INDEPENDENT, DiagonalState, FullState
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.price import TimeBudget, expected_seconds
from pymc_ngvi.fitting.progress import announced
from pymc_ngvi.fitting.record import NESTED, FitRecord
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.exact import Unavailable, forest_of, if_available
from pymc_ngvi.nested.posterior import latent_rows_of, nested_posterior
from pymc_ngvi.nested.seconds import nested_seconds
from pymc_ngvi.nested.state import NestedState
from pymc_ngvi.results.costs import MANY_GLOBALS
from pymc_ngvi.results.exact_step import ExactStep, with_pool
from pymc_ngvi.results.fitted import Fitted

#: Seconds that it may take without being asked for; dimensions up to which its Gaussian has all correlations.
_MOST_SECONDS, _MOST_DENSE = 120.0, 2_000
#: Latent variables for each hyperparameter, from which on it is worth while.
_MANY = 3
#: Effective size of the hyperparameters below which a Gaussian fit of all coordinates may know more.
_FEWEST = 20.0
#: Draws behind the ELBO of that Gaussian.
_N_DRAWS = 64
_FROM_MOMENTS = "it has the moments of the nested posterior"


def comes_first(options: FitOptions, density: ModelDensity) -> bool:
    """Tell whether a nested posterior is to be had without a Gaussian fit of all coordinates before it."""
    if options.posterior not in ("auto", "nested") or density.has_minibatch or density.n_directions is not None:
        return False
    forest = if_available(forest_of, density)
    if forest is not None and forest.n_local and forest.n_globals <= MANY_GLOBALS:
        return False
    given = if_available(latent_rows_of, density)
    if given is None:
        return False
    if options.posterior == "nested":
        return True
    return given.n_dim >= _MANY * len(given.outside) and nested_seconds(given) <= _affordable(options, density)


def _affordable(options: FitOptions, density: ModelDensity) -> float:
    """Return the seconds that a nested posterior may take: as many as a Gaussian fit and what may follow it."""
    if options.max_seconds is not None:
        return options.max_seconds
    of_fit = expected_seconds(density)
    return min(of_fit + TimeBudget(of_fit).left(), _MOST_SECONDS)


def nested_first[A: Fitted](
    options: FitOptions,
    density: ModelDensity,
    seed: int,
    make: Callable[..., A],
    *,
    include_transformed: bool,
    progressbar: bool = True,
) -> A | None:
    """Return the nested posterior; None where there is none, after all.

    Parameters
    ----------
    options : FitOptions
    density : ModelDensity
    seed : int
    make : callable
        The class of approximations.
    include_transformed, progressbar : bool
    """
    clock, step = time.perf_counter(), ExactStep("nested", seed, options.max_seconds)
    before = density.compile_seconds
    try:
        with few_threads(density), announced("Nested posterior", nested_seconds(latent_rows_of(density)), progressbar):
            state = nested_posterior(density, None, step.stream)
    except Unavailable:
        return None
    if state.checks.effective_size < _FEWEST and options.posterior == "auto":
        return None
    q = _with_moments_of(state)
    object.__setattr__(state, "gaussian", q)
    gaussian = make(density, q, random_seed=seed, include_transformed=include_transformed)
    gaussian.record = _record(density, q, state, seed, time.perf_counter() - clock - density.compile_seconds + before)
    approx = make(density, state, random_seed=seed, include_transformed=include_transformed)
    own = dataclasses.replace(gaussian.record, elbo=Elbo(*state.elbo()))
    approx.take(gaussian, step, with_pool(own, state, 0.0, 0.0))
    return approx


def _with_moments_of(state: NestedState) -> GaussianState:
    """Return the Gaussian with the moments of a nested posterior."""
    if state.n_dim > _MOST_DENSE:
        return DiagonalState.from_scale(state.mean(), state.sd())
    return FullState(state.mean(), np.linalg.cholesky(state.cov()))


def _record(density: ModelDensity, q: GaussianState, state: NestedState, seed: int, seconds: float) -> FitRecord:
    """Return what there is to say of that Gaussian."""
    theta = q.draws(np.random.default_rng(seed).standard_normal((_N_DRAWS, q.n_dim)))
    h = latent_rows_of(density).logp_of_all(theta) - q.log_density(theta)  # log p of all at once need not be compiled
    elbo = Elbo(float(h.mean()), float(h.std(ddof=1) / np.sqrt(len(h))))
    if not np.isfinite(h).all():
        elbo = Elbo(-np.inf, np.inf)
    return FitRecord(
        status=Status.CONVERGED,
        elbo=elbo,
        gap=float("nan"),
        n_iterations=state.checks.n_fits,
        n_gradients=density.n_gradients,
        n_hessians=density.n_hessians,
        n_dropped=0,
        compile_seconds=density.compile_seconds,
        run_seconds=max(seconds, 0.0),
        family=DENSE if isinstance(q, FullState) else INDEPENDENT,
        update="natural",
        estimator="quadrature",
        step=NESTED,
        backend=density.backend_in_use,
        family_reason=_FROM_MOMENTS,
        seed=seed,
    )
