"""The posterior of the autoregression of ``inla_models.musa`` on a lattice: all of it, with both of its modes.

Given the three hyperparameters, level and process are Gaussian, and all sums below are exact.

Examples
--------
::

    python inla_lattice.py DATA
"""

import sys

from pathlib import Path

import numpy as np

from inla_models import table

#: Of log((1 + rho) / (1 - rho)), log tau_x and log tau_y.
_AXES = (np.linspace(-6.0, 12.0, 91), np.linspace(-6.0, 6.0, 61), np.linspace(-2.5, 11.0, 109))
#: Precision of the noise from which there is hardly any.
NO_NOISE = 2.0


def by_lattice(data: Path, most_precision: float = np.inf) -> dict[str, tuple[float, float]]:
    """Return means and standard deviations, of all or where the precision of the noise is at most a value."""
    log_m, level, variance = _evaluated(data)
    logit, log_x, log_y = _AXES
    weight = np.exp(log_m - log_m.max()) * (np.exp(log_y) <= most_precision)
    weight /= weight.sum()
    rho, tau_x, tau_y = np.tanh(0.5 * logit)[:, None, None], np.exp(log_x)[:, None], np.exp(log_y)
    found = {name: _moments(weight, values) for name, values in (("rho", rho), ("tau_x", tau_x), ("tau_y", tau_y))}
    mean, spread = _moments(weight, level)
    found["intercept"] = mean, float(np.sqrt(spread**2 + (weight * variance).sum()))
    return found


def share_without_noise(data: Path) -> float:
    """Return the posterior probability that the precision of the noise is above `NO_NOISE`."""
    log_m = _evaluated(data)[0]
    weight = np.exp(log_m - log_m.max())
    return float(weight[:, :, np.exp(_AXES[2]) > NO_NOISE].sum() / weight.sum())


def _evaluated(data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log m on the lattice, and mean and variance of the level, given the hyperparameters."""
    y = np.log(table(data, "musa.csv")["time"].to_numpy(dtype=float))[:95]
    lags = np.abs(np.arange(len(y))[:, None] - np.arange(len(y)))
    logit, log_x, log_y = _AXES
    shape = tuple(map(len, _AXES))
    log_m, level, variance = np.empty(shape), np.empty(shape), np.empty(shape)
    for i, value in enumerate(logit):
        values, vectors = np.linalg.eigh(np.tanh(0.5 * value) ** lags)
        ones, rotated = vectors.T @ np.ones(len(y)), vectors.T @ y
        spread = np.maximum(values, 0.0) / np.exp(log_x)[:, None, None] + 1.0 / np.exp(log_y)[:, None]
        precision, cross = (ones**2 / spread).sum(axis=-1), (ones * rotated / spread).sum(axis=-1)
        rest = (rotated**2 / spread).sum(axis=-1) - cross**2 / precision
        log_m[i] = -0.5 * (np.log(spread).sum(axis=-1) + np.log(precision) + rest) - 0.5 * 0.15 * value**2
        level[i], variance[i] = cross / precision, 1.0 / precision
    log_m += (log_x - 5e-5 * np.exp(log_x))[:, None] + log_y - 5e-5 * np.exp(log_y)
    return log_m, level, variance


def _moments(weight: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    mean = float((weight * values).sum())
    return mean, float(np.sqrt((weight * (values - mean) ** 2).sum()))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(f"P(tau_y > {NO_NOISE:g}) = {share_without_noise(folder):.3f}")
    for bound in (np.inf, NO_NOISE):
        print(
            f"tau_y <= {bound:g}", {name: f"{m:.3f} +- {s:.3f}" for name, (m, s) in by_lattice(folder, bound).items()}
        )
