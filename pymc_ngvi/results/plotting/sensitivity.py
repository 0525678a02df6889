"""A picture of power scaling, by arviz-plots."""

from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from pymc_ngvi.results.plotting.comparison import arviz_plots, by_matplotlib, columns_of
from pymc_ngvi.results.plotting.style import need_matplotlib

#: Elements that are shown, at most.
_MOST_SHOWN = 6
#: Width of the figure, and height of a row and of the legend, inches.
_WIDTH, _ROW, _LEGEND = 7.0, 1.9, 0.8


def plot_sensitivity(tree: xr.DataTree, table: pd.DataFrame, **options: Any) -> Any:
    """Plot marginal distributions with prior and likelihood raised to powers; see `plot_prior_sensitivity`.

    Parameters
    ----------
    tree : xarray.DataTree
        Groups ``posterior``, ``log_prior`` and ``log_likelihood``.
    table : pandas.DataFrame
        Sensitivities of the elements of the variables, in their order. Of many, those most sensitive to the prior are
        shown.
    **options
        Of ``arviz_plots.plot_psense_dist``.
    """
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
