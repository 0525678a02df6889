"""The corrections of q: by importance weights, and by linear response."""

from collections.abc import Sequence

import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.results.corrections.linear_response import LinearResponse, linear_response
from pymc_ngvi.results.corrections.weighted import corrected_moments
from pymc_ngvi.results.fitted import Fitted

#: Seed of the fixed draws of linear response: its result does not change by itself.
_RESPONSE_SEED = 20_180_051


class CorrectionMethods(Fitted):
    """Corrections of q."""

    def corrected(
        self, draws: int = 10_000, *, random_seed: Seed = None, include_transformed: bool | None = None
    ) -> xr.Dataset:
        """Return means and standard deviations corrected by importance weights, beside those of q.

        Parameters
        ----------
        draws : int, default 10_000
            Of q; at least 100.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        include_transformed : bool, optional
            Include the unconstrained variables. Default: the attribute of that name.

        Returns
        -------
        xarray.Dataset
            Free variables on their constrained scale, and Deterministics, with two dims before their own: ``moment``
            ("mean", "sd") and ``estimate`` ("corrected", its Monte Carlo standard error "se", and "uncorrected", which
            is that of the same draws without weights). ``attrs`` has ``khat``, ``effective_sample_size``, and in
            ``correction`` a sentence on what the weights change, and with what error.

        Raises
        ------
        ValueError
            Where k-hat says that weights can't help; where ``pm.set_data`` changed the data after the fit; for a model
            that reads minibatches; of an exact posterior, which has nothing to correct.

        Warns
        -----
        UserWarning
            Where the error of the weights is larger than what they correct.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> from pymc_ngvi.results.approximation import NGVIApproximation
        >>> from pymc_ngvi.families import DiagonalState
        >>> from pymc_ngvi.density import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.Normal("x", 0.0, 1.0)
        >>> q = DiagonalState.from_scale(np.array([0.2]), np.array([1.2]))
        >>> approx = NGVIApproximation(LogDensity(model), q)
        >>> found = approx.corrected(random_seed=1)
        >>> found["x"].sel(moment="sd", estimate=["corrected", "uncorrected"]).values.round(1)
        array([1. , 1.2])
        """
        transformed = self.include_transformed if include_transformed is None else include_transformed
        return corrected_moments(
            self._posterior, check_draws(draws), self.generator(random_seed), transformed=transformed
        )

    def linear_response(
        self,
        names: str | Sequence[str] | None = None,
        *,
        draws: int = 128,
        tol: float = 1e-6,
        random_seed: Seed = _RESPONSE_SEED,
    ) -> LinearResponse:
        """Return covariances with the correlations that a diagonal or block family leaves out [1]_.

        The covariance is how the mean of q moves when log p is tilted. It comes from the Hessian of the ELBO at the
        optimum, on fixed quasi-random draws, and is exact where the posterior is Gaussian. Means stay those of q.

        Parameters
        ----------
        names : str or sequence of str, optional
            Unconstrained values (``sd_log__``), random variables on their constrained scale (``sd``), or
            Deterministics. The last two are found by the delta method at the mean of q. Default: all unconstrained
            values. Fewer names take less time.
        draws : int, default 128
            A power of 2, at least 2.
        tol : float, default 1e-6
            Relative residual of the conjugate gradients.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of the draws; by default they are the same in each call.

        Returns
        -------
        LinearResponse
            ``cov``, labelled as that of `cov_of`; ``sd`` by variable; ``n_products``.

        Raises
        ------
        ValueError
            For families that have correlations, and of an exact posterior; where the fit has not converged, or the
            Hessian of the ELBO is not negative definite; for unknown names; where ``pm.set_data`` changed the data
            after the fit; for a model that reads minibatches; for more than 5,000 quantities.

        References
        ----------
        .. [1] Giordano, Broderick, Jordan (2018). Covariances, robustness, and variational Bayes. JMLR 19(51).
           https://doi.org/10.48550/arXiv.1709.02536

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> from pymc_ngvi.results.approximation import NGVIApproximation
        >>> from pymc_ngvi.families import DiagonalState
        >>> from pymc_ngvi.density import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.MvNormal("x", np.zeros(2), cov=[[1.0, 0.6], [0.6, 1.0]])
        >>> q = DiagonalState.from_scale(np.zeros(2), np.array([0.8, 0.8]))  # the best of its family
        >>> NGVIApproximation(LogDensity(model), q).linear_response().cov.values.round(6)
        array([[1. , 0.6],
               [0.6, 1. ]])
        """
        self._posterior.check_correctable("linear_response()")
        return linear_response(self._posterior, self.q, names, draws, tol, self.generator(random_seed))
