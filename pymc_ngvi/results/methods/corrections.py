"""The corrections that an approximation offers: weighted and resampled draws, corrected moments, linear response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from pymc_ngvi.core.draws import sobol_draws
from pymc_ngvi.core.sizes import check_cov_size, check_draws
from pymc_ngvi.core.status import Status
from pymc_ngvi.families import BlockState, DiagonalState
from pymc_ngvi.results.corrections.quantities import Quantities
from pymc_ngvi.results.corrections.response import ElboHessian, covariance, n_solves, products_at
from pymc_ngvi.results.corrections.weighted import corrected
from pymc_ngvi.results.methods.fit import FitReport

#: Seed of the fixed draws of linear response: its result does not change by itself.
_RESPONSE_SEED = 20_180_051


@dataclass(frozen=True, eq=False)
class LinearResponse:
    """Covariances of the posterior by linear response.

    Parameters
    ----------
    cov : xarray.DataArray
        Square; both axes are labelled: ``beta[3]``, ``sd_log__``.
    sd : xarray.Dataset
        Standard deviations by variable, with its dims and coords.
    n_products : int
        Hessian-vector products that the solves took.
    """

    cov: xr.DataArray
    sd: xr.Dataset
    n_products: int


class CorrectionReport(FitReport):
    """The part of an approximation that corrects q."""

    def corrected(
        self, draws: int = 10_000, *, random_seed: Any = None, include_transformed: bool | None = None
    ) -> xr.Dataset:
        """Return means and standard deviations corrected by importance weights, beside those of q.

        Parameters
        ----------
        draws : int, default 10_000
            Of q; at least 100.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        include_transformed : bool, optional
            Have the unconstrained variables, too. Default: the attribute of that name.

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
        >>> from pymc_ngvi.model import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.Normal("x", 0.0, 1.0)
        >>> q = DiagonalState.from_scale(np.array([0.2]), np.array([1.2]))
        >>> approx = NGVIApproximation(LogDensity(model), q)
        >>> found = approx.corrected(random_seed=1)
        >>> found["x"].sel(moment="sd", estimate=["corrected", "uncorrected"]).values.round(1)
        array([1. , 1.2])
        """
        transformed = self.include_transformed if include_transformed is None else include_transformed
        return corrected(self._posterior, check_draws(draws), self.generator(random_seed), transformed=transformed)

    def linear_response(
        self,
        names: str | Sequence[str] | None = None,
        *,
        draws: int = 128,
        tol: float = 1e-6,
        random_seed: Any = _RESPONSE_SEED,
    ) -> LinearResponse:
        """Return covariances with the correlations that a diagonal or block family leaves out [1]_.

        It is how the mean of q moves when log p is tilted, from the Hessian of the ELBO at the optimum on fixed
        quasi-random draws: exact where the posterior is Gaussian. Means stay those of q.

        Parameters
        ----------
        names : str or sequence of str, optional
            Of unconstrained values (``sd_log__``), of random variables on their constrained scale (``sd``), or of
            Deterministics; the last two by the delta method at the mean of q. Default: all unconstrained values. Only
            what is asked for is solved for.
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
        >>> from pymc_ngvi.model import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.MvNormal("x", np.zeros(2), cov=[[1.0, 0.6], [0.6, 1.0]])
        >>> q = DiagonalState.from_scale(np.zeros(2), np.array([0.8, 0.8]))  # the best of its family
        >>> NGVIApproximation(LogDensity(model), q).linear_response().cov.values.round(6)
        array([[1. , 0.6],
               [0.6, 1. ]])
        """
        q = self._without_correlations()
        if draws != int(draws) or draws < 2 or int(draws) & (int(draws) - 1):
            raise ValueError(f"The draws of linear_response should be a power of 2, at least 2; got {draws!r}.")
        asked = Quantities.of(names, self.layout, self._constrainer, q.mean(), q.sd())
        check_cov_size(len(asked.jacobian))
        z = sobol_draws(int(draws), q.n_dim, self.generator(random_seed)).z
        products = products_at(self.density, q.draws(z), q.sd(), n_solves(asked.jacobian))
        hessian = ElboHessian(q, z, products)
        cov = covariance(hessian, asked.jacobian, tol)
        sd = asked.dataset(np.sqrt(np.maximum(np.diag(cov), 0.0)), self.layout, self.model)
        return LinearResponse(asked.matrix(cov), sd, hessian.n_products)

    def _without_correlations(self) -> DiagonalState | BlockState:
        """Return q; raise ValueError where linear response has nothing to add to it, or nothing to go by."""
        self._posterior.check_correctable("linear_response()")
        q = self.q
        if not isinstance(q, DiagonalState | BlockState):
            raise ValueError(
                "linear_response() adds the correlations that family='diagonal' and 'block' leave out, and q is a "
                f"{type(q).__name__}, which has its own: see cov_of()."
            )
        if self.density.has_minibatch:
            raise ValueError(
                "The model reads pm.Minibatch data, and linear response needs the Hessian given all of them: build the "
                "model on all of the data."
            )
        self.refuse_changed_data("The model's posterior is another one now than q approximates")
        if self.record is not None and self.record.status is not Status.CONVERGED:
            status = self.record.status
            raise ValueError(
                f"Linear response is that of an optimum, and the fit has not converged ({status}). {status.sentence} "
                f"{status.cure}"
            )
        return q
