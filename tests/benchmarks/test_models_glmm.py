"""The models of the benchmarks on hierarchical models: their log densities against formulas in NumPy and SciPy."""

import marginal
import models_glmm
import numpy as np
import pandas as pd
import pytest

from scipy import integrate, stats
from scipy.special import expit, gammaln

from pymc_ngvi import LogDensity

N_GROUPS, N_VISITS = 5, 4
#: PyTensor holds whole numbers in single precision, and PyMC takes logarithms of them there.
SINGLE = 1e-6


@pytest.fixture
def epilepsy_table(rng):
    visits = np.tile([-0.3, -0.1, 0.1, 0.3], N_GROUPS)
    per_patient = {
        "subject": [7, 3, 9, 1, 4],
        "trt": [0, 1, 1, 0, 1],
        "log_base4": rng.normal(size=5),
        "age": [20, 31, 44, 25, 38],
    }
    table = pd.DataFrame({name: np.repeat(values, N_VISITS) for name, values in per_patient.items()})
    return table.assign(visit_code=visits, seizures=rng.poisson(4.0, size=len(table)))


@pytest.fixture
def toenail_table(rng):
    n = N_GROUPS * N_VISITS
    return pd.DataFrame(
        {
            "patient": np.repeat([7, 3, 9, 1, 4], N_VISITS),
            "treatment": np.repeat([0, 1, 1, 0, 1], N_VISITS),
            "time": np.tile([0.0, 1.0, 2.1, 9.0], N_GROUPS),
            "outcome": rng.integers(0, 2, size=n),
        }
    )


@pytest.fixture
def hers_table(rng):
    n = N_GROUPS * N_VISITS
    return pd.DataFrame(
        {
            "pptid": np.repeat([7, 3, 9, 1, 4], N_VISITS),
            "age": np.repeat([60, 55, 71, 66, 50], N_VISITS),
            "bmi": rng.normal(27, 4, size=n),
            "htnmeds": rng.integers(0, 2, size=n),
            "visit_code": np.tile([-1.0, -0.6, 0.2, 1.0], N_GROUPS),
            "high_sbp": rng.integers(0, 2, size=n),
        }
    )


def evaluate(model, point):
    """Return the compiled log density at a point of value variables."""
    density = LogDensity(model)
    theta = np.empty(density.n_dim)
    for variable in density.layout.variables:
        theta[variable.where] = np.ravel(point[variable.value_name])
    return density.logp(theta[None])[0]


def log_bernoulli(y, logit):
    return np.log(np.where(y == 1, expit(logit), expit(-logit))).sum()


def half_vectorised(matrix):
    return matrix[np.tril_indices(len(matrix))]


def precision_of(omega):
    w = np.array([[np.exp(omega[0]), 0.0], [omega[1], np.exp(omega[2])]])
    return w @ w.T


def log_wishart_prior(omega, df, scale):
    """Return the log density of omega by SciPy's Wishart and a Jacobian from differences."""
    steps = 1e-6 * np.eye(len(omega))
    columns = [half_vectorised(precision_of(omega + e) - precision_of(omega - e)) / 2e-6 for e in steps]
    log_jacobian = np.linalg.slogdet(np.array(columns))[1]
    return stats.wishart.logpdf(precision_of(omega), df, scale) + log_jacobian


def test_epilepsy_agrees_with_a_multivariate_normal_and_a_wishart(epilepsy_table, rng):
    glmm = models_glmm.epilepsy(epilepsy_table)
    beta, omega, b = 0.3 * rng.normal(size=6), np.array([0.4, -0.3, 0.2]), rng.normal(size=(N_GROUPS, 2))
    t = epilepsy_table
    # Codes of the groups go by subject number, not by the order of the rows.
    code = t["subject"].map({1: 0, 3: 1, 4: 2, 7: 3, 9: 4}).to_numpy()
    age = np.log(t["age"]) - np.log(t["age"]).mean()
    fixed = beta[0] + beta[1] * t["log_base4"] + beta[2] * t["trt"] + beta[3] * t["log_base4"] * t["trt"]
    eta = (fixed + beta[4] * age + beta[5] * t["visit_code"]).to_numpy() + b[code, 0] + b[code, 1] * t["visit_code"]
    df, scale = 3.0, np.array([[11.0169, -0.1616], [-0.1616, 0.5516]])
    log_y_factorials = gammaln(t["seizures"] + 1.0).sum()
    expected = (
        (t["seizures"] * eta - np.exp(eta)).sum()
        - log_y_factorials
        + stats.norm.logpdf(beta, 0, 10).sum()
        + stats.multivariate_normal.logpdf(b, cov=np.linalg.inv(precision_of(omega))).sum()
        + log_wishart_prior(omega, df, scale)
    )
    point = {"beta": beta, "omega": omega, "intercept": b[:, 0], "slope": b[:, 1]}
    assert evaluate(glmm.model, point) == pytest.approx(expected, abs=1e-6)

    # What the paper leaves out: with it left out here and in log q alike, log p - log q as the paper writes it remains.
    w = np.array([[np.exp(omega[0]), 0.0], [omega[1], np.exp(omega[2])]])
    log_p = (
        (t["seizures"] * eta - np.exp(eta)).sum()
        - beta @ beta / 200
        + N_GROUPS * (omega[0] + omega[2])
        - np.sum((b @ w) ** 2) / 2
        + 3 * omega[0]
        + 2 * omega[2]
        - np.trace(np.linalg.solve(scale, w @ w.T)) / 2
    )
    n_dim = 6 + 3 + 2 * N_GROUPS
    log_q_constant = -n_dim / 2 * np.log(2 * np.pi)
    assert expected - log_q_constant - glmm.left_out == pytest.approx(log_p, abs=1e-6)


