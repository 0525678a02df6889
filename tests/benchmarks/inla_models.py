"""Examples of R-INLA as PyMC models, and what was published for them.

Data are not kept here. ``tests/benchmarks/results/inla.md`` says where each file comes from.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

#: Precision of fixed effects by default; that of the intercept is 0.
_PRECISION = 1e-3
FONG, BOOK, OWN = "Fong, Rue & Wakefield", "Ravishanker, Raman & Soyer", "R-INLA's examples"


@dataclass(frozen=True)
class Example:
    """An example: where it is from, its kind, files, the model, and published means and standard deviations.

    ``published`` has the name of a variable, or "sd of NAME" for the standard deviation whose precision is NAME; None
    where there are no figures.
    The model takes the folder of the data, and whether effects are centred, as most people write them; NUTS may do
    better on the other.
    """

    source: str
    effects: str
    files: tuple[str, ...]
    model: Callable[[Path, bool], pm.Model]
    published: dict[str, tuple[float, float] | None] = field(default_factory=dict)


def effects(name: str, tau: pt.TensorVariable, shape: int, centred: bool) -> pt.TensorVariable:
    """Return independent random effects with a precision."""
    if centred:
        return pm.Normal(name, 0.0, tau=tau, shape=shape)
    return pm.Deterministic(name, pm.Normal(f"{name}_raw", shape=shape) / pt.sqrt(tau))


def fixed(name: str) -> pt.TensorVariable:
    """Return a fixed effect with R-INLA's prior."""
    return pm.Normal(name, 0.0, tau=_PRECISION)


def regression(covariates: dict[str, np.ndarray], centred: bool) -> pt.TensorVariable:
    """Return an intercept and fixed effects; for NUTS, of covariates less their means, which is the same posterior."""
    slopes = {name: fixed(name) for name in covariates}
    means = {name: 0.0 if centred else float(values.mean()) for name, values in covariates.items()}
    level = pm.Flat("intercept" if centred else "level")
    if not centred:
        pm.Deterministic("intercept", level - sum(slopes[name] * mean for name, mean in means.items()))
    return level + sum(slopes[name] * (values - means[name]) for name, values in covariates.items())


def table(data: Path, file: str) -> pd.DataFrame:
    """Read a file of R's."""
    return pd.read_csv(data / file, sep="," if file.endswith(".csv") else " ")


# --- independent effects ----------------------------------------------------------------------------------------------


def seeds(data: Path, centred: bool, *, interaction: bool) -> pm.Model:
    """Return germination on plates."""
    frame = table(data, "Seeds.txt")
    x1, x2 = frame["x1"].to_numpy(), frame["x2"].to_numpy()
    with pm.Model() as model:
        tau = pm.Gamma("tau", 0.5, 0.0164)
        covariates = {"seed": x1, "extract": x2} | ({"interaction": x1 * x2} if interaction else {})
        eta = regression(covariates, centred) + effects("plate", tau, len(frame), centred)
        pm.Binomial("r", frame["n"].to_numpy(), logit_p=eta, observed=frame["r"].to_numpy())
    return model


def epilepsy(data: Path, centred: bool, *, visits: bool) -> pm.Model:
    """Return seizures of patients, with an effect of each visit or without."""
    frame = table(data, "Epil.txt")
    base, age = np.log(frame["Base"].to_numpy() / 4), np.log(frame["Age"].to_numpy())
    treated, v4 = frame["Trt"].to_numpy(), frame["V4"].to_numpy()
    patient = frame["Ind"].to_numpy() - 1
    with pm.Model() as model:
        tau = pm.Gamma("tau", 2.0, 1.24 if visits else 1.14)
        covariates = {"base": base, "treatment": treated, "base_treatment": base * treated, "age": age, "v4": v4}
        eta = regression(covariates, centred)
        eta = eta + effects("patient", tau, int(patient.max()) + 1, centred)[patient]
        if visits:
            eta = eta + effects("visit", pm.Gamma("tau_visit", 2.0, 1.14), len(frame), centred)
        pm.Poisson("y", pt.exp(eta), observed=frame["y"].to_numpy())
    return model


