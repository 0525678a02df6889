"""Another fit of a model, by the same method and from another place."""

import warnings

import pymc as pm

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import LogDensity
from pymc_ngvi.fitting.begun import make_rule
from pymc_ngvi.fitting.defaults import options_for
from pymc_ngvi.fitting.outcome import Outcome
from pymc_ngvi.fitting.problem import problem_of
from pymc_ngvi.fitting.progress import FitProgress
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.fitting.session import FitSession
from pymc_ngvi.fitting.threads import few_threads

#: Backends that have names.
_BACKENDS = ("quick", "numba", "c", "jax")


def fitted_again(model: pm.Model, record: FitRecord, point: Array, seed: int, most_iterations: int) -> Outcome | None:
    """Fit a model once more.

    Parameters
    ----------
    model : pymc.Model
    record : FitRecord
        Of the fit whose method is used again.
    point : ndarray, shape (n_dim,)
        Where the mean starts, unconstrained.
    seed : int
    most_iterations : int

    Returns
    -------
    Outcome or None
        None where the fit could not be made.
    """
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
