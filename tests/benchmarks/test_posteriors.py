"""The benchmark of posteriors: what is looked at, errors, references without NUTS, and tables."""

import itertools

import numpy as np
import pandas as pd
import posteriors
import posteriors_tables as tables
import pymc as pm
import pytest

from functionals_references import Summary
from posteriors_cases import CASES
from posteriors_exact import CrossedLinear, crossed_linear, of_normals
from posteriors_looks import N_EACH, Looks
from scipy.stats import multivariate_normal
from xarray import Dataset, DataTree


def test_what_people_look_at_of_a_model():
    x = np.arange(100.0)
    with pm.Model() as model:
        level, s = pm.Normal("level"), pm.HalfNormal("s")
        u = pm.Normal("u", 0, s, shape=4)
        pm.Deterministic("ratio", u / s)
        pm.Poisson("y", pm.math.exp(level + 0.01 * x * u[0]), observed=np.ones(100, dtype=int))
    rng = np.random.default_rng(1)
    draws = {"level": rng.normal(size=(1, 7)), "s": rng.uniform(1, 2, (1, 7)), "u": rng.normal(size=(1, 7, 4))}
    dims = {"level": ("chain", "draw"), "s": ("chain", "draw"), "u": ("chain", "draw", "k")}
    posterior = DataTree(Dataset({name: (dims[name], value) for name, value in draws.items()}))
    flat, names, n_functionals = Looks(model)(posterior)
    assert flat.shape == (7, len(names))
    assert names[n_functionals:] == ["level", "s_log__", "u[0]", "u[1]", "u[2]", "u[3]"]
    column = dict(zip(names, flat.T, strict=True))
    level, s, u = draws["level"][0], draws["s"][0], draws["u"][0]
    mu = np.exp(level[:, None] + 0.01 * x * u[:, :1])
    np.testing.assert_allclose(column["ratio[3]"], u[:, 3] / s)
    np.testing.assert_allclose(column["y, parameter 1[99]"], mu[:, 99])
    np.testing.assert_allclose(column["total of y, parameter 1"], mu.sum(axis=1))
    np.testing.assert_allclose(column["steps of u[2]"], u[:, 3] - u[:, 2])
    np.testing.assert_allclose(column["total of u"], u.sum(axis=1))
    np.testing.assert_allclose(column["s_log__"], np.log(s))
    assert sum(name.startswith("y, ") for name in names) == N_EACH


def test_errors_are_those_of_what_the_reference_has():
    """Draws that are off by known amounts; of the reference, one name is unknown and one is a constant."""
    names = ["total", "mu[0]", "heavy", "constant", "s_log__", "z[0]"]
    levels = (np.arange(4_000) + 0.5) / 4_000
    normal = multivariate_normal().rvs(4_000, random_state=1)
    normal = (normal - normal.mean()) / normal.std()
    draws = np.column_stack([normal + 0.1, 2 * normal, levels, 0 * levels, 1.2 * normal - 0.3, normal])
    kurtosis = np.array([3.0, 3.0, 1e3, 3.0, 3.0, 3.0, 3.0])
    sd = np.array([1.0, 2.0, 1e6, 0.0, 1.0, 1.0, 1.0])
    reference = of_normals([*names, "unknown"], np.zeros(7), sd, 400.0)._replace(kurtosis=kurtosis)
    found = posteriors.errors((draws, names, 4), 1_600.0, reference)
    assert found["functional_em"] == pytest.approx(0.1 / np.sqrt(3))
    assert (found["functional_worst"], found["functional_worst_at"]) == (pytest.approx(0.1), "total")
    assert found["coordinate_em"] == pytest.approx(0.3 / np.sqrt(2))
    assert found["coordinate_es"] == pytest.approx(0.2 / np.sqrt(2))
    assert (found["scalar_em"], found["scalar_worst"]) == (pytest.approx(0.3), pytest.approx(-0.3))
    assert (found["scalar_worst_sd"], found["scalar_worst_sd_at"]) == (pytest.approx(0.2), "s_log__")
    assert found["n_heavy"] == 1
    assert found["noise"] == pytest.approx(np.sqrt(1 / 400 + 1 / 1_600))


