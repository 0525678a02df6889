"""Whether a posterior is improper, and in which variable: a look at its tails, far beyond q.

The other coordinates are integrated out by Laplace's method at values of one with a flat prior, farther and farther
out. A tail from r to 2 r has less mass than the one before it only where the log density falls by more than log 2;
where it does not fall so much over orders of magnitude, the integral diverges.
"""

import dataclasses
import logging

import numpy as np

from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from pymc_ngvi.core.refusal import OtherForm
from pymc_ngvi.core.status import Status
from pymc_ngvi.core.types import Array, Rule
from pymc_ngvi.density import LogDensity
from pymc_ngvi.density.new_priors import flat_coordinates, has_proper_priors
from pymc_ngvi.fitting import loop
from pymc_ngvi.fitting.problem import Problem

logger = logging.getLogger("pymc.ngvi")

#: Coordinates in all, and of those with flat priors, up to which tails are looked at.
_MOST_DIM, _MOST_FLAT = 100, 20
#: Distances at which they are: in standard deviations of q, and on the scale of a logarithm.
_DISTANCES: Array = 8.0 * 16.0 ** np.arange(10.0)
_LOG_DISTANCES: Array = 2.5 * 2.0 ** (0.5 * np.arange(8.0))
#: Spans between these, the farthest ones, over all of which a tail does not fall; nats by which one has fallen for
#: good.
_SPANS, _DEEP = 3, 100.0
#: Iterations after which a fit that is still under way is looked at.
_LOOK = 100
#: Farthest starting point on the scale of a logarithm.
_FARTHEST_LOG = 100.0
#: Steps of Newton at most, halvings of one, and nats that it may still promise at the end; pivot, of 1, below which a
#: determinant is rounding error.
_MOST_STEPS, _MOST_HALVINGS, _SOLVED, _LEAST_PIVOT = 30, 30, 1e-4, 1e-12


class Watched:
    """Iterates until a fit ends, or its posterior is found to be improper."""

    def __init__(self, problem: Problem) -> None:
        density = problem.density
        self._problem = problem
        #: None where not all of log p can be evaluated at single points, far out.
        self._density = density if isinstance(density, LogDensity) and not density.has_minibatch else None
        #: Whether the posterior may be improper at all.
        self._is_open = self._density is None or not has_proper_priors(density.model)
        #: The variables in which it is.
        self.improper: tuple[str, ...] = ()

    def run(self, rule: Rule, state: loop.LoopState, last: int, observe: loop.Observer) -> loop.LoopState:
        """Return where the loop ends, at iteration ``last`` at the latest; see `loop.run`."""

        def until(state: loop.LoopState, end: int) -> loop.LoopState:
            return loop.run(rule, state, end - state.n_iterations, observe)

        if self._is_open and self._density is not None and state.n_iterations < _LOOK < last:
            state = until(state, _LOOK)
            if state.status is Status.MAX_ITERATIONS and self._is_improper(state, ended=False):
                return dataclasses.replace(state, status=Status.UNBOUNDED)
        state = until(state, last)
        while state.status is Status.UNBOUNDED and state.n_iterations < last:
            if self._is_open and (self._is_improper(state, ended=False) or self._is_open):
                break
            # What is proper is only wide: the fit goes on, and standard deviations are compared with those of now.
            state = until(dataclasses.replace(state, rule=rule.reopen(state.rule), status=Status.RUNNING), last)
        return state

    def ended(self, state: loop.LoopState) -> loop.LoopState:
        """Return the end of a fit, which is none near a posterior that is improper."""
        if state.status.can_be_followed and self._is_improper(state, ended=True):
            return dataclasses.replace(state, status=Status.UNBOUNDED)
        return state

    def _is_improper(self, state: loop.LoopState, *, ended: bool) -> bool:
        """Tell whether the posterior is found to be improper, looking out from a Gaussian, or from the start."""
        density = self._density
        if not self._is_open or density is None or self.improper:
            return bool(self.improper)
        improper, is_known = tails_of(density, *self._problem.mean_and_sd(state.rule.q), level=not ended)
        if not (improper or is_known):
            start = density.initial_point()
            improper, _ = tails_of(density, start, np.ones_like(start), level=True)
        self._is_open = bool(improper) or not is_known
        self.improper = tuple(_name(density, i) for i in improper)
        return bool(self.improper)


def _name(density: LogDensity, index: int) -> str:
    """Return the label of a coordinate with the name that its variable has in the model."""
    variable = next(v for v in density.layout.variables if v.where.start <= index < v.where.stop)
    return variable.name + density.layout.label(index).removeprefix(variable.value_name)


