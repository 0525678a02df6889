"""Posteriors that have several modes, may have, or seem to, each with what is known of it: see `modes.py`."""

import functools
import itertools

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from numpy.typing import NDArray
from users_models import MODELS as USERS

Array = NDArray[np.float64]
#: Means and standard deviations by name of a variable, as arrays of its shape.
type Moments = dict[str, tuple[Array, Array]]

ORDERED = pm.distributions.transforms.ordered


@dataclass(frozen=True)
class Case:
    """A model, and what is known of its posterior.

    Parameters
    ----------
    build : callable
    moments : callable or None
        Returns means and standard deviations; None where they are not known, or mean nothing: a fit is to say so.
    names : tuple of str
        Variables of which a reason has to name one, if there is a reason; those whose moments are compared.
    sampled : callable or None
        The model that NUTS samples where moments are not known otherwise; None where it can't.
    image : callable or None
        Draws by name to draws of the other one of two equal modes.
    drawn : callable or None
        Returns draws by name, (n_chains, n_draws, ...), by other means than NUTS of PyMC's model.
    """

    build: Callable[[], pm.Model]
    moments: Callable[[], Moments] | None
    names: tuple[str, ...] = ()
    sampled: Callable[[], pm.Model] | None = None
    image: Callable[[dict[str, Array]], dict[str, Array]] | None = None
    drawn: Callable[[], dict[str, Array]] | None = None


# --- differential equations ---

#: Pelts of hares and lynxes, in thousands, 1900 to 1920 (Hudson's Bay Company): posteriordb, hudson_lynx_hare.
PELTS = np.array([
    [30, 4], [47.2, 6.1], [70.2, 9.8], [77.4, 35.2], [36.3, 59.4], [20.6, 41.7], [18.1, 19], [21.4, 13], [22, 8.3],
    [25.4, 9.1], [27.1, 7.4], [40.3, 8], [57, 12.3], [76.6, 19.5], [52.3, 45.7], [19.5, 51.1], [11.2, 29.7],
    [7.6, 15.8], [14.6, 9.7], [16.2, 10.1], [24.7, 8.6],
])  # fmt: skip
#: Infected, and bacteria in the water, on 20 occasions a week apart (simulated): posteriordb, sir.
INFECTED = np.array([441, 419, 553, 666, 753, 692, 644, 509, 371, 286, 200, 147, 101, 68, 49, 35, 19, 12, 7, 10])
BACTERIA = np.array([
    6141.73, 5801.72, 9439.14, 13742, 11975, 16387, 15144, 14705.6, 8736.39, 7553.29, 6007.09, 5979.96, 3048.17,
    1566.77, 1275.21, 824.85, 604.605, 516.25, 258.046, 188.591,
])  # fmt: skip


def _predators(y, t, p):
    return [(p[0] - p[1] * y[1]) * y[0], (-p[2] + p[3] * y[0]) * y[1]]


def lotka_volterra() -> pm.Model:
    """Hares and lynxes: posteriordb's model."""
    equation = pm.ode.DifferentialEquation(
        func=_predators, times=np.arange(1.0, len(PELTS)), n_states=2, n_theta=4, t0=0.0
    )
    with pm.Model() as model:
        theta = pm.TruncatedNormal("theta", [1, 0.05, 1, 0.05], [0.5, 0.05, 0.5, 0.05], lower=0.0, shape=4)
        start = pm.LogNormal("z_init", np.log(10.0), 1.0, shape=2)
        sigma = pm.LogNormal("sigma", -1.0, 1.0, shape=2)
        pm.LogNormal("y_init", pt.log(start), sigma, observed=PELTS[0])
        pm.LogNormal("y", pt.log(equation(y0=start, theta=theta)), sigma, observed=PELTS[1:])
    return model


