"""Iterations of a step rule, one by one: which to keep, and how fast something falls."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

from measure import Array

from pymc_ngvi.density import LogDensity

#: Iterations of a run, about, that are kept.
N_RECORDED = 32


def iterates(rule: Any, q: Any, n: int) -> Iterator[tuple[int, Any]]:
    """Yield iteration and state of a step rule, the start included; the rule's own stop is set aside."""
    state = rule.init(q)
    yield 0, state
    for t in range(1, n + 1):
        state = rule.step(state)
        yield t, state


def recorded(n: int, n_kept: int = N_RECORDED) -> set[int]:
    """Return the iterations to keep: 0 and a geometric series up to n."""
    return {0, *np.unique(np.geomspace(1, n, n_kept).round().astype(int)).tolist()}


def on_independent_batches(model: pm.Model) -> LogDensity:
    """Return log p on rows with replacement, as Wu and Gardner (2024) have it, not on those of passes."""
    density = LogDensity(model)

    def draw(seed: int, number: int) -> None:
        density.next_batch(np.random.default_rng([seed, number, 1]))

    density.take_batch = draw  # type: ignore[method-assign]
    return density


def slope_of_mean(runs: pd.DataFrame) -> str:
    """Return the slope of the mean over runs, on logarithmic axes, with its standard error over resampled runs.

    Parameters
    ----------
    runs : DataFrame
        A row for each iteration, a column for each run.
    """

    def slope(values: Array) -> float:
        return float(np.polyfit(np.log(runs.index), np.log(values.mean(axis=1)), 1)[0])

    values, rng = runs.to_numpy(), np.random.default_rng(0)
    resampled = [slope(values[:, rng.integers(values.shape[1], size=values.shape[1])]) for _ in range(500)]
    return f"{slope(values):.2f} ± {np.std(resampled):.2f}"
