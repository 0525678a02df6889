"""Draws of an approximation, without PyTensor nodes."""

import logging

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr

from pymc.backends.base import MultiTrace

from pymc_ngvi.core.draws import chunks
from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.seeds import generator_of
from pymc_ngvi.core.sizes import check_chains, check_draws
from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.model import Layout, LogDensity
from pymc_ngvi.model.constrain import Constrainer
from pymc_ngvi.model.data import DataSnapshot
from pymc_ngvi.results.convert import to_datatree, to_multitrace
from pymc_ngvi.results.corrections.weighted import weighted_draws
from pymc_ngvi.results.distributions.variational import distribution_of
from pymc_ngvi.results.plotting.structure import plot_structure
from pymc_ngvi.results.posterior import Distribution, Posterior
from pymc_ngvi.results.structure import ModelStructure

logger = logging.getLogger("pymc.ngvi")

NO_Q = (
    "An exact posterior is a weighted pool of draws and has no q: approx.gaussian has that of the Gaussian fit it "
    "began from, with its density and its parameters."
)


class Exports:
    """The part of an approximation that draws, without PyTensor nodes."""

    density: LogDensity
    include_transformed: bool
    model: Any
    groups: list[Any]
    record: FitRecord | None
    _rng: np.random.Generator
    _data: DataSnapshot
    _gaussian: Any
    _constrainer: Constrainer
    _narrow: Constrainer | None
    hist: Array
    gap_hist: Array
    _made: tuple[VariationalState, Distribution] | None = None

    @property
    def q(self) -> VariationalState:
        """The current state of the approximation.

        Raises
        ------
        AttributeError
            Of an exact posterior, which has none.
        """
        if self._gaussian is not None:
            raise AttributeError(NO_Q)
        return self._state

    @property
    def params(self) -> Any:
        """Shared variables that hold the parameters of q.

        Raises
        ------
        AttributeError
            Of an exact posterior, which has none.
        """
        if self._gaussian is not None:
            raise AttributeError(NO_Q)
        return super().params  # type: ignore[misc]

    @property
    def _state(self) -> VariationalState:
        q: VariationalState = self.groups[0].current_state()
        return q

    @property
    def _distribution(self) -> Distribution:
        """What reports read of q: chosen once for each q."""
        q = self._state
        if self._made is None or self._made[0] is not q:
            self._made = q, distribution_of(q)
        return self._made[1]

    @property
    def _posterior(self) -> Posterior:
        return Posterior(
            self._distribution, self.density, self._constrainer, self.record, self.hist, self.gap_hist, self._data
        )

    @property
    def layout(self) -> Layout:
        """Where each variable is in the flat vector."""
        return self.density.layout

    @property
    def structure(self) -> ModelStructure:
        """Which coordinates are independent of each other given which others; ``print`` says it in words."""
        return self._posterior.structure

    def plot_structure(self, ax: Any = None) -> Any:
        """Draw which entries the posterior precision can have; see `plot_structure`.

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
        return self._posterior.draw(check_draws(n), self.generator(random_seed))

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

            Of an exact posterior, ``log_q`` is not known. Attributes of the groups have ``effective_sample_size``, that
            of the pool of global parameters which the draws were taken from, and ``distinct_global_draws``: so many
            draws differ in their global parameters. ``global_draw`` in ``sample_stats`` is a number that is the same
            for those that do not; each of these has group effects of its own.

        Raises
        ------
        ValueError
            For a name that the model does not have; with ``importance``: where k-hat says that weights can't help,
            where the data were changed, for a model that reads minibatches, and of an exact posterior.

        Warns
        -----
        UserWarning
            Where the Monte Carlo error of the weights is larger than what they correct.
        """
        if self.record is not None:
            self.record.refuse_diverged()
        rng = self.generator(random_seed)
        chains = check_chains(chains)
        if include_transformed is None:
            include_transformed = self.include_transformed
        constrainer = self._constrainer_of(var_names, include_transformed)
        if var_names is not None and kwargs.get("log_likelihood"):
            raise ValueError("log_likelihood needs the draws of all free variables: leave var_names out.")
        made = weighted_draws(self._posterior, check_draws(draws) * chains, importance, rng)
        theta = made.theta
        values = constrainer(theta, random_seed=int(rng.integers(2**31)))
        stats = dict(made.stats)
        if log_p and not self._data.changed():
            stats["log_p"] = self.log_p(theta) if made.log_p is None else made.log_p
        stats |= self._distribution.stats(theta, rng, log_p)
        attrs = {**made.attrs, **self._distribution.attrs(theta)}
        if (effective := self._distribution.effective(len(theta))) < len(theta):
            logger.info(
                f"The effective sample size is {effective:,.0f}: among {len(theta):,} draws, those of the global "
                "parameters repeat (distinct_global_draws in the attributes says how many different ones there are)."
            )
        trace = to_multitrace(self.model, values, stats, chains)
        if not return_inferencedata:
            return trace
        more, named = self._distribution.groups(self.layout), var_names is not None
        tree = to_datatree(trace, self.model, more, include_transformed=include_transformed or named, **kwargs)
        for group in {"posterior", "sample_stats"} & set(tree.children):
            tree[group].attrs.update(attrs)
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

    def _draw_chunks(self, n_draws: int, random_seed: Any) -> Iterator[Array]:
        """Yield ``n_draws`` unconstrained draws in chunks that fit in memory."""
        rng = self.generator(random_seed)
        for size in chunks(n_draws, self.layout.n_dim):
            yield self.draw_flat(size, rng)

    def log_q(self, theta: Array) -> Array:
        """Return log q, (n_draws,), at unconstrained points, (n_draws, n_dim)."""
        return self._posterior.log_q(theta)

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
