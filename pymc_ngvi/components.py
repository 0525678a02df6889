"""What an approximation shows of the components of a mixture."""

from typing import Any

import numpy as np
import xarray as xr

from numpy.typing import NDArray
from scipy.special import logsumexp

from pymc_ngvi.convert import dims_of, flat_dataset
from pymc_ngvi.diagnosis.weights import DRAWS
from pymc_ngvi.export import check_draws
from pymc_ngvi.families import MixtureState
from pymc_ngvi.mixtures.worth import Worth, effective_components, worth_of
from pymc_ngvi.model import Layout
from pymc_ngvi.plot_components import plot_components
from pymc_ngvi.types import Array, VariationalState
from pymc_ngvi.verdict import Verdict, VerdictReport

#: Weights that the representation of an approximation shows, at most.
_MAX_SHOWN = 6


def components_dataset(mixture: MixtureState, layout: Layout) -> xr.Dataset:
    """Return weights, means and standard deviations of components, unconstrained.

    Parameters
    ----------
    mixture : MixtureState
    layout : Layout

    Returns
    -------
    xarray.Dataset
        By value name (``sd_log__``), with dims ``component``, ``moment`` ("mean", "sd") and those of the variable;
        ``weights`` by component. A name that the model has taken itself gets ``q_`` before it.
    """
    component, moment, weights = _names(layout)
    leading = {component: np.arange(mixture.n_components), moment: ["mean", "sd"]}
    moments = np.stack([mixture.means, mixture.sds], axis=1)
    shares = xr.DataArray(mixture.weights, dims=component, coords={component: leading[component]})
    return flat_dataset(layout, moments, leading).assign({weights: shares})


def _names(layout: Layout) -> list[str]:
    """Return the names of the dims of components and of moments, and of the weights, apart from those of the model."""
    taken = {v.value_name for v in layout.variables}.union(*(dims_of(v) for v in layout.variables))
    return [f"q_{name}" if name in taken else name for name in ("component", "moment", "weights")]


