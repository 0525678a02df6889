"""What an approximation shows of q without PyTensor nodes: draws, moments, covariances."""

import warnings

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from numpy.typing import NDArray
from pymc.backends.base import MultiTrace
from pymc.variational.opvi import VIState

from pymc_ngvi.convert import constrained_dataset, flat_dataset, to_datatree, to_multitrace
from pymc_ngvi.corrections.drawn import Drawn
from pymc_ngvi.families.arrow import ArrowStructure
from pymc_ngvi.model import Layout, LogDensity
from pymc_ngvi.model.constrain import Constrainer
from pymc_ngvi.plots import plot_structure
from pymc_ngvi.seeds import generator_of
from pymc_ngvi.structure import ModelStructure
from pymc_ngvi.types import Array, VariationalState

#: Largest dimension for which a dense covariance is made.
MAX_COV_DIM = 5_000
#: Draws behind ``state.std``, and their seed: fixed, so that the property does not change by itself.
_STATE_DRAWS, _STATE_SEED = 4_000, 20_240_607
#: Draws held in memory at once, times dimension.
_CHUNK_ELEMENTS = 2**20


def indices_of(layout: Layout, names: Any) -> NDArray[np.intp]:
    """Return the flat coordinates of the named variables, in the order of the names.

    Parameters
    ----------
    layout : Layout
    names : str or sequence of str
        Of random variables (``sd``) or of their value variables (``sd_log__``), or labels of single coordinates
        (``beta[3]``).

    Raises
    ------
    ValueError
        For an unknown name, listing the known ones.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    where = {v.name: v.where for v in layout.variables} | {v.value_name: v.where for v in layout.variables}
    if any(name not in where for name in wanted):
        where |= {layout.label(i): slice(i, i + 1) for i in range(layout.n_dim)}
    unknown = [name for name in wanted if name not in where]
    if unknown:
        known = ", ".join(repr(v.name) for v in layout.variables)
        raise ValueError(f"No free variable is called {', '.join(map(repr, unknown))}; there are {known}.")
    ranges = [np.arange(where[name].start, where[name].stop) for name in wanted]
    return np.concatenate(ranges) if ranges else np.empty(0, dtype=np.intp)


def covariance_array(layout: Layout, index: NDArray[np.intp], matrix: Array) -> xr.DataArray:
    """Return the covariance of some flat coordinates, labelled: ``beta[3]``, ``sd_log__``."""
    labels = [layout.label(int(i)) for i in index]
    dims = ("unconstrained", "unconstrained_2")
    return xr.DataArray(matrix, dims=dims, coords=dict.fromkeys(dims, labels), name="covariance")


def check_cov_size(n_dim: int) -> None:
    """Raise ValueError if a dense covariance of ``n_dim`` coordinates is too large to make."""
    if n_dim > MAX_COV_DIM:
        raise ValueError(
            f"The covariance of {n_dim:,} coordinates would take {8 * n_dim**2 / 2**30:.1f} GiB of "
            "memory. Use std or sd_flat for the standard deviations, and cov_of(names) for the "
            "covariance of some variables."
        )


def check_draws(n: Any) -> int:
    """Return a number of draws; raise ValueError if it is not a whole number of at least 1."""
    if n != int(n) or n < 1:
        raise ValueError(f"The number of draws should be a whole number of at least 1; got {n!r}.")
    return int(n)


class DataSnapshot:
    """Remembers the data that a model had, to tell later whether it was changed.

    Parameters
    ----------
    model : pymc.Model
        Its ``pm.Data`` are remembered by reference: ``pm.set_data`` puts new arrays in their place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._arrays: dict[str, NDArray[Any]] = {
            var.name: var.get_value(borrow=True) for var in model.data_vars if hasattr(var, "get_value")
        }

    def changed(self) -> list[str]:
        """Return the names of the data that differ from what they were."""
        return [
            name
            for name, then in self._arrays.items()
            if (now := self._model[name].get_value(borrow=True)) is not then and not np.array_equal(now, then)
        ]


