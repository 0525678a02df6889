"""The log density of a model whose data are not in one place: a prior here, and likelihoods of parts of the data."""

from abc import abstractmethod
from collections.abc import Iterable

from pymc_ngvi.core.target import CountedElsewhere
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.model_density import ModelDensity


class Sum(CountedElsewhere, ModelDensity):
    """The sum of a prior and of likelihoods, which say what they are at points."""

    def __init__(self, prior: LogDensity) -> None:
        self.prior = self.counter = prior
        self.info, self.functions, self.by_rows = prior.info, prior.functions, prior.by_rows
        self.minibatches, self._hessians = prior.minibatches, prior._hessians

    # --- of the likelihoods ---

    @property
    @abstractmethod
    def likelihood_seconds(self) -> float:
        """Estimated time of the likelihoods and their gradients at one point."""

    @abstractmethod
    def log_likelihoods(self, theta: Array) -> Iterable[Array]:
        """Evaluate them, (n_draws,) each."""

    @abstractmethod
    def log_likelihoods_and_grads(self, theta: Array) -> Iterable[tuple[Array, Array]]:
        """Evaluate them and their gradients, (n_draws,) and (n_draws, n_dim)."""

    # --- sums ---

    def logp(self, theta: Array) -> Array:
        """Evaluate the log density alone, (n_draws,), at points (n_draws, n_dim)."""
        return sum(self.log_likelihoods(theta), self.prior.logp(theta))

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Evaluate the log density and its gradient; see `ModelDensity`."""
        logp, grad = self.prior.logp_grad(theta)
        for of_part, grad_of_part in self.log_likelihoods_and_grads(theta):
            logp, grad = logp + of_part, grad + grad_of_part
        return logp, grad

    @property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point."""
        return self.prior.gradient_seconds + self.likelihood_seconds