def test_a_reference_of_coordinates_alone_says_nothing_of_functionals():
    draws = np.random.default_rng(1).normal(size=(100, 2))
    found = posteriors.errors((draws, ["total", "x"], 1), 100.0, of_normals(["x"], np.zeros(1), np.ones(1), np.inf))
    assert "functional_em" not in found
    assert abs(found["coordinate_em"] - abs(draws[:, 1].mean())) < 1e-12


@pytest.fixture
def ratings():
    rng = np.random.default_rng(1)
    s, d = rng.integers(6, size=40), rng.integers(4, size=40)
    y = 3.0 + rng.normal(0, 0.8, 6)[s] + rng.normal(0, 0.5, 4)[d] + rng.normal(size=40)
    return pd.DataFrame({"y": y, "s": s, "d": d})


def test_log_m_of_crossed_effects_is_that_of_a_dense_normal(ratings):
    y = ratings["y"].to_numpy()
    z = [pd.get_dummies(ratings[name]).to_numpy(dtype=float) for name in ("s", "d")]
    log_m, values, dense = CrossedLinear(ratings), [], []
    for theta in np.log([[0.5, 0.7, 1.1], [1.3, 0.1, 0.6]]):
        s, d, noise = np.exp(theta)
        covariance = s**2 * z[0] @ z[0].T + d**2 * z[1] @ z[1].T + noise**2 * np.eye(40)
        whole = covariance + 25.0
        prior = sum(
            pm.logp(pm.HalfNormal.dist(sd), np.exp(t)).eval() + t for sd, t in zip((1, 1, 2), theta, strict=True)
        )
        value, mean, variance = log_m(theta)
        values.append(value)
        dense.append(multivariate_normal(np.zeros(40), whole).logpdf(y) + prior)
        precision = np.linalg.inv(covariance)
        assert variance == pytest.approx(1.0 / (precision.sum() + 1.0 / 25.0))
        assert mean == pytest.approx(variance * (precision @ y).sum())
    assert values[0] - values[1] == pytest.approx(dense[0] - dense[1])


def test_moments_of_crossed_effects_are_those_of_a_lattice(ratings):
    found = crossed_linear(ratings, n_draws=4_000)
    log_m = CrossedLinear(ratings)
    axes = [np.linspace(m - 6 * sd, m + 6 * sd, 25) for m, sd in zip(found.mean[1:], found.sd[1:], strict=True)]
    theta = np.array(list(itertools.product(*axes)))
    values = np.array([log_m(t) for t in theta])
    w = np.exp(values[:, 0] - values[:, 0].max())
    w /= w.sum()
    mean = w @ np.column_stack([values[:, 1], theta])
    assert found.names == ["level", "sd_s_log__", "sd_d_log__", "noise_log__"]
    assert found.least_size() > 400
    np.testing.assert_allclose((found.mean - mean) / found.sd, 0.0, atol=4.0 / np.sqrt(found.least_size()))


def test_tables_have_the_worst_of_the_last_run():
    row = dict.fromkeys(posteriors.FIELDS, "")
    row |= {"model": "nile", "fit": "first", "date": "2026-01-01", "environment": "a machine", "verdict": "reliable"}
    old = {**row, "run": "1", "seconds": "99", "cpu": "99"}
    new = {**row, "run": "2", "seconds": "4", "cpu": "3", "kind": "exact", "coordinate_em": "0.01"}
    new |= {"coordinate_worst": "-0.02", "coordinate_worst_at": "s", "rival": "theirs", "rival_cpu": "0.5"}
    warm = {**new, "fit": "warm", "cpu": "1", "seconds": "2", "coordinate_em": "0.04", "verdict": "not judged"}
    warm |= {"coordinate_worst": "0.01"}
    text = tables.write([old, new, warm], list(CASES))
    assert "99" not in text
    assert "| nile |  | 4 (3) | 2 (1) | - | theirs | 0.5 | 2 | exact | not judged / reliable |" in text
    assert "| nile | 0.04 | - | -0.02 `s` |" in text


def test_models_are_built_and_have_names_that_summaries_can_have():
    case = CASES["2pl"]
    model = case.build(None)
    assert np.isfinite(model.compile_logp()(model.initial_point()))
    assert all(case.rival_name for case in CASES.values() if case.rival)
    assert isinstance(of_normals(["a"], np.zeros(1), np.ones(1), 1.0), Summary)
    with pytest.raises(ValueError, match="give --data"):
        CASES["insteval_linear"].build(None)
