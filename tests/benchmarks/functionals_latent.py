"""The Gaussian processes of ``functionals.py`` as `functionals_weights.weighted` wants them."""

from collections.abc import Callable
from functools import partial

import functionals_fields as fields
import numpy as np
import pymc as pm

from functionals_weights import Latent, Rows
from measure import Array


def matern(x: Array, log_ell: float, log_eta: float) -> Array:
    """Return the lower factor of the covariance of a process, as `pm.gp.Latent` has it."""
    apart = np.sqrt(5.0 * ((x[:, None] - x) ** 2).sum(axis=2)) / np.exp(log_ell)
    covariance = np.exp(2.0 * log_eta) * (1.0 + apart + apart**2 / 3.0) * np.exp(-apart)
    return np.linalg.cholesky(covariance + 1e-6 * np.eye(len(x)))


def _prior(h: Array, betas: tuple[float, ...], scales: tuple[float, ...], noise: bool) -> float:
    """Return log p of pairs of a length scale, InverseGamma(5, beta), and a half-normal amplitude; and of a noise."""
    value = 0.0
    for i, (beta, scale) in enumerate(zip(betas, scales, strict=True)):
        ell, eta = h[2 * i], h[2 * i + 1]
        value += (
            5.0 * (np.log(beta) - ell) - beta * np.exp(-ell) + eta - 0.5 * (np.exp(eta) / scale) ** 2 - np.log(scale)
        )
    return value + (h[-1] - 0.5 * np.exp(2.0 * h[-1]) if noise else 0.0)


def _one(model: pm.Model, x: Array, kind: str, sd: float, trials: float = 1.0, offset: Array | float = 0.0) -> Latent:
    """Return a level and one process."""
    n = len(x)
    return Latent(
        Rows(kind, _observed(model), trials),
        offset,
        lambda h: np.column_stack([np.ones(n), matern(x, h[0], h[1])]),
        partial(_prior, betas=(5.0,), scales=(2.0,), noise=False),
        np.array([0.3, 0.0]),
        ("ell_f_log__", "eta_f_log__"),
        ("level", "f_rotated_"),
        np.concatenate([[sd], np.ones(n)]),
    )


def _additive(model: pm.Model) -> Latent:
    x = fields.places(40, 35)[0][:, None]
    hyper = ("ell_slow_log__", "eta_slow_log__", "ell_quick_log__", "eta_quick_log__", "noise_log__")
    return Latent(
        Rows("normal", _observed(model)),
        0.0,
        lambda h: np.column_stack([np.ones(40), matern(x, h[0], h[1]), matern(x, h[2], h[3])]),
        partial(_prior, betas=(25.0, 3.0), scales=(3.0, 1.0), noise=True),
        np.array([1.7, 0.3, -0.3, -0.7, -1.0]),
        hyper,
        ("level", "slow_rotated_", "quick_rotated_"),
        np.concatenate([[5.0], np.ones(80)]),
    )


def _hierarchical(model: pm.Model) -> Latent:
    x = fields.places(15, 36)[0][:, None]
    return Latent(
        Rows("poisson", _observed(model)),
        0.0,
        lambda h: np.column_stack(
            [np.ones(60), np.tile(matern(x, h[0], h[1]), (4, 1)), np.kron(np.eye(4), matern(x, h[2], h[3]))]
        ),
        partial(_prior, betas=(5.0, 5.0), scales=(2.0, 1.0), noise=False),
        np.array([0.3, 0.0, 0.3, -0.7]),
        ("ell_f_log__", "eta_f_log__", "ell_own_log__", "eta_own_log__"),
        ("level", "f_rotated_", *(f"f{j}_rotated_" for j in range(4))),
        np.concatenate([[3.0], np.ones(75)]),
    )


def _offset(model: pm.Model) -> Latent:
    x, rng = fields.places(40, 34)
    return _one(model, x[:, None], "poisson", 3.0, offset=np.log(fields.exposure(rng)))


def _observed(model: pm.Model) -> Array:
    [y] = model.observed_RVs
    return model.rvs_to_values[y].data.astype(float).ravel()


#: From a model to what is integrated.
LATENT: dict[str, Callable[[pm.Model], Latent]] = {
    "gp.Latent, Poisson": lambda m: _one(m, fields.places(40, 3)[0][:, None], "poisson", 5.0),
    "gp.Latent, Bernoulli": lambda m: _one(m, fields.places(60, 31)[0][:, None], "binomial", 2.0),
    "gp.Latent, binomial of 200": lambda m: _one(m, fields.places(40, 32)[0][:, None], "binomial", 2.0, 200.0),
    "gp.Latent, plane": lambda m: _one(m, fields.plane(), "poisson", 3.0),
    "gp.Latent, offset": _offset,
    "two additive GPs": _additive,
    "hierarchical GPs": _hierarchical,
}