def salamander(data: Path, centred: bool, *, experiment: int) -> pm.Model:
    """Return matings of one experiment, with effects of females and males."""
    frame = table(data, "salamander.csv")
    both = frame["WW"].to_numpy()
    female, male = frame["WR"].to_numpy() + both, frame["RW"].to_numpy() + both
    with pm.Model() as model:
        tau_f, tau_m = pm.Gamma("tau_f", 1.0, 0.622), pm.Gamma("tau_m", 1.0, 0.622)
        eta = regression({"wsf": female, "wsm": male, "wsf_wsm": both}, centred)
        for name, tau in (("female", tau_f), ("male", tau_m)):
            eta = eta + effects(name, tau, 20, centred)[frame[name].to_numpy() - 1]
        pm.Bernoulli("y", logit_p=eta, observed=frame[f"y{experiment}"].to_numpy())
    return model


def oxford(data: Path, centred: bool) -> pm.Model:
    """Return childhood cancers by year of birth: a mixed model for a log odds ratio."""
    frame = table(data, "oxford.csv")
    year = frame["birth.year"].to_numpy() - 54
    years, where = np.unique(year, return_inverse=True)
    exposed = frame["exposed"].to_numpy()
    with pm.Model() as model:
        tau = pm.Gamma("tau", 0.5, 0.0164)
        level = pt.concatenate([pt.zeros(1), pm.Normal("stratum", 0.0, tau=_PRECISION, shape=len(years) - 1)])
        slope = fixed("beta0") + fixed("beta1") * year + fixed("beta2") * (year**2 - 22)
        slope = slope + effects("year", tau, len(years), centred)[where]
        eta = pm.Flat("intercept") + level[where] + slope * exposed
        pm.Binomial("cases", frame["total"].to_numpy(), logit_p=eta, observed=frame["cases"].to_numpy())
    return model


# --- maps -------------------------------------------------------------------------------------------------------------


def adjacency(file: Path) -> np.ndarray:
    """Read a graph of R-INLA's."""
    lines = [list(map(int, line.split())) for line in file.read_text().splitlines() if line.strip()]
    matrix = np.zeros((lines[0][0], lines[0][0]), dtype=int)
    first = lines[1][0]  # regions count from 0 or from 1
    for region, n, *neighbours in lines[1:]:
        matrix[region - first, np.array(neighbours[:n], dtype=int) - first] = 1
    return matrix


def scotland(data: Path, centred: bool, *, covariate: bool, rate: float | None = None) -> pm.Model:
    """Return lip cancer in counties: independent effects, a covariate or none, and a map if it has a prior."""
    frame = table(data, "Scotland.txt")
    with pm.Model() as model:
        x = {"x": frame["X"].to_numpy() / 10} if covariate else {}
        eta = np.log(frame["E"].to_numpy()) + regression(x, centred)
        eta = eta + effects("v", pm.Gamma("tau_v", 1.0, 0.0014), len(frame), centred)
        if rate is not None:
            tau = pm.Gamma("tau_u", 1.0, rate)
            eta = eta + pm.ICAR("u", W=adjacency(data / "scotland.graph")) / pt.sqrt(tau)
        pm.Poisson("y", pt.exp(eta), observed=frame["Counts"].to_numpy())
    return model


def germany(data: Path, centred: bool) -> pm.Model:
    """Return larynx cancer in districts, with a covariate and both effects of Besag, York and Mollie."""
    frame = table(data, "Germany.txt")
    with pm.Model() as model:
        eta = np.log(frame["E"].to_numpy()) + regression({"smoking": frame["x"].to_numpy()}, centred)
        eta = eta + effects("v", pm.Gamma("tau_v", 1.0, 5e-4), len(frame), centred)
        eta = eta + pm.ICAR("u", W=adjacency(data / "germany.graph")) / pt.sqrt(pm.Gamma("tau_u", 1.0, 5e-4))
        pm.Poisson("y", pt.exp(eta), observed=frame["Y"].to_numpy())
    return model


