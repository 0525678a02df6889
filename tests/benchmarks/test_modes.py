"""Parts of the benchmark of several modes."""

import numpy as np
import pytest
import xarray as xr

from modes import ALARM, OTHER, REFUSED, RIGHT, WRONG, errors_of, is_named, outcome_of
from modes_models import CASES, _mirrored, _swapped


@pytest.mark.parametrize(
    ("reliable", "mean", "sd", "outcome"),
    [
        (True, 0.1, -0.1, RIGHT), (True, 0.1, -0.4, WRONG), (True, -0.5, 0.0, WRONG), (False, 0.1, 0.1, ALARM),
        (False, 0.1, 0.5, REFUSED), (False, None, None, REFUSED), (True, None, None, OTHER),
    ],
)  # fmt: skip
def test_outcomes(reliable, mean, sd, outcome):
    assert outcome_of(reliable, mean, sd) == outcome


def test_errors_are_in_standard_deviations_of_what_is_right():
    draws = np.array([1.0, 3.0]).repeat(50)[None]
    found = errors_of(xr.Dataset({"x": (("chain", "draw"), draws)}), {"x": (np.array(1.0), np.array(2.0))})
    assert found["worst_mean"] == pytest.approx(0.5)
    assert found["worst_sd"] == pytest.approx(-0.5)
    assert found["worst_at"] == "x"


@pytest.mark.parametrize(
    ("reason", "named"), [("at `f[0]` = 1", True), ("at `f_interval__` = 1", True), ("at `ff` = 1", False)]
)
def test_a_reason_names_a_variable_or_an_entry_or_its_unconstrained_value(reason, named):
    assert is_named([reason], ["f"]) is named


@pytest.mark.parametrize("image", [_swapped, _mirrored])
def test_the_image_of_an_image_is_where_it_began(image):
    rng = np.random.default_rng(1)
    draws = {"w": rng.random((2, 5)), "mu": rng.normal(size=(2, 5, 2)), "sigma": rng.random((2, 5))}
    twice = image(image(draws))
    for name, x in draws.items():
        np.testing.assert_allclose(twice[name], x)
    assert np.all(image(draws)["sigma"] == draws["sigma"])


@pytest.mark.parametrize("name", ["y = u^2", "sinusoid 3", "two modes 6 sd apart, 0.8"])
def test_moments_that_are_known_are_those_of_log_p(name):
    """By importance sampling from a wide t in unconstrained coordinates, of the densities of the models."""
    from pymc_ngvi.density import LogDensity

    case = CASES[name]
    density = LogDensity(case.build())
    rng = np.random.default_rng(2)
    n, d = 400_000 if density.n_dim > 2 else 60_000, density.n_dim
    theta = 2.5 * rng.standard_normal((n, d)) / np.sqrt(rng.chisquare(5, (n, 1)) / 5)
    log_q = -0.5 * (5 + d) * np.log1p((theta**2).sum(axis=1) / 2.5**2 / 5)
    log_w = density.logp(theta) - log_q
    w = np.exp(log_w - log_w.max())
    w /= w.sum()
    size = 1.0 / (w**2).sum()
    at, (mean, sd) = (
        ("x", case.moments()["x"])
        if d == 2
        else ("a" if "a" in case.moments() else "u", next(iter(case.moments().values())))
    )
    where = density.layout.variables[[v.name for v in density.layout.variables].index(at)].where
    values = theta[:, where]
    found = w @ values
    np.testing.assert_allclose(found, np.ravel(mean), atol=5.0 * float(np.max(sd)) / np.sqrt(size))
    spread = np.sqrt(w @ (values - found) ** 2)
    np.testing.assert_allclose(spread, np.ravel(sd), rtol=5.0 * 2.0 / np.sqrt(size))