def _lotka_volterra() -> Moments:
    """Those of posteriordb's reference draws."""
    mean = np.array([0.546864, 0.0277473, 0.800095, 0.0240859, 34.03522, 5.935894, 0.248057, 0.251017])
    square = np.array(
        [0.30303629, 0.0007871719, 0.6481388153, 0.0005925775, 1166.9038171, 35.5163321, 0.0634036795, 0.0649094189]
    )
    sd = np.sqrt(square - mean**2)
    return {n: (mean[at], sd[at]) for n, at in (("theta", slice(4)), ("z_init", slice(4, 6)), ("sigma", slice(6, 8)))}


def _infections(y, t, p):
    rate = p[0] * y[3] / (y[3] + 1e6)
    return [-rate * y[0], rate * y[0] - p[1] * y[1], p[1] * y[1], p[2] * y[1] - p[3] * y[3]]


def sir() -> pm.Model:
    """Cholera spread by water: posteriordb's model."""
    times, start = 7.0 * np.arange(1, 21), np.array([1e4, 0.0, 0.0, 1e4])
    equation = pm.ode.DifferentialEquation(func=_infections, times=times, n_states=4, n_theta=4, t0=0.0)
    with pm.Model() as model:
        rates = [pm.HalfCauchy(name, scale) for name, scale in SIR_SCALES.items()]
        y = equation(y0=start, theta=pt.stack(rates))
        new = pt.concatenate([start[:1] - y[:1, 0], y[:-1, 0] - y[1:, 0]])
        pm.Poisson("infected", new, observed=INFECTED)
        pm.LogNormal("bacteria", pt.log(y[:, 3]), 0.15, observed=BACTERIA)
    return model


SIR_SCALES = {"beta": 2.5, "gamma": 1.0, "xi": 25.0, "delta": 1.0}
#: Chains, steps and kept ones of the reference, and steps a day of its integration.
_CHAINS, _STEPS, _KEPT, _A_DAY = 300, 1_000, 300, 8
#: Nats below the best, after 20 steps, at which a chain has led to nothing.
_NO_MASS = 100.0


def sir_draws() -> dict[str, Array]:
    """Draws of the same posterior by a program of its own: chains that begin at draws of the prior.

    Differential evolution Markov chains (ter Braak 2006, https://doi.org/10.1007/s11222-006-8769-1), with equations
    solved by the classical Runge-Kutta method at fixed steps. Before any draw is kept, chains that are stuck at poor
    modes go to where others are.
    """
    rng, scales = np.random.default_rng(1), np.array(list(SIR_SCALES.values()))
    u = np.log(np.abs(scales * rng.standard_cauchy((_CHAINS, 4))))
    logp, kept = _sir_logp(u), []
    for step in range(_STEPS):
        one, other = ((np.arange(_CHAINS) + rng.integers(1, _CHAINS, _CHAINS)) % _CHAINS for _ in range(2))
        gamma = 1.0 if step % 10 == 0 else 2.38 / np.sqrt(8.0)
        new = u + gamma * (u[one] - u[other]) + 1e-4 * rng.standard_normal(u.shape)
        of_new = _sir_logp(new)
        taken = logp + np.log(rng.random(_CHAINS)) < of_new  # those without a density move to any that have one
        u, logp = np.where(taken[:, None], new, u), np.where(taken, of_new, logp)
        if step % 20 == 0 and step < _STEPS - 2 * _KEPT:  # what has no mass is left before anything is kept
            poor = ~(logp > logp.max() - _NO_MASS)
            better = rng.choice(np.flatnonzero(~poor), poor.sum())
            u[poor], logp[poor] = u[better], logp[better]
        if step >= _STEPS - _KEPT:
            kept.append(np.exp(u))
    rates = np.stack(kept, axis=1)
    return {name: rates[..., i] for i, name in enumerate(SIR_SCALES)}