# --- series -----------------------------------------------------------------------------------------------------------


def autoregression(name: str, rho: pt.TensorVariable, tau: pt.TensorVariable, n: int) -> pt.TensorVariable:
    """Return a stationary process of order 1, whose precision is that of each of its values."""
    sd = 1.0 / pt.sqrt(tau)
    step = sd * pt.sqrt(1.0 - rho**2)
    return pm.AR(name, rho=[rho], sigma=step, init_dist=pm.Normal.dist(0.0, sd), steps=n - 1)


def correlation(name: str, precision: float) -> pt.TensorVariable:
    """Return a lag-one correlation, with a normal prior on log((1 + rho) / (1 - rho))."""
    return pm.Deterministic(name, pt.tanh(0.5 * pm.Normal(f"logit_{name}", 0.0, tau=precision)))


def musa(data: Path, centred: bool, *, walk: bool) -> pm.Model:
    """Return log times between failures of software: a level and an autoregression, or a random walk."""
    y = np.log(table(data, "musa.csv")["time"].to_numpy(dtype=float))[:95]
    with pm.Model() as model:
        tau_y, tau_x = pm.Gamma("tau_y", 1.0, 5e-5), pm.Gamma("tau_x", 1.0, 5e-5)
        if not walk:
            x = autoregression("x", correlation("rho", 0.15), tau_x, len(y))
            mean = pm.Flat("intercept") + x
        elif centred:
            sd = 1.0 / pt.sqrt(tau_x)
            mean = pm.GaussianRandomWalk("x", sigma=sd, init_dist=pm.Normal.dist(0.0, 100.0), steps=len(y) - 1)
        else:
            steps = pm.Normal("x_raw", shape=len(y) - 1) / pt.sqrt(tau_x)
            mean = pm.Normal("start", 0.0, 100.0) + pt.concatenate([pt.zeros(1), pt.cumsum(steps)])
        pm.Normal("y", mean, tau=tau_y, observed=y)
    return model


def trips(data: Path, centred: bool) -> pm.Model:
    """Return weekly shopping trips of a household."""
    y = table(data, "weekly_shopping_single_household.csv")["n.trips"].to_numpy()[:-6]
    with pm.Model() as model:
        x = autoregression("x", correlation("rho", 1.0), pm.Gamma("tau_x", 0.1, 0.1), len(y))
        pm.Binomial("y", y.max(), logit_p=pm.Flat("intercept") + x, observed=y)
    return model


_SALAMANDERS = (
    ((1.48, 0.72), (-3.26, 1.01), (-0.50, 0.73), (3.52, 1.03), (1.29, 0.46), (0.78, 0.29)),
    ((0.56, 0.71), (-2.51, 1.02), (-0.75, 0.75), (3.74, 1.03), (1.38, 0.50), (1.00, 0.36)),
    ((1.07, 0.73), (-3.39, 0.92), (-0.85, 0.94), (4.03, 1.05), (0.80, 0.28), (1.46, 0.48)),
)
_MATING = ("intercept", "wsf", "wsm", "wsf_wsm", "sd of tau_f", "sd of tau_m")
_GRAPH = ("Scotland.txt", "scotland.graph")

