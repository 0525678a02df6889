"""Make the references that no other place has, by long runs of NUTS: ``python tests/battery/references.py [NAME ...]``.

A reference is written only if its chains agree and have moved enough; what is in the file already is not made again.
Log marginal likelihoods are those of bridge sampling from the same draws (Meng and Wong 1996).
Needs nutpie.
"""

import sys
import time

from pathlib import Path

import arviz_stats
import numpy as np

from scipy.special import expit, logsumexp
from scipy.stats import multivariate_normal

FILE = Path(__file__).with_name("references.npz")
if __name__ == "__main__":
    sys.path.insert(0, str(FILE.parents[1]))

from measure import log_density_of, unconstrain  # noqa: E402
from xarray import DataTree  # noqa: E402

from battery.known import Known, quantities, varying  # noqa: E402
from battery.models import TOLD_BY_NUTS  # noqa: E402

CHAINS, TUNE, DRAWS, TARGET, MOST_PAIRS = 2, 1_000, 4_000, 0.9, 3
#: The largest R-hat and the least effective size of a mean that are written.
RHAT, LEAST = 1.01, 1_000.0
#: Dimensions up to which there is a log marginal likelihood, and the standard error that it may have.
DIMENSIONS, ERROR = 45, 0.05


def make(name):
    """Return what NUTS knows of a model."""
    import nutpie

    model, written, moved = TOLD_BY_NUTS[name]()
    compiled, parts = nutpie.compile_pymc_model(written), []
    while True:
        tree = nutpie.sample(
            compiled, chains=CHAINS, cores=1, tune=TUNE, draws=DRAWS, seed=1 + len(parts), target_accept=TARGET,
            adaptation="low_rank", progress_bar=False,
        )  # fmt: skip
        posterior = moved(tree.posterior.to_dataset())
        parts.append(posterior)
        draws, names, pairs = varying(*quantities_of(parts, model))
        known = Known.of_draws(draws, names, pairs, CHAINS * len(parts))
        rhat = max(float(arviz_stats.rhat(x.reshape(CHAINS * len(parts), -1))) for x in draws.T)
        least = float(known.size.min())
        if rhat < RHAT and least >= LEAST:
            return known, rhat, bridge(parts, model)
        if len(parts) == MOST_PAIRS:
            raise ValueError(f"R-hat {rhat:.3f}, effective size {least:.0f}")


def quantities_of(parts, model):
    """Return the quantities of several pairs of chains."""
    found = [quantities(part, model) for part in parts]
    return np.concatenate([draws for draws, _, _ in found]), *found[0][1:]


def bridge(parts, model):
    """Return the log marginal likelihood and its standard error; NaN where it is not well known."""
    theta = np.concatenate([unconstrain(DataTree(part), model) for part in parts])
    n, d = theta.shape
    if d > DIMENSIONS:
        return np.full(2, np.nan)
    scale = theta.std(axis=0)
    theta = (theta / scale).reshape(-1, DRAWS, d)
    first, theta = theta[:, ::2].reshape(-1, d), theta[:, 1::2].reshape(-1, d)
    q = multivariate_normal(first.mean(axis=0), np.atleast_2d(np.cov(first.T)))
    log_p, n = log_density_of(model), len(theta)
    drawn = q.rvs(n, random_state=1).reshape(n, d)
    ours, theirs = (log_p(x * scale) + np.log(scale).sum() - q.logpdf(x) for x in (theta, drawn))
    theirs = np.nan_to_num(theirs, nan=-np.inf)
    centre = np.median(ours)
    ours, theirs, value = ours - centre, theirs - centre, 0.0
    for _ in range(1_000):
        top = logsumexp(theirs - np.logaddexp(theirs, value))
        before, value = value, float(top - logsumexp(-np.logaddexp(ours, value)))
        if abs(value - before) < 1e-10:
            break
    of_ours, of_theirs = expit(value - ours), expit(theirs - value)  # shares of the one in the other
    chains = of_ours.reshape(len(parts) * CHAINS, -1)
    size = float(arviz_stats.ess(chains, method="mean"))
    error = np.sqrt(of_theirs.var() / of_theirs.mean() ** 2 / n + of_ours.var() / of_ours.mean() ** 2 / size)
    return np.array([value + centre, error]) if error < ERROR else np.full(2, np.nan)


def main(names):
    """Make what is missing, or what is named."""
    for name in names or TOLD_BY_NUTS:
        store = dict(np.load(FILE)) if FILE.exists() else {}
        if f"{name}/mean" in store:
            continue
        start = time.perf_counter()
        try:
            known, rhat, evidence = make(name)
        except Exception as error:  # the others are not to wait for this one
            print(f"{name}: NOT WRITTEN: {error}", flush=True)
            continue
        values = known.to_store(name) | {f"{name}/evidence": evidence}
        np.savez_compressed(FILE.with_suffix(".new.npz"), **(store | values))
        FILE.with_suffix(".new.npz").replace(FILE)
        print(
            f"{name}: {len(known.names)} quantities, effective size {known.size.min():.0f}, R-hat {rhat:.3f}, "
            f"evidence {evidence[0]:.3f} +- {evidence[1]:.3f}, {time.perf_counter() - start:.0f} s", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
