"""Simulation-based calibration of exact posteriors: the ranks of true parameters among draws.

Parameters from the prior, data from the model given these, a fit, and the rank of each true value among 999 draws
(Talts, Betancourt, Simpson, Vehtari & Gelman 2018, https://doi.org/10.48550/arXiv.1804.06788). Draws of the posterior
make all ranks from 0 to 999 as likely, those of functionals too: the sum of the fitted means, and the difference of two
groups. Each data set is fitted once: the Gaussian fit that the exact posterior begins from is judged beside it. Nothing
is compiled anew for a data set. A run can be stopped and resumed. From a checkout that is not installed, set
``PYTHONPATH`` to its root.

Examples
--------
::

    python calibration_exact.py
    python calibration_exact.py --models poisson --datasets 20 --out small.csv --table small.md --figure small.png
    python calibration_exact.py --datasets 0
"""

import argparse
import datetime
import json
import logging
import time
import warnings

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pymc as pm

from environment import describe_environment
from measure import Array
from pages import column_of, measured_on, median, table, write_between_marks
from records import Records, Row
from scipy.special import expit
from scipy.stats import binom, chisquare, kstest

#: Simulated at once, so that the data sets do not depend on how many of them are fitted.
MAX_DATASETS = 1_000
N_DRAWS, N_GROUPS, N_OF_GROUP = 999, 30, 5
#: Of the design, of the simulation, and of the draws, plus the number of the data set.
DESIGN_SEED, SIMULATION_SEED, DRAWS_SEED = 4, 2_024, 100_000
#: Bars of histograms, and of the test of uniformity.
N_BINS = 20
LEVELS = (0.5, 0.9)
POSTERIORS = ("exact", "gaussian")
#: Value variables whose ranks are recorded, with their names in tables: ranks are the same on any monotone scale.
PARAMETERS = {"intercept": "intercept", "slope": "slope", "scale_log__": "scale"}
#: Functionals whose ranks are recorded after these: the sum of the fitted means, and a difference of two groups.
FUNCTIONALS = ("total", "difference")
RANKED = (*PARAMETERS.values(), *FUNCTIONALS)
TITLES = {"bernoulli": "Bernoulli GLMM", "poisson": "Poisson GLMM"}
KEY = ("model", "dataset")
FIELDS = (
    *KEY, "status", "is_exact", "verdict", "khat", "cpu_seconds", "compile_seconds", "exact", "gaussian", "date",
    "environment",
)  # fmt: skip

#: Written with the tables: the file is there when they are.
FIGURE = """\
![Histograms of ranks, a row for each model and posterior.](img/calibration_exact.png)

The grey band has 99 % of the bars where ranks are uniform. U-shaped: intervals are too narrow. Higher at the left: the
posterior lies too high. The rows are in `tests/benchmarks/results/calibration_exact.csv`.
"""

CAPTION = f"""\
{N_GROUPS} groups of {N_OF_GROUP}, ranks among {N_DRAWS} draws. Exact: where the default fit says so; of the others, its
Gaussian is what it returns and what is judged here. Processor seconds of a whole fit, nothing compiled.
"""

