"""What an approximation shows of the components of a mixture."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from pymc_ngvi.core.seeds import Seed
from pymc_ngvi.core.sizes import check_draws
from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.families import MixtureState
from pymc_ngvi.mixtures.finite.worth import Worth, worth_between
from pymc_ngvi.results.components import components_dataset, responsibilities, weights_by_component
from pymc_ngvi.results.fitted import Fitted
from pymc_ngvi.results.plotting.components import plot_components
from pymc_ngvi.results.plotting.style import AxesArray, Figure


class ComponentMethods(Fitted):
    """The components of q, where it is a mixture."""

    def _mixture(self, what: str, error: type[Exception] = ValueError) -> MixtureState:
        q = self._state
        if not isinstance(q, MixtureState):
            kind = self._posterior.kind
            raise error(f"{what} is there for mixtures, and q is {kind}: fit with family='mixture'.")
        return q

    @property
    def weights(self) -> xr.DataArray:
        """Weights of the components of a mixture, by ``component``.

        Raises
        ------
        AttributeError
            Where q is no mixture.
        """
        return weights_by_component(self._mixture("weights", AttributeError), self.layout)

    @property
    def components(self) -> xr.Dataset:
        """Means and standard deviations of the components of a mixture, unconstrained, and their weights.

        By value name (``sd_log__``), with dims ``component``, ``moment`` ("mean", "sd") and those of the variable;
        ``weights`` by component. Where the model has a variable of such a name, ``q_`` is put before it, as in
        ``q_weights``.

        Raises
        ------
        AttributeError
            Where q is no mixture.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> from pymc_ngvi.results.approximation import NGVIApproximation
        >>> from pymc_ngvi.families import DiagonalState, MixtureState
        >>> from pymc_ngvi.density import LogDensity
        >>> with pm.Model() as model:
        ...     scale = pm.HalfNormal("scale")
        >>> q = MixtureState.of([DiagonalState(np.array([m]), np.ones(1)) for m in (-2.0, 2.0)])
        >>> approx = NGVIApproximation(LogDensity(model), q)
        >>> approx.components.sel(moment="mean")["scale_log__"].values
        array([-2.,  2.])
        >>> approx.responsibilities(np.array([[0.0], [3.0]])).values.round(2)
        array([[0.5, 0.5],
               [0. , 1. ]])
        """
        return components_dataset(self._mixture("components", AttributeError), self.layout)

    def responsibilities(self, draws: Array | int | None = None, random_seed: Seed = None) -> xr.DataArray:
        """Return the probability that a draw belongs to each component of a mixture.

        Parameters
        ----------
        draws : ndarray, shape (n_draws, n_dim), or int, optional
            Unconstrained; a number of draws stands for those that ``draw_flat(draws, random_seed)`` returns. Default:
            1,000 of them.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None

        Returns
        -------
        xarray.DataArray
            Dims ``draw`` and ``component``; rows sum to 1.

        Raises
        ------
        ValueError
            Where q is no mixture, or draws do not have ``n_dim`` columns.
        """
        q = self._mixture("responsibilities()")
        if draws is None or isinstance(draws, int | np.integer):
            theta = self._posterior.draw(check_draws(1_000 if draws is None else draws), self.generator(random_seed))
        else:
            theta = np.asarray(draws, dtype=np.float64)
        return responsibilities(q, self.layout, theta)

    def plot_components(
        self,
        var_names: str | Sequence[str] | None = None,
        draws: int = 1_000,
        *,
        max_coordinates: int = 6,
        random_seed: Seed = None,
        figure: Figure | None = None,
    ) -> AxesArray:
        """Plot the components of a mixture over draws of q; see `plot_components`.

        Parameters
        ----------
        var_names : str or sequence of str, optional
            Random variables (``sd``), their unconstrained values (``sd_log__``) or single coordinates (``beta[3]``).
            Default: all.
        draws : int, default 1_000
            Points in each panel; 0 for none.
        max_coordinates : int, default 6
            Of more, those in which components differ most are shown.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        figure : matplotlib.figure.Figure or SubFigure, optional
            To draw into; by default one is made.

        Returns
        -------
        ndarray of matplotlib.axes.Axes, shape (n_coordinates, n_coordinates)
            None above the diagonal.

        Raises
        ------
        ValueError
            Where q is no mixture, or a name is unknown.
        ImportError
            Where Matplotlib is not installed.
        """
        q, rng = self._mixture("plot_components()"), self.generator(random_seed)
        theta = self._posterior.draw(check_draws(draws), rng) if draws else np.empty((0, q.n_dim))
        return plot_components(q, self.layout, theta, var_names, max_coordinates=max_coordinates, figure=figure)

    def worth(
        self, draws: int = 10_000, random_seed: Seed = None, *, gaussian: VariationalState | None = None
    ) -> Worth:
        """Return what the mixture gains over the single Gaussian that it began from.

        Parameters
        ----------
        draws : int, default 10_000
            Draws of each of the two, from the same standard normals.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            The same seed gives the k-hat of `khat`.
        gaussian : VariationalState, optional
            To compare with; default: the one in ``record``.

        Returns
        -------
        Worth
            ``gain`` in nats of ELBO with its standard error ``se``, ``n_effective`` components, ``khat`` and
            ``khat_gaussian``; `Worth.sentence` says it in one line.

        Raises
        ------
        ValueError
            Where q is no mixture, or no Gaussian is known; where ``pm.set_data`` changed the data after the fit; for a
            model that reads minibatches.
        """
        q = self._mixture("worth()")
        if gaussian is None and self.record is not None:
            gaussian = self.record.gaussian
        if gaussian is None:
            raise ValueError(
                "What the mixture began from is known after a fit with family='mixture' only: "
                "pass gaussian=, for instance the q of a fit with family='full'."
            )
        self._posterior.check_weights()
        return worth_between(q, gaussian, self.density, check_draws(draws), self.generator(random_seed))
