"""Draws of an approximation, without PyTensor nodes."""

import warnings

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from numpy.typing import NDArray
from pymc.backends.base import MultiTrace

from pymc_ngvi.convert import to_datatree, to_multitrace
from pymc_ngvi.corrections.drawn import Drawn
from pymc_ngvi.families.arrow import ArrowStructure
from pymc_ngvi.model import Layout, LogDensity
from pymc_ngvi.model.constrain import Constrainer
from pymc_ngvi.plots import plot_structure
from pymc_ngvi.registry import suggestion
from pymc_ngvi.result import FitRecord
from pymc_ngvi.seeds import generator_of
from pymc_ngvi.structure import ModelStructure
from pymc_ngvi.types import Array, VariationalState

#: Largest dimension for which a dense covariance is made.
MAX_COV_DIM = 5_000
#: Draws held in memory at once, times dimension.
_CHUNK_ELEMENTS = 2**20


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


def _check_chains(chains: Any) -> int:
    if not isinstance(chains, int | np.integer) or isinstance(chains, bool) or chains < 1:
        raise ValueError(f"chains should be a whole number of at least 1; got {chains!r}.")
    return int(chains)


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
    """The part of an approximation that draws, without PyTensor nodes."""

    density: LogDensity
    include_transformed: bool
    model: Any
    groups: list[Any]
    record: FitRecord | None
    _rng: np.random.Generator
    _data: DataSnapshot
    _constrainer: Constrainer
    _narrow: Constrainer | None

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
        chains: int = 1,
        var_names: str | Sequence[str] | None = None,
        importance: str | None = None,
        random_seed: Any = None,
        return_inferencedata: bool = True,
        include_transformed: bool | None = None,
        log_p: bool = False,
        **kwargs: Any,
    ) -> xr.DataTree | MultiTrace:
        """Draw from the approximate posterior.

        Parameters
        ----------
        draws : int, default 500
            Of each chain.
        chains : int, default 1
            Draws of q are independent: chains only arrange them as other tools expect.
        var_names : str or sequence of str, optional
            Free variables, Deterministics, or unconstrained values (``sd_log__``): only these are evaluated and kept.
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
        log_p : bool, default False
            Evaluate the log densities of the model and of q at each draw, for ``sample_stats``. With much data that
            takes much longer than the draws.
        **kwargs
            Passed to ``pymc.to_inference_data``, for instance ``coords``, ``dims``, ``log_likelihood=True``.

        Returns
        -------
        xarray.DataTree or MultiTrace
            Group ``posterior`` holds free variables on their constrained scale and Deterministics. With
            ``log_p=True``, ``sample_stats`` holds ``log_p`` (unnormalised, Jacobian included) and ``log_q``, both on
            the unconstrained scale; ``log_p`` is left out where ``pm.set_data`` changed the data after the fit, since
            the draws are not from the posterior given the new data. For mixtures, ``sample_stats`` has the
            ``component`` of each draw, and a group ``components`` is that of `NGVIApproximation.components`. Attributes
            of the tree and of ``posterior`` say how the fit ended: ``status``, ``family``, ``elbo``, ``elbo_se``,
            ``gap`` and, if `NGVIApproximation.diagnose` or ``summary`` has been asked, ``verdict``.

        Raises
        ------
        ValueError
            For a name that the model does not have; with ``importance``: where k-hat says that weights can't help,
            where the data were changed, and for a model that reads minibatches.

        Warns
        -----
        UserWarning
            Where the Monte Carlo error of the weights is larger than what they correct.
        """
        if self.record is not None:
            self.record.refuse_diverged()
        rng = self.generator(random_seed)
        chains = _check_chains(chains)
        if include_transformed is None:
            include_transformed = self.include_transformed
        constrainer = self._constrainer_of(var_names, include_transformed)
        if var_names is not None and kwargs.get("log_likelihood"):
            raise ValueError("log_likelihood needs the draws of all free variables: leave var_names out.")
        drawn = self._drawn(check_draws(draws) * chains, importance, rng)
        theta = drawn.theta
        values = constrainer(theta, random_seed=int(rng.integers(2**31)))
        stats = dict(drawn.stats)
        if log_p and not self._data.changed():
            stats["log_p"] = self.log_p(theta) if drawn.log_p is None else drawn.log_p
        stats |= self._stats_of_q(theta, rng, log_p)
        trace = to_multitrace(self.model, values, stats, chains)
        if not return_inferencedata:
            return trace
        more, named = self._groups_of_q(), var_names is not None
        tree = to_datatree(trace, self.model, more, include_transformed=include_transformed or named, **kwargs)
        for group in {"posterior", "sample_stats"} & set(tree.children):
            tree[group].attrs.update(drawn.attrs)
        for node in (tree, tree["posterior"]):
            node.attrs.update(self._outcome())
        return tree

    def _constrainer_of(self, var_names: str | Sequence[str] | None, include_transformed: bool) -> Constrainer:
        """Return what evaluates the named variables."""
        if var_names is None:
            return self._constrainer
        names = frozenset([var_names] if isinstance(var_names, str) else var_names)
        values = {v.name: v.value_name for v in self.layout.variables}
        valid = dict.fromkeys([*values, *(d.name for d in self.model.deterministics), *values.values()])
        if unknown := sorted(names - valid.keys()):
            raise ValueError(f"var_names has {unknown[0]!r}, which the model has not: {suggestion(unknown[0], valid)}")
        if not names:
            raise ValueError("var_names is empty: name at least one variable, or leave it out for all of them.")
        if include_transformed:
            names |= {values[name] for name in names & values.keys()}
        if self._narrow is None or self._narrow.names != names:
            self._narrow = Constrainer.of(self.density, names=names)
        return self._narrow

    def _outcome(self) -> dict[str, str | float]:
        """Return how the fit ended, as attributes of a tree."""
        verdict = self._verdict_if_known()
        attrs = {} if self.record is None else self.record.attrs()
        return attrs if verdict is None else {**attrs, "verdict": verdict}

    def _verdict_if_known(self) -> str | None:
        """Return what `diagnose` has found, if it has been asked; computes nothing."""
        return None

    def _drawn(self, draws: int, importance: str | None, rng: np.random.Generator) -> Drawn:
        """Return draws of q; subclasses know of importance weights."""
        return Drawn(self.draw_flat(draws, rng), None, {}, {})

    def _stats_of_q(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[Any]]:
        """Return what ``sample_stats`` say of q at its draws."""
        return {"log_q": self.log_q(theta)} if log_q else {}

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
