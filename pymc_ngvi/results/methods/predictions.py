"""Predictions for new data."""

from collections.abc import Sequence
from typing import Any

import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.predictions.either import Given, Groups, predict


class PredictionMethods(Fitted):
    """Predictions for new data."""

    def predict(
        self,
        new_data: Given | Any = None,
        *,
        groups: Groups = "known",
        var_names: str | Sequence[str] | None = None,
        draws: int = 1_000,
        random_seed: Seed = None,
        bambi_model: Any = None,
    ) -> xr.DataTree:
        """Draw predictions for new data, levels of groups that were not in the fit included.

        Parameters
        ----------
        new_data : dict or DataFrame, optional
            Arrays by the name of a ``pm.Data``, and lists of labels by the name of a dim with coords, as
            ``pm.set_data`` takes them. An index into variables that have such a dim may be given by labels, too. Data
            that are not named are those of the fit. For a Bambi model: a DataFrame with the columns of its formula.
        groups : {"known", "new", "average"}, default "known"
            What becomes of elements that were not in the fit, and of effects of groups:

            - "known": levels that were not in the fit are an error, which names them;
            - "new": they are drawn from their prior given the parameters of each posterior draw. Levels that were in
              the fit keep their posterior draws;
            - "average": all effects of groups are the mean of their prior given the parameters of each posterior draw,
              for levels that were in the fit as well: 0 for ``Normal(0, sd)``, ``mu`` for ``Normal(mu, sd)``. So are
              other elements that were not in the fit. It is the mean of effects, not of what is predicted: where the
              link is not linear, that is another number.
        var_names : str or sequence of str, optional
            Variables of the model. Default: those that are observed, and those that were added to the model after the
            fit, such as ``gp.conditional``. Of a Bambi model: its response, and the parameters of the response that
            have a value for each row.
        draws : int, default 1_000
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        bambi_model : bambi.Model, optional
            The model that was fitted, where ``new_data`` is a DataFrame.

        Returns
        -------
        xarray.DataTree
            Groups ``predictions``, with one chain and the labels of the new data, and ``predictions_constant_data``.
            Attributes of ``predictions`` say which variables have elements that were ``drawn_from_prior``, and which
            were ``averaged``.

        Raises
        ------
        ValueError
            For levels that were not in the fit, unless ``groups`` says what to do; for names that the model does not
            have, ragged arrays, and lengths that do not agree; where only new elements of a walk or of a process are
            given; where new elements have no distribution given the others, as those of effects that sum to zero, or of
            a vector in order; for a model that reads minibatches, or whose data are in shards.
        TypeError
            For new data that are no dict; for a DataFrame without the Bambi model, and for anything else with it.

        Warns
        -----
        UserWarning
            Where a Potential depends on a variable of which new elements are drawn: it is left out.

        Notes
        -----
        The model is left as it is: predictions are drawn from a copy of its graph, in which data and lengths of dims
        are replaced.

        Elements of a dim with coords are told by their labels. Those of other axes are the same as in the fit where the
        new data begin with those of the fit, and others where they do not.

        A random walk, an AR and a multivariate normal go on from their elements in the fit, by their distribution given
        these: that is a forecast, or a process at new points. So do sums of independent innovations, with
        ``groups="new"``. All of them need the elements of the fit before the new ones.

        Means, standard deviations, maxima and the like, by which the model standardises its data, are those of the fit:
        in ``x - x.mean()``, the mean is the one that coefficients belong to. Sums are those of the new rows.

        References
        ----------
        .. [1] J. T. Wilson et al. (2021). Pathwise conditioning of Gaussian processes. JMLR 22, 1-47.
           https://doi.org/10.48550/arXiv.2011.04026

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model(coords={"school": ["north", "south", "west"]}):
        ...     index = pm.Data("school_of", [0, 0, 1, 1, 2, 2])
        ...     tau = pm.HalfNormal("tau")
        ...     effect = pm.Normal("effect", 0.0, tau, dims="school")
        ...     _ = pm.Normal("y", effect[index], 1.0, observed=[0.3, -0.2, 1.5, 1.1, -0.9, -1.4])
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> found = approx.predict(
        ...     {"school_of": ["south", "east"]}, groups="new", var_names=["effect", "y"], random_seed=1
        ... )
        >>> found["predictions"]["y"].shape
        (1, 1000, 2)
        >>> found["predictions"]["school"].values.tolist()
        ['north', 'south', 'west', 'east']
        >>> approx.predict({"school_of": ["south", "east"]})
        Traceback (most recent call last):
        ValueError: 'effect' has levels 'east' along dim 'school' that were not in the fit. ...
        """
        rng = self.generator(random_seed)
        return predict(
            self._posterior, new_data, groups=groups, var_names=var_names, draws=draws, rng=rng, bambi_model=bambi_model
        )
