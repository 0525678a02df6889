"""Is the Gaussian fit calibrated? Intervals and probabilities of q beside parameters drawn from the prior.

Simulation-based calibration of variational inference (Yao, Vehtari, Simpson & Gelman 2018, "Yes, but did it work?",
ICML, https://proceedings.mlr.press/v80/yao18a.html): parameters theta_0 from the prior, data from the model, a fit, and
p = P_q(theta < theta_0). Where q is the posterior, p is uniform, in the data sets of any class that the data alone
decide (such as those with k-hat < .5). A run can be stopped and resumed: data sets that are in the results file already
are not fitted again. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python calibration.py
    python calibration.py --models logistic --datasets 20 --out small.csv --table small.md --figure small.png
    python calibration.py --datasets 0
"""

import argparse
import datetime
import io
import json
import logging
import time
import warnings

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pymc as pm

from environment import describe_environment
from measure import Array, Estimate
from pages import column_of, measured_on, median, table, write_between_marks
from records import Records, Row
from scipy.stats import binom, ks_2samp

#: Simulated at once, so that the data sets do not depend on how many of them are fitted.
MAX_DATASETS = 1_000
DRAWS, KHAT_DRAWS = 2_000, 10_000
#: Of the simulation; of the draws behind p and of k-hat, plus the number of the data set; of the test of symmetry.
SIMULATION_SEED, DRAWS_SEED, KHAT_SEED, FLIPS_SEED = 2018, 100_000, 700_000, 3
N_GROUPS, N_OF_GROUP = 12, 8
LEVELS = (0.5, 0.9)
#: Bounds of the classes of k-hat.
CLASSES = (-np.inf, 0.5, 0.7, np.inf)
CLASS_NAMES = ("k-hat < .5", ".5 to .7", "above .7")
KEY = ("model", "dataset")
FIELDS = (*KEY, "status", "gap", "khat", "n_iterations", "n_gradients", "seconds", "p", "date", "environment")

CAPTION = f"""\
Each fit is the default Gaussian one, but for `reparam="rvb2"` where it says so; p comes from {DRAWS:,} draws, k-hat
from {KHAT_DRAWS:,}. Seconds are of one fit, its log density compiled already, on a busy machine.
"""

ABOUT_COVERAGE = """\
Share of central intervals that hold the parameter, in percent. After ±, the standard error: the larger of that of
independent trials at the nominal level and that of the means of the data sets. The elements of a vector are counted
together. In brackets, the number of data sets.
"""

ABOUT_SYMMETRY = """\
VSBC: p is symmetric about 1/2 where q's mean is unbiased, on average over data sets. Mean of p: below 1/2, q lies too
high. D: the distance of Kolmogorov and Smirnov between p and 1 - p; "KS": its P value as in the paper, which takes the
two for independent samples and so is too small; "signs": the P value from 9,999 random reflections of data sets, which
is exact. In the scale, sd(p): 1 / sqrt(12) = .289 if p is uniform, more where q is too narrow.
"""


@dataclass(frozen=True)
class Setting:
    """A model whose data are simulated.

    Parameters
    ----------
    title : str
    build : callable
        Returns the model, with its data in ``pm.Data`` named "data" and observed as "y".
    shown : tuple of str
        Variables whose p the figure has.
    options : dict
        Of ``pm.fit``.
    """

    title: str
    build: Callable[[], pm.Model]
    shown: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


def logistic() -> pm.Model:
    x = np.random.default_rng(1).normal(size=(100, 6))
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 1.5, shape=6)
        pm.Bernoulli("y", logit_p=x @ beta, observed=pm.Data("data", np.zeros(100, dtype=int)))
    return model


def random_intercepts(centred: bool, counts: bool) -> pm.Model:
    """Return a GLMM of 0 and 1, or of counts, with an intercept for each group."""
    x = np.random.default_rng(2).normal(size=N_GROUPS * N_OF_GROUP)
    group = np.repeat(np.arange(N_GROUPS), N_OF_GROUP)
    with pm.Model() as model:
        data = pm.Data("data", np.zeros(len(x), dtype=int))
        intercept, slope = pm.Normal("intercept", 0.0, 1.0), pm.Normal("slope", 0.0, 1.0)
        scale = pm.HalfNormal("scale", 1.0)
        effect = pm.Normal("effect", 0.0, scale, shape=N_GROUPS) if centred else scale * pm.Normal("z", shape=N_GROUPS)
        eta = intercept + slope * x + effect[group]
        if counts:
            pm.Poisson("y", pm.math.exp(eta), observed=data)
        else:
            pm.Bernoulli("y", logit_p=eta, observed=data)
    return model


