"""Classification by a Gaussian process with a fixed kernel, as a file that other packages' Pythons read as well.

Nothing but NumPy and SciPy is imported here, for ``natgrad_gpjax.py`` and ``natgrad_gpflow.py`` run in environments of
their own.
"""

import os
import time

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scipy.special import ndtr

#: Added to the diagonal of the kernel, by all methods alike.
NUGGET = 1e-4
#: Standard deviation from which log(1 + exp(-|f|)) is integrated over f, and not over standardised f.
_WIDE = 0.5


@dataclass(frozen=True)
class Problem:
    """Points (n, d), labels of -1 and 1 (n,), and length scale and standard deviation of a squared exponential."""

    x: np.ndarray
    sign: np.ndarray
    length: float
    sd: float

    @classmethod
    def read(cls, file: Path) -> "Problem":
        """Read what `write` wrote."""
        with np.load(file) as found:
            return cls(found["x"], found["sign"], float(found["length"]), float(found["sd"]))

    def write(self, file: Path) -> None:
        """Write a file."""
        np.savez(file, x=self.x, sign=self.sign, length=self.length, sd=self.sd)

    @cached_property
    def factor(self) -> np.ndarray:
        """The Cholesky factor of K, (n, n): f = factor v."""
        square = (self.x**2).sum(axis=1)
        distance = np.maximum(square[:, None] + square - 2.0 * self.x @ self.x.T, 0.0)
        kernel = self.sd**2 * np.exp(-0.5 * distance / self.length**2)
        return np.linalg.cholesky(kernel + NUGGET * np.eye(len(kernel)))

    def loss(self, mean: np.ndarray, root: np.ndarray) -> float:
        """Return -ELBO of v ~ N(mean, root root'), where v has a standard normal prior; nan if it is not finite."""
        if not (np.isfinite(mean).all() and np.isfinite(root).all()):
            return np.nan
        half = self.factor @ root
        sd = np.sqrt((half**2).sum(axis=1))
        divergence = 0.5 * (mean @ mean + (root**2).sum() - len(mean)) - np.linalg.slogdet(root)[1]
        return float(divergence + softplus(-self.sign * (self.factor @ mean), sd).sum())


def softplus(mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Return E log(1 + exp(f)) under N(mean, sd^2), (n,), by the trapezoidal rule or Simpson's.

    log(1 + exp(f)) = max(f, 0) + log(1 + exp(-|f|)): the first part has a closed form if sd is wide, and what is left
    is integrated on both sides of its kink.
    """
    z = np.linspace(-10.0, 10.0, 801)
    weights = np.exp(-0.5 * z**2) * (z[1] - z[0]) / np.sqrt(2.0 * np.pi)
    found = np.empty(len(mean))
    narrow = sd < _WIDE
    found[narrow] = np.logaddexp(0.0, mean[narrow, None] + sd[narrow, None] * z) @ weights
    mean, sd = mean[~narrow, None], sd[~narrow, None]
    f, step = np.linspace(0.0, 40.0, 2001, retstep=True)
    simpson = np.where(np.arange(len(f)) % 2, 4.0, 2.0)
    simpson[[0, -1]] = 1.0
    simpson *= step / 3.0 * np.log1p(np.exp(-f))
    densities = np.exp(-0.5 * ((f - mean) / sd) ** 2) + np.exp(-0.5 * ((f + mean) / sd) ** 2)
    rest = (densities @ simpson)[:, None] / (np.sqrt(2.0 * np.pi) * sd)
    part = mean * ndtr(mean / sd) + sd * np.exp(-0.5 * (mean / sd) ** 2) / np.sqrt(2.0 * np.pi)
    found[~narrow] = (rest + part)[:, 0]
    return found


def one_core() -> None:
    """Keep this process on one core, so that processor seconds do not count threads that wait."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def follow(
    problem: Problem, step: Callable[[], tuple[Any, Any, float]], n: int, seconds: float, near: float
) -> dict[str, np.ndarray]:
    """Take steps, and return -ELBO after each, by exact expectations and as the package has it, and its seconds.

    Parameters
    ----------
    step : callable
        Returns mean and root of the covariance of v, and -ELBO as the package has it at the values before the step.
    n : int
        Steps at most.
    seconds : float
        Processor seconds at most.
    near : float
        A step that changes -ELBO by less than this, five times in turn, is the last one.
    """
    losses, own, times = [problem.loss(np.zeros(len(problem.x)), np.eye(len(problem.x)))], [], []
    still = 0
    while len(own) < n and sum(times) < seconds and still < 5:
        start = time.process_time()
        mean, root, before = step()
        times.append(time.process_time() - start)
        own.append(before)
        losses.append(problem.loss(np.asarray(mean, dtype=float).ravel(), np.asarray(root, dtype=float)))
        if not np.isfinite(losses[-1]):
            break
        still = still + 1 if abs(losses[-1] - losses[-2]) < near else 0
    return {"loss": np.array(losses), "own": np.array(own), "seconds": np.array(times)}
