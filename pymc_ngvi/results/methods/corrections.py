"""The corrections of q by importance weights."""

import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.results.corrections.weighted import corrected_moments
from pymc_ngvi.results.fitted import Fitted


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