ABOUT_RANKS = f"""\
Share of central intervals that hold the parameter, in percent, with the standard error at the nominal level; mean rank
over {N_DRAWS}, which is .5 ± .289 / sqrt(data sets) without bias, and its standard deviation, .289 where ranks are
uniform and more where intervals are too narrow; P values of tests of uniformity, chi-squared with {N_BINS} bars, and of
Kolmogorov and Smirnov.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit what is missing and write tables and figure."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    experiments = {name: Experiment(name) for name in options.models} if options.datasets else {}
    for i in range(options.datasets):  # both models at the same pace: a run that is stopped has something of each
        for name, experiment in experiments.items():
            if (name, str(i)) not in done:
                row = {**dict(zip(KEY, (name, i), strict=True)), **experiment.run(i)}
                date = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({**row, "date": date, "environment": describe_environment()})
                print(f"{name} {i}: {row['verdict']} {row['cpu_seconds']:.1f} s", flush=True)
    rows = records.read()
    write_between_marks(options.table, write_tables(rows), Path(__file__).name)
    if rows:
        draw(rows, options.figure)


def design() -> tuple[Array, Array]:
    """Return the covariate of rows and their groups."""
    x = np.random.default_rng(DESIGN_SEED).normal(size=N_GROUPS * N_OF_GROUP)
    return x, np.repeat(np.arange(N_GROUPS), N_OF_GROUP)


def glmm(name: str) -> pm.Model:
    """Return a model of 0 and 1, or of counts, with random intercepts; its data are ``data``."""
    x, group = design()
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(len(x), dtype=int))
        intercept, slope = pm.Normal("intercept", 0.0, 1.0), pm.Normal("slope", 0.0, 1.0)
        scale = pm.HalfNormal("scale", 1.0)
        effect = pm.Normal("effect", 0.0, scale, shape=N_GROUPS)
        eta = intercept + slope * x + effect[group]
        if name == "poisson":
            pm.Poisson("y", pm.math.exp(eta), observed=data)
        else:
            pm.Bernoulli("y", logit_p=eta, observed=data)
    return model


def functionals(name: str, intercept: Array, slope: Array, effect: Array) -> Array:
    """Return the functionals of draws, (n, 2): parameters (n,), effects (n, groups)."""
    x, group = design()
    eta = intercept[:, None] + slope[:, None] * x + effect[:, group]
    mean = np.exp(eta) if name == "poisson" else expit(eta)
    return np.column_stack([mean.sum(axis=1), effect[:, 1] - effect[:, 0]])


class Experiment:
    """The simulated data sets of one model, and what fits them: built with the first, serves for all.

    Parameters
    ----------
    name : {"bernoulli", "poisson"}
    """

    def __init__(self, name: str) -> None:
        from pymc_ngvi import NGVI

        self.name, self.model = name, glmm(name)
        with self.model:
            simulated = pm.sample_prior_predictive(
                MAX_DATASETS,
                var_names=[*PARAMETERS.values(), "effect", "y"],
                random_seed=SIMULATION_SEED,
                compile_kwargs={"mode": "FAST_COMPILE"},
            )
        truth = {name: simulated["prior"][name].to_numpy()[0] for name in (*PARAMETERS.values(), "effect")}
        of_functionals = functionals(name, truth["intercept"], truth["slope"], truth["effect"])
        self.truth = np.column_stack([truth["intercept"], truth["slope"], np.log(truth["scale"]), of_functionals])
        self.data = simulated["prior_predictive"]["y"].to_numpy()[0]
        self.inference = NGVI(self.model)

    def run(self, i: int) -> dict[str, object]:
        """Fit data set ``i`` and return what is to be recorded."""
        with self.model, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the status is in the row
            pm.set_data({"data": self.data[i]})
            self.inference.configure(random_seed=i)
            start = time.process_time()
            approx = self.inference.fit(progressbar=False)
            seconds = time.process_time() - start
        record = approx.record
        ranks = {"exact": self.ranks(approx, i), "gaussian": self.ranks(approx.gaussian, i)}
        return {
            "status": str(record.status),
            "is_exact": int(record.is_exact),
            "verdict": record.posterior,
            "khat": float(approx.khat()) if record.is_exact else None,
            "cpu_seconds": seconds,
            "compile_seconds": float(record.compile_seconds),
            **{name: json.dumps(found) for name, found in ranks.items()},
        }

    def ranks(self, approx: Any, i: int) -> list[int]:
        """Return the rank of each true parameter and functional among draws, from 0 to their number."""
        draws = approx.draw_flat(N_DRAWS, random_seed=DRAWS_SEED + i)
        found = {v.value_name: draws[:, v.where] for v in approx.layout.variables}
        of_functionals = functionals(self.name, found["intercept"][:, 0], found["slope"][:, 0], found["effect"])
        ranked = np.column_stack([*(found[name] for name in PARAMETERS), of_functionals])
        return (ranked < self.truth[i]).sum(axis=0).tolist()


# --- statistics of ranks ----------------------------------------------------------------------------------------------


def covered(ranks: Array, level: float, n_draws: int = N_DRAWS) -> float:
    """Return the share of central intervals of draws that hold the true value."""
    n_out = round((1.0 - level) / 2.0 * (n_draws + 1))  # ranks beyond either end
    return float(np.mean((ranks >= n_out) & (ranks <= n_draws - n_out)))


def bars(ranks: Array, n_draws: int = N_DRAWS) -> Array:
    """Return how many ranks are in each of `N_BINS` bars of equal probability."""
    return np.bincount(ranks.astype(int) * N_BINS // (n_draws + 1), minlength=N_BINS)


def uniformity(ranks: Array, n_draws: int = N_DRAWS) -> tuple[float, float]:
    """Return the P values of two tests of uniformity: chi-squared, and that of Kolmogorov and Smirnov."""
    part = (ranks + 0.5) / (n_draws + 1)
    return float(chisquare(bars(ranks, n_draws)).pvalue), float(kstest(part, "uniform").pvalue)


def ranks_of(rows: Sequence[Row], posterior: str) -> Array:
    """Return the ranks, (n_datasets, n): of rows from before functionals were ranked, those of the parameters."""
    found = [json.loads(row[posterior]) for row in rows]
    n = min(map(len, found))
    return np.array([ranks[:n] for ranks in found])


# --- tables and figure ------------------------------------------------------------------------------------------------


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    if not rows:
        return "No results.\n"
    by_model = {name: own for name in TITLES if (own := [row for row in rows if row["model"] == name])}
    header = ("model", "data sets", "exact", "k-hat", "seconds")
    lines = [
        FIGURE,
        *measured_on(rows),
        CAPTION,
        *table(header, [_fits(name, own) for name, own in by_model.items()]),
        "",
    ]
    header = ("model", "parameter", "posterior", *(f"{level:.0%}" for level in LEVELS), "mean rank", "sd", "P, chi2")
    lines += [ABOUT_RANKS, *table((*header, "P, KS"), [line for item in by_model.items() for line in _ranked(*item)])]
    return "\n".join([*lines, ""])


def _fits(name: str, rows: Sequence[Row]) -> list[object]:
    of = column_of(rows)
    return [
        TITLES[name],
        len(rows),
        int(of("is_exact").sum()),
        median(of("khat"), ".2f"),
        median(of("cpu_seconds"), ".2f"),
    ]


def _ranked(name: str, rows: Sequence[Row]) -> list[list[object]]:
    lines: list[list[object]] = []
    by_posterior = {posterior: ranks_of(rows, posterior).T for posterior in POSTERIORS}
    for j, parameter in enumerate(RANKED[: len(by_posterior["exact"])]):
        for posterior, of in by_posterior.items():
            ranks = of[j]
            spread = [np.sqrt(level * (1.0 - level) / len(ranks)) for level in LEVELS]
            shares = [f"{100 * covered(ranks, b):.1f} ± {100 * se:.1f}" for b, se in zip(LEVELS, spread, strict=True)]
            part = (ranks + 0.5) / (N_DRAWS + 1)
            figures = [f"{part.mean():.3f}", f"{part.std():.3f}", *(f"{p:.2g}" for p in uniformity(ranks))]
            lines.append([TITLES[name], f"`{parameter}`", posterior, *shares, *figures])
    return lines


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw histograms of ranks, a row for each model and posterior, with the band that 99 % of bars are in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [(name, own, posterior) for name in TITLES if (own := _of(rows, name)) for posterior in POSTERIORS]
    names = RANKED[: ranks_of(rows, "exact").shape[1]]
    size = (3 * len(names), 1.7 * len(lines))
    figure, axes = pyplot.subplots(len(lines), len(names), figsize=size, layout="constrained", squeeze=False)
    for panels, (name, own, posterior) in zip(axes, lines, strict=True):
        ranks, n = ranks_of(own, posterior), len(own)
        low, high = binom.ppf([0.005, 0.995], n, 1.0 / N_BINS)
        for j, (ax, parameter) in enumerate(zip(panels, names, strict=True)):
            ax.axhspan(low, high, color="0.88")
            ax.axhline(n / N_BINS, color="0.45", linewidth=0.8)
            colour = "#1c5c9e" if posterior == "exact" else "#d55e00"
            ax.bar(np.arange(N_BINS) + 0.5, bars(ranks[:, j]), width=0.9, color=colour)
            ax.set(xlim=(0, N_BINS), xticks=(0, N_BINS), xticklabels=("0", str(N_DRAWS)))
            ax.set_title(parameter, fontsize=9, loc="left")
            ax.spines[["top", "right"]].set_visible(False)
            ax.tick_params(labelsize=8)
        panels[0].set_ylabel(f"{TITLES[name]},\n{'exact' if posterior == 'exact' else 'Gaussian'}", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("rank of the true value", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=90)


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["model"] == name]


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    results = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=TITLES, default=list(TITLES), metavar="MODEL")
    parser.add_argument(
        "--datasets", type=int, choices=range(MAX_DATASETS + 1), default=400, metavar="N", help="0: only the tables"
    )
    parser.add_argument("--out", type=Path, default=results / "calibration_exact.csv")
    parser.add_argument("--table", type=Path, default=results / "calibration.md", help="page with marks, or a new file")
    parser.add_argument("--figure", type=Path, default=Path(__file__).parents[2] / "docs/img/calibration_exact.png")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    main()
