"""Cross-validation."""

from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.left_out import asked_for, elementwise_of, leave_out, observed_name

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData


class LeftOutMethods(Fitted):
    """Cross-validation."""

    def leave_out(
        self,
        *,
        groups: str | ArrayLike | None = None,
        folds: int | ArrayLike | None = None,
        future: int | None = None,
        horizon: int = 1,
        var_name: str | None = None,
        refit: bool = True,
        random_seed: Seed = None,
    ) -> "ELPDData":
        """Return predictive densities of parts of the data given the rest, without a fit for each part.

        The draws that are there are weighted by how likely they are without a part, with Pareto-smoothed weights [1]_.
        Under an exact posterior of a model with groups these are draws of the global parameters alone, and the groups
        that a part touches are integrated again without it [2]_. Parts whose weights can't be relied on, by k-hat, are
        left out by a fit of their own.

        Parameters
        ----------
        groups : str or array, optional
            Leave out one group after the other, and predict all of its rows together. A dim of the observed variable,
            or of effects of which each row has one; or the group of each row, in the shape of the variable.
        folds : int or array, optional
            Leave out one fold after the other, and predict each of its rows. A number of folds, into which rows are put
            at random; or the fold of each row.
        future : int, optional
            Predict from the past: so many times, along the first axis, are always known. For each of the others, it and
            all that come after it are left out.
        horizon : int, default 1
            With ``future``: how many times are predicted, together.
        var_name : str, optional
            The observed variable. Needed where there are several.
        refit : bool, default True
            Whether to fit again without those parts whose k-hat is too large. The log says how many there were.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None

        Returns
        -------
        arviz_stats.ELPDData
            For ``az.compare`` and plots of ArviZ. ``elpd``, the sum of log predictive densities in nats, with its
            standard error ``se``; ``elpd_i`` and ``pareto_k`` of each row, group or time. By default, rows are left out
            one at a time. ``pareto_k`` is 0 where a part was left out by a fit.

        Raises
        ------
        ValueError
            For groups or folds that do not go with the rows; where data are in shards or batches, or have changed since
            the fit.

        References
        ----------
        .. [1] A. Vehtari, A. Gelman, J. Gabry (2017). Practical Bayesian model evaluation using leave-one-out
           cross-validation and WAIC. Statistics and Computing 27. https://doi.org/10.1007/s11222-016-9696-4
        .. [2] A. Vehtari, T. Mononen, V. Tolvanen, T. Sivula, O. Winther (2016). Bayesian leave-one-out
           cross-validation approximations for Gaussian latent variable models. JMLR 17(103).
           https://jmlr.org/papers/v17/14-540.html

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> y = np.random.default_rng(1).normal(size=(20, 3)) + np.arange(20)[:, None] / 10.0
        >>> with pm.Model(coords={"school": np.arange(20)}):
        ...     mu, s = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("s", 1.0)
        ...     a = pm.Normal("a", mu, s, dims="school")
        ...     _ = pm.Normal("y", a[:, None], 1.0, observed=y)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.leave_out(groups="school", random_seed=1).n_data_points
        20
        """
        self.refuse_changed_data("leave_out() needs the data of the fit.")
        posterior = self._posterior
        name, rng = observed_name(posterior, var_name), self.generator(random_seed)
        elementwise = elementwise_of(posterior, name)
        asked = asked_for(posterior, elementwise, name, rng, horizon=horizon, groups=groups, folds=folds, future=future)
        return leave_out(posterior, elementwise, asked, rng, self._fits_of if refit else None)
