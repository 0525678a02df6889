"""What an exact posterior has beside its draws: checks, the marginal likelihood, groups left out."""

import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.core.verdict import Verdict
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.marginal_likelihood import LogMarginalLikelihood, leave_one_group_out, log_marginal_likelihood
from pymc_ngvi.results.sampling import chains_tree


class ExactMethods(Fitted):
    """What an exact posterior has beside its draws."""

    @property
    def is_exact(self) -> bool:
        """Whether this is the posterior up to simulation error, rather than a Gaussian or another q."""
        checks = self.checks
        return checks is not None and checks.is_exact

    @property
    def is_nested(self) -> bool:
        """Whether this is a nested posterior: hyperparameters sampled, latent variables by Gaussians given these."""
        state = self._state
        return isinstance(state, PoolState) and state.rest.is_nested

    @property
    def checks(self) -> Verdict | None:
        """The measurements that an exact or nested posterior was judged by; None for any other."""
        state = self._state
        return state.checks if isinstance(state, PoolState) else None

    def chains(self, random_seed: Seed = None) -> xr.DataTree:
        """Return the chains of a moved posterior, as they were moved: many short ones.

        Plain R-hat is too strict for so many short chains; ``approx.checks`` has nested R-hat, by which they were
        judged. `sample` gives draws of all of them.

        Parameters
        ----------
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            For Deterministics that draw random numbers.

        Returns
        -------
        xarray.DataTree
            As from ``pm.sample``; ``sample_stats`` has ``superchain``, the number of the point at which a chain began.
            Chains that stay in several modes have ``mode``, and ``weight``, by which averages over chains are taken.

        Raises
        ------
        ValueError
            Where the posterior is not moved.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     x = pm.Normal("x", shape=2)
        ...     bent = pm.Potential("bent", -((x[0] ** 2 - x[1]) ** 2))
        ...     approx = pymc_ngvi.fit_ngvi(posterior="moved", random_seed=1, progressbar=False)
        >>> approx.chains().posterior.sizes["chain"]
        128
        """
        return chains_tree(self._posterior, self.generator(random_seed))

    @property
    def log_marginal_likelihood(self) -> LogMarginalLikelihood:
        """The log marginal likelihood, log p(y), with its standard error, of an exact, nested or moved posterior.

        Of a moved one, it is found by bridge sampling between a Gaussian and the chains. If the posterior has several
        modes, only those that were found are counted. Where symmetry makes K equal modes,
        add log K. Constants of the likelihood are included, as PyMC has them.

        Raises
        ------
        ValueError
            Where the posterior is none of these, or the value would mean nothing: with improper priors (``pm.Flat``),
            or with terms without a normalising constant (``pm.ICAR``, a Potential, unless `pymc_ngvi.normalised` says
            otherwise). Where no Gaussian is near enough to the chains.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     p = pm.Beta("p", 1.0, 1.0)
        ...     y = pm.Binomial("y", 4, p, observed=1)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> abs(approx.log_marginal_likelihood.value - -1.609) < 0.01  # 1/5: each number of successes is as likely
        True
        """
        return log_marginal_likelihood(self._posterior)

    def leave_one_group_out(self) -> xr.Dataset:
        """Return the predictive density of each group's data given those of all other groups.

        Groups are the independent blocks of the model. Where groups are nested, these are the outermost.

        Returns
        -------
        xarray.Dataset
            Along ``group``, whose labels are those of the first effect of each: ``log_density``, and ``khat`` of the
            weights behind it. ``attrs`` has ``elpd``, their sum, with its standard error ``elpd_se``, and
            ``n_high_khat``, the number of groups with a k-hat above .7.

        Raises
        ------
        ValueError
            Where the posterior is not exact, the model has no groups, or the data are in shards.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> y = np.random.default_rng(1).normal(size=(20, 3)) + np.arange(20)[:, None] / 10.0
        >>> with pm.Model():
        ...     mu, s = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("s", 1.0)
        ...     a = pm.Normal("a", mu, s, shape=20)
        ...     _ = pm.Normal("y", a[:, None], 1.0, observed=y)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.leave_one_group_out().sizes["group"]
        20
        """
        return leave_one_group_out(self._posterior)
