"""Two experiments in the setting of Wu and Gardner (2024): Hessians against gradients alone, and the rate 1/T.

The first is Bayesian logistic regression with the natural-parameter update and a constant step size: the loss against
iterations, and how often a step would have left no positive definite precision. The second is Bayesian linear
regression on minibatches with steps 2/(2 + t): the divergence from the exact posterior against iterations. Runs that
are in the results file already are not run again. From a checkout that is not installed, set ``PYTHONPATH`` to its
root.

References
----------
.. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
   https://doi.org/10.48550/arXiv.2406.01870

Examples
--------
::

    python wu_gardner.py --data DATA --references REFERENCES --out docs/experiments
    python wu_gardner.py ... --experiments conjugate --seeds 3
"""

import argparse
import functools

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import measure
import numpy as np
import pandas as pd
import pymc as pm

from measure import Array
from records import Records, Row
from scipy.special import expit
from sklearn.datasets import load_breast_cancer, load_diabetes

from pymc_ngvi.core.types import MatrixHessian, MeanHessian, Moments
from pymc_ngvi.estimators import ESTIMATORS
from pymc_ngvi.families import FAMILIES
from pymc_ngvi.model import LogDensity
from pymc_ngvi.steps import STEPS
from pymc_ngvi.updates import UPDATES

mpl.use("Agg")
import matplotlib.pyplot as plt

EXPERIMENTS = ("logistic", "conjugate")
LOG_2PI = float(np.log(2 * np.pi))

#: Step size of the natural-parameter update, and iterations.
STEP_SIZES = {0.1: 150, 0.01: 800}
METHODS = ("price", "pathwise", "stein")
#: As in the paper, and as the package has them by default.
DRAWS: dict[str, dict[str, Any]] = {
    "plain": {"base_draws": "plain", "stl": False},
    "antithetic": {"base_draws": "antithetic", "stl": True},
}
N_DRAWS = 10
N_RECORDED = 32  # iterations of a run, about, that are kept

NOISE_VARIANCE = 0.5
BATCH = 50
N_CONJUGATE = 5_000
CONSTANT_STEP = 0.05
#: Runs on the PyMC model itself.
N_PYMC = 24

FIELDS = ("experiment", "data", "method", "step_size", "draws", "seed", "iteration", "value", "lost", "halved")
#: Columns that name one run.
KEYS = FIELDS[:6]


# --- the regressions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logistic:
    """Logistic regression with prior N(0, prior_sd^2): every expectation under a Gaussian by quadrature.

    Parameters
    ----------
    name : str
    design : ndarray, shape (n, d)
    y : ndarray, shape (n,)
        0 or 1.
    prior_sd : float
    """

    name: str
    design: Array
    y: Array
    prior_sd: float

    @property
    def n_dim(self) -> int:
        """Number of coefficients."""
        return self.design.shape[1]

    def model(self, batch: int | None = None) -> pm.Model:
        """Return the model, of minibatches of ``batch`` rows if given."""
        with pm.Model() as model:
            beta = pm.Normal("beta", 0, self.prior_sd, shape=self.n_dim)
            x, y = (self.design, self.y) if batch is None else pm.Minibatch(self.design, self.y, batch_size=batch)
            total = {} if batch is None else {"total_size": len(self.y)}
            pm.Bernoulli("y", logit_p=x @ beta, observed=y, **total)
        return model

    def loss(self, q: Any) -> float:
        """Return -ELBO of a Gaussian."""
        eta, weights = self._predictors(q)
        likelihood = self.y @ (self.design @ q.mean()) - np.sum(np.logaddexp(0.0, eta) @ weights)
        squares = np.sum(q.mean() ** 2) + np.sum(q.sd() ** 2)
        prior = -0.5 * squares / self.prior_sd**2 - self.n_dim * (np.log(self.prior_sd) + 0.5 * LOG_2PI)
        return float(-(likelihood + prior + q.entropy()))

    def moments(self, q: Any) -> Moments:
        """Return the whitened moments of a Gaussian, without noise."""
        eta, weights = self._predictors(q)
        mean = expit(eta) @ weights
        slope = (expit(eta) * expit(-eta)) @ weights
        grad = q.whiten(self.design.T @ (self.y - mean) - q.mean() / self.prior_sd**2)
        precision = self.design.T @ (slope[:, None] * self.design) + np.eye(self.n_dim) / self.prior_sd**2
        curvature = q.whiten(q.whiten(precision).T)
        gap = 0.5 * grad @ grad + 0.25 * np.sum(q.curvature_error(curvature) ** 2)
        zero = np.zeros(self.n_dim)
        return Moments(grad, curvature, zero, zero, float(gap), 0.0, 0.0)

    def start(self) -> Any:
        """Return N(0, I)."""
        return FAMILIES["full"].from_scale(np.zeros(self.n_dim), np.ones(self.n_dim))

    @functools.cache  # noqa: B019 (lives as long as the script)
    def least_loss(self) -> float:
        """Return the loss of the best Gaussian, by natural-gradient steps without noise."""
        q = self.start()
        for _ in range(500):
            moments = self.moments(q)
            if moments.gap < 1e-10:
                return self.loss(q)
            q = UPDATES["natural"](q, moments, 0.7, True)
        raise RuntimeError(f"{self.name}: the best Gaussian was not found; the gap is {moments.gap:.2g} nats.")

    def _predictors(self, q: Any) -> tuple[Array, Array]:
        """Return nodes, (n, n_nodes), and weights of the linear predictors."""
        nodes, weights = _hermite()
        spread = np.linalg.norm(q.whiten(self.design), axis=1)
        return (self.design @ q.mean())[:, None] + spread[:, None] * nodes, weights

    # The arrays have no hash: one object is one data set.
    __hash__ = object.__hash__


