"""A nested posterior in the place of a Gaussian fit of all coordinates, where the plan has it first.

It is a variational fit as well: its ELBO is that of the joint distribution q(theta) q(x | theta) of hyperparameters and
latent variables, and each of its iterations is a Gaussian fit of the latter by natural gradients.
"""

import dataclasses
import math
import time

from collections.abc import Callable

import numpy as np

from pymc_ngvi.core.elbo import Elbo
from pymc_ngvi.core.status import Status
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.families import DENSE, INDEPENDENT, FullState
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.progress import announced
from pymc_ngvi.fitting.record import NESTED, FitRecord
from pymc_ngvi.fitting.threads import few_threads
from pymc_ngvi.marginal.exact import Unavailable
from pymc_ngvi.nested.posterior import nested_posterior
from pymc_ngvi.nested.state import NestedState
from pymc_ngvi.posteriors.candidates import UNEVEN, plan_without_gaussian
from pymc_ngvi.posteriors.plan import Decision
from pymc_ngvi.results.exact_step import ExactStep, with_moments, with_pool
from pymc_ngvi.results.fitted import Fitted

#: Effective size of the hyperparameters below which a Gaussian fit of all coordinates may know more.
_FEWEST = 20.0
#: Seconds that are left in any case.
_LEAST_SECONDS = 1e-3
_FROM_MOMENTS = "it has the moments of the nested posterior"


def nested_first[A: Fitted](
    options: FitOptions,
    density: ModelDensity,
    seed: int,
    make: Callable[..., A],
    *,
    include_transformed: bool,
    progressbar: bool = True,
) -> A | FitOptions:
    """Return the nested posterior where it comes first, and there is one; else the options of the Gaussian fit.

    A posterior that was tried in vain leaves fewer of its seconds.

    Parameters
    ----------
    options : FitOptions
    density : ModelDensity
    seed : int
    make : callable
        The class of approximations.
    include_transformed, progressbar : bool
    """
    plan = plan_without_gaussian(options, density)
    if plan is None or (nested := plan.of("nested")) is None:
        return options
    clock, before = time.perf_counter(), density.compile_seconds
    step = ExactStep("nested", seed, options.max_seconds, options)
    try:
        with few_threads(density), announced("Nested posterior", nested.seconds, progressbar):
            most = UNEVEN if plan.of("exact") is not None else math.inf
            state = nested_posterior(density, None, step.stream, most)
    except Unavailable:
        return _with_less(options, nested.seconds)
    if state.checks.effective_size < _FEWEST and options.posterior == "auto":
        return _with_less(options, nested.seconds)
    with_moments(state)
    approx = make(density, state, random_seed=seed, include_transformed=include_transformed)
    record = _record(density, state, seed, time.perf_counter() - clock - density.compile_seconds + before)
    plan = plan.having(nested.became(Decision.TAKEN, "" if state.checks.is_exact else "not exact"))
    approx.take(None, step, with_pool(record, state, plan, 0.0, 0.0))
    approx.hist, approx.gap_hist = np.array([-record.elbo.value]), np.array([math.nan])
    return approx


def _with_less(options: FitOptions, seconds: float) -> FitOptions:
    """Return options with what is left of their seconds."""
    if options.max_seconds is None:
        return options
    return dataclasses.replace(options, max_seconds=max(options.max_seconds - seconds, _LEAST_SECONDS))


def _record(density: ModelDensity, state: NestedState, seed: int, seconds: float) -> FitRecord:
    """Return what there is to say of a nested posterior that no fit came before."""
    return FitRecord(
        status=Status.CONVERGED,
        elbo=Elbo(*state.elbo()),
        gap=math.nan,
        n_iterations=state.checks.n_fits,
        n_gradients=density.n_gradients,
        n_hessians=density.n_hessians,
        n_dropped=0,
        compile_seconds=density.compile_seconds,
        run_seconds=max(seconds, 0.0),
        family=DENSE if isinstance(state.gaussian, FullState) else INDEPENDENT,
        update="natural",
        estimator="quadrature",
        step=NESTED,
        backend=density.backend_in_use,
        family_reason=_FROM_MOMENTS,
        seed=seed,
    )
