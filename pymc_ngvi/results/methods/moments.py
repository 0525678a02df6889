"""Moments of q by variable: means, standard deviations, covariances."""

from collections.abc import Sequence

import xarray as xr

from pymc.variational.opvi import VIState

from pymc_ngvi.core.types import Array
from pymc_ngvi.results.convert import flat_dataset
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.moments import constrained_state, covariance_of


class MomentMethods(Fitted):
    """Moments of q by variable, without PyTensor nodes."""

    @property
    def mean_flat(self) -> Array:
        """Mean, (n_dim,), unconstrained."""
        return self._distribution.mean()

    @property
    def sd_flat(self) -> Array:
        """Standard deviations, (n_dim,), unconstrained."""
        return self._distribution.sd()

    @property
    def mean_data(self) -> xr.Dataset:
        """Unconstrained mean by name of the value variable, with dims and coords."""
        return flat_dataset(self.layout, self._distribution.mean())

    @property
    def std_data(self) -> xr.Dataset:
        """Unconstrained standard deviations by name of the value variable, with dims and coords."""
        return flat_dataset(self.layout, self._distribution.sd())

    def cov_of(self, names: str | Sequence[str], *, constrained: bool = False) -> xr.DataArray:
        """Return the covariance of some variables.

        Parameters
        ----------
        names : str or sequence of str
            Free variables (``sd``) or their unconstrained values (``sd_log__``), labels of single coordinates
            (``beta[3]``), Deterministics.
        constrained : bool, default False
            Take free variables on their constrained scale.

        Returns
        -------
        xarray.DataArray
            Square, with labels on both axes. By default it is that of the unconstrained coordinates of free variables
            (``sd_log__``), and exact. With Deterministics among the names, which have one scale only, or with
            ``constrained=True``, it comes from 10,000 draws with a fixed seed.

        Raises
        ------
        ValueError
            For unknown names; above 5,000 dimensions of q where its family can't give a part of the covariance.

        Notes
        -----
        Up to 1,000 dimensions, the draws have the exact mean and covariance where q is Gaussian, and so do all linear
        functions of the unconstrained values, such as contrasts.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     x = pm.Normal("x", 0.0, [1.0, 2.0])
        ...     contrast = pm.Deterministic("contrast", x[1] - x[0])
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> round(float(approx.cov_of("contrast")[0, 0]), 4)
        5.0
        """
        return covariance_of(self._posterior, names, constrained=constrained)

    @property
    def state(self) -> VIState:
        """Mean and standard deviation of the free variables on their constrained scale, as Datasets.

        ``mean`` is the constrained value of the unconstrained mean, as in PyMC. ``std`` is the standard deviation of
        the constrained variables, from 4,000 draws with a fixed seed. (PyMC's own ``std`` is the constrained value
        of the unconstrained standard deviation, which is not the spread of anything.)
        """
        return constrained_state(self._posterior)