SETTINGS = {
    "logistic": Setting("logistic regression", logistic, ("beta",)),
    "noncentred": Setting(
        "logistic GLMM, non-centred", lambda: random_intercepts(False, False), ("intercept", "scale", "z")
    ),
    "centred": Setting(
        "logistic GLMM, centred", lambda: random_intercepts(True, False), ("intercept", "scale", "effect")
    ),
    "rvb2": Setting(
        "logistic GLMM, rvb2",
        lambda: random_intercepts(True, False),
        ("intercept", "scale", "effect"),
        {"reparam": "rvb2"},
    ),
    "poisson": Setting(
        "Poisson GLMM, centred", lambda: random_intercepts(True, True), ("intercept", "scale", "effect")
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit what is missing and write tables and figure."""
    options = _parse_options(arguments)
    records = Records(options.out, FIELDS)
    done = {tuple(row[key] for key in KEY) for row in records.read()}
    experiments = {name: Experiment(SETTINGS[name]) for name in options.models} if options.datasets else {}
    for i in range(options.datasets):  # all models at the same pace: a run that is stopped has something of each
        for name, experiment in experiments.items():
            if (name, str(i)) not in done:
                row = {**dict(zip(KEY, (name, i), strict=True)), **experiment.run(i)}
                date = datetime.datetime.now().isoformat(timespec="seconds")
                records.append({**row, "date": date, "environment": describe_environment()})
                print(f"{name} {i}: {row['status']}, k-hat {row['khat']:.2f}, {row['seconds']:.1f} s", flush=True)
    rows = records.read()
    write_between_marks(options.table, write_tables(rows), Path(__file__).name)
    if rows:
        draw(rows, options.figure)


class Experiment:
    """The simulated data sets of one model, and its log density, compiled once for all of them.

    Parameters
    ----------
    setting : Setting
    """

    def __init__(self, setting: Setting) -> None:
        from pymc_ngvi import LogDensity

        self.model, self.options = setting.build(), setting.options
        self.names = [variable.name for variable in self.model.free_RVs]
        self.density = LogDensity(self.model)
        with self.model:
            simulated = pm.sample_prior_predictive(
                MAX_DATASETS,
                var_names=[*self.names, "y"],
                random_seed=SIMULATION_SEED,
                compile_kwargs={"mode": "FAST_COMPILE"},
            )
        self.truth = {name: simulated["prior"][name].values[0] for name in self.names}
        self.data = simulated["prior_predictive"]["y"].values[0]

    def fit(self, i: int) -> Any:
        """Fit data set ``i``."""
        from pymc_ngvi import inference

        self.density.n_gradients = self.density.n_hessians = 0
        reused = patch.object(inference, "density_of", lambda *_: self.density)  # else each fit compiles anew
        with self.model, warnings.catch_warnings(), reused:
            warnings.simplefilter("ignore")  # the status is in the row
            pm.set_data({"data": self.data[i]})
            options = {"posterior": "gaussian", **self.options}
            return pm.fit(method="ngvi", random_seed=i, progressbar=False, **options)

    def run(self, i: int) -> dict[str, object]:
        """Fit data set ``i`` and return what is to be recorded."""
        start = time.perf_counter()
        approx = self.fit(i)
        seconds = time.perf_counter() - start
        posterior = approx.sample(DRAWS, chains=1, random_seed=DRAWS_SEED + i, log_p=False)["posterior"]
        p = {name: (posterior[name].values[0] < self.truth[name][i]).mean(axis=0) for name in self.names}
        return {
            "status": str(approx.status),
            "gap": float(approx.gap),
            "khat": approx.khat(KHAT_DRAWS, random_seed=KHAT_SEED + i),
            "n_iterations": approx.n_iterations,
            "n_gradients": approx.n_gradients,
            "seconds": seconds,
            "p": json.dumps({name: np.atleast_1d(values).round(4).tolist() for name, values in p.items()}),
        }


# --- statistics of p, (n_datasets, n_elements) ------------------------------------------------------------------------


def coverage(p: Array, level: float) -> Estimate:
    """Return the share of central intervals that hold the parameter, with its standard error."""
    inside = np.abs(p - 0.5) <= level / 2.0 + 1e-9
    independent = np.sqrt(level * (1.0 - level) / inside.size)
    between = inside.mean(axis=1).std(ddof=1) / np.sqrt(len(p)) if len(p) > 1 else 0.0
    return Estimate(float(inside.mean()), float(max(independent, between)))


def asymmetry(p: Array) -> float:
    """Return the distance of Kolmogorov and Smirnov between p and 1 - p."""
    return float(ks_2samp(p.ravel(), 1.0 - p.ravel(), method="asymp").statistic)


def symmetry_test(p: Array, n_flips: int = 9_999) -> float:
    """Return the probability of so large an asymmetry where p is symmetric: data sets are reflected as a whole."""
    rng = np.random.default_rng(FLIPS_SEED)
    grid = np.linspace(0.0, 0.5, 101)[1:-1]
    # F(x) + F(1 - x) - 1: a data set adds its elements below x less those above 1 - x; a reflection changes the sign.
    below = (p[:, :, None] <= grid).mean(axis=1)
    above = (p[:, :, None] >= 1.0 - grid).mean(axis=1)
    excess = below - above
    signs = rng.choice([-1.0, 1.0], size=(n_flips, len(p)))
    observed = np.abs(excess.sum(axis=0)).max()
    at_least = np.abs(signs @ excess).max(axis=1) >= observed - 1e-9
    return float((1 + at_least.sum()) / (1 + n_flips))


def probabilities(rows: Sequence[Row]) -> dict[str, Array]:
    """Return p of each variable, (n_datasets, n_elements)."""
    values = [json.loads(row["p"]) for row in rows]
    return {name: np.array([value[name] for value in values]) for name in (values[0] if values else ())}


# --- tables -----------------------------------------------------------------------------------------------------------


def write_tables(rows: Sequence[Row]) -> str:
    """Return the tables as Markdown."""
    if not rows:
        return "No results.\n"
    by_model = {name: [row for row in rows if row["model"] == name] for name in SETTINGS}
    by_model = {name: own for name, own in by_model.items() if own}
    header = ("model", "data sets", "converged", "k-hat", "k-hat < .5", "k-hat < .7", "gradients", "seconds")
    lines = [*measured_on(rows), CAPTION, *table(header, [_fits(name, own) for name, own in by_model.items()]), ""]
    header = ("model", "parameter", *(f"{level:.0%}" for level in LEVELS), *(f"90%, {c}" for c in CLASS_NAMES))
    lines += [ABOUT_COVERAGE, *table(header, [line for item in by_model.items() for line in _covered(*item)]), ""]
    header = ("model", "parameter", "mean of p", "sd(p)", "D", "P, KS", "P, signs")
    lines += [ABOUT_SYMMETRY, *table(header, [line for item in by_model.items() for line in _symmetric(*item)])]
    return "\n".join([*lines, ""])


def _fits(name: str, rows: Sequence[Row]) -> list[str]:
    of, n = column_of(rows), len(rows)
    khat, converged = of("khat"), sum(row["status"] == "converged" for row in rows)
    shares = [f"{np.mean(khat < bound):.0%}" for bound in (0.5, 0.7)]
    return [
        SETTINGS[name].title, str(n), str(converged), median(khat, ".2f"), *shares, median(of("n_gradients"), ",.0f"),
        f"{np.median(of('seconds')):.2f}",
    ]  # fmt: skip


def _covered(name: str, rows: Sequence[Row]) -> list[list[str]]:
    p, place = probabilities(rows), np.digitize(column_of(rows)("khat"), CLASSES) - 1
    lines = []
    for variable, values in p.items():
        of_all = [_percent(values, level) for level in LEVELS]
        of_classes = [_percent(values[place == k], 0.9, count=True) for k in range(len(CLASS_NAMES))]
        lines.append([SETTINGS[name].title, _label(variable, values), *of_all, *of_classes])
    return lines


def _percent(p: Array, level: float, count: bool = False) -> str:
    if not len(p):
        return "-"
    share = coverage(p, level)
    return f"{100 * share.value:.1f} ± {100 * share.se:.1f}" + (f" ({len(p)})" if count else "")


def _symmetric(name: str, rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for variable, p in probabilities(rows).items():
        scalar = p.shape[1] == 1
        test = f"{ks_2samp(p.ravel(), 1 - p.ravel(), method='asymp').pvalue:.2g}" if scalar else "-"
        mean = Estimate.of(p.mean(axis=1))
        cells = f"{mean.value:.3f} ± {mean.se:.3f}", f"{p.std():.3f}", f"{asymmetry(p):.3f}", test
        lines.append([SETTINGS[name].title, _label(variable, p), *cells, f"{symmetry_test(p):.2g}"])
    return lines


def _label(variable: str, p: Array) -> str:
    return f"`{variable}`" + (f" ({p.shape[1]})" if p.shape[1] > 1 else "")


# --- figure -----------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], file: Path, n_bins: int = 20) -> None:
    """Draw histograms of p, and coverage against the nominal level, a row of panels for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    by_model = {name: own for name in SETTINGS if (own := [row for row in rows if row["model"] == name])}
    figure, axes = pyplot.subplots(
        len(by_model), 4, figsize=(10, 2.3 * len(by_model)), layout="constrained", squeeze=False
    )
    for panels, (name, own) in zip(axes, by_model.items(), strict=True):
        p, setting = probabilities(own), SETTINGS[name]
        # One variable alone: its first elements apart.
        shown = [(v, p[v]) for v in setting.shown]
        if len(shown) == 1:
            shown = [(f"{v}[{j}]", values[:, [j]]) for v, values in shown for j in range(3)]
        for ax, (label, values) in zip(panels, shown, strict=False):
            _histogram(ax, values, n_bins)
            ax.set_title(label, fontsize=9, loc="left")
        panels[0].set_ylabel(setting.title, fontsize=9)
        _coverages(panels[3], p)
    for ax, text in zip(axes[-1], [*["p = P(θ < θ₀) under q"] * 3, "nominal level"], strict=True):
        ax.set_xlabel(text, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=90)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(255).save(file, optimize=True)
    pyplot.close(figure)


def _histogram(ax: Any, p: Array, n_bins: int) -> None:
    """Draw p, and the band in which 99 % of bars of uniform, independent p are."""
    low, high = (binom.ppf(q, p.size, 1.0 / n_bins) for q in (0.005, 0.995))
    ax.axhspan(low, high, color="0.88")
    ax.axhline(p.size / n_bins, color="0.45", linewidth=0.8)
    ax.hist(p.ravel(), np.linspace(0.0, 1.0, n_bins + 1), color="#1c5c9e", rwidth=0.9)
    ax.set_xlim(0.0, 1.0)
    _trim(ax)


def _coverages(ax: Any, p: dict[str, Array]) -> None:
    levels = np.linspace(0.02, 0.98, 49)
    ax.plot([0, 1], [0, 1], color="0.45", linewidth=0.8)
    for (variable, values), colour in zip(p.items(), ("#1c5c9e", "#009e73", "#d55e00", "#8a2be2"), strict=False):
        found = [coverage(values, level) for level in levels]
        value, se = np.array(found).T
        ax.fill_between(levels, value - 2 * se, value + 2 * se, color=colour, alpha=0.12, linewidth=0)
        ax.plot(levels, value, color=colour, linewidth=1.2, label=variable)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_title("coverage", fontsize=9, loc="left")
    ax.legend(fontsize=7, frameon=False, loc="upper left", borderaxespad=0.1, handlelength=1.2)
    _trim(ax)


def _trim(ax: Any) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    results = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="MODEL")
    parser.add_argument(
        "--datasets", type=int, choices=range(MAX_DATASETS + 1), default=200, metavar="N", help="0: only the tables"
    )
    parser.add_argument("--out", type=Path, default=results / "calibration.csv")
    parser.add_argument("--table", type=Path, default=results / "calibration.md", help="page with marks, or a new file")
    parser.add_argument("--figure", type=Path, default=results / "calibration.png")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    main()
