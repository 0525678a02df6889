"""Random walks that two sensors disagree on, in both spellings: whether both modes are found, and what that takes.

Right values are those of a filter on a grid. Models with one mode, of which none is to be told that there is another,
come after them.

Examples
--------
::

    python sensors.py --seeds 1 2 3
"""

import argparse
import sys
import time
import warnings

from pathlib import Path

import numpy as np
import pymc as pm
import pytensor.tensor as pt

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

sys.path.append(str(Path(__file__).parents[1]))

from battery.test_kinds import smooth
from scipy import stats

#: Steps, and how far apart the sensors are.
WALKS = ((12, 3.0), (12, 4.0), (24, 2.0), (24, 3.0), (24, 4.0))


def walk(model: pm.Model, n: int, init_sd: float, *, is_centred: bool) -> pt.TensorVariable:
    """Return a walk with a half-normal scale."""
    with model:
        s = pm.HalfNormal("s", 1)
        if is_centred:
            return pm.GaussianRandomWalk("f", sigma=s, init_dist=pm.Normal.dist(0, init_sd), steps=n - 1)
        f0, z = pm.Normal("f0", 0, init_sd), pm.Normal("z", 0, 1, shape=n)
        return pm.Deterministic("f", f0 + s * pt.cumsum(z))


def sensors(n: int, gap: float, *, is_centred: bool) -> tuple[pm.Model, float]:
    """Return the model, and the probability that the walk is above 0 in the middle."""
    rng, model = np.random.default_rng(4), pm.Model()
    y = np.stack([side * gap / 2 + 0.15 * rng.normal(size=n) for side in (-1, 1)])
    f = walk(model, n, 3.0, is_centred=is_centred)
    with model:
        pm.StudentT("y", nu=3, mu=f, sigma=0.3, observed=y)
    grid, log_s = np.linspace(-5, 5, 501), np.linspace(np.log(0.005), np.log(4), 60)
    rows, first = stats.t.logpdf((y[:, :, None] - grid) / 0.3, 3).sum(0), stats.norm.pdf(grid, 0, 3)
    _, p, _ = smooth(grid, first / first.sum(), rows, np.exp(log_s), stats.halfnorm.logpdf(np.exp(log_s)) + log_s)
    return model, float(p[n // 2, grid > 0].sum())


def alone(number: int) -> pm.Model:
    """Return one of ten models with one mode: a walk with t, normal or Poisson noise, or groups or slopes with t."""
    rng, model = np.random.default_rng(number), pm.Model()
    level = np.cumsum(0.3 * rng.normal(size=30))
    with model:
        if number < 6:
            f = walk(model, 30, 3.0, is_centred=number % 2 == 0)
            match number // 2:
                case 0:
                    pm.StudentT("y", nu=3, mu=f, sigma=0.3, observed=level + 0.3 * rng.standard_t(3, 30))
                case 1:
                    pm.Laplace("y", mu=f, b=pm.HalfNormal("b", 1), observed=level + rng.laplace(scale=0.3, size=30))
                case _:
                    pm.Poisson("y", pt.exp(f), observed=rng.poisson(np.exp(level)))
            return model
        group, x, s = np.repeat(np.arange(20), 6), rng.normal(size=(120, 5)), pm.HalfNormal("s", 1)
        slope, t = pm.Normal("slope", 0, 2, shape=5), pm.HalfNormal("t", 1)
        u = pm.Normal("u", 0, t, shape=20) if number % 2 else t * pm.Normal("z", 0, 1, shape=20)
        mu, noise = x @ slope + u[group], rng.standard_t(4, 120) if number < 8 else rng.normal(size=120)
        pm.StudentT("y", nu=4, mu=mu, sigma=s, observed=x[:, 0] + 0.5 * rng.normal(size=20)[group] + noise)
    return model


def outcome(model: pm.Model, seed: int) -> tuple[object, str]:
    """Return a fit of the model, with what it took, its verdict and the modes that it leaves out."""
    before = time.process_time()
    with model:
        approx = pm.fit(method="ngvi", random_seed=seed, progressbar=False)
    seconds, verdict = time.process_time() - before, approx.diagnose(random_seed=seed).verdict
    return approx, f"{seconds:.1f} s, {verdict}, leaves out {[round(m.share, 2) for m in approx.record.modes]}"


def main() -> None:
    """Fit all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore")  # of how fits end
    for n, gap in WALKS:
        for is_centred in (False, True):
            model, right = sensors(n, gap, is_centred=is_centred)
            for seed in seeds:
                approx, said = outcome(model, seed)
                share = float(
                    (approx.sample(2_000, random_seed=seed).posterior["f"] > 0).mean(("chain", "draw"))[n // 2]
                )
                name = f"{n} steps, {gap:g} apart, {'' if is_centred else 'not '}centred, seed {seed}"
                print(f"{name}: {share:.2f}, right {right:.2f}; {said}", flush=True)
    for number in range(10):
        model = alone(number)
        for seed in seeds:
            print(f"one mode, {number}, seed {seed}: {outcome(model, seed)[1]}", flush=True)


if __name__ == "__main__":
    main()