@np.errstate(all="ignore")
def _sir_logp(u: Array) -> Array:
    """Return log p at logarithms of the rates, (n, 4)."""
    rates, h = np.exp(u), 1.0 / _A_DAY
    y = np.broadcast_to([[1e4], [0.0], [0.0], [1e4]], (4, len(u))).copy()
    path = []
    for step in range(7 * _A_DAY * len(INFECTED)):
        k1 = _infections_of(y, rates.T)
        k2 = _infections_of(y + 0.5 * h * k1, rates.T)
        k3 = _infections_of(y + 0.5 * h * k2, rates.T)
        y = y + h / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + _infections_of(y + h * k3, rates.T))
        if (step + 1) % (7 * _A_DAY) == 0:
            path.append(y)
    solved = np.stack(path)
    new = -np.diff(np.concatenate([np.full((1, len(u)), 1e4), solved[:, 0]]), axis=0)
    infected = INFECTED[:, None] * np.log(new) - new
    bacteria = -0.5 * ((np.log(BACTERIA)[:, None] - np.log(solved[:, 3])) / 0.15) ** 2
    prior = (u - np.log1p((rates / np.array(list(SIR_SCALES.values()))) ** 2)).sum(axis=1)
    logp = infected.sum(axis=0) + bacteria.sum(axis=0) + prior
    return np.where(np.isfinite(logp), logp, -np.inf)


def _infections_of(y: Array, p: Array) -> Array:
    return np.stack(_infections(y, 0.0, p))


# --- curves ---


def two_exponentials(ordered: bool) -> pm.Model:
    """A sum of two decays, whose rates are ordered or can be exchanged."""
    rng = np.random.default_rng(11)
    t = np.linspace(0.2, 8.0, 30)
    y = 2.0 * np.exp(-1.6 * t) + 1.0 * np.exp(-0.25 * t) + rng.normal(0.0, 0.06, 30)
    with pm.Model() as model:
        a = pm.HalfNormal("a", 3.0, shape=2)
        if ordered:
            log_k = pm.Normal("log_k", 0.0, 1.5, shape=2, transform=ORDERED, initval=[-1.0, 1.0])
        else:
            log_k = pm.Normal("log_k", 0.0, 1.5, shape=2)
        sigma = pm.HalfNormal("sigma", 0.5)
        pm.Normal("y", (a * pt.exp(-pt.exp(log_k) * t[:, None])).sum(axis=1), sigma, observed=y)
    return model


#: Frequency and noise of the sinusoids, and the seed of their data.
SINUSOIDS = {1: (0.35, 0.8, 3), 2: (0.35, 0.8, 4), 3: (0.8, 1.0, 5), 4: (0.15, 0.6, 6), 5: (0.6, 0.9, 7)}


def _waves(number: int) -> tuple[Array, Array]:
    frequency, noise, seed = SINUSOIDS[number]
    rng, t = np.random.default_rng(seed), np.linspace(0.0, 10.0, 25)
    return t, np.sin(2 * np.pi * frequency * t + 0.5) + rng.normal(0.0, noise, 25)


def sinusoid(number: int) -> pm.Model:
    """A sinusoid of unknown frequency, with few and noisy data."""
    t, y = _waves(number)
    with pm.Model() as model:
        f, a, b = pm.Uniform("f", 0.0, 1.2), pm.Normal("a", 0.0, 1.0), pm.Normal("b", 0.0, 1.0)
        s = pm.HalfNormal("s", 1.0)
        pm.Normal("y", a * pt.sin(2 * np.pi * f * t) + b * pt.cos(2 * np.pi * f * t), s, observed=y)
    return model


