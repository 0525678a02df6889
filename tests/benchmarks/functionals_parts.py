"""What models of ``functionals.py`` share: effects written either way, and the quantities that users look at."""

from collections.abc import Callable

import numpy as np
import pymc as pm
import pytensor.tensor as pt

Variable = pt.TensorVariable


def effects(name: str, sd: Variable, shape: int, *, centred: bool, swapped: bool = False) -> Variable:
    """Return independent effects with a scale, as centred or not; ``swapped``: sampled the other way, both named."""
    if centred == swapped:
        return pm.Deterministic(name, sd * pm.Normal(f"z_{name}", shape=shape))
    effect = pm.Normal(name, 0.0, sd, shape=shape)
    if swapped:
        pm.Deterministic(f"z_{name}", effect / sd)
    return effect


def walk(name: str, sd: Variable, first: float, n: int, *, swapped: bool = False, start: float = 0.0) -> Variable:
    """Return a Gaussian random walk; ``swapped``: sampled by its standardised steps.

    The first value is normal with mean ``start`` and standard deviation ``first``.
    """
    if not swapped:
        return pm.GaussianRandomWalk(name, sigma=sd, init_dist=pm.Normal.dist(start, first), shape=n)
    begin = pm.Normal(f"{name}_first", start, first, initval=start)
    steps = pm.Normal(f"{name}_steps", shape=n - 1)
    return pm.Deterministic(name, begin + sd * pt.concatenate([pt.zeros(1), pt.cumsum(steps)]))


def autoregression(name: str, rho: Variable, sd: Variable, n: int, *, swapped: bool = False) -> Variable:
    """Return a stationary autoregression of order 1; ``swapped``: sampled in units of its innovations."""
    if swapped:
        first = pm.Normal.dist(0.0, 1.0 / pt.sqrt(1.0 - rho**2))
        return pm.Deterministic(name, sd * pm.AR(f"{name}_z", rho=rho, sigma=1.0, init_dist=first, shape=n))
    first = pm.Normal.dist(0.0, sd / pt.sqrt(1.0 - rho**2))
    return pm.AR(name, rho=rho, sigma=sd, init_dist=first, shape=n)


def differences(values: Variable) -> Variable:
    """Return differences of neighbours."""
    return values[1:] - values[:-1]


def fitted(eta: Variable, inverse: Callable[[Variable], Variable] | None = None) -> Variable:
    """Name a linear predictor, the fitted means and what is made of them; return the means.

    ``inverse`` is that of the link; None is the identity.
    """
    eta = pm.Deterministic("eta", eta)
    pm.Deterministic("average", eta.mean())
    if inverse is None:
        pm.Deterministic("steps", differences(eta))
        return eta
    mu = pm.Deterministic("mu", inverse(eta))
    pm.Deterministic("total", mu.sum())
    pm.Deterministic("steps", differences(mu))
    return mu


def groups(n_groups: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return the sorted groups of rows, each with one at least."""
    return np.sort(np.concatenate([np.arange(n_groups), rng.integers(n_groups, size=n - n_groups)]))
