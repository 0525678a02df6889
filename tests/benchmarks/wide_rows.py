"""Models whose priors are so wide that rows alone say what q is: nats below the optimum, by expectations.

Classification by Gaussian processes with prior standard deviations of 150 to 400, as in Khan et al. (2016), and two
simulated models. All expectations of a default fit are counted: the start, trials of steps that are not taken, and the
last check. Each is one of all rows, and one factorisation. Results of models whose data are not at hand stay as they
are. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

``--data`` is a folder with ``sonar.csv``, ``usps_2vs4.csv.gz`` and ``usps_3vs5.csv.gz``: labels 0 and 1 in the column
``y``, ``is_test`` (of Sonar; USPS is split at random), and the features, those of USPS in thousandths.

References
----------
.. [1] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146

Examples
--------
::

    python wide_rows.py --data DIR
"""

import argparse
import datetime
import functools
import time

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pymc as pm

from environment import describe_environment
from khan_gp_data import SETTINGS, process, split
from pages import measured_on, table, write_between_marks
from records import Records, Row

from pymc_ngvi import fit_ngvi
from pymc_ngvi.core.types import Density, GaussianState
from pymc_ngvi.methods.estimators import ExactEvaluation, Quadrature
from pymc_ngvi.results.approximation import NGVIApproximation

RESULTS = Path(__file__).parent / "results"
FIELDS = ("model", "n_rows", "prior_sd", "expectation", "elbo", "seconds", "date", "environment")
#: Nats below the optimum, and expectations, in the columns of the tables.
DISTANCES, EXPECTATIONS = (10.0, 1.0, 0.1, 0.01), (1, 2, 4, 6, 8, 10, 11, 12, 13, 14, 16, 18, 20)


def simulated_process(data: Path | None) -> pm.Model:
    """Return a classification of 200 points in two dimensions."""
    rng = np.random.default_rng(5)
    x = rng.uniform(0.0, 3.0, (200, 2))
    signal = 6.0 * np.sin(3.0 * x[:, 0]) * np.cos(2.0 * x[:, 1])
    return process(x, (rng.uniform(size=200) < 1.0 / (1.0 + np.exp(-signal))).astype(int), 0.7, 400.0)[0]


def separable(data: Path | None) -> pm.Model:
    """Return a logistic regression whose data a plane separates."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(150, 60))
    y = (x @ rng.normal(size=60) > 0.0).astype(int)
    with pm.Model() as model:
        pm.Bernoulli("y", logit_p=x @ pm.Normal("beta", 0.0, 100.0, shape=60), observed=y)
    return model


def khan(data: Path, name: str) -> pm.Model:
    """Return a classification of Khan et al."""
    setting = SETTINGS[name]
    x, y, is_test = split(data / setting.file, setting.n_train)
    return process(x[~is_test], y[~is_test], np.exp(setting.log_length), np.exp(setting.log_sd))[0]


def _of_khan(name: str, n_rows: int) -> tuple[int, int, str, Callable[..., pm.Model]]:
    setting = SETTINGS[name]
    return n_rows, round(np.exp(setting.log_sd)), setting.file, functools.partial(khan, name=name)


#: Name: rows, prior sd, file of the data if there is one, and what makes the model.
MODELS: dict[str, tuple[int, int, str | None, Callable[..., pm.Model]]] = {
    "Sonar": _of_khan("Sonar", 165),
    "USPS, 2 against 4": _of_khan("USPS, 2 against 4", 884),
    "USPS, 3 against 5": _of_khan("USPS, 3 against 5", 767),
    "simulated, Gaussian process": (200, 400, None, simulated_process),
    "simulated, separable": (150, 100, None, separable),
}


def followed(model: pm.Model) -> tuple[list[float], float, NGVIApproximation]:
    """Return the ELBO of each expectation of a fit, in turn, processor seconds of the fit, and what came out."""
    found: list[float] = []
    plain = Quadrature.by_rules

    def counted(self: Quadrature, target: Density, state: GaussianState, *rest: object, **how: object) -> object:
        evaluation: ExactEvaluation = plain(self, target, state, *rest, **how)
        found.append(evaluation.elbo)
        return evaluation

    Quadrature.by_rules = counted
    try:
        start = time.process_time()
        approx = fit_ngvi(model=model, posterior="gaussian", random_seed=1, progressbar=False)
        return found, time.process_time() - start, approx
    finally:
        Quadrature.by_rules = plain


def measure(records: Records, name: str, data: Path | None) -> None:
    """Fit a model, and keep one row for each expectation; say why where that cannot be."""
    n_rows, prior_sd, file, make = MODELS[name]
    if file is not None and (data is None or not (data / file).exists()):
        print(f"{name}: left out, for there is no {file} in {data or 'a folder that --data names'}")
        return
    found, seconds, _ = followed(make(data))
    records.drop(lambda row: row["model"] == name)
    shared = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "environment": describe_environment()}
    for number, elbo in enumerate(found, start=1):
        row = {"model": name, "n_rows": n_rows, "prior_sd": prior_sd, "expectation": number, "elbo": elbo}
        records.append(row | {"seconds": round(seconds, 2)} | shared)
    print(name, f"{max(found):.4f}", len(found), flush=True)


def tables(rows: Sequence[Row]) -> str:
    """Return how many expectations each model takes, and how far it is after some."""
    names = [name for name in MODELS if any(row["model"] == name for row in rows)]
    needed, left = [], []
    for name in names:
        own = [row for row in rows if row["model"] == name]
        best = np.maximum.accumulate([float(row["elbo"]) for row in own])
        below = best[-1] - best
        within = [int(np.argmax(below < distance)) + 1 for distance in DISTANCES]
        first = own[0]
        needed.append(
            [name, first["n_rows"], first["prior_sd"], f"{-best[-1]:.4f}", *within, len(own), first["seconds"]]
        )
        left.append([name, *(f"{below[n - 1]:.2g}" if n <= len(own) else "" for n in EXPECTATIONS)])
    distances = [f"{distance:g} nat{'s'[: distance != 1.0]}" for distance in DISTANCES]
    lines = [*measured_on(rows), "Expectations until the ELBO is within some nats of the optimum, and all:", ""]
    lines += table(["model", "rows", "prior sd", "-ELBO", *distances, "all", "processor seconds"], needed)
    lines += ["", "Nats below the optimum after some expectations:", ""]
    lines += table(["model", *map(str, EXPECTATIONS)], left)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit models, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--out", type=Path, default=RESULTS / "wide_rows.csv")
    parser.add_argument("--table", type=Path, default=RESULTS / "wide_rows.md", help="page with marks, or a new file")
    options = parser.parse_args(arguments)
    records = Records(options.out, FIELDS)
    for name in options.models:
        measure(records, name, options.data)
    write_between_marks(options.table, tables(records.read()), Path(__file__).name)


if __name__ == "__main__":
    main()