EXAMPLES = {
    "Seeds": Example(
        FONG, "iid", ("Seeds.txt",), partial(seeds, interaction=False),
        {"intercept": (-0.389, 0.173), "seed": (-0.351, 0.221), "extract": (1.033, 0.212), "sd of tau": (0.315, 0.125)},
    ),
    "Seeds, interaction": Example(
        FONG, "iid", ("Seeds.txt",), partial(seeds, interaction=True),
        {"intercept": (-0.549, 0.182), "seed": (0.087, 0.298), "extract": (1.347, 0.259),
         "interaction": (-0.821, 0.414), "sd of tau": (0.278, 0.117)},
    ),
    "Epilepsy, patients": Example(
        FONG, "iid", ("Epil.txt",), partial(epilepsy, visits=False),
        {"base": (0.88, 0.15), "treatment": (-0.94, 0.44), "base_treatment": (0.34, 0.22), "age": (0.47, 0.38),
         "v4": (-0.16, 0.05), "sd of tau": (0.56, 0.08)},
    ),
    "Epilepsy, patients and visits": Example(
        FONG, "iid, twice", ("Epil.txt",), partial(epilepsy, visits=True),
        {"base": (0.88, 0.15), "treatment": (-0.96, 0.44), "base_treatment": (0.35, 0.23), "age": (0.48, 0.39),
         "v4": (-0.10, 0.09), "sd of tau_visit": (0.41, 0.04), "sd of tau": (0.53, 0.07)},
    ),
    "Oxford childhood cancers": Example(
        FONG, "iid", ("oxford.csv",), oxford,
        {"beta0": (0.569, 0.075), "beta1": (-0.047, 0.017), "beta2": (0.007, 0.003), "sd of tau": (0.170, 0.066)},
    ),
    **{
        f"Salamanders, experiment {i + 1}": Example(
            FONG, "iid, crossed", ("salamander.csv",), partial(salamander, experiment=i + 1),
            dict(zip(_MATING, values, strict=True)),
        )
        for i, values in enumerate(_SALAMANDERS)
    },
    "Scotland, no map": Example(
        FONG, "iid", _GRAPH[:1], partial(scotland, covariate=False),
        {"intercept": (0.08, 0.12), "sd of tau_v": (0.75, 0.10)},
    ),
    "Scotland, covariate, no map": Example(
        FONG, "iid", _GRAPH[:1], partial(scotland, covariate=True),
        {"intercept": (-0.49, 0.16), "x": (0.68, 0.14), "sd of tau_v": (0.58, 0.09)},
    ),
    "Scotland, map": Example(
        FONG, "iid, Besag", _GRAPH, partial(scotland, covariate=False, rate=0.2 / 0.59),
        {"intercept": (0.10, 0.05), "sd of tau_v": (0.05, 0.03), "sd of tau_u": (0.75, 0.11)},
    ),
    "Scotland, covariate, map": Example(
        FONG, "iid, Besag", _GRAPH, partial(scotland, covariate=True, rate=0.2 / 0.59),
        {"intercept": (-0.11, 0.11), "x": (0.26, 0.12), "sd of tau_v": (0.05, 0.03), "sd of tau_u": (0.69, 0.11)},
    ),
    "Germany, larynx cancer": Example(
        OWN, "iid, Besag", ("Germany.txt", "germany.graph"), germany,
        {"intercept": None, "smoking": None, "sd of tau_v": None, "sd of tau_u": None},
    ),
    "Musa, AR(1)": Example(
        BOOK, "AR(1)", ("musa.csv",), partial(musa, walk=False),
        {"intercept": (10.02, 0.869), "tau_y": (0.416, 0.070), "tau_x": (0.713, 0.423), "rho": (0.955, 0.031)},
    ),
    "Musa, random walk": Example(
        BOOK, "RW1", ("musa.csv",), partial(musa, walk=True), {"tau_y": (0.40, 0.062), "tau_x": (19.13, 15.332)}
    ),
    "Shopping trips": Example(
        BOOK, "AR(1)", ("weekly_shopping_single_household.csv",), trips,
        {"intercept": (0.288, 0.194), "tau_x": (4.625, 1.947), "rho": (0.802, 0.089)},
    ),
}  # fmt: skip
