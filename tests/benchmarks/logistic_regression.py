"""Bayesian logistic regression, and a Gaussian q: every expectation by quadrature, without noise."""

import functools

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm

from measure import Array
from scipy.special import expit
from sklearn.datasets import load_breast_cancer

from pymc_ngvi.families import FullState
from pymc_ngvi.methods import UPDATES
from pymc_ngvi.methods.estimators import Moments

LOG_2PI = float(np.log(2 * np.pi))


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
        gap = 0.5 * grad @ grad + 0.25 * np.sum(q.add_to_diagonal(curvature, -1.0) ** 2)
        zero = np.zeros(self.n_dim)
        return Moments(grad, curvature, zero, zero, gap=float(gap), floor=0.0, floor_sd=0.0)

    def start(self) -> Any:
        """Return N(0, I)."""
        return FullState.from_scale(np.zeros(self.n_dim), np.ones(self.n_dim))

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
        spread = np.linalg.norm(q.whiten(self.design), axis=1)
        nodes, weights = _trapezoidal()
        return (self.design @ q.mean())[:, None] + spread[:, None] * nodes, weights

    # The arrays have no hash: one object is one data set.
    __hash__ = object.__hash__


@functools.cache
def _trapezoidal() -> tuple[Array, Array]:
    """Return nodes and weights, whose error for a row is 1e-13 for sds of a predictor up to 7, and 1e-9 up to 10."""
    nodes = np.linspace(-8.5, 8.5, 171)
    weights = np.exp(-0.5 * nodes**2)
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
