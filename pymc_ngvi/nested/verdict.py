"""How far a nested posterior can be relied on: every condition, with its figure."""

from dataclasses import dataclass

import numpy as np

from pymc_ngvi.core.psis import khat_error
from pymc_ngvi.core.stored import stored
from pymc_ngvi.marginal.verdict import LEAST_SIZE, MOST_KHAT

#: Error of log m, an sd over the hyperparameters in nats, up to which a posterior is reliable.
MOST_ERROR = 0.1
#: Part of the draws that are effective from which on a heavy tail of weights does not matter.
EVEN = 0.7


@stored("nested.checks")
@dataclass(frozen=True)
class NestedChecks:
    """What was measured of a nested posterior.

    Parameters
    ----------
    khat : float
        Of the weights of the hyperparameters.
    effective_size : float
        Of these weights, in draws.
    n_draws, n_globals, n_local : int
        Of the pool; hyperparameters; latent variables.
    n_fits : int
        Fits of the latent variables at given hyperparameters.
    difference : float
        Between log m and what is predicted from those fits, at hyperparameters that it was not predicted from, an sd in
        nats.
    doubt : float
        Between two estimates of what the ELBO lacks of log m, an sd over the hyperparameters in nats.
    correction : float
        What the ELBO lacks of log m by the one in use, an sd over the hyperparameters in nats.
    lacking : float
        The same, in the mean.
    """

    khat: float
    effective_size: float
    n_draws: int
    n_globals: int
    n_local: int
    n_fits: int
    difference: float
    doubt: float
    correction: float
    lacking: float = 0.0

    @property
    def error(self) -> float:
        """Of log m, an sd over the hyperparameters in nats."""
        return float(np.hypot(self.difference, self.doubt))

    @property
    def failures(self) -> tuple[str, ...]:
        """What stands against relying on the posterior, in clauses; empty if nothing does."""
        found = []
        error = khat_error(self.khat, self.n_draws)
        is_uneven = not self.khat < MOST_KHAT + (error if np.isfinite(error) else 0.0)
        if is_uneven and self.effective_size < EVEN * self.n_draws:
            found.append(f"k-hat of the weights of the hyperparameters is {self.khat:.2f}, above {MOST_KHAT}")
        if not self.effective_size >= LEAST_SIZE:
            found.append(f"the effective size of their draws is {self.effective_size:,.0f}, below {LEAST_SIZE:,.0f}")
        if not self.error < MOST_ERROR:
            found.append(f"their log marginal density is known to {self.error:.2f} nats only")
        return tuple(found)

    @property
    def is_reliable(self) -> bool:
        """Whether nothing stands against relying on the posterior."""
        return not self.failures

    @property
    def sentence(self) -> str:
        """What the posterior is, in a sentence."""
        n = self.n_globals
        what = f"{n} hyperparameter{'s'[: n != 1]}"
        own = (
            f"Nested: {what} sampled (effective sample size {self.effective_size:,.0f}), {self.n_local:,} latent "
            f"variable{'s'[: self.n_local != 1]} by {self.n_fits:,} Gaussian fits given these; approximate, with an "
            f"error of {self.error:.2f} nats in the log density of the hyperparameters."
        )
        return own if self.is_reliable else f"{own} Not reliable: {'; '.join(self.failures)}."
