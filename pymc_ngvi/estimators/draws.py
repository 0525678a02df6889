"""What the estimators share that know log p at joint draws of q."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from pymc_ngvi.core.types import Array, BaseDraws, Density, Evaluation, GaussianState, MeanHessian, VariationalState


class AtDraws:
    """Expectations are means over draws of all coordinates."""

    uses_hessians = False

    def evaluate(self, target: Density, state: VariationalState, base: BaseDraws) -> Evaluation:
        """Evaluate log p and its gradient at the draws of a state."""
        theta = state.draws(base.z)
        logp, grad = target.logp_grad(theta)
        return evaluation_of(state, theta, logp, grad)

    def evaluate_each(self, target: Density, states: Sequence[VariationalState], base: BaseDraws) -> list[Evaluation]:
        """Evaluate log p and its gradient at the draws of several states, in one batch."""
        thetas = [state.draws(base.z) for state in states]
        logp, grad = target.logp_grad(np.concatenate(thetas))
        rows = [slice(k * base.n_draws, (k + 1) * base.n_draws) for k in range(len(thetas))]
        return [evaluation_of(q, theta, logp[at], grad[at]) for q, theta, at in zip(states, thetas, rows, strict=True)]

    def has_hessian(self, target: Density) -> bool:
        """Tell whether `hessian_at_mean` can be formed."""
        return target.has_hessian

    def hessian_at_mean(self, target: Density, state: GaussianState) -> MeanHessian:
        """Return the Hessian of log p at the mean of a state."""
        return target.mean_hessian(state.mean()[None])


def evaluation_of(state: VariationalState, theta: Array, logp: Array, grad: Array) -> Evaluation:
    """Return what log p and its gradient at draws of a state, (n_draws, n_dim), make of it."""
    finite = np.isfinite(logp) & np.isfinite(grad).all(axis=1)
    return Evaluation(theta, logp, grad, finite, _elbo(state, theta[finite], logp[finite]) if finite.any() else -np.inf)


def _elbo(state: VariationalState, theta: Array, logp: Array) -> float:
    if state.n_uniform:  # log q at the draws: log p - log q has no noise where q is the posterior
        return float(np.mean(logp - state.log_density(theta)))
    return float(logp.mean()) + cast(GaussianState, state).entropy()  # the mean over draws would only add noise