@pytest.mark.parametrize(("name", "rate"), [("toenail", 0.4962), ("hers", 0.5079)])
def test_random_intercepts_agree_with_a_gamma_prior_on_the_precision(name, rate, request, rng):
    t = request.getfixturevalue(f"{name}_table")
    glmm = models_glmm.TABLE_6[name](t)
    if name == "toenail":
        time = (t["time"] - t["time"].mean()) / t["time"].std()
        columns, y, group = [t["treatment"], time, t["treatment"] * time], t["outcome"], t["patient"]
    else:
        age, bmi = ((t[c] - t[c].mean()) / t[c].std() for c in ("age", "bmi"))
        columns, y, group = [age, bmi, t["htnmeds"], t["visit_code"]], t["high_sbp"], t["pptid"]
    beta, omega, b = 0.4 * rng.normal(size=1 + len(columns)), -0.3, rng.normal(size=N_GROUPS)
    code = group.map({1: 0, 3: 1, 4: 2, 7: 3, 9: 4}).to_numpy()
    logit = beta[0] + sum(c.to_numpy() * value for c, value in zip(columns, beta[1:], strict=True)) + b[code]
    precision = np.exp(2 * omega)
    expected = (
        log_bernoulli(y.to_numpy(), logit)
        + stats.norm.logpdf(beta, 0, 10).sum()
        + stats.norm.logpdf(b, 0, precision**-0.5).sum()
        + stats.gamma.logpdf(precision, 0.5, scale=1 / rate)
        + np.log(2 * precision)
    )
    assert evaluate(glmm.model, {"beta": beta, "omega": omega, "b": b}) == pytest.approx(expected, abs=1e-9)

    log_p = log_bernoulli(y.to_numpy(), logit) - beta @ beta / 200 + N_GROUPS * omega - precision * (b @ b) / 2
    log_p += omega - rate * precision
    n_dim = len(beta) + 1 + N_GROUPS
    log_q_constant = -n_dim / 2 * np.log(2 * np.pi)
    assert expected - log_q_constant - glmm.left_out == pytest.approx(log_p, abs=1e-9)


def test_marginal_posterior_agrees_with_adaptive_quadrature(rng):
    data = models_glmm.simulate_logistic(4, seed=4)
    found = marginal.Marginal(data)
    theta, other = (np.append(0.5 * rng.normal(size=5), value) for value in (0.1, -0.4))

    def log_posterior(theta):
        s = np.exp(theta[-1])
        total = stats.norm.logpdf(theta[:-1], 0, 10).sum() + stats.halfnorm.logpdf(s, scale=3) + theta[-1]
        for g in range(4):
            rows = data.group == g
            logit, sign = data.x[rows] @ theta[:-1], 2 * data.y[rows] - 1

            def integrand(b, logit=logit, sign=sign):
                return np.prod(expit(sign * (logit + b))) * stats.norm.pdf(b, 0, s)

            total += np.log(integrate.quad(integrand, -8 * s, 8 * s)[0])
        return total

    difference = found.log_density(theta) - found.log_density(other)
    assert difference == pytest.approx(log_posterior(theta) - log_posterior(other), abs=1e-6)
    slopes = [(found.log_density(theta + e) - found.log_density(theta - e)) / 2e-6 for e in 1e-6 * np.eye(6)]
    np.testing.assert_allclose(found.gradient(theta), slopes, atol=1e-6)