def _sinusoid(number: int) -> Moments:
    """Those on a grid of frequency and noise, given which all is Gaussian."""
    t, y = _waves(number)
    grid_f, grid_s = np.linspace(0.0005, 1.1995, 2_400), np.linspace(0.2, 3.0, 150)
    log_p = np.empty((len(grid_f), len(grid_s)))
    first, second = np.empty((*log_p.shape, 2)), np.empty((*log_p.shape, 2))
    for i, f in enumerate(grid_f):
        x = np.column_stack([np.sin(2 * np.pi * f * t), np.cos(2 * np.pi * f * t)])
        values, vectors = np.linalg.eigh(x.T @ x)
        rotated = vectors.T @ (x.T @ y)
        precision = 1.0 + values / grid_s[:, None] ** 2
        mean = rotated / grid_s[:, None] ** 2 / precision
        log_p[i] = (
            -len(y) * np.log(grid_s) - 0.5 * (y @ y) / grid_s**2 - 0.5 * np.log(precision).sum(axis=1)
            + 0.5 * (mean**2 * precision).sum(axis=1) - 0.5 * grid_s**2
        )  # fmt: skip
        first[i] = mean @ vectors.T
        second[i] = first[i] ** 2 + (1.0 / precision) @ (vectors**2).T
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    of_ab = [(p[..., None] * x).sum(axis=(0, 1)) for x in (first, second)]
    sd_ab = np.sqrt(of_ab[1] - of_ab[0] ** 2)
    result = {name: (of_ab[0][i], sd_ab[i]) for i, name in enumerate("ab")}
    for name, grid, axis in (("f", grid_f, 1), ("s", grid_s, 0)):
        weights = p.sum(axis=axis)
        mean = weights @ grid
        result[name] = (mean, np.sqrt(weights @ grid**2 - mean**2))
    return result


# --- modes apart ---


def two_modes(apart: float, weight: float, at_first: bool) -> pm.Model:
    """Two Gaussians in the plane, and a flat prior: the start is near the one or the other."""
    half = 0.5 * apart
    with pm.Model() as model:
        x = pm.Flat("x", shape=2, initval=np.array([half if at_first else -half, 0.3]))
        centre = np.array([half, 0.0])
        parts = [np.log(w) - 0.5 * ((x - s * centre) ** 2).sum() for w, s in ((weight, 1.0), (1.0 - weight, -1.0))]
        pm.Potential("p", pt.logaddexp(*parts))
    return model


def _two_modes(apart: float, weight: float) -> Moments:
    mean, variance = (2.0 * weight - 1.0) * 0.5 * apart, 1.0 + weight * (1.0 - weight) * apart**2
    return {"x": (np.array([mean, 0.0]), np.array([np.sqrt(variance), 1.0]))}


TWO_MODES = tuple(
    (apart, weight, (i + j) % 2 == 0)
    for (i, apart), (j, weight) in itertools.product(
        enumerate((3.0, 4.0, 6.0, 8.0, 10.0)), enumerate((0.5, 0.6, 0.8, 0.95))
    )
)


def square() -> pm.Model:
    """The sign of what is squared is not known."""
    with pm.Model() as model:
        u = pm.Normal("u", 0.0, 3.0)
        pm.Normal("y", u**2, 0.5, observed=np.array([3.7, 4.1, 4.3, 3.9, 4.2, 3.8]))
    return model


def square_off_centre() -> pm.Model:
    """The same about a prior that prefers one of the signs."""
    with pm.Model() as model:
        u = pm.Normal("u", 1.0, 3.0)
        pm.Normal("y", u**2, 0.5, observed=np.array([3.7, 4.1, 4.3, 3.9, 4.2, 3.8]))
    return model


def _square(centre: float) -> Moments:
    u = np.linspace(-4.0, 4.0, 80_001)
    y = np.array([3.7, 4.1, 4.3, 3.9, 4.2, 3.8])
    log_p = -0.5 * ((u - centre) / 3.0) ** 2 - 2.0 * ((y[:, None] - u**2) ** 2).sum(axis=0)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ u
    return {"u": (mean, np.sqrt(p @ u**2 - mean**2))}


def factor_signs() -> pm.Model:
    """One factor behind four indicators: its sign, and that of its loadings, is not known."""
    rng = np.random.default_rng(2)
    f = rng.standard_normal(25)
    y = np.outer(f, [1.0, 0.8, -0.6, 0.9]) + rng.normal(0.0, 0.5, (25, 4))
    with pm.Model() as model:
        loadings = pm.Normal("loadings", 0.0, 1.0, shape=4)
        factor = pm.Normal("factor", 0.0, 1.0, shape=25)
        pm.Normal("y", factor[:, None] * loadings, pm.HalfNormal("sigma", 1.0), observed=y)
    return model


