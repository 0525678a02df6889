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
    """Return a model with one mode: a walk, or the effects of groups, in either spelling, with t or Laplace noise."""
    rng, model, at = np.random.default_rng(number), pm.Model(), np.arange(30)
    if number < 5:
        effects = walk(model, 30, 3.0, is_centred=number % 2 == 0)
    with model:
        if number >= 5:
            at, t = np.repeat(np.arange(20), 6), pm.HalfNormal("t", 1)
            effects = pm.Normal("u", 0, t, shape=20) if number % 2 else t * pm.Normal("z", 0, 1, shape=20)
        y, law = np.cumsum(0.3 * rng.normal(size=30))[at] + 0.3 * rng.standard_t(3, len(at)), {"mu": effects[at]}
        (pm.Laplace("y", **law, b=0.3, observed=y) if number % 3 else pm.StudentT("y", 3, **law, sigma=0.3, observed=y))
    return model


def main() -> None:
    """Fit all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore")  # of how fits end
    cases = {
        f"{n} steps, {gap:g} apart, {'' if is_centred else 'not '}centred": sensors(n, gap, is_centred=is_centred)
        for n, gap in WALKS
        for is_centred in (False, True)
    } | {f"one mode, {number}": (alone(number), None) for number in range(10)}
    for name, (model, right) in cases.items():
        for seed in seeds:
            before = time.process_time()
            approx = pm.fit(method="ngvi", model=model, random_seed=seed, progressbar=False)
            said = f"{time.process_time() - before:.1f} s, {approx.diagnose(random_seed=seed).verdict}"
            if right is not None:
                f = approx.sample(2_000, random_seed=seed).posterior["f"]
                said += f", {float((f[..., f.shape[2] // 2] > 0).mean()):.2f}, right {right:.2f}"
            print(f"{name}, {seed}: {said}, leaves out {[round(m.share, 2) for m in approx.record.modes]}", flush=True)


if __name__ == "__main__":
    main()
