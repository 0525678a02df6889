"""Models of `scans.py`: a hidden Markov model with two outcomes, and a local level, as people write them."""

import warnings

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

N_HMM, N_LEVEL = 400, 100


def _scan(step, **options):
    return pytensor.scan(step, return_updates=False, **options)


def hmm_data():
    """Return normal and Poisson outcomes of two states."""
    rng = np.random.default_rng([35, 1])
    moves, state = np.array([[0.9, 0.1], [0.2, 0.8]]), np.zeros(N_HMM, dtype=int)
    for t in range(1, N_HMM):
        state[t] = rng.choice(2, p=moves[state[t - 1]])
    return rng.normal(np.array([-1.0, 1.0])[state], 0.8), rng.poisson(np.array([2.0, 5.0])[state])


def level_data():
    """Return a level that wanders, observed with noise."""
    rng = np.random.default_rng([35, 2])
    return np.cumsum(rng.normal(0.0, 0.5, N_LEVEL)) + rng.normal(0.0, 1.0, N_LEVEL)


def _parameters(*, is_initial_given=True):
    ordered = pm.distributions.transforms.ordered
    rows = pm.Dirichlet("P", np.array([[4.0, 1.0], [1.0, 4.0]]))
    # pymc-extras takes no initial values: there, that of the prior is ordered
    given = {"mu": 0.0, "initval": np.array([-1.0, 1.0])} if is_initial_given else {"mu": np.array([-1e-6, 1e-6])}
    mu = pm.Normal("mu", sigma=2.0, shape=2, transform=ordered, **given)
    return rows, mu, pm.HalfNormal("sigma", 2.0, shape=2), pm.Gamma("lam", 2.0, 0.5, shape=2)


def forward():
    """The forward algorithm; densities of the outcomes are computed before it."""
    y, counts = hmm_data()
    with pm.Model() as model:
        rows, mu, sigma, lam = _parameters()
        emitted = pm.logp(pm.Normal.dist(mu, sigma), y[:, None]) + pm.logp(pm.Poisson.dist(lam), counts[:, None])
        alpha = _scan(
            lambda e, a, moves: pt.logsumexp(a[:, None] + moves, axis=0) + e,
            sequences=[emitted[1:]], outputs_info=[emitted[0] + np.log(0.5)], non_sequences=[pt.log(rows)],
        )  # fmt: skip
        pm.Potential("outcomes", pt.logsumexp(alpha[-1]))
    return model


def in_the_step():
    """Densities of the outcomes inside of the step; the first state has its stationary distribution."""
    y, counts = hmm_data()
    with pm.Model() as model:
        rows, mu, sigma, lam = _parameters()
        start = pt.linalg.solve(pt.eye(2) - rows.T + 1.0, pt.ones(2, dtype="float64"))

        def emitted(y, k, mu, sigma, lam):
            return pm.logp(pm.Normal.dist(mu, sigma), y) + pm.logp(pm.Poisson.dist(lam), k)

        def step(y, k, a, rows, *others):
            return pt.logsumexp(a[:, None] + pt.log(rows), axis=0) + emitted(y, k, *others)

        alpha = _scan(
            step, sequences=[pt.as_tensor(y[1:]), pt.as_tensor(counts[1:])],
            outputs_info=[pt.log(start) + emitted(y[0], counts[0], mu, sigma, lam)],
            non_sequences=[rows, mu, sigma, lam],
        )  # fmt: skip
        pm.Potential("outcomes", pt.logsumexp(alpha[-1]))
    return model


def marginalised():
    """A chain of pymc-extras, summed over by it."""
    import pymc_extras as pmx

    y, counts = hmm_data()
    with pm.Model() as model, warnings.catch_warnings():
        rows, mu, sigma, lam = _parameters(is_initial_given=False)
        chain = pmx.DiscreteMarkovChain("chain", P=rows, init_dist=pm.Categorical.dist([0.5, 0.5]), steps=N_HMM - 1)
        pm.Normal("y", mu[chain], sigma[chain], observed=y)
        pm.Poisson("counts", lam[chain], observed=counts)
        return pmx.marginalize(model, ["chain"])


def _scales():
    return pm.HalfNormal("move", 1.0), pm.HalfNormal("noise", 2.0)


def by_numbers():
    """A Kalman filter of a level, a number."""
    with pm.Model() as model:
        move, noise = _scales()

        def step(y, a, p, move, noise):
            p = p + move**2
            f = p + noise**2
            gain, error = p / f, y - a
            return a + gain * error, p * (1.0 - gain), -0.5 * (pt.log(2.0 * np.pi * f) + error**2 / f)

        start = [pt.constant(0.0, dtype="float64"), pt.constant(25.0, dtype="float64"), None]
        *_, fits = _scan(step, sequences=[level_data()], outputs_info=start, non_sequences=[move, noise])
        pm.Potential("y", fits.sum())
    return model


def by_matrices():
    """The same, written for any state space."""
    with pm.Model() as model:
        move, noise = _scales()
        moves, see = np.eye(1), np.eye(1)

        def step(y, a, p, moved, seen):
            p = moves @ p @ moves.T + moved
            f = see @ p @ see.T + seen
            inverse, error = pt.linalg.inv(f), y - see @ a
            gain = p @ see.T @ inverse
            fit = -0.5 * (np.log(2.0 * np.pi) + pt.linalg.slogdet(f)[1] + error @ inverse @ error)
            return a + gain @ error, p - gain @ see @ p, fit

        *_, fits = _scan(
            step, sequences=[level_data()[:, None]],
            outputs_info=[pt.zeros(1, dtype="float64"), pt.constant(25.0 * np.eye(1)), None],
            non_sequences=[pt.diag(pt.stack([move**2])), pt.diag(pt.stack([noise**2]))],
        )  # fmt: skip
        pm.Potential("y", fits.sum())
    return model


def by_extras():
    """The filter of pymc-extras; the first level is a parameter."""
    import pandas as pd

    from pymc_extras.statespace import structural

    components = structural.LevelTrend(order=1, innovations_order=1) + structural.MeasurementError()
    space = components.build(verbose=False)
    with pm.Model(coords=space.coords) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing index of time
        pm.Deterministic("P0", pt.constant(25.0 * np.eye(1)), dims=space.param_dims["P0"])
        pm.Normal("initial_level_trend", 0.0, 5.0, dims=space.param_dims["initial_level_trend"])
        pm.HalfNormal("sigma_level_trend", 1.0, dims=space.param_dims["sigma_level_trend"])
        pm.HalfNormal("sigma_MeasurementError", 2.0)
        space.build_statespace_graph(pd.DataFrame({"y": level_data()}))
    return model


MODELS = {
    "hidden Markov, densities before the loop": forward,
    "hidden Markov, densities in the step": in_the_step,
    "hidden Markov, `marginalize` of pymc-extras": marginalised,
    "local level, numbers": by_numbers,
    "local level, matrices": by_matrices,
    "local level, state space of pymc-extras": by_extras,
}
