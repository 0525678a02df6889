"""What priors do to a posterior, from the draws that are there: other ones, and their sensitivity."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.plotting.comparison import arviz_plots, by_matplotlib, columns_of
from pymc_ngvi.results.plotting.style import need_matplotlib
from pymc_ngvi.results.priors.reweighted import Reweighted, reweighted
from pymc_ngvi.results.priors.sensitivity import PriorSensitivity, prior_sensitivity

# --- a picture of power scaling, by arviz-plots ---

#: Elements that are shown, at most.
_MOST_SHOWN = 6
#: Width of the figure, and height of a row and of the legend, inches.
_WIDTH, _ROW, _LEGEND = 7.0, 1.9, 0.8


def plot_sensitivity(tree: xr.DataTree, table: pd.DataFrame, **options: Any) -> Any:
    """Plot marginal distributions with prior and likelihood raised to powers; see `plot_prior_sensitivity`."""
    need_matplotlib("plot_prior_sensitivity")
    plots = arviz_plots("plot_prior_sensitivity")
    columns = columns_of(tree["posterior"].to_dataset())
    order = np.argsort(-np.nan_to_num(table["prior"].to_numpy()), kind="stable")[:_MOST_SHOWN]
    names = list(columns)
    shown = {names[i]: columns[names[i]] for i in np.sort(order)}
    n = len(tree["log_prior"]["draw"])
    dataset = xr.Dataset(
        {name: (("chain", "draw"), values[None]) for name, values in shown.items()},
        coords={"chain": [0], "draw": np.arange(n)},
    )
    both = {name: tree[name].to_dataset() for name in ("log_prior", "log_likelihood")}
    is_matplotlib = by_matplotlib(options)
    figure = {"figsize": (_WIDTH, _LEGEND + _ROW * len(shown)), "figsize_units": "inches"}
    figure |= {"layout": "constrained"} if is_matplotlib else {}
    one = xr.DataTree.from_dict({"posterior": dataset, **both})
    plot = plots.plot_psense_dist(one, **{"figure_kwargs": figure, **options})
    if is_matplotlib:
        for legend in plot.viz["figure"].item().legends:  # which would hide the first row
            legend.remove()
        plot.add_legend(["alpha"], title="power", loc="outside lower center", ncols=3)
    if len(shown) < len(columns):
        plot.add_title(f"{len(shown)} of {len(columns):,} elements: those that depend most on the prior")
    return plot


# --- what priors do to a posterior, from the draws that are there: other ones, and their sensitivity ---

#: Number of the random stream behind their draws.
_STREAM = 9_000_000


class PriorMethods(Fitted):
    """Other priors, and how much the posterior depends on those that it has."""

    def with_prior(
        self,
        priors: Mapping[str, Any] | None = None,
        /,
        *,
        draws: int = 4_000,
        random_seed: Seed = None,
        **by_name: Any,
    ) -> Reweighted:
        """Return the posterior under other priors, from draws that are there, without another fit.

        Draws are weighted by the new prior over the old one, and by the weights that they have: all draws of an exact,
        nested or moved posterior, or new ones of another q with its importance weights where these help [1]_.

        Parameters
        ----------
        priors : mapping of str to distribution, optional
            By name, for names that are no words of Python, such as Bambi's ``1|group_sigma``.
        draws : int, default 4_000
            Independent draws that those of the posterior should be worth; at least 100.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Default: a seed that belongs to the fit, so that two priors are compared on the same draws.
        **by_name
            New priors of free variables: ``sd=pm.HalfCauchy.dist(1)``. They have the support of the old ones. A scalar
            distribution is that of each element of an array. Parameters may be variables of the model.

        Returns
        -------
        Reweighted
            ``sample()``, ``summary()``, ``khat``, ``effective_sample_size``, ``is_reliable`` and ``doubts``,
            ``log_marginal_likelihood`` and ``log_bayes_factor``, and ``model``: one with the new priors, for
            ``pm.fit(method="ngvi", model=...)`` where a fit is due.

        Raises
        ------
        ValueError
            For a name that is no free variable; for a prior of another support or shape, or a discrete one.
        TypeError
            For what is no distribution.

        Warns
        -----
        UserWarning
            Where the result can't be relied on: k-hat is above .7, or the draws are worth fewer than 400 independent
            ones, so that the error of a mean is above .05 of its standard deviation; or the posterior has doubts of its
            own.

        Notes
        -----
        Of an exact or nested posterior, another prior of few parameters, such as the standard deviation of group
        effects, costs little. Another prior of many parameters at once changes log p by more, and k-hat may be high.

        References
        ----------
        .. [1] A. Vehtari, D. Simpson, A. Gelman, Y. Yao, J. Gabry (2024). Pareto smoothed importance sampling. JMLR
           25(72). https://doi.org/10.48550/arXiv.1507.02646

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     p = pm.Beta("p", 1.0, 1.0)
        ...     y = pm.Binomial("y", 10, p, observed=7)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> found = approx.with_prior(p=pm.Beta.dist(5.0, 5.0))
        >>> found.is_reliable
        True
        >>> abs(found.sample(4_000, random_seed=1).posterior["p"].mean().item() - 12 / 20) < 0.01
        True
        """
        given = {**(priors or {}), **by_name}
        return reweighted(self._posterior, given, draws, self._generator_of_fit(random_seed, _STREAM))

    def prior_sensitivity(
        self,
        var_names: str | Sequence[str] | None = None,
        *,
        prior_var_names: str | Sequence[str] | None = None,
        likelihood_var_names: str | Sequence[str] | None = None,
        draws: int = 4_000,
        threshold: float = 0.05,
        random_seed: Seed = None,
    ) -> PriorSensitivity:
        """Return how much the posterior depends on the priors, and on the data, by power scaling.

        The prior is raised to a power slightly below and above 1, and so is the likelihood; draws are weighted
        accordingly. Sensitivity is the change of each marginal distribution: the cumulative Jensen-Shannon distance
        for a doubling of the power [1]_. ArviZ computes it (``arviz_stats.psense_summary``).

        Parameters
        ----------
        var_names : str or sequence of str, optional
            Free variables and Deterministics in the table. Default: what `summary` shows.
        prior_var_names : str or sequence of str, optional
            Whose priors are scaled. Default: those at the top, that have no free variable among their parameters, and
            are no standardised effects. Effects of groups given their standard deviation are part of the model, not a
            prior in this sense.
        likelihood_var_names : str or sequence of str, optional
            Observed variables, or Potentials, that are scaled as likelihood. Default: all observed variables.
        draws : int, default 4_000
        threshold : float, default .05
            Above it, a quantity is sensitive.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Default: a seed that belongs to the fit.

        Returns
        -------
        PriorSensitivity
            ``table`` is a DataFrame with the columns ``prior``, ``likelihood`` and ``diagnosis``; ``khat`` has the
            k-hats of the weights; ``tree`` is what ArviZ takes: draws, and sums of ``log_prior`` and
            ``log_likelihood``.

        Raises
        ------
        ValueError
            For unknown names; for a model without observed variables; for one that reads minibatches; where
            ``pm.set_data`` changed the data after the fit.

        Notes
        -----
        Both sensitive: prior and data may be in conflict. The prior alone: it is strong, or the data say little. Not
        every such line is a mistake: an informative prior that is meant is one.

        References
        ----------
        .. [1] N. Kallioinen, T. Paananen, P.-C. Bürkner, A. Vehtari (2024). Detecting and diagnosing prior and
           likelihood sensitivity with power-scaling. Statistics and Computing 34, 57.
           https://doi.org/10.1007/s11222-023-10366-5

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     mu = pm.Normal("mu", 0.0, 1.0)  # far from the data, and narrow
        ...     y = pm.Normal("y", mu, 1.0, observed=np.full(4, 8.0))
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.prior_sensitivity().table.loc["mu", "diagnosis"]
        'potential prior-data conflict'
        """
        return prior_sensitivity(
            self._posterior,
            draws,
            self._generator_of_fit(random_seed, _STREAM),
            var_names=var_names,
            prior_var_names=prior_var_names,
            likelihood_var_names=likelihood_var_names,
            threshold=threshold,
        )

    def plot_prior_sensitivity(self, var_names: str | Sequence[str] | None = None, **options: Any) -> Any:
        """Plot marginal distributions with the prior, and the likelihood, raised to powers around 1.

        Parameters
        ----------
        var_names : str or sequence of str, optional
            Default: the elements that depend most on the prior, six at most.
        **options
            Of `prior_sensitivity`: ``prior_var_names``, ``likelihood_var_names``, ``draws``, ``threshold``,
            ``random_seed``. All others are passed to ``arviz_plots.plot_psense_dist``.

        Returns
        -------
        arviz_plots.PlotCollection

        Raises
        ------
        ValueError
            As `prior_sensitivity` does.
        ImportError
            Where arviz-plots or Matplotlib is not installed.
        """
        own = ("prior_var_names", "likelihood_var_names", "draws", "threshold", "random_seed")
        chosen = {name: options.pop(name) for name in own if name in options}
        found = self.prior_sensitivity(var_names, **chosen)
        return plot_sensitivity(found.tree, found.table, **options)