class ComponentReport(VerdictReport):
    """The part of an approximation that shows the components of q, where it is a mixture."""

    def _mixture(self, what: str, error: type[Exception] = ValueError) -> MixtureState:
        q = self.q
        if not isinstance(q, MixtureState):
            raise error(f"{what} is there for mixtures, and q is a {type(q).__name__}: fit with family='mixture'.")
        return q

    def _kind_of_q(self) -> str:
        """Return the class of q; of a mixture also the weights, the largest first."""
        q, name = self.q, type(self.q).__name__
        if not isinstance(q, MixtureState):
            return name
        largest = [f"{w:.2f}" for w in np.sort(q.weights)[::-1][:_MAX_SHOWN]]
        return f"{name} with weights {', '.join(largest)}{', ...'[: 5 * (q.n_components > _MAX_SHOWN)]}"

    # --- what q is made of ---

    @property
    def weights(self) -> xr.DataArray:
        """Weights of the components of a mixture, by ``component``.

        Raises
        ------
        AttributeError
            Where q is no mixture.
        """
        q = self._mixture("weights", AttributeError)
        dim = _names(self.layout)[0]
        return xr.DataArray(q.weights, coords={dim: np.arange(q.n_components)}, dims=dim, name="weights")

    @property
    def components(self) -> xr.Dataset:
        """Means and standard deviations of the components of a mixture, unconstrained, and their weights.

        By value name (``sd_log__``), with dims ``component``, ``moment`` ("mean", "sd") and those of the variable;
        ``weights`` by component. A name that the model has taken itself gets ``q_`` before it: ``q_weights`` where it
        has a variable called ``weights``.

        Raises
        ------
        AttributeError
            Where q is no mixture.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> from pymc_ngvi.approximation import NGVIApproximation
        >>> from pymc_ngvi.families import DiagonalState, MixtureState
        >>> from pymc_ngvi.model import LogDensity
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

    def responsibilities(self, draws: Any = None, random_seed: Any = None) -> xr.DataArray:
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
        if draws is None or np.ndim(draws) == 0:
            theta = self.draw_flat(1_000 if draws is None else draws, random_seed)
        else:
            theta = np.asarray(draws, dtype=np.float64)
        if theta.ndim != 2 or theta.shape[1] != q.n_dim:
            raise ValueError(
                f"draws should be unconstrained, of shape (n_draws, {q.n_dim}), such as draw_flat(n) returns; "
                f"got {theta.shape}."
            )
        coords = {"draw": np.arange(len(theta)), _names(self.layout)[0]: np.arange(q.n_components)}
        return xr.DataArray(q.responsibilities(theta), coords=coords, dims=list(coords), name="responsibilities")

    def _stats_of_q(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[Any]]:
        """Add the component of each draw, drawn with its responsibilities: draw and component have their joint law."""
        q = self.q
        if not isinstance(q, MixtureState):
            return super()._stats_of_q(theta, rng, log_q)
        terms = q.log_densities(theta)
        total: Array = logsumexp(terms, axis=1)
        ends = np.cumsum(np.exp(terms - total[:, None]), axis=1)
        # u < 1 times the last end: at least one end, the last, is above it.
        component = np.sum(ends <= rng.random((len(theta), 1)) * ends[:, -1:], axis=1)
        return {"component": component, "log_q": total} if log_q else {"component": component}

    def _groups_of_q(self) -> dict[str, xr.Dataset]:
        q = self.q
        return {"components": components_dataset(q, self.layout)} if isinstance(q, MixtureState) else {}

    def plot_components(
        self,
        var_names: Any = None,
        draws: int = 1_000,
        *,
        max_coordinates: int = 6,
        random_seed: Any = None,
        figure: Any = None,
    ) -> Any:
        """Plot the components of a mixture over draws of q; see `pymc_ngvi.plot_components.plot_components`.

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
        q = self._mixture("plot_components()")
        theta = self.draw_flat(draws, random_seed) if draws else np.empty((0, q.n_dim))
        return plot_components(q, self.layout, theta, var_names, max_coordinates=max_coordinates, figure=figure)

    # --- was it worth it? ---

    def worth(self, draws: int = 10_000, random_seed: Any = None, *, gaussian: VariationalState | None = None) -> Worth:
        """Return what the mixture gains over the single Gaussian that it began from.

        Parameters
        ----------
        draws : int, default 10_000
            Of each, made of the same standard normals.
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
        gaussian = self._began_from() if gaussian is None else gaussian
        if gaussian is None:
            raise ValueError(
                "What the mixture began from is known after a fit with family='mixture' only: "
                "pass gaussian=, for instance the q of a fit with family='full'."
            )
        self._check_weights()
        rng = self.generator(random_seed)
        found, done = np.empty((2, 2, check_draws(draws))), 0  # of mixture and Gaussian: log p, log q
        for size in self._chunks(found.shape[2]):
            base, now = self._base(size, rng), slice(done, done + size)
            for of, state in zip(found, (q, gaussian), strict=True):
                theta = state.draws(base[:, : q.n_dim + state.n_uniform])
                of[:, now] = self.log_p(theta), state.log_density(theta)
            done += size
        return worth_of(q.weights, *found)

    def _began_from(self) -> VariationalState | None:
        gaussian: VariationalState | None = None if self.record is None else self.record.gaussian
        return gaussian

    def _verdict_lines(self, khat_draws: int | None, rng: np.random.Generator) -> tuple[tuple[str, ...], Verdict]:
        """Return the verdict, and what the mixture gains, where weights of it are within the budget, too."""
        seed = int(rng.integers(2**63))
        lines, verdict = super()._verdict_lines(khat_draws, np.random.default_rng(seed))
        q = self.q
        if not isinstance(q, MixtureState) or verdict.weights is None:
            return lines, verdict
        if self._began_from() is None:
            number = f"{q.n_components} components, {effective_components(q.weights):.1f} effective"
            return (*lines, f"Mixture of {number}."), verdict
        same = self._own_generator() if khat_draws == DRAWS else np.random.default_rng(seed)
        return (*lines, self.worth(verdict.weights.n_draws, same).sentence()), verdict
