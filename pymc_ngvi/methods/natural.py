r"""Natural gradients in natural parameters: the updates, and steps of a size that is given [1]_ [2]_ [3]_.

A Gaussian with precision S has the natural parameters :math:`(S\mu, -S/2)`. The natural gradient of the ELBO there is
the gradient in the expectation parameters, :math:`g = E_q[\nabla \log p]` and :math:`H = E_q[\nabla^2 \log p]` by the
theorems of Bonnet and of Price: :math:`S' = (1-\rho) S - \rho H`, :math:`\mu' = \mu + \rho S'^{-1} g`.

Proximal steps maximise the linearised ELBO less :math:`\mathrm{KL}(q\,\|\,q_k)/\beta_k`, where the prior's share is
kept exact; in natural parameters that is the same step with :math:`\rho_k = \beta_k / (1 + \beta_k)` [3]_.

References
----------
.. [1] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in
   complex models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326
.. [2] W. Lin, M. Schmidt and M. E. Khan (2020). Handling the positive-definite constraint in the Bayesian learning
   rule. ICML. https://doi.org/10.48550/arXiv.2002.10060
.. [3] M. E. Khan, R. Babanezhad, W. Lin, M. Schmidt and M. Sugiyama (2016). Faster stochastic variational inference
   using proximal-gradient methods with general divergence functions. UAI. https://doi.org/10.48550/arXiv.1511.00146
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.families.gaussian import AnyGaussian
from pymc_ngvi.methods.estimators import Moments
from pymc_ngvi.methods.stochastic import Stochastic, StochasticState

#: Relative precision below which a direction counts as lost, and the correction of [2]_ takes over there.
_LOST = 0.1


def _corrected_eigenvalues(eigenvalues: Array, rho: float) -> Array:
    """Return 1 + rho b, b = a - 1, with the second-order term of [2]_ where it would be (nearly) negative.

    Everywhere else the term is left out: where the whitened curvature is huge, its square overshoots the precision,
    which could then only halve in each iteration.
    """
    excess = rho * (eigenvalues - 1.0)
    plain = 1.0 + excess
    # Cap: far outside its range, the quadratic term would make a lost direction needlessly tight.
    corrected = 1.0 + np.maximum(excess, -2.0) + 0.5 * np.maximum(excess, -2.0) ** 2
    return np.where(plain < _LOST, corrected, plain)


def natural[S: AnyGaussian](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    r"""Natural-parameter update: natural-gradient ascent in :math:`(S\mu, -S/2)` [1]_ [2]_.

    With precision S and step size :math:`\rho`: :math:`S' = (1-\rho) S - \rho E_q[\nabla^2 \log p]` and
    :math:`\mu' = \mu + \rho S'^{-1} E_q[\nabla \log p]` (the *new* precision). In whitened form nothing but
    :math:`M = (1-\rho) I + \rho A` is needed. Exact in one step of size 1 for a Gaussian target. Where S' is not
    positive definite, ``correct`` gives the directions that are lost the second-order term of [3]_.

    References
    ----------
    .. [1] K. Wu and J. R. Gardner (2024). Understanding stochastic natural gradient variational inference. ICML.
       https://doi.org/10.48550/arXiv.2406.01870
    .. [2] M. E. Khan and D. Nielsen (2018). Fast yet simple natural-gradient descent for variational inference in
       complex models. ISITA. https://doi.org/10.23919/ISITA.2018.8664326
    .. [3] W. Lin, M. Schmidt and M. E. Khan (2020). Handling the positive-definite constraint in the Bayesian learning
       rule. ICML. https://doi.org/10.48550/arXiv.2002.10060
    """
    if not moments.is_finite():
        return None
    rho, curvature = step_size, moments.curvature
    scaled = state.precision_scaled_by(state.add_to_diagonal(rho * curvature, 1.0 - rho), moments.grad)
    if scaled is None and correct:
        scaled = state.precision_scaled_by_function(curvature, lambda a: _corrected_eigenvalues(a, rho), moments.grad)
    if scaled is None:
        return None
    new, displacement = scaled
    return replace(new, location=state.location + rho * displacement)


def natural_pd[S: AnyGaussian](state: S, moments: Moments, step_size: float, correct: bool) -> S | None:
    r"""Natural-parameter update that keeps the precision positive definite at any step size [1]_.

    With precision S, :math:`G = -(E_q[\nabla^2 \log p] + S)` and step size :math:`\rho`: :math:`S' = S + \rho G +
    \rho^2/2\; G S^{-1} G` and :math:`\mu' = \mu + \rho S^{-1} E_q[\nabla \log p]` (the *old* precision). In whitened
    form :math:`M = \frac12 (I + R^2)` with :math:`R = (1-\rho) I + \rho A`, positive definite for any symmetric A.
    Agrees with the natural-parameter update to first order in the step size; on a Gaussian target it converges
    quadratically instead of in one step.

    References
    ----------
    .. [1] W. Lin, M. Schmidt and M. E. Khan (2020). Handling the positive-definite constraint in the Bayesian learning
       rule. ICML. https://doi.org/10.48550/arXiv.2002.10060
    """
    if not moments.is_finite():
        return None
    rho, identity_part = step_size, 1.0 - step_size
    relative = state.add_to_diagonal(rho * moments.curvature, identity_part)
    with np.errstate(over="ignore", invalid="ignore"):  # squares may overflow: no precision then
        matrix = state.add_to_diagonal(0.5 * state.structure.product(relative, relative), 0.5)
    scaled = state.precision_scaled_by(matrix, moments.grad)
    if scaled is None:  # so far from the identity that its square is singular to rounding
        scaled = state.precision_scaled_by_function(
            moments.curvature, lambda a: 0.5 + 0.5 * (identity_part + rho * a) ** 2, moments.grad
        )
    if scaled is None:
        return None
    return replace(scaled[0], location=state.location + rho * state.unwhiten(moments.grad))


class Constant(Stochastic[None]):
    """Apply the update with a constant step size, 0.1 by default; options as for `Stochastic`."""

    def _advance(self, state: StochasticState[None], moments: Moments) -> StochasticState[None] | None:
        return self._updated(state, moments, self._rate(state.t - 1))


class Proximal(Constant):
    """Proximal steps; options as for `Stochastic`.

    ``step_size`` is beta, 0.25 by default; with ``step_decay`` kappa, beta_k = beta / (1 + k)^kappa.
    """

    takes: ClassVar[frozenset[str]] = Stochastic.takes | {"step_decay"}
    default_step_size: ClassVar[float] = 0.25

    def _rate(self, t: int) -> float:
        beta = super()._rate(t)
        return beta / (1.0 + beta)
