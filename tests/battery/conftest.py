"""One fit of each model for all that is asserted of it."""

import csv
import os
import time
import warnings

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pymc as pm
import pytest

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method)

from battery.models import APPROXIMATE, EXACT, GAUSSIAN, MODELS, QUICK

#: Draws of a fit.
N_DRAWS = 10_000
#: Seconds of each fit today, as multiples of those of a kernel. Lines are added to the file that BATTERY_SECONDS names.
_SECONDS = Path(__file__).with_name("seconds.csv")


@dataclass(frozen=True)
class Outcome:
    """A fit of a model, and seconds of the processor as multiples of those of a fixed kernel."""

    name: str
    entry: object
    approx: object
    ratio: float


def kernel_seconds():
    """Return the seconds of the processor that a fixed piece of work takes: small matrices, as in a fit."""
    matrix = np.eye(30) + 0.01
    start = time.process_time()
    for _ in range(2_000):
        np.linalg.cholesky(matrix)
        np.exp(matrix).sum()
    return time.process_time() - start


def kind_of(approx):
    """Return the kind of a posterior."""
    if approx.record.is_exact:
        return EXACT
    return GAUSSIAN if approx.plan is None or approx.plan.taken.kind == "gaussian" else APPROXIMATE


def models(names=MODELS):
    """Return parameters of models, each in a group of its own, those that are not quick only in the whole battery."""
    return [
        pytest.param(
            name, id=name, marks=[pytest.mark.xdist_group(name), *([] if name in QUICK else [pytest.mark.battery])]
        )
        for name in names
    ]


@pytest.fixture(scope="session")
def _warm():
    """Leave what the first fit of a process takes out of the seconds of a model."""
    with MODELS["closed: gamma-Poisson"].build():
        pm.fit(method="ngvi", random_seed=1, progressbar=False)


@pytest.fixture(scope="session")
def seconds():
    """The seconds of today, by model."""
    with _SECONDS.open(newline="") as file:
        return {name: float(ratio) for name, ratio in csv.reader(file)}


@pytest.fixture(scope="module", params=models())
def outcome(request, _warm):
    """The fit of a model by the default."""
    entry = MODELS[request.param]
    with warnings.catch_warnings():
        if entry.is_reliable is not True:
            warnings.simplefilter("ignore")  # that it did not converge is what is asked for
        model, start = entry.build(), time.process_time()
        with model:
            approx = pm.fit(method="ngvi", random_seed=1, progressbar=False, **entry.options)
        ratio = (time.process_time() - start) / kernel_seconds()
    if "BATTERY_SECONDS" in os.environ:
        with open(os.environ["BATTERY_SECONDS"], "a", newline="") as file:
            csv.writer(file).writerow([request.param, f"{ratio:.2f}"])
    return Outcome(request.param, entry, approx, ratio)