def mixture(ordered: bool) -> pm.Model:
    """Two normals well apart."""
    rng = np.random.default_rng(8)
    y = np.concatenate([rng.normal(-2.0, 0.7, 40), rng.normal(2.0, 0.7, 25)])
    with pm.Model() as model:
        w = pm.Beta("w", 2.0, 2.0)
        if ordered:
            mu = pm.Normal("mu", 0.0, 3.0, shape=2, transform=ORDERED, initval=[-1.0, 1.0])
        else:
            mu = pm.Normal("mu", 0.0, 3.0, shape=2)
        s = pm.HalfNormal("s", 1.0)
        parts = [pm.logp(pm.Normal.dist(mu[i], s), y) for i in range(2)]
        pm.Potential("y", pt.logaddexp(pt.log(w) + parts[0], pt.log1p(-w) + parts[1]).sum())
    return model


#: Models of the battery of `users.py` that have several modes, or an order that leaves one.
OF_USERS = (
    "structured: label switching", "structured: factor analysis", "structured: normal mixture",
    "structured: hidden markov", "regression: ordered logit", "series and fields: changepoint",
)  # fmt: skip


def _swapped(draws: dict[str, Array]) -> dict[str, Array]:
    """Exchange the labels of two components."""
    return {n: 1.0 - x if n == "w" else x[..., ::-1] if x.ndim > 2 else x for n, x in draws.items()}


def _mirrored(draws: dict[str, Array]) -> dict[str, Array]:
    """Change the signs of a factor and its loadings."""
    return {n: x if n == "sigma" else -x for n, x in draws.items()}


def _of_users(name: str) -> Case:
    build = USERS[name][1]
    sampled = build if name in OF_USERS[:2] else None  # `users.py` has references of the others
    image = {"structured: label switching": _swapped, "structured: factor analysis": _mirrored}.get(name)
    return Case(build, None, tuple(rv.name for rv in build().free_RVs), sampled, image)


_exponentials, _mixture = functools.partial(two_exponentials, True), functools.partial(mixture, True)
CASES: dict[str, Case] = {
    "Lotka-Volterra": Case(lotka_volterra, _lotka_volterra, ("theta", "z_init", "sigma")),
    "SIR": Case(sir, None, tuple(SIR_SCALES), drawn=sir_draws),
    "two exponentials, ordered": Case(_exponentials, None, ("a", "log_k", "sigma"), _exponentials),
    "two exponentials": Case(
        functools.partial(two_exponentials, False), None, ("a", "log_k", "sigma"), _exponentials, _swapped
    ),
    **{
        f"sinusoid {i}": Case(functools.partial(sinusoid, i), functools.partial(_sinusoid, i), ("f", "a", "b", "s"))
        for i in SINUSOIDS
    },
    **{
        f"two modes {apart:g} sd apart, {weight:g}{'' if first else ', from the other'}": Case(
            functools.partial(two_modes, apart, weight, first), functools.partial(_two_modes, apart, weight), ("x",)
        )
        for apart, weight, first in TWO_MODES
    },
    "y = u^2": Case(square, functools.partial(_square, 0.0), ("u",)),
    "y = u^2, off centre": Case(square_off_centre, functools.partial(_square, 1.0), ("u",)),
    "factor signs": Case(factor_signs, None, ("loadings", "factor", "sigma"), factor_signs, _mirrored),
    "mixture, ordered": Case(_mixture, None, ("w", "mu", "s"), _mixture),
    "mixture": Case(functools.partial(mixture, False), None, ("w", "mu", "s"), _mixture, _swapped),
    **{name: _of_users(name) for name in OF_USERS},
}
