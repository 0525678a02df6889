"""Draws of an approximation, densities at them, without PyTensor nodes, and a start for samplers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from pymc.backends.base import MultiTrace

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.core.types import Array
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.samplers import Covariance, SamplerInit, sampler_init
from pymc_ngvi.results.sampling import Sampling, sample_trace, sample_tree


class DrawMethods(Fitted):
    """Draws, densities at them, and a start for NUTS."""

    def draw_flat(self, n: int, random_seed: Seed = None) -> Array:
        """Draw from q.

        Parameters
        ----------
        n : int
            At least 1.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Equal seeds give common random numbers across approximations of one family.

        Returns
        -------
        ndarray, shape (n, n_dim)
            Unconstrained.
        """
        return self._posterior.draw(check_draws(n), self.generator(random_seed))

    def sample(
        self,
        draws: int = 500,
        *,
        chains: int = 1,
        var_names: str | Sequence[str] | None = None,
        importance: str | None = None,
        random_seed: Seed = None,
        return_inferencedata: bool = True,
        include_transformed: bool | None = None,
        log_p: bool = False,
        **kwargs: Any,
    ) -> xr.DataTree | MultiTrace:
        """Draw from the approximate posterior.

        Parameters
        ----------
        draws : int, default 500
            Of each chain.
        chains : int, default 1
            Draws of q are independent. Chains only arrange them as other tools expect.
        var_names : str or sequence of str, optional
            Free variables, Deterministics, or unconstrained values (``sd_log__``): only these are evaluated and kept.
            Default: all, but for Deterministics that read ``pm.Minibatch`` data, which have the rows of one batch. For
            all rows, or new ones: ``pm.sample_posterior_predictive`` in a model of these.
        importance : {"psis", "psir"}, optional
            Correct q by Pareto-smoothed importance weights. "psis": draws of q, with ``log_weight`` in
            ``sample_stats``, normalised. "psir": draws without weights, resampled from ten times as many (at least
            10,000) draws of q, none of them twice. Attributes of both groups say what came of it: ``khat``,
            ``effective_sample_size``, ``correction``.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        return_inferencedata : bool, default True
            Return a DataTree; a PyMC MultiTrace where False.
        include_transformed : bool, optional
            Keep the unconstrained variables too. Default: the attribute of that name.
        log_p : bool, default False
            Evaluate the log densities of the model and of q at each draw, for ``sample_stats``. With much data this
            takes much longer than the draws.
        **kwargs
            Passed to ``pymc.to_inference_data``, for instance ``coords``, ``dims``, ``log_likelihood=True``.

        Returns
        -------
        xarray.DataTree or MultiTrace
            Group ``posterior`` holds free variables on their constrained scale and Deterministics. With
            ``log_p=True``, ``sample_stats`` holds ``log_p`` (unnormalised, Jacobian included) and ``log_q``, both on
            the unconstrained scale; ``log_p`` is left out where ``pm.set_data`` changed the data after the fit, since
            the draws are not from the posterior given the new data. For mixtures, ``sample_stats`` has the
            ``component`` of each draw, and a group ``components`` is that of `NGVIApproximation.components`. Attributes
            of the tree and of ``posterior`` say how the fit ended: ``status``, ``family``, ``elbo``, ``elbo_se``,
            ``gap`` and, if `NGVIApproximation.diagnose` or ``summary`` has been asked, ``verdict``.

            For an exact or nested posterior, ``log_q`` is not known. Its groups have three more attributes:
            ``effective_sample_size``, of the pool that the draws come from; ``effective_global_draws``, the same for
            global parameters, which repeat more often; and ``distinct_global_draws``, the number of draws that differ
            in these. Draws with equal global parameters have the same number ``global_draw`` in ``sample_stats``; what
            they have beside these differs. For a nested posterior, ``sample_stats`` has ``log_weight``, the log weight
            of each draw in the pool, by which it was picked.

        Raises
        ------
        ValueError
            For a name that the model does not have; for the ``log_likelihood`` of a model that reads minibatches; with
            ``importance``: where k-hat says that weights can't help, where the data were changed, for a model that
            reads minibatches, and of an exact posterior.

        Warns
        -----
        UserWarning
            Where the Monte Carlo error of the weights is larger than what they correct; where ``pm.set_data`` changed
            the data after the fit.
        """
        how = Sampling(chains, var_names, importance, include_transformed, log_p, of_batches=False)
        rng = self.generator(random_seed)
        drawn: xr.DataTree | MultiTrace
        if return_inferencedata:
            drawn = sample_tree(self._posterior, self._kept, draws, rng, how, **kwargs)
        else:
            drawn = sample_trace(self._posterior, self._kept, draws, rng, how)[0]
        self._posterior.warn_of_changed_data()
        return drawn

    def log_q(self, theta: Array) -> Array:
        """Return log q, (n_draws,), at unconstrained points, (n_draws, n_dim)."""
        return self._posterior.log_q(theta)

    def log_p(self, theta: Array) -> Array:
        """Return the unnormalised log density of the model, Jacobian included, given its current data.

        Parameters
        ----------
        theta : ndarray, shape (n_draws, n_dim)
            Unconstrained.

        Returns
        -------
        ndarray, shape (n_draws,)
        """
        return self.density.logp(np.asarray(theta, dtype=np.float64))

    def sampler_init(
        self, chains: int = 4, random_seed: Seed = None, *, covariance: Covariance = "auto"
    ) -> SamplerInit:
        """Return initial points and a mass matrix for NUTS.

        Parameters
        ----------
        chains : int, default 4
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of the starts, which are draws of q.
        covariance : {"auto", "dense", "diagonal"}, default "auto"
            What is taken from the covariance of q. "auto" takes all of it up to 500 dimensions.

        Returns
        -------
        SamplerInit
            ``pm.sample(tune=200, **approx.sampler_init(4).kwargs())`` uses it.

        Raises
        ------
        ValueError
            For bad arguments; for a model that reads minibatches; where log p is not finite at the draws of q, or the
            variance of q is not finite; above 5,000 dimensions with a dense covariance.

        References
        ----------
        .. [1] Hoffman, Gelman (2014). The No-U-Turn sampler. JMLR 15, 1593-1623.
           https://doi.org/10.48550/arXiv.1111.4246
        """
        return sampler_init(self._posterior, chains, self.generator(random_seed), covariance)
