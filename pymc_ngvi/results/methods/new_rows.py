"""New rows beside those of the fit."""

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.new_rows.updated import Updated, updated
from pymc_ngvi.results.predictions.new_data import Given

#: Number of the random stream behind its draws.
_STREAM = 9_100_000


class NewRowsMethods(Fitted):
    """The posterior given new rows as well."""

    def update(self, new_data: Given, *, draws: int = 4_000, random_seed: Seed = None) -> Updated:
        """Return the posterior given new rows as well as those of the fit, without another fit.

        Draws of the posterior are weighted by the density of the new rows [1]_. Under an exact posterior of a model
        with groups, these are draws of the global parameters: groups that have new rows are integrated again, from
        their conditional moments, and so are new groups, from their prior. The rows of the fit are not read.

        Parameters
        ----------
        new_data : dict
            The new rows alone: observations by the name of the observed variable, or of its ``pm.Data``; the other
            ``pm.Data`` of these rows; and lists of labels by the name of a dim with coords, as `predict` takes them. An
            index into variables that have such a dim may be given by labels; labels that were not in the fit are new
            levels. Data that are not named are those of the fit.
        draws : int, default 4_000
            Independent draws that those of the posterior should be worth; at least 100.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Default: a seed that belongs to the fit.

        Returns
        -------
        Updated
            ``sample()``, ``summary()``, ``khat``, ``effective_sample_size``, ``is_reliable`` and ``doubts``, and
            ``log_predictive_density`` of the new rows given those of the fit.

        Raises
        ------
        TypeError
            For new data that are no dict.
        ValueError
            Where the observations are not there, or have missing values; for names that the model does not have, ragged
            arrays, and lengths that do not agree; where the elements of an observed variable have one distribution
            together, as those of a series; where new elements have no distribution given the others (`predict`).

        Warns
        -----
        UserWarning
            Where a fit of all rows is due: k-hat is above .7, or the draws are worth fewer than 400 independent ones; a
            group moves by more than two of its conditional standard deviations, or by .25 where its conditional
            distribution is skewed; what new rows say of new levels is known from few candidates; or the posterior has
            doubts of its own.

        Notes
        -----
        An update is one of the fit, not of an earlier update: give all rows since the fit. The rows of the fit need not
        be there. From a file, `load` takes a model that is built with other rows, and warns of them; a Gaussian that is
        not exact can't be compared with log p then, and groups that are skewed are known by their moments only.

        Means and the like by which the model standardises its data are those of the data that the model has.

        References
        ----------
        .. [1] N. Chopin (2002). A sequential particle filter method for static models. Biometrika 89(3), 539-552.
           https://doi.org/10.1093/biomet/89.3.539

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     mu = pm.Normal("mu", 0.0, 10.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.zeros(40))
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> newer = approx.update({"y": np.full(4, 1.0)})
        >>> newer.is_reliable
        True
        >>> mean = newer.sample(4_000, random_seed=1).posterior["mu"].mean().item()
        >>> abs(mean - 4 / 44) < 0.02
        True
        """
        return updated(self._posterior, new_data, draws, self._generator_of_fit(random_seed, _STREAM))