def tails_of(density: LogDensity, mean: Array, sd: Array, *, level: bool = False) -> tuple[tuple[int, ...], bool]:
    """Return the coordinates with flat priors in which log p is improper; and whether all tails could be followed."""
    if density.second.error() is not None or density.n_dim > _MOST_DIM:
        return (), False
    flat = flat_coordinates(density.model, density.layout)
    if not len(flat):
        return (), False
    before = density.n_gradients, density.n_hessians
    flat = flat[np.argsort(-sd[flat])]
    try:
        with np.errstate(all="ignore"):
            falls = {int(i): _falls(density, int(i), mean, sd, level) for i in flat[:_MOST_FLAT]}
    except OtherForm:
        logger.debug("The Hessian has entries that its pattern lacks.", exc_info=True)
        return (), False
    finally:
        density.n_gradients, density.n_hessians = before  # those of the fit
    known = len(flat) <= _MOST_FLAT and None not in falls.values()
    return tuple(i for i, does in falls.items() if does is False), known


def _falls(density: LogDensity, at: int, mean: Array, sd: Array, level: bool) -> bool | None:
    """Tell whether both tails of a coordinate fall; None where that is not known."""
    variable = next(v for v in density.layout.variables if v.where.start <= at < v.where.stop)
    is_log, centre = variable.value_name != variable.name, mean.copy()
    if is_log:
        centre[at] = np.clip(centre[at], -_FARTHEST_LOG, _FARTHEST_LOG)
    distances: Array = _LOG_DISTANCES if is_log else _DISTANCES * sd[at]
    most = 1.0 if level and not is_log else np.inf
    least: Array = np.log(distances[1:] / distances[:-1])
    found = [_side_falls(_profile(density, centre, at, side * distances, least), least, most) for side in (-1.0, 1.0)]
    if False in found:
        return False
    return None if None in found else True


def _side_falls(values: Array, least: Array, most: float) -> bool | None:
    """Tell whether a tail falls by more than the least in each span; None where that is not known or it rises."""
    falls = -np.diff(values)
    if np.isneginf(values).any() or falls.sum() > _DEEP:
        return True
    if len(falls) < _SPANS:
        return None
    if (falls >= least[: len(falls)])[-_SPANS:].any():
        return True
    return None if (falls[-_SPANS:] < -most).any() else False


def _profile(density: LogDensity, centre: Array, at: int, shifts: Array, least: Array) -> Array:
    """Return the log density of a coordinate at some values, as far as Laplace's method goes or there is doubt."""
    free = np.flatnonzero(np.arange(len(centre)) != at)
    theta = centre.copy()
    values: list[float] = []
    for k, shift in enumerate(shifts):
        theta[at] = centre[at] + shift
        found = _laplace(density, theta, free)
        if found is None:
            break
        theta = found[0]
        values.append(found[1])
        falls = -np.diff(values[-_SPANS - 1 :])
        steadily = len(falls) == _SPANS and (falls > 1.5 * least[k - _SPANS : k]).all()
        if steadily or np.isneginf(found[1]) or values[0] - found[1] > _DEEP:
            break
    return np.array(values)


def _laplace(density: LogDensity, theta: Array, free: NDArray[np.intp]) -> tuple[Array, float] | None:
    """Return the mode in some coordinates, and the log integral over these; None where there is none."""
    value, gradient = (part[0] for part in density.logp_grad(theta[None]))
    if np.isneginf(value):
        return theta, -np.inf
    for _ in range(_MOST_STEPS):
        if not (np.isfinite(value) and np.isfinite(gradient[free]).all()):
            return None
        if not len(free):
            return theta, float(value)
        precision = -density.second.mean_products(theta[None], np.eye(len(theta))[free])[:, free]
        size = np.sqrt(np.abs(np.diagonal(precision)))
        if not (np.isfinite(precision).all() and size.all()):
            return None
        scaled, slope = precision / size / size[:, None], gradient[free] / size
        for damping in (0.0, 1e-6, 1e-3, 0.1, 1.0, 10.0):
            try:
                factor = cho_factor(scaled + damping * np.eye(len(free)), lower=True)
                break
            except LinAlgError:
                continue
        else:
            return None
        step = cho_solve(factor, slope)
        if 0.5 * step @ slope < _SOLVED:
            if damping or np.diagonal(factor[0]).min() ** 2 < _LEAST_PIVOT:
                return None
            log_det = 2.0 * np.sum(np.log(np.diagonal(factor[0]) * size))
            return theta, float(value + 0.5 * len(free) * np.log(2.0 * np.pi) - 0.5 * log_det)
        for halving in range(_MOST_HALVINGS):
            trial = theta.copy()
            trial[free] += 0.5**halving * step / size
            new, its_gradient = (part[0] for part in density.logp_grad(trial[None]))
            if new > value:
                break
        else:
            return None
        theta, value, gradient = trial, new, its_gradient
    return None
