"""What each observation contributes to a Gaussian fit."""

import xarray as xr

from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.sites import sites


class SiteMethods(Fitted):
    """What each observation contributes to a Gaussian fit."""

    def sites(self, var_name: str | None = None) -> xr.Dataset:
        """Return the site of each observation, and its predictive density given all others.

        A site is the Gaussian factor that an observation contributes to q: the likelihood of a pseudo-observation of
        its linear predictor. Without its site, q is about what a fit without that observation would give.

        Parameters
        ----------
        var_name : str, optional
            The observed variable. Needed where there are several.

        Returns
        -------
        xarray.Dataset
            With the dims of the observed variable, for the linear predictor eta of each observation:

            - ``mean`` and ``variance`` under q;
            - ``alpha``, the expected slope of the log likelihood in eta, and ``gamma``, its expected curvature with the
              opposite sign, which is the precision of the site; it can be negative where a log likelihood is not
              concave;
            - ``natural``, alpha + gamma * mean: the other natural parameter of the site;
            - ``pseudo_observation``, mean + alpha / gamma; NaN where gamma is not positive;
            - ``cavity_mean`` and ``cavity_variance``: without the site; NaN where the site is more precise than q.

            ``log_density`` is the log of the predictive density of an observation given all others, log E[p(y | eta)]
            under the cavity. It is NaN where there is no cavity, or quadrature is off by more than .001. ``influence``
            is the part of the precision of q that is the site's, ``variance * gamma`` where an observation has no other
            predictor: above .3, a fit without the observation may predict it otherwise, mostly worse. ``attrs`` has
            ``elpd``, the sum, with its standard error ``elpd_se``; ``n_missing``, how many are NaN; ``n_influential``,
            how many have an influence above .3; and ``var_name``.

        Raises
        ------
        ValueError
            Where q is not Gaussian; for unknown names; where the log density of an observation is not a function of a
            few linear predictors; where ``pm.set_data`` changed the data after the fit; for a model that reads
            minibatches.

        Notes
        -----
        Parameters that a likelihood has beside eta, such as the scale of a normal one, are not held fixed: alpha and
        gamma are expectations over them, too, and the cavity is that of eta and them together. Where an observation has
        no one linear predictor, as in factor analysis, there is ``log_density`` alone, and the other variables are NaN.

        The sites are computed from q, by quadrature; nothing is stored, and there are no draws.

        References
        ----------
        .. [1] M. E. Khan and W. Lin (2017). Conjugate-computation variational inference. AISTATS.
           https://doi.org/10.48550/arXiv.1703.04265

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     mu = pm.Normal("mu", 0.0, 1.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=[0.0, 1.0, 5.0])
        ...     approx = pymc_ngvi.fit_ngvi(posterior="gaussian", random_seed=1, progressbar=False)
        >>> found = approx.sites()
        >>> (found["pseudo_observation"].values.round(6) + 0.0).tolist()  # no negative 0
        [0.0, 1.0, 5.0]
        >>> found["cavity_mean"].values.round(6).tolist()  # the sum of the other two, over 3
        [2.0, 1.666667, 0.333333]
        """
        return sites(self._posterior, var_name)
