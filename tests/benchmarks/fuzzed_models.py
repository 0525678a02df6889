"""Models at random, from a seed: likelihoods, predictors, priors and sizes that users might put together."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from measure import Array

#: Rows, levels of the first factor, and of the second.
ROWS, GROUPS, KINDS = (8, 8, 15, 15, 30, 30, 60, 60, 120, 400), (2, 4, 8, 20), ["a", "b", "c"]
#: Tries to draw data that a model might be fitted to, and the largest value of these.
TRIES, LARGEST = 40, 1e4


@dataclass
class Rows:
    """What terms are made of: chance, columns of data, and whether flat priors have to be proper, for a simulation."""

    rng: np.random.Generator
    is_simulated: bool
    data: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return a column."""
        return self.data[name]

    def coin(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def scale(self, name: str, **shape: Any) -> Any:
        """Add a positive parameter."""
        priors: list[tuple[Any, ...]] = [
            (pm.HalfNormal, 1.0), (pm.HalfCauchy, 0.5), (pm.Exponential, 2.0), (pm.Gamma, 2.0, 3.0),
            (pm.Uniform, 0.0, 2.0), (pm.InverseGamma, 3.0, 1.5), (pm.LogNormal, -1.0, 0.5), (pm.Weibull, 1.5, 0.7),
        ]  # fmt: skip
        kind, *parameters = priors[self.rng.integers(len(priors))]
        return kind(name, *parameters, **shape)

    def coefficient(self, name: str, **shape: Any) -> Any:
        """Add a parameter of any sign."""
        priors: list[tuple[Any, ...]] = [
            (pm.Normal, 0.0, 1.0), (pm.Normal, 0.0, 1.0), (pm.Cauchy, 0.0, 0.7), (pm.Laplace, 0.0, 0.7),
            (pm.Uniform, -2.0, 2.0), (pm.Normal, 0.0, 5.0), (pm.Flat,), (pm.Logistic, 0.0, 0.5),
        ]  # fmt: skip
        kind, *parameters = priors[self.rng.integers(len(priors))]
        if kind is pm.Flat and self.is_simulated:
            kind, parameters = pm.Normal, [0.0, 1.0]
        return kind(name, *parameters, **shape)

    def effects(self, name: str, sd: Any, **shape: Any) -> Any:
        """Add normal effects, centred or not."""
        if self.coin():
            return pm.Normal(name, 0.0, sd, **shape)
        return pm.Deterministic(name, sd * pm.Normal(f"{name}_z", 0.0, 1.0, **shape), dims=shape.get("dims"))


def _correlated_slopes(rows: Rows) -> Any:
    b = pm.MvNormal("b_together", np.zeros(3), 0.5 * np.eye(3) + 0.4)
    if rows.coin():
        pm.Potential("soft", -0.5 * ((b.sum() - 0.3) / 0.2) ** 2)
    return rows.x @ b


def _horseshoe(rows: Rows) -> Any:
    tau, local = pm.HalfCauchy("tau", 0.3), pm.HalfCauchy("local", 1.0, shape=3)
    return rows.x @ pm.Deterministic("b_shrunk", tau * local * pm.Normal("b_z", shape=3))


def _slopes_by_group(rows: Rows) -> Any:
    u = rows.effects("u_intercept", rows.scale("sd_intercept"), dims="group")
    v = rows.effects("u_slope", rows.scale("sd_slope"), dims="group")
    return u[rows.member] + v[rows.member] * rows.x[:, 0]


def _correlated_effects(rows: Rows) -> Any:
    chol, *_ = pm.LKJCholeskyCov("chol", n=2, eta=2.0, sd_dist=pm.HalfNormal.dist(1.0, shape=2))
    if rows.coin():
        w = pm.MvNormal("w", np.zeros(2), chol=chol, dims=("group", "term"))
    else:
        w = pm.Deterministic("w", pm.Normal("w_z", dims=("group", "term")) @ chol.T, dims=("group", "term"))
    return w[rows.member, 0] + w[rows.member, 1] * rows.x[:, 1]


def _crossed(rows: Rows) -> Any:
    first = rows.effects("first", rows.scale("sd_first"), dims="group")
    second = rows.effects("second", rows.scale("sd_second"), dims="kind")
    return first[rows.member] + second[rows.of_kind]


def _nested(rows: Rows) -> Any:
    upper = rows.effects("upper", rows.scale("sd_upper"), dims="group")
    lower = rows.effects("lower", rows.scale("sd_lower"), dims=("group", "kind"))
    return upper[rows.member] + lower[rows.member, rows.of_kind]


def _walk(rows: Rows) -> Any:
    sd = rows.scale("sd_walk")
    if rows.coin():
        return pm.GaussianRandomWalk("walk", sigma=sd, init_dist=pm.Normal.dist(0.0, 1.0), dims="period")[rows.time]
    return pm.Deterministic("walk", pt.cumsum(sd * pm.Normal("walk_z", dims="period")), dims="period")[rows.time]


def _series(rows: Rows) -> Any:
    rho = pm.Uniform("rho", -1.0, 1.0) if rows.coin() else pm.Beta("rho", 3.0, 2.0)
    return pm.AR("ar", rho, sigma=rows.scale("sd_ar"), init_dist=pm.Normal.dist(0.0, 1.0), dims="period")[rows.time]


def _process(rows: Rows) -> Any:
    length, sd = pm.InverseGamma("length", 5.0, 5.0), rows.scale("sd_gp")
    process = pm.gp.Latent(cov_func=sd**2 * pm.gp.cov.Matern52(1, ls=length))
    times = np.linspace(0.0, 3.0, rows.n_times)[:, None]
    return process.prior("f", X=times, reparameterize=rows.coin())[rows.time]


def _spline(rows: Rows) -> Any:
    knots = np.linspace(-2.0, 2.0, 6)
    bumps = pm.GaussianRandomWalk("bumps", sigma=rows.scale("sd_bumps"), init_dist=pm.Normal.dist(0.0, 1.0), shape=6)
    return pt.exp(-((rows.x[:, 0][:, None] - knots) ** 2)) @ bumps


def _step(rows: Rows) -> Any:
    b = rows.coefficient("b_step", shape=2)
    if rows.coin():
        return pt.switch(rows.x[:, 2] > 0.0, b[0] * rows.x[:, 2], b[1] * rows.x[:, 2])
    return b[0] * pm.math.sigmoid(4.0 * (rows.x[:, 2] - pm.Normal("change", 0.0, 1.0)))


def _measured(rows: Rows) -> Any:
    truth = pm.Normal("truth", 0.0, 1.0, shape=rows.values["x"].shape[0])
    pm.Normal("measured", truth, 0.5, observed=rows.values["x"][:, 1])
    return rows.coefficient("b_truth") * truth


TERMS: dict[str, Callable[[Rows], Any]] = {
    "slopes": lambda rows: rows.x @ rows.coefficient("b", shape=3),
    "slope": lambda rows: rows.x[:, 0] * rows.coefficient("b_first"),
    "correlated slopes": _correlated_slopes,
    "horseshoe": _horseshoe,
    "groups": lambda rows: rows.effects("u", rows.scale("sd"), dims="group")[rows.member],
    "zero sum": lambda rows: pm.ZeroSumNormal("zero", sigma=rows.scale("sd_zero"), dims="group")[rows.member],
    "slopes by group": _slopes_by_group,
    "correlated effects": _correlated_effects,
    "crossed": _crossed,
    "nested": _nested,
    "walk": _walk,
    "AR": _series,
    "GP": _process,
    "spline": _spline,
    "step": _step,
    "measured": _measured,
    "offset": lambda rows: rows.x[:, 2] * 0.5,
}


def _correlated_pair(eta: Any, rows: Rows) -> tuple[Any, dict[str, Any]]:
    chol, *_ = pm.LKJCholeskyCov("residual", n=2, eta=2.0, sd_dist=pm.Exponential.dist(1.0, shape=2))
    return pm.MvNormal, {"mu": pt.stack([eta, rows.coefficient("other") - eta], axis=1), "chol": chol}


def _in_time(eta: Any, rows: Rows) -> tuple[Any, dict[str, Any]]:
    at = np.arange(rows.values["x"].shape[0]) / 4.0
    return pm.MvNormal, {"mu": eta, "cov": rows.scale("sigma") ** 2 * np.exp(-np.abs(at[:, None] - at))}


def _mixture(eta: Any, rows: Rows) -> tuple[Any, dict[str, Any]]:
    parts = [pm.Normal.dist(eta, rows.scale("sigma")), pm.Normal.dist(eta + 3.0, 1.0)]
    return pm.Mixture, {"w": pm.Dirichlet("part", np.ones(2)), "comp_dists": parts}


def _ordered(eta: Any, rows: Rows) -> tuple[Any, dict[str, Any]]:
    ordered, start = pm.distributions.transforms.ordered, np.array([-1.0, 0.0, 1.0])
    cut = pm.Normal("cut", start, 1.0, shape=3, transform=None if rows.is_simulated else ordered, initval=start)
    return pm.OrderedLogistic, {"eta": eta, "cutpoints": pt.sort(cut) if rows.is_simulated else cut}


def _categories(eta: Any, rows: Rows) -> tuple[Any, dict[str, Any]]:
    logits = pt.stack([pt.zeros_like(eta), eta, rows.coefficient("second_class") - 0.5 * eta], axis=1)
    return pm.Categorical, {"logit_p": logits}


LIKELIHOODS: dict[str, Callable[[Any, Rows], tuple[Any, dict[str, Any]]]] = {
    "Normal": lambda eta, rows: (pm.Normal, {"mu": eta, "sigma": rows.scale("sigma")}),
    "Normal, two scales": lambda eta, rows: (
        pm.Normal, {"mu": eta, "sigma": pt.exp(rows.coefficient("log_sigma") * 0.3 + 0.2 * rows.x[:, 1])}
    ),
    "StudentT": lambda eta, rows: (
        pm.StudentT, {"nu": pm.Gamma("nu", 2.0, 0.1) if rows.coin() else 4.0, "mu": eta, "sigma": rows.scale("sigma")}
    ),
    "Laplace": lambda eta, rows: (pm.Laplace, {"mu": eta, "b": rows.scale("sigma")}),
    "LogNormal": lambda eta, rows: (pm.LogNormal, {"mu": eta, "sigma": rows.scale("sigma")}),
    "Poisson": lambda eta, rows: (pm.Poisson, {"mu": pt.exp(eta)}),
    "NegativeBinomial": lambda eta, rows: (pm.NegativeBinomial, {"mu": pt.exp(eta), "alpha": rows.scale("alpha")}),
    "Bernoulli": lambda eta, rows: (pm.Bernoulli, {"logit_p": eta}),
    "Bernoulli, probit": lambda eta, rows: (pm.Bernoulli, {"p": pm.math.invprobit(eta)}),
    "Binomial": lambda eta, rows: (pm.Binomial, {"n": 7, "logit_p": eta}),
    "Beta": lambda eta, rows: (pm.Beta, {"mu": pm.math.sigmoid(eta), "nu": 2.0 + 10.0 * rows.scale("phi")}),
    "Gamma": lambda eta, rows: (pm.Gamma, {"mu": pt.exp(eta), "sigma": pt.exp(eta) * rows.scale("cv")}),
    "Weibull, censored": lambda eta, rows: (
        pm.Censored, {"dist": pm.Weibull.dist(0.5 + rows.scale("shape"), pt.exp(eta)), "lower": None, "upper": 2.0}
    ),
    "truncated": lambda eta, rows: (
        pm.Truncated, {"dist": pm.Normal.dist(eta, rows.scale("sigma")), "lower": -1.0, "upper": None}
    ),
    "OrderedLogistic": _ordered,
    "ZeroInflatedPoisson": lambda eta, rows: (
        pm.ZeroInflatedPoisson, {"psi": pm.Beta("psi", 2.0, 2.0), "mu": pt.exp(eta)}
    ),
    "hurdle": lambda eta, rows: (
        pm.HurdleGamma, {"psi": pm.Beta("psi", 2.0, 2.0), "mu": pt.exp(eta), "sigma": pt.exp(eta)}
    ),
    "Categorical": _categories,
    "MvNormal of pairs": _correlated_pair,
    "MvNormal in time": _in_time,
    "mixture": _mixture,
}  # fmt: skip


def build(seed: int, y: Array | None = None) -> tuple[str, pm.Model, dict[str, Any]]:
    """Return a model in words, the model, and its columns; without observations, one that can be simulated."""
    rng = np.random.default_rng(seed)
    n, n_groups = int(rng.choice(ROWS)), int(rng.choice(GROUPS))
    n_times = min(n, 25)
    values = {
        "x": rng.normal(size=(n, 3)),
        "member": (n_groups * rng.random(n) ** rng.choice([1.0, 2.0, 4.0])).astype(int),
        "of_kind": rng.integers(len(KINDS), size=n),
        "time": np.arange(n) % n_times,
    }
    coords = {"group": [f"g{i}" for i in range(n_groups)], "kind": KINDS, "term": ["intercept", "slope"]}
    names = rng.choice(list(TERMS), size=rng.choice([0, 1, 1, 1, 2, 2, 3]), replace=False).tolist()
    likelihood, has_data, is_weighted = str(rng.choice(list(LIKELIHOODS))), rng.random() < 0.6, rng.random() < 0.07
    with pm.Model(coords={**coords, "period": np.arange(n_times)}) as model:
        columns = {name: pm.Data(name, value) if has_data else value for name, value in values.items()}
        rows = Rows(rng, y is None, {**columns, "values": values, "n_times": n_times})
        eta = rows.coefficient("intercept") if rng.random() < 0.8 or names in ([], ["offset"]) else 0.0
        eta = sum((TERMS[name](rows) for name in names or ["offset"]), start=eta)
        if rng.random() < 0.3:
            pm.Deterministic("first_mean", eta[0])
        kind, parameters = LIKELIHOODS[likelihood](eta, rows)
        if is_weighted and y is not None:
            pm.Potential("y", (np.arange(n) % 3 + 1)[:, *[None] * (y.ndim - 1)] * pm.logp(kind.dist(**parameters), y))
        else:
            kind("y", **parameters, observed=y)
    where = "data" if has_data else "constants"
    said = f"{likelihood}{', weighted' * is_weighted}: {' + '.join(names)}; {n} rows, {n_groups} groups, {where}"
    return said, model, values if has_data else {}


def simulated(seed: int) -> tuple[str, pm.Model, dict[str, Any]]:
    """Return a model given data that are drawn from it."""
    _, model, _ = build(seed)
    for i in range(TRIES):
        y = np.asarray(pm.draw(model["y"], random_seed=1_000 * seed + i, mode="FAST_COMPILE"))
        if np.isfinite(y).all() and np.abs(y).max() < LARGEST and len(np.unique(y)) > 1:
            return build(seed, y)
    return build(seed, np.where(np.isfinite(y), np.clip(y, -LARGEST, LARGEST), 1.0))
