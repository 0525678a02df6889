"""The posterior under other priors, from draws of the one that was fitted, by importance weights."""

import dataclasses
import functools
import warnings

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr

from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.psis import MIN_KHAT_DRAWS
from pymc_ngvi.core.seeds import Seed, generator_of
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.new_priors import NewPriors
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.marginal_likelihood import LogMarginalLikelihood, log_marginal_likelihood
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.priors.judged import Judged, JudgedDraws, log_mean
from pymc_ngvi.results.priors.weighted import WeightedDistribution, joint_draws
from pymc_ngvi.results.sampling import Names, Sampling, sample_tree
from pymc_ngvi.results.summary.summary import Summary, summary_of_draws

_FIT = (
    'Fit the model with these priors: pm.fit(method="ngvi", model=found.model), where `found` is what with_prior '
    "returned."
)


@dataclass(frozen=True, eq=False)
class Reweighted(JudgedDraws):
    """The posterior under other priors: what `NGVIApproximation.with_prior` returns. It prints as a summary.

    Parameters
    ----------
    posterior : Posterior
        That was fitted.
    priors : NewPriors
    draws : JointDraws
        With the weights that they have under the old priors.
    log_ratio : ndarray, shape (n_draws,)
        Log p under the new priors minus that under the old ones.
    judged : Judged
        How good the weights are.
    seed : int
        Of draws, where none is given.
    """

    posterior: Posterior
    priors: NewPriors
    draws: JointDraws
    log_ratio: Array
    judged: Judged
    seed: int

    @property
    def n_draws(self) -> int:
        """Weighted draws."""
        return len(self.log_ratio)

    @property
    def model(self) -> pm.Model:
        """A copy of the model with the new priors and the data of the fit.

        Raises
        ------
        ValueError
            Where the data are in shards or batches: the model has some of them only.
        """
        if self.posterior.density.is_sharded or self.posterior.density.is_streamed:
            raise ValueError(f"The data are not all in one model. {_elsewhere(self.posterior)}")
        with self.posterior.with_data_of_fit():
            return self.priors.changed_model

    @property
    def sentence(self) -> str:
        """Whether it can be relied on, and what to do where not."""
        what = f"Posterior with other priors of {', '.join(f'`{name}`' for name in self.priors.names)}"
        return self.judged.sentence(what)

    def __repr__(self) -> str:
        """Return what it is, in short."""
        return (
            f"Reweighted({', '.join(self.priors.names)}: k-hat {self.khat:.2f}, effective sample size "
            f"{self.effective_sample_size:,.0f}, {'reliable' if self.is_reliable else 'not reliable'})"
        )

    # --- draws ---

    @functools.cached_property
    def _weighted(self) -> Posterior:
        """The posterior with the new weights; its density is that of the old priors, and is not asked for."""
        in_order_of = next(v.where.start for v in self.posterior.layout.variables if v.name == self.priors.names[0])
        attrs = {"khat": self.khat, "effective_sample_size": self.effective_sample_size}
        q = WeightedDistribution(
            self.posterior.distribution, self.draws.theta, self.draws.log_weights + self.log_ratio, in_order_of, attrs
        )
        return dataclasses.replace(self.posterior, distribution=q, record=None)

    def sample(self, draws: int = 2_000, *, var_names: Names = None, random_seed: Seed = None) -> xr.DataTree:
        """Draw from the posterior under the new priors: draws of equal weight, picked by the weights.

        Parameters
        ----------
        draws : int, default 2_000
        var_names : str or sequence of str, optional
            Default: free variables and Deterministics.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Default: the same draws in each call.

        Returns
        -------
        xarray.DataTree
            As that of `NGVIApproximation.sample`. Attributes of ``posterior`` are ``khat`` and
            ``effective_sample_size``.
        """
        with self.posterior.with_data_of_fit():
            return sample_tree(
                self._weighted, Kept(), check_draws(draws), self._generator(random_seed), Sampling(var_names=var_names)
            )

    def summary(
        self, draws: int = 4_000, *, group_effects: bool = False, random_seed: Seed = None, **kwargs: Any
    ) -> Summary:
        """Return a table of the variables under the new priors, and whether it can be relied on.

        Parameters
        ----------
        draws, group_effects, random_seed, **kwargs
            As those of `NGVIApproximation.summary`.

        Returns
        -------
        Summary
        """
        with self.posterior.with_data_of_fit():
            made = summary_of_draws(
                self._weighted, Kept(), check_draws(draws), self._generator(random_seed), group_effects, kwargs
            )
        return dataclasses.replace(made, lines=(self.sentence,), khat=self.khat)

    def _generator(self, random_seed: Seed) -> np.random.Generator:
        return generator_of(self.seed if random_seed is None else random_seed)

    # --- marginal likelihood ---

    @functools.cached_property
    def log_bayes_factor(self) -> LogMarginalLikelihood:
        """Log p(y) under the new priors minus that under the old ones, with its standard error.

        Raises
        ------
        ValueError
            Where the weights can't be relied on, or a prior is improper.
        """
        if reasons := self.priors.improper:
            raise ValueError(f"There is no marginal likelihood: {'; '.join(reasons)}.")
        if not self.judged.weights_help:
            raise ValueError(f"There is no marginal likelihood to be relied on. {self.sentence}")
        return LogMarginalLikelihood(*log_mean(self.draws, self.log_ratio))

    @functools.cached_property
    def log_marginal_likelihood(self) -> LogMarginalLikelihood:
        """Log p(y) under the new priors, with its standard error.

        Raises
        ------
        ValueError
            Where the fit has none (`NGVIApproximation.log_marginal_likelihood`); where the weights can't be relied on,
            or a prior is improper.
        """
        change = self.log_bayes_factor
        with self.posterior.with_data_of_fit():
            old = log_marginal_likelihood(self.posterior)
        return LogMarginalLikelihood(old.value + change.value, float(np.hypot(old.se, change.se)))


def reweighted(posterior: Posterior, priors: Mapping[str, Any], draws: int, rng: np.random.Generator) -> Reweighted:
    """Return the posterior under other priors; see `NGVIApproximation.with_prior`."""
    if posterior.record is not None:
        posterior.record.refuse_diverged()
    new = NewPriors.of(posterior.model, posterior.layout, priors)
    if check_draws(draws) < MIN_KHAT_DRAWS:
        raise ValueError(f"Weights take at least {MIN_KHAT_DRAWS} draws; got {draws}.")
    with posterior.with_data_of_fit():
        made, doubts = joint_draws(posterior, draws, rng)
        log_ratio = new.log_ratio(made.theta)
    log_ratio[np.isnan(log_ratio)] = -np.inf  # at draws that could not be made
    if not np.isfinite(made.log_weights + log_ratio).any():
        raise ValueError(f"The new prior of {' or '.join(new.names)} is 0 at all draws of the posterior: fit again.")
    judged = Judged.of(made, log_ratio, doubts, draws, _elsewhere(posterior) or _FIT)
    result = Reweighted(posterior, new, made, log_ratio, judged, int(rng.integers(2**62)))
    if judged.doubts:
        warnings.warn(result.sentence, UserWarning, skip_file_prefixes=OURS)
    return result


def _elsewhere(posterior: Posterior) -> str:
    """Return what to do where the data are not all in one model; empty where they are."""
    if posterior.density.is_sharded:
        return "Fit shards that are built with these priors."
    return "Fit the stream with a model that has these priors." if posterior.density.is_streamed else ""