@functools.cache
def _hermite() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    return nodes, weights / weights.sum()


def breast_cancer(prior_sd: float = 1.0) -> Logistic:
    """Return 569 tumours, 30 standardised predictors and an intercept."""
    x, y = load_breast_cancer(return_X_y=True)
    design = np.column_stack([np.ones(len(x)), (x - x.mean(axis=0)) / x.std(axis=0)])
    return Logistic("breast cancer", design, y.astype(float), prior_sd)


def german(data: Path) -> Logistic:
    """Return 1,000 loans, 49 predictors with the intercept; the prior is that of the reference posterior."""
    table = pd.read_csv(data / "german_credit_design.csv")
    return Logistic("German credit", table.drop(columns="y").to_numpy(float), table["y"].to_numpy(float), 10.0)


@dataclass(frozen=True)
class Linear:
    """Linear regression with prior N(0, 1) and known noise: the posterior is Gaussian."""

    design: Array
    y: Array

    @property
    def n_dim(self) -> int:
        """Number of coefficients."""
        return self.design.shape[1]

    def model(self) -> pm.Model:
        """Return the model on minibatches."""
        with pm.Model() as model:
            x, y = pm.Minibatch(self.design, self.y, batch_size=BATCH)
            beta = pm.Normal("beta", 0, 1, shape=self.n_dim)
            pm.Normal("y", x @ beta, np.sqrt(NOISE_VARIANCE), observed=y, total_size=len(self.y))
        return model

    def divergence(self, q: Any) -> float:
        """Return KL(q || posterior)."""
        precision = np.eye(self.n_dim) + self.design.T @ self.design / NOISE_VARIANCE
        apart = q.mean() - np.linalg.solve(precision, self.design.T @ self.y / NOISE_VARIANCE)
        whitened = q.whiten(q.whiten(precision).T)
        log_det = np.linalg.slogdet(whitened)[1]
        return float(0.5 * (np.trace(whitened) - self.n_dim - log_det + apart @ precision @ apart))