class Exports:
    """The part of an approximation that draws, and that shows q by variable, without PyTensor nodes."""

    density: LogDensity
    include_transformed: bool
    model: Any
    groups: list[Any]
    _rng: np.random.Generator
    _data: DataSnapshot
    _constrainer: Constrainer

    @property
    def q(self) -> VariationalState:
        """The current state of the approximation."""
        q: VariationalState = self.groups[0].current_state()
        return q

    @property
    def layout(self) -> Layout:
        """Where each variable is in the flat vector."""
        return self.density.layout

    @property
    def structure(self) -> ModelStructure:
        """Which coordinates are independent of each other given which others; ``print`` says it in words."""
        gaussian = getattr(self.q, "gaussian", self.q)  # of a reparametrised model
        arrow = getattr(gaussian, "structure", None)
        return ModelStructure(
            self.layout, self.density.structural_pattern, arrow if isinstance(arrow, ArrowStructure) else None
        )

    def plot_structure(self, ax: Any = None) -> Any:
        """Draw which entries the posterior precision can have; see `pymc_ngvi.plots.plot_structure`.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional

        Returns
        -------
        matplotlib.axes.Axes
        """
        return plot_structure(self.structure, ax)

    def generator(self, random_seed: Any) -> np.random.Generator:
        """Return the random generator for a seed; the approximation's own, which goes on, for None."""
        return self._rng if random_seed is None else generator_of(random_seed)

    def draw_flat(self, n: int, random_seed: Any = None) -> Array:
        """Draw from q.

        Parameters
        ----------
        n : int
            At least 1.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Equal seeds give common random numbers across approximations of one family.

        Returns
        -------
        ndarray, shape (n, n_dim)
            Unconstrained.
        """
        theta = self.q.draws(self._base(check_draws(n), self.generator(random_seed)))
        lost = int(np.isnan(theta).any(axis=1).sum())
        if lost:
            warnings.warn(
                f"{lost:,} of {n:,} draws are NaN: given their global parameters, no conditional mode of the group "
                "effects was found. Fit without reparam, or leave these draws out.",
                UserWarning,
                stacklevel=2,
            )
        return theta

    def _base(self, n: int, rng: np.random.Generator) -> Array:
        """Return what ``n`` draws are made of: standard normals and, behind them, the uniforms of q."""
        base = rng.standard_normal((n, self.layout.n_dim))
        if self.q.n_uniform:
            base = np.concatenate([base, rng.random((n, self.q.n_uniform))], axis=1)
        return base

    def sample(
        self,
        draws: int = 500,
        *,
        importance: str | None = None,
        random_seed: Any = None,
        return_inferencedata: bool = True,
        include_transformed: bool | None = None,
        log_p: bool = True,
        **kwargs: Any,
    ) -> xr.DataTree | MultiTrace:
        """Draw from the approximate posterior.

        Parameters
        ----------
        draws : int, default 500
        importance : {"psis", "psir"}, optional
            Correct q by Pareto-smoothed importance weights. "psis": draws of q, with ``log_weight`` in
            ``sample_stats``, normalised. "psir": draws without weights, resampled from ten times as many (at least
            10,000) draws of q, none of them twice. Attributes of both groups say what came of it: ``khat``,
            ``effective_sample_size``, ``correction``.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        return_inferencedata : bool, default True
            Return a DataTree; a PyMC MultiTrace where False.
        include_transformed : bool, optional
            Keep the unconstrained variables too. Default: the attribute of that name.
        log_p : bool, default True
            Evaluate the log density of the model at each draw, for ``sample_stats``.
        **kwargs
            Passed to ``pymc.to_inference_data``, for instance ``coords``, ``dims``, ``log_likelihood=True``.

        Returns
        -------
        xarray.DataTree or MultiTrace
            Group ``posterior`` holds free variables on their constrained scale and Deterministics. ``sample_stats``
            holds ``log_p`` (unnormalised, Jacobian included) and ``log_q``, both on the unconstrained scale;
            ``log_p`` is left out where ``pm.set_data`` changed the data after the fit, since the draws are not from
            the posterior given the new data. For mixtures, ``sample_stats`` also has the ``component`` of each draw,
            and a group ``components`` is that of `NGVIApproximation.components`.

        Raises
        ------
        ValueError
            With ``importance``: where k-hat says that weights can't help, where the data were changed, and for a model
            that reads minibatches.

        Warns
        -----
        UserWarning
            Where the Monte Carlo error of the weights is larger than what they correct.
        """
        rng = self.generator(random_seed)
        drawn = self._drawn(draws, importance, rng)
        theta = drawn.theta
        values = self._constrainer(theta, random_seed=int(rng.integers(2**31)))
        stats = dict(drawn.stats)
        if log_p and not self._data.changed():
            stats["log_p"] = self.log_p(theta) if drawn.log_p is None else drawn.log_p
        stats |= self._stats_of_q(theta, rng)
        trace = to_multitrace(self.model, values, stats)
        if not return_inferencedata:
            return trace
        if include_transformed is None:
            include_transformed = self.include_transformed
        more = self._groups_of_q()
        tree = to_datatree(trace, self.model, more, include_transformed=include_transformed, **kwargs)
        for group in ("posterior", "sample_stats"):
            tree[group].attrs.update(drawn.attrs)
        return tree

    def _drawn(self, draws: int, importance: str | None, rng: np.random.Generator) -> Drawn:
        """Return draws of q; subclasses know of importance weights."""
        return Drawn(self.draw_flat(draws, rng), None, {}, {})

    def _stats_of_q(self, theta: Array, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Return what ``sample_stats`` say of q at its draws."""
        return {"log_q": self.log_q(theta)}

    def _groups_of_q(self) -> dict[str, xr.Dataset]:
        """Return groups that describe q itself."""
        return {}

    def _chunks(self, n_draws: int) -> Iterator[int]:
        """Yield the sizes of chunks of draws that fit in memory."""
        size = max(1, _CHUNK_ELEMENTS // max(self.layout.n_dim, 1))
        for start in range(0, n_draws, size):
            yield min(size, n_draws - start)

    def _draw_chunks(self, n_draws: int, random_seed: Any) -> Iterator[Array]:
        """Yield ``n_draws`` unconstrained draws in chunks that fit in memory."""
        rng = self.generator(random_seed)
        for size in self._chunks(n_draws):
            yield self.draw_flat(size, rng)

    def log_q(self, theta: Array) -> Array:
        """Return log q, (n_draws,), at unconstrained points, (n_draws, n_dim)."""
        return self.q.log_density(np.asarray(theta, dtype=np.float64))

    def log_p(self, theta: Array) -> Array:
        """Return the unnormalised log density of the model, Jacobian included, given its current data.

        Parameters
        ----------
        theta : ndarray, shape (n_draws, n_dim)
            Unconstrained.

        Returns
        -------
        ndarray, shape (n_draws,)
        """
        return self.density.logp(np.asarray(theta, dtype=np.float64))

    @property
    def mean_flat(self) -> Array:
        """Mean, (n_dim,), unconstrained."""
        return self.q.mean()

    @property
    def sd_flat(self) -> Array:
        """Standard deviations, (n_dim,), unconstrained."""
        return self.q.sd()

    @property
    def mean_data(self) -> xr.Dataset:
        """Unconstrained mean by name of the value variable, with dims and coords."""
        return flat_dataset(self.layout, self.q.mean())

    @property
    def std_data(self) -> xr.Dataset:
        """Unconstrained standard deviations by name of the value variable, with dims and coords."""
        return flat_dataset(self.layout, self.q.sd())

    def cov_of(self, names: str | Sequence[str]) -> xr.DataArray:
        """Return the covariance of some variables.

        Parameters
        ----------
        names : str or sequence of str
            Random variables (``sd``) or their unconstrained values (``sd_log__``).

        Returns
        -------
        xarray.DataArray
            Square; of the unconstrained coordinates, which label both axes.

        Raises
        ------
        ValueError
            For unknown names; above 5,000 dimensions of q where its family can't give a part of the covariance.
        """
        index = indices_of(self.layout, names)
        block = getattr(self.q, "cov_block", None)  # families that need not form the whole
        if block is None:
            check_cov_size(self.layout.n_dim)
            return covariance_array(self.layout, index, self.q.cov()[np.ix_(index, index)])
        return covariance_array(self.layout, index, block(index))

    @property
    def state(self) -> VIState:
        """Mean and standard deviation of the free variables on their constrained scale, as Datasets.

        ``mean`` is the constrained value of the unconstrained mean, as in PyMC. ``std`` is the standard deviation of
        the constrained variables, from 4,000 draws with a fixed seed. (PyMC's own ``std`` is the constrained value
        of the unconstrained standard deviation, which is not the spread of anything.)
        """
        constrainer = Constrainer(self.density, deterministics=False)
        values = constrainer(self.q.mean()[None])
        names = [rv.name for rv in self.model.free_RVs]
        unconstrained_sd = self.layout.unflatten(self.q.sd())
        sd = {
            **self._constrained_sd(constrainer),
            **{n: unconstrained_sd[n] for n in names if n in unconstrained_sd},
        }
        mean_set = constrained_dataset(self.model, {n: values[n][0] for n in names})
        sd_set = constrained_dataset(self.model, {n: sd[n] for n in names})
        if self.include_transformed:
            mean_set = mean_set.merge(self.mean_data, compat="override")
            sd_set = sd_set.merge(self.std_data, compat="override")
        return VIState(mean=mean_set, std=sd_set)

    def _constrained_sd(self, constrainer: Constrainer) -> dict[str, Array]:
        """Return the standard deviations over draws, accumulated chunk by chunk."""
        n_seen = 0
        mean: dict[str, Array] = {}
        square: dict[str, Array] = {}
        for theta in self._draw_chunks(_STATE_DRAWS, _STATE_SEED):
            for name, value in constrainer(theta).items():
                centre = value.mean(axis=0)
                shift = centre - mean.get(name, 0.0)
                weight = len(theta) / (n_seen + len(theta))
                mean[name] = mean.get(name, 0.0) + weight * shift
                spread = ((value - centre) ** 2).sum(axis=0) + n_seen * weight * shift**2
                square[name] = square.get(name, 0.0) + spread
            n_seen += len(theta)
        return {name: np.sqrt(total / (n_seen - 1)) for name, total in square.items()}
