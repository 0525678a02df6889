"""The pictures that an approximation draws of itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.results.diagnosis.weights import log_ratio_of
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.plotting.comparison import Kind, Plot, plot_comparison
from pymc_ngvi.results.plotting.fit import plot_fit
from pymc_ngvi.results.plotting.style import Axes, AxesArray, Figure
from pymc_ngvi.results.plotting.weights import khat_title, plot_khat
from pymc_ngvi.results.sampling import sample_tree
from pymc_ngvi.results.structure import ModelStructure


class PlotMethods(Fitted):
    """Pictures."""

    @property
    def structure(self) -> ModelStructure:
        """Which coordinates are independent of each other given which others, and the rows; ``print`` says it."""
        return replace(self._posterior.structure, rows=self.density.described_rows())

    def plot_fit(self, *, tol: float | None = None, figure: Figure | None = None) -> AxesArray:
        """Plot ELBO and gap by iteration; see `pymc_ngvi.results.plotting.plot_fit`.

        Parameters
        ----------
        tol : float, optional
            Nats that may be left to gain: drawn as a line.
        figure : matplotlib.figure.Figure or SubFigure, optional
            To draw into; by default one is made.

        Returns
        -------
        ndarray of matplotlib.axes.Axes
            That of the ELBO, and that of the gap; one of them where the other is not known.

        Raises
        ------
        RuntimeError
            If the approximation was not made by a fit.
        ValueError
            Where no iteration was run, or no Gaussian fit came before a nested posterior.
        ImportError
            Where Matplotlib is not installed.
        """
        record = self._record_of("plot_fit()")
        if record.comes_first:
            raise ValueError(
                "No Gaussian fit came before this nested posterior: there are no iterations to show. "
                "approx.gaussian.plot_fit() shows those of the Gaussian fit, which is made for it."
            )
        return plot_fit(self.hist, self.gap_hist, record, tol=tol, figure=figure)

    def plot_khat(self, draws: int | None = None, random_seed: Seed = None, *, ax: Axes | None = None) -> Axes:
        """Plot the tail of the importance weights that k-hat describes; see `pymc_ngvi.results.plotting.plot_khat`.

        Of an exact posterior, these are the weights of the pool of global parameters that it is drawn from.

        Parameters
        ----------
        draws : int, optional
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            As those of `khat`: what is equal gives the same k-hat.
        ax : matplotlib.axes.Axes, optional
            To draw into; by default a figure is made.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ValueError
            As `khat` does.
        ImportError
            Where Matplotlib is not installed.
        """
        own = draws is None and random_seed is None
        ratio = log_ratio_of(self._posterior, self._kept, draws, None if own else self.generator(random_seed))
        return plot_khat(ratio, np.zeros(len(ratio)), title=khat_title(self._posterior), ax=ax)

    def plot_comparison(
        self,
        reference: xr.DataTree | xr.Dataset,
        var_names: str | Sequence[str] | None = None,
        kind: Kind = "forest",
        draws: int = 2_000,
        *,
        max_coordinates: int | None = None,
        random_seed: Seed = None,
        **options: Any,
    ) -> Plot:
        """Plot draws of q beside those of a reference, such as NUTS; see `pymc_ngvi.results.plotting.plot_comparison`.

        Parameters
        ----------
        reference : DataTree or Dataset
            With the group ``posterior``, as ``pm.sample`` returns it, or that group.
        var_names : str or sequence of str, optional
            Variables (``beta``) or single coordinates (``beta[age]``). Default: the free variables that both have.
        kind : {"forest", "dist", "pair"}, default "forest"
            Intervals, marginal densities, or pairs of coordinates.
        draws : int, default 2_000
            Of q, and of the reference at most.
        max_coordinates : int, optional
            Of more, those that differ most are shown. Default: 40, 20 and 5 for the three kinds.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        **options
            Passed to ``arviz_plots.plot_forest``, ``plot_dist`` or ``plot_pair``.

        Returns
        -------
        arviz_plots.PlotCollection or arviz_plots.PlotMatrix

        Raises
        ------
        ValueError
            For an unknown kind or name, or where shapes do not agree.
        ImportError
            Where arviz-plots or Matplotlib is not installed.
        """
        tree = sample_tree(self._posterior, self._kept, draws, self.generator(random_seed))
        posterior = tree["posterior"].to_dataset()
        if var_names is None:
            posterior = posterior[[rv.name for rv in self.model.free_RVs]]
        return plot_comparison(posterior, reference, var_names, kind, max_coordinates=max_coordinates, **options)