class LinearMinibatches:
    """The log density of `Linear.model` in NumPy, on the rows that the model would choose: the same numbers, sooner.

    Parameters
    ----------
    data : Linear
    """

    has_hessian = has_minibatch = True

    def __init__(self, data: Linear) -> None:
        self._data = data
        self.n_dim = data.n_dim
        self.n_gradients = self.n_hessians = 0
        self.next_batch(np.random.default_rng(0))

    def next_batch(self, rng: np.random.Generator) -> None:
        """Choose rows with replacement."""
        rows = rng.integers(0, len(self._data.y), size=BATCH)
        self._design, self._y = self._data.design[rows], self._data.y[rows]
        self._weight = len(self._data.y) / (BATCH * NOISE_VARIANCE)

    def take_batch(self, seed: int, number: int) -> None:
        """Choose rows with replacement, as in the paper."""
        independent_batch(self, seed, number)

    @property
    def n_batches(self) -> int:
        """Minibatches that have as many rows as the data."""
        return -(-len(self._data.y) // BATCH)

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Return log p, but for a constant, and its gradient."""
        residuals = self._y - theta @ self._design.T
        logp = -0.5 * (self._weight * np.sum(residuals**2, axis=1) + np.sum(theta**2, axis=1))
        return logp, self._weight * residuals @ self._design - theta

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the Hessian, the same everywhere."""
        return MatrixHessian(-np.eye(self.n_dim) - self._weight * self._design.T @ self._design)


def diabetes() -> Linear:
    """Return 442 patients, 10 standardised predictors, standardised response."""
    x, y = load_diabetes(return_X_y=True)
    return Linear((x - x.mean(axis=0)) / x.std(axis=0), (y - y.mean()) / y.std())


# --- runs -------------------------------------------------------------------------------------------------------------


class Counted:
    """The natural-parameter update with its correction, counting where it was needed.

    Attributes
    ----------
    n_lost : int
        Steps after which the precision would not have been positive definite.
    n_invalid : int
        Of these, steps that the correction did not save either: they are halved.
    """

    def __init__(self) -> None:
        self.n_lost = self.n_invalid = 0

    def __call__(self, state: Any, moments: Moments, step_size: float, correct: bool) -> Any:
        """Take one step."""
        plain = UPDATES["natural"](state, moments, step_size, False)
        if plain is not None:
            return plain
        self.n_lost += 1
        corrected = UPDATES["natural"](state, moments, step_size, correct)
        self.n_invalid += corrected is None
        return corrected


def iterates(rule: Any, q: Any, n: int) -> Iterator[tuple[int, Any]]:
    """Yield iteration and state of a step rule, the start included; the rule's own stop is set aside."""
    state = rule.init(q)
    yield 0, state
    for t in range(1, n + 1):
        state = rule.step(state)
        yield t, state


def recorded(n: int) -> set[int]:
    """Return the iterations to keep: 0 and a geometric series up to n."""
    return {0, *np.unique(np.geomspace(1, n, N_RECORDED).round().astype(int)).tolist()}


def run_logistic(data: Logistic, seeds: int, records: Records) -> None:
    """Run every estimator with every step size and kind of draws."""
    density = LogDensity(data.model())
    done = {tuple(row[key] for key in KEYS) for row in records.read()}
    for draws, options in DRAWS.items():
        for step_size, n in STEP_SIZES.items():
            for method in METHODS:
                for seed in range(1, 1 + (seeds if draws == "plain" else -(-seeds // 2))):
                    key = ("logistic", data.name, method, f"{step_size:g}", draws, str(seed))
                    if key in done:
                        continue
                    update = Counted()
                    rule = STEPS["constant"](
                        density, update, ESTIMATORS[method], seed=seed, n_draws=N_DRAWS, step_size=step_size, **options
                    )
                    keep, rows = recorded(n), []
                    for t, state in iterates(rule, data.start(), n):
                        if t in keep:
                            loss = data.loss(state.q) - data.least_loss()
                            rows.append((t, loss, update.n_lost, update.n_invalid))
                    _append(records, key, rows)
                    print(f"{data.name}, {method}, {draws}, step {step_size:g}, seed {seed}: {rows[-1][1:]}")


def run_conjugate(data: Linear, seeds: int, records: Records) -> None:
    """Run decaying steps, averaged and not, and a constant step.

    The first runs use the PyMC model with `pm.Minibatch`, the others the same density in NumPy.
    """
    density, same = LogDensity(data.model()), LinearMinibatches(data)
    density.take_batch = functools.partial(independent_batch, density)  # type: ignore[method-assign]
    check_same(density, same)
    done = {tuple(row[key] for key in KEYS) for row in records.read()}
    for step, options in {"decay": {}, "constant": {"step_size": CONSTANT_STEP}}.items():
        # The level of a constant step shows in a few runs; a slope needs more.
        for seed in range(1, 1 + (seeds if step == "decay" else min(seeds, 8))):
            averaged = step == "decay"
            names = ["average", "last iterate"] if averaged else ["constant step"]
            size = "" if averaged else f"{CONSTANT_STEP:g}"
            keys = [("conjugate", "diabetes", name, size, "2", str(seed)) for name in names]
            if set(keys) <= done:
                continue
            rule = STEPS[step](
                density if seed <= N_PYMC else same,
                UPDATES["natural"],
                ESTIMATORS["price"],
                seed=seed,
                n_draws=2,
                base_draws="antithetic",
                **options,
            )
            start = FAMILIES["full"].from_scale(np.zeros(data.n_dim), np.ones(data.n_dim))
            keep = recorded(N_CONJUGATE)
            rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
            for t, state in iterates(rule, start, N_CONJUGATE):
                if t in keep:
                    for name, q in zip(names, (state.q, state.iterate), strict=False):
                        rows[name].append((t, data.divergence(q), 0, 0))
            for name, key in zip(names, keys, strict=True):
                _append(records, key, rows[name])
                print(f"{name}, seed {seed}: {rows[name][-1][1]:.3g}")


def independent_batch(target: Any, seed: int, number: int) -> None:
    """Draw rows with replacement, as in the paper, in place of those of a pass through the data."""
    target.next_batch(np.random.default_rng([seed, number, 1]))


def check_same(density: LogDensity, same: LinearMinibatches) -> None:
    """Raise AssertionError unless both have the same derivatives on the same minibatch."""
    theta = np.random.default_rng(1).standard_normal((2, same.n_dim))
    directions = np.eye(same.n_dim)
    for target in (density, same):
        target.next_batch(np.random.default_rng(2))
    pairs = [
        (density.logp_grad(theta)[1], same.logp_grad(theta)[1]),
        (density.mean_hessian(theta).products(directions), same.mean_hessian(theta).products(directions)),
    ]
    for ours, other in pairs:
        np.testing.assert_allclose(ours, other, rtol=1e-9, atol=1e-9)


def _append(records: Records, key: tuple[str, ...], rows: list[tuple[float, ...]]) -> None:
    for t, value, lost, halved in rows:
        values = {"iteration": t, "value": float(f"{value:.5g}"), "lost": lost, "halved": halved}
        records.append({**dict(zip(KEYS, key, strict=True)), **values})


# --- figures and tables -----------------------------------------------------------------------------------------------

COLOURS = {"price": "C0", "pathwise": "C3", "stein": "C1"}
#: Nats above the least loss that the figure shows: runs that diverge leave it.
SHOWN = (5e-3, 1e6)
NAMES = {"price": "Hessians (Price)", "pathwise": "reparametrisation", "stein": "Stein"}


def _table(rows: list[Row]) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    for name in ("seed", "iteration", "value", "lost", "halved"):
        table[name] = pd.to_numeric(table[name])
    return table


def _band(axis: Any, table: pd.DataFrame, **style: Any) -> None:
    """Draw the median over seeds, and all but the extreme tenths."""
    groups = table.groupby("iteration")["value"]
    middle, low, high = groups.median(), groups.quantile(0.1), groups.quantile(0.9)
    axis.plot(middle.index, middle, **style)
    axis.fill_between(middle.index, low, high, alpha=0.2, color=style["color"], linewidth=0)


def draw_logistic(table: pd.DataFrame, out: Path, draws: str) -> None:
    """Draw the loss above that of the best Gaussian against iterations."""
    data = list(dict.fromkeys(table["data"]))
    figure, axes = plt.subplots(len(data), len(STEP_SIZES), figsize=(9, 6.5), squeeze=False, sharey="row")
    for line, name in zip(axes, data, strict=True):
        for axis, step_size in zip(line, STEP_SIZES, strict=True):
            chosen = table[(table["data"] == name) & (table["step_size"] == f"{step_size:g}")]
            for method in METHODS:
                part = chosen[(chosen["method"] == method) & (chosen["draws"] == draws) & (chosen["iteration"] > 0)]
                _band(axis, part, color=COLOURS[method], label=NAMES[method])
            axis.set(xscale="log", yscale="log", title=f"{name}, step size {step_size:g}", xlabel="iterations")
            axis.set_ylim(*SHOWN)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("loss above the least, nats")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def draw_conjugate(table: pd.DataFrame, out: Path) -> None:
    """Draw the mean divergence from the posterior against iterations."""
    figure, axis = plt.subplots(figsize=(7, 4.5))
    styles = {"average": ("C0", "-"), "last iterate": ("C1", "-"), "constant step": ("C7", "-")}
    for method, (colour, line) in styles.items():
        part = table[(table["method"] == method) & (table["iteration"] > 0)]
        groups = part.groupby("iteration")["value"]
        mean, se = groups.mean(), groups.sem()
        step = part["step_size"].iloc[0]
        label = {"average": "2/(2 + t), average", "last iterate": "2/(2 + t), last iterate"}.get(
            method, f"constant {step}"
        )
        axis.plot(mean.index, mean, line, color=colour, label=label)
        axis.fill_between(mean.index, mean - 2 * se, mean + 2 * se, alpha=0.2, color=colour, linewidth=0)
        if method == "average":
            reference = mean.iloc[-1] * mean.index[-1] / mean.index
            axis.plot(mean.index, reference, "k:", linewidth=1, label="slope -1")
    axis.set(xscale="log", yscale="log", xlabel="iterations T", ylabel="mean KL(q || posterior), nats")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def logistic_table(table: pd.DataFrame) -> str:
    """Return the loss at the end and the share of steps that were corrected, over seeds."""
    lines = [
        "| data | draws | step size | estimator | loss above the least at the end, nats: median (10 % - 90 %) "
        "| steps not positive definite | of these halved |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, part in table.groupby(["data", "draws", "step_size", "method"], sort=False):
        name, draws, step_size, method = key
        last = part[part["iteration"] == part["iteration"].max()]
        low, middle, high = last["value"].quantile([0.1, 0.5, 0.9])
        n_steps = last["iteration"].sum()
        lines.append(
            f"| {name} | {draws} | {step_size} | `{method}` | {middle:.3g} ({low:.3g} - {high:.3g}) "
            f"| {last['lost'].sum() / n_steps:.1%} | {last['halved'].sum() / n_steps:.1%} |"
        )
    return "\n".join(lines)


def conjugate_table(table: pd.DataFrame) -> str:
    """Return the mean divergence at some iterations, and the slope over the last decade."""
    at = sorted(set(table["iteration"]))
    shown = [min(at, key=lambda t: abs(np.log((t or 0.1) / wanted))) for wanted in (1, 10, 100, 1_000, N_CONJUGATE)]
    head = " | ".join(f"T = {t:,}" for t in shown)
    lines = [f"| | runs | {head} | slope of the last decade | of the last two |", "|---" * (len(shown) + 4) + "|"]
    for method, part in table.groupby("method", sort=False):
        runs = part.pivot_table(index="iteration", columns="seed", values="value")
        mean = runs.mean(axis=1)
        slopes = [_slope(runs[runs.index >= N_CONJUGATE / 10**n_decades]) for n_decades in (1, 2)]
        values = " | ".join([f"{mean[t]:.3g}" for t in shown] + slopes)
        lines.append(f"| {method} | {runs.shape[1]} | {values} |")
    return "\n".join(lines)


def _slope(runs: pd.DataFrame) -> str:
    """Return the slope of the mean over runs, on logarithmic axes, with its standard error over resampled runs."""

    def slope(values: Array) -> float:
        return float(np.polyfit(np.log(runs.index), np.log(values.mean(axis=1)), 1)[0])

    values, rng = runs.to_numpy(), np.random.default_rng(0)
    resampled = [slope(values[:, rng.integers(values.shape[1], size=values.shape[1])]) for _ in range(500)]
    return f"{slope(values):.2f} ± {np.std(resampled):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, draw the figures and print the tables."""
    options = _parse_options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    records = Records(options.out / "wu_gardner.csv", FIELDS)
    if "conjugate" in options.experiments:
        run_conjugate(diabetes(), options.conjugate_seeds, records)
    if "logistic" in options.experiments:
        measure.check_inputs(options.data, options.references, ["german"])
        for data in (breast_cancer(), german(options.data)):
            print(f"{data.name}: least loss {data.least_loss():.4f}")
            run_logistic(data, options.seeds, records)
    table = _table(records.read())
    logistic, conjugate = (table[table["experiment"] == name] for name in EXPERIMENTS)
    if len(logistic):
        draw_logistic(logistic, options.out / "wu_gardner.png", "plain")
        print(logistic_table(logistic))
    if len(conjugate):
        draw_conjugate(conjugate, options.out / "wu_gardner_conjugate.png")
        print(conjugate_table(conjugate))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--references", type=Path, help="folder of models.py and NUTS moments")
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS)
    parser.add_argument(
        "--seeds", type=int, default=5, help="of the logistic regressions; half as many where draws are antithetic"
    )
    parser.add_argument("--conjugate-seeds", type=int, default=96, help="of the linear regression")
    parser.add_argument("--out", type=Path, default=Path("docs/experiments"), help="folder of csv and figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
