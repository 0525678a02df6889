"""Seizure counts of 59 epileptic patients: a Poisson GLMM, fitted in seconds.

Each patient has a random intercept and a random slope over visits. Run it with ``make example``, or with
``python examples/epilepsy.py --output FOLDER``; it prints a summary of the exact posterior, and writes its draws and a
figure, with the Gaussian that was fitted first beside it.
"""

import argparse

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pymc as pm

import pymc_ngvi  # noqa: F401  (makes pm.fit know the method "ngvi")

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
#: Columns of the design matrix.
EFFECTS = ["intercept", "log baseline", "treatment", "baseline x treatment", "log age", "visit"]


def build_model(table):
    """Return the model: log mean = X beta + patient's intercept + patient's slope * visit."""
    log_age = np.log(table["age"].to_numpy(dtype=float))
    log_base, treated, visit = (table[c].to_numpy(dtype=float) for c in ("log_base4", "trt", "visit_code"))
    design = np.column_stack(
        [np.ones(len(table)), log_base, treated, log_base * treated, log_age - log_age.mean(), visit]
    )
    patient, patients = pd.factorize(table["subject"], sort=True)
    coords = {"effect": EFFECTS, "term": ["intercept", "visit"], "patient": patients}
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0, 10, dims="effect")
        sd = pm.HalfNormal("sd", 1, dims="term")
        z = pm.Normal("z", 0, 1, dims=("patient", "term"))
        b = pm.Deterministic("b", z * sd, dims=("patient", "term"))
        log_rate = design @ beta + b[patient, 0] + b[patient, 1] * visit
        pm.Poisson("seizures", pm.math.exp(log_rate), observed=table["seizures"].to_numpy())
    return model


def plot(approx, posterior):
    """Return a figure: what was found, how it differs from the Gaussian fit of everything, and how that fit went."""
    fig, axes = plt.subplot_mosaic(
        [["beta", "intercept"], ["elbo", "visit"]], figsize=(10, 7), layout="constrained", width_ratios=[1.3, 1]
    )
    labels = [str(e) for e in posterior["effect"].values]
    draws = posterior["beta"].stack(sample=("chain", "draw")).transpose("sample", "effect").to_numpy()
    forest(axes["beta"], draws, labels)
    axes["beta"].axvline(0, color="0.7", linewidth=1, zorder=0)
    axes["beta"].set(xlabel="Effect on the log seizure rate", title="Fixed effects: median, 50 % and 90 % intervals")
    of_everything = approx.gaussian  # made when it is asked for
    gaussian = of_everything.sample(len(draws), random_seed=2)["posterior"]
    for term in posterior["term"].values:
        scales(axes[str(term)], posterior["sd"].sel(term=term), gaussian["sd"].sel(term=term))
        axes[str(term)].set(title=f"sd among patients: {term}", xlabel="Standard deviation (log seizure rate)")
    elbo = -of_everything.hist
    axes["elbo"].plot(np.arange(1, len(elbo) + 1), elbo, marker="o", markersize=3)
    # The first iterations are far away: show where the fit settles.
    axes["elbo"].set_ylim(np.quantile(elbo, 0.3), elbo.max() + 5)
    axes["elbo"].set(xlabel="Iteration", ylabel="Nats", title="Gaussian fit: ELBO after each iteration")
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    fig.suptitle("Seizures of 59 patients in four periods: Poisson GLMM")
    return fig


def scales(axis, exact, gaussian):
    """Draw the posterior of a standard deviation, and the Gaussian's, on the same bins."""
    exact, gaussian = exact.to_numpy().ravel(), gaussian.to_numpy().ravel()
    bins = np.linspace(exact.min(), exact.max(), 41)
    axis.hist(exact, bins=bins, density=True, alpha=0.35, label="exact")
    axis.hist(gaussian, bins=bins, density=True, histtype="step", linewidth=1.5, color="C1", label="Gaussian")
    axis.set(ylabel="Density")
    axis.legend(frameon=False)


def forest(axis, draws, labels):
    """Draw medians with 50 % and 90 % intervals, first label on top."""
    low, quarter, median, three_quarters, high = np.quantile(draws, [0.05, 0.25, 0.5, 0.75, 0.95], axis=0)
    place = np.arange(len(labels))[::-1]
    axis.hlines(place, low, high, linewidth=1.2)
    axis.hlines(place, quarter, three_quarters, linewidth=4)
    axis.plot(median, place, "o", color="white", markeredgecolor="C0", markersize=5)
    axis.set_yticks(place, labels)


def main():
    """Fit, print, and write the figure and the draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "output", help="folder for the figure and the draws")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)

    with build_model(pd.read_csv(HERE / "data" / "epilepsy.csv")):
        approx = pm.fit(method="ngvi", random_seed=1)
    posterior = approx.sample(4_000, random_seed=2)

    print(approx.summary(random_seed=3))

    plot(approx, posterior["posterior"]).savefig(folder / "epilepsy.png", dpi=150)
    posterior.to_netcdf(folder / "epilepsy.nc", engine="h5netcdf")
    print(f"Wrote {folder / 'epilepsy.png'} and {folder / 'epilepsy.nc'}.")


if __name__ == "__main__":
    main()
