"""The result of a fit: a ``pymc.Approximation`` whose q is any `VariationalState`."""

import contextlib
import copy
import copyreg
import functools
import os

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import cloudpickle
import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import ArrayLike
from pymc import modelcontext
from pymc.backends.base import MultiTrace
from pymc.variational.opvi import Approximation, VIState
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.variable import TensorVariable
from rich.theme import Theme

from pymc_ngvi.core.importance import pareto_khat
from pymc_ngvi.core.messages import listed, warn
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import (
    DRAWS,
    HELD,
    N_CHAINS,
    N_PREDICTED,
    N_REWEIGHTED,
    N_SHOWN,
    N_WEIGHED,
    PRIORS,
    UPDATES,
    WEIGHTS,
    Seed,
    check_draws,
    draws_of_chains,
    generator_of,
    seed_of,
)
from pymc_ngvi.core.status import Elbo, Status
from pymc_ngvi.core.types import Array, VariationalState
from pymc_ngvi.core.verdict import NOT_TESTED, Verdict
from pymc_ngvi.density import Layout, LogDensity, ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import DataSnapshot
from pymc_ngvi.density.shards import ShardedDensity, Shards
from pymc_ngvi.families import MixtureState
from pymc_ngvi.fitting.options import MOST_ITERATIONS, check_n
from pymc_ngvi.fitting.record import FitRecord, SoFar, record_of_pool, report_outcome
from pymc_ngvi.fitting.session import FitSession, Snapshot
from pymc_ngvi.marginal.pooled import WEIGHTED, PoolState
from pymc_ngvi.methods.mixtures import Worth, worth_between
from pymc_ngvi.posteriors.plan import Plan
from pymc_ngvi.results.diagnosis import (
    Diagnosis,
    log_ratio_of,
    own_generator,
    requested_diagnosis,
    standing_diagnosis,
)
from pymc_ngvi.results.distributions import (
    Distribution,
    LogMarginalLikelihood,
    Posterior,
    components_dataset,
    distribution_of,
    flat_dataset,
    free_names,
)
from pymc_ngvi.results.group import NGVIGroup
from pymc_ngvi.results.left_out import leave_out, log_marginal_likelihood, sites
from pymc_ngvi.results.persistence import (
    APPROXIMATION,
    FIT,
    UNCONSTRAINED,
    Content,
    SavedData,
    check_path,
    content_of_generator,
    content_of_q,
    content_of_tree,
    damaged,
    data_of,
    differences,
    digest,
    free_variables,
    group_of,
    q_of,
    readable,
    reading,
    restored_generator,
    versions,
    write,
)
from pymc_ngvi.results.plotting import (
    Axes,
    AxesArray,
    Figure,
    Kind,
    Plot,
    khat_title,
    plot_comparison,
    plot_fit,
    plot_khat,
    plot_sensitivity,
)
from pymc_ngvi.results.predictions import Given, Groups, Settings, averages, predictions_at
from pymc_ngvi.results.reweighted import Weighted, corrected, reweighted, updated
from pymc_ngvi.results.sampling import (
    Covariance,
    SamplerInit,
    chains_tree,
    check_options,
    constrained_state,
    covariance_of,
    moments_of,
    sample_trace,
    sample_tree,
    sampler_init,
)
from pymc_ngvi.results.structure import ModelStructure
from pymc_ngvi.results.summary import PriorSensitivity, Summary, card_of, prior_sensitivity, summarise

if TYPE_CHECKING:
    from arviz_stats.utils import ELPDData

NO_Q = (
    "An exact posterior is a weighted pool of draws and has no q: approx.gaussian has that of the Gaussian fit it "
    "began from, with its density and its parameters."
)


def _of_record(name: str, doc: str) -> Any:
    """Return a property that is known after a fit only."""
    return property(lambda approx: getattr(approx._record_of(name), name), doc=doc)


class NGVIApproximation(Approximation):
    """Approximate posterior of a PyMC model; everything that works with the result of ``pm.fit`` works with it.

    The work is in functions of a `Posterior`.

    Parameters
    ----------
    density : ModelDensity
        Log density of the model.
    q : VariationalState
        On the unconstrained scale, in the order of ``density.layout``.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        Seeds the draws of calls that are given no seed of their own.
    include_transformed : bool, default False
        Whether `sample` and `state` show the unconstrained variables (``sd_log__``) too.

    Attributes
    ----------
    record : FitRecord or None
        Outcome of the fit; None where there was none.
    hist : ndarray
        Loss, -ELBO, of each iteration.
    gap_hist : ndarray
        Estimated nats still to be gained after each iteration.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> from pymc_ngvi.results.approximation import NGVIApproximation
    >>> from pymc_ngvi.families import DiagonalState
    >>> from pymc_ngvi.density import LogDensity
    >>> with pm.Model() as model:
    ...     scale = pm.HalfNormal("scale")
    >>> q = DiagonalState.from_scale(np.array([-0.6]), np.array([0.8]))
    >>> approx = NGVIApproximation(LogDensity(model), q, random_seed=1)
    >>> dict(approx.sample(1000).posterior.sizes)
    {'chain': 4, 'draw': 250}
    >>> approx.mean_flat, approx.sd_flat
    (array([-0.6]), array([0.8]))
    """

    groups: list[NGVIGroup]
    _session: FitSession | Snapshot | None = None
    _gaussian: Self | None = None
    #: Whose draws it has by weights, where that is another posterior.
    _change: Weighted
    #: The `Choice` that is made again when a fit goes on.
    _next_step: Any = None
    _reports: Posterior | None = None
    #: The class of fits, from a model and its options: set where it is defined, which is above results.
    _inference: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        density: ModelDensity,
        q: VariationalState,
        *,
        random_seed: Seed = None,
        include_transformed: bool = False,
    ) -> None:
        super().__init__([NGVIGroup(density.layout, q, model=density.model)], model=density.model)
        self.record: FitRecord | None = None
        self.hist = self.gap_hist = np.empty(0)
        self.restart(density, q, random_seed=random_seed, include_transformed=include_transformed)

    def restart(
        self, density: ModelDensity, q: VariationalState, *, random_seed: Seed = None, include_transformed: bool = False
    ) -> None:
        """Begin anew from ``q``, with arguments as those of the class; nodes made before follow.

        Raises
        ------
        ValueError
            If the free variables of the model are not those that this approximation was made for.
        """
        made_for = self.groups[0].layout.variables
        if density.layout.variables != made_for:
            raise ValueError(
                "The free variables of the model, or their shapes, changed after the approximation was made: "
                f"{[v.name for v in made_for]} then, {[v.name for v in density.layout.variables]} now. Make a new one."
            )
        self.density = density
        self.set_state(q)
        self.include_transformed = include_transformed
        # Apart from the streams that a fit with the same seed draws from.
        whole = isinstance(random_seed, int | np.integer)
        self._rng = generator_of([random_seed, DRAWS] if whole else random_seed)
        self._data = DataSnapshot(density.model)
        self._constrainer = Constrainer.of(density)

    def __repr__(self) -> str:
        """Return the kind of q, the dimension and how the fit ended."""
        q, kind, record, outcome = self._state, self._distribution.name, self.record, "not fitted"
        if isinstance(q, PoolState):
            kind += f" with an effective sample size of {q.effective_size:,.0f}"
        elif isinstance(q, MixtureState):
            kind += f" with weights {listed(np.sort(q.weights)[::-1].tolist(), '{:.2f}')}"
        if record is not None:
            outcome = record.verdict.word if record.kind == WEIGHTED else f"{record.status}: ELBO {record.elbo}"
        return f"NGVIApproximation({kind}, n_dim={self.layout.n_dim}, {outcome})"

    __str__ = __repr__

    @property
    def params(self) -> dict[str, TensorSharedVariable]:
        """Shared variables that hold the parameters of q.

        Raises
        ------
        AttributeError
            Of an exact posterior, which has none.
        """
        if self._next_step is not None:
            raise AttributeError(NO_Q)
        return super().params

    @property
    def mean(self) -> TensorVariable:
        """Mean, (n_dim,), unconstrained: a PyTensor variable that follows the fit."""
        return self.groups[0].mean

    @property
    def std(self) -> TensorVariable:
        """Standard deviations, (n_dim,), unconstrained: a PyTensor variable that follows the fit."""
        return self.groups[0].std

    @property
    def cov(self) -> TensorVariable:
        """Covariance, (n_dim, n_dim), unconstrained: a PyTensor variable that follows the fit.

        Raises
        ------
        ValueError
            Above 5,000 dimensions: use `std`, `sd_flat` or `cov_of`.
        """
        return self.groups[0].cov

    @property
    def q(self) -> VariationalState:
        """The current state of the approximation.

        Raises
        ------
        AttributeError
            Of an exact posterior, which has none.
        """
        if self._next_step is not None:
            raise AttributeError(NO_Q)
        return self._state

    @property
    def layout(self) -> Layout:
        """Where each variable is in the flat vector."""
        return self.density.layout

    @property
    def gaussian(self) -> Self:
        """The Gaussian fit: what an exact posterior began from; this object itself where it is none.

        Where a nested posterior came in the place of it, it is made when it is first asked for: that takes as long as
        ``pm.fit(method="ngvi", posterior="gaussian")``, and gives the same bits.

        Raises
        ------
        ValueError
            Where it is still to be made, and ``pm.set_data`` changed the data since.
        """
        if self._next_step is None:
            return self
        if self._gaussian is None:
            self._gaussian = self._next_step.gaussian_of(self)
        return self._gaussian

    @property
    def _begins_with(self) -> VariationalState:
        """What another fit begins from: q, or the Gaussian that belongs to an exact or a nested posterior."""
        state = self._state
        return state.gaussian if isinstance(state, PoolState) and self._gaussian is None else self.gaussian.q

    @property
    def _has_other_modes(self) -> bool:
        """Whether a search has found other modes than the first fit: named, or in the posterior."""
        record, state = self.record, self._state
        is_named = record is not None and bool(record.modes or record.restarted)
        return is_named or (isinstance(state, PoolState) and state.checks.n_modes > 1)

    @property
    def plan(self) -> Plan | None:
        """Which posteriors there were to choose from, at which prices, and what became of each; `print` shows a table.

        None where there was nothing to choose: a method was named, or a Gaussian asked for.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     mu = pm.Normal("mu", 0.0, 3.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.ones(5))
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.plan.taken.kind
        'gaussian'
        """
        return None if self.record is None else self.record.plan

    def generator(self, random_seed: Seed) -> np.random.Generator:
        """Return the random generator for a seed; the approximation's own, which goes on, for None."""
        return self._rng if random_seed is None else generator_of(random_seed)

    def _generator_of_fit(self, random_seed: Seed, stream: int) -> np.random.Generator:
        """Return the random generator for a seed; for None, one that belongs to the fit, by the number of a stream."""
        return own_generator(self.record, stream) if random_seed is None else generator_of(random_seed)

    def set_state(self, q: VariationalState) -> None:
        """Replace q; nodes and compiled functions follow where it is of the same class, and else keep the old one."""
        if not self.groups[0].holds(q):
            super().__init__([NGVIGroup(self.layout, q, model=self.model)], model=self.model)
        self.groups[0].set_state(q)

    def take(self, gaussian: Self | None, step: Any, record: FitRecord) -> None:
        """Take over what a Gaussian fit has to say, after an exact step.

        Parameters
        ----------
        gaussian : NGVIApproximation or None
            None where there is none yet.
        step : PosteriorStep
            Is done again when the fit goes on.
        record : FitRecord
        """
        self._gaussian, self._next_step, self.record = gaussian, step, record
        if gaussian is not None:
            self.hist, self.gap_hist, self._data = gaussian.hist, gaussian.gap_hist, gaussian._data

    def _fits_of(self, density: LogDensity) -> Callable[[int], Posterior]:
        """Return what fits another log p, again and again as its data change, to the same kind of posterior."""
        kind = getattr(self._state, "kind", "gaussian")
        kind = "auto" if kind == WEIGHTED else kind
        inference = type(self)._inference(density.given, posterior=kind)
        inference._density = density
        inference._pilot = None if self._has_other_modes else self
        inference._problem(None, None)  # reads rows of log p while all of them count

        def fitted(random_seed: int) -> Posterior:
            inference.configure(random_seed=random_seed)
            found: NGVIApproximation = inference.fit(progressbar=False)
            found._record_of("leave_out()").refuse_interrupted()
            return found._posterior

        return fitted

    def _follow(self, session: FitSession) -> None:
        """Take over what a fit has come to."""
        q, self.record, self.hist, self.gap_hist = session.outcome()
        self.set_state(q)

    @property
    def _state(self) -> VariationalState:
        return self.groups[0].current_state()

    @property
    def _distribution(self) -> Distribution:
        """What reports read of q."""
        return self._posterior.distribution

    @property
    def _posterior(self) -> Posterior:
        """What reports read, and have computed: of another q, or of another density, that is forgotten."""
        q, known = self._state, self._reports
        if known is None or known.distribution.q is not q or known.density is not self.density:
            known = self._reports = Posterior(distribution_of(q), self.density, self._constrainer)
        known.record, known.data, known.include_transformed = self.record, self._data, self.include_transformed
        return known

    def _record_of(self, what: str) -> FitRecord:
        if self.record is None:
            raise RuntimeError(
                f"{what} is known after a fit only, and this approximation was not made by one. "
                "Use pm.fit(method='ngvi')."
            )
        return self.record

    # --- draws ---

    def draw_flat(self, n: int, random_seed: Seed = None) -> Array:
        """Draw from the approximate posterior.

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

    @task("Drawing from the posterior")
    def sample(
        self,
        draws: int = 500,
        *,
        chains: int = N_CHAINS,
        var_names: str | Sequence[str] | None = None,
        random_seed: Seed = None,
        return_inferencedata: bool = True,
        include_transformed: bool | None = None,
        log_p: bool = False,
        **kwargs: Any,
    ) -> xr.DataTree | MultiTrace:
        """Draw from the approximate posterior.

        Parameters
        ----------
        draws : int, default 500
            Draws in total, of all chains together; ``pm.sample`` has as many in each chain. ``sample(2_000)`` returns 4
            chains of 500. A number that the chains don't divide is rounded up: ``sample(50)`` returns 4 chains of 13.
        chains : int, default 4
            Chains that the draws are arranged in, so that R-hat, effective sample sizes and rank plots of ArviZ work.
            Draws that are not independent, as some of an exact or nested posterior have the same global parameters,
            follow each other within a chain: effective sample sizes and Monte Carlo errors of ArviZ account for them.
        var_names : str or sequence of str, optional
            Free variables, Deterministics, or unconstrained values (``sd_log__``): only these are evaluated and kept.
            Default: all, but for Deterministics that read ``pm.Minibatch`` data, which have the rows of one batch. For
            all rows, or new ones: ``pm.sample_posterior_predictive`` in a model of these. Of a Bambi model, those that
            Bambi's own results have.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        return_inferencedata : bool, default True
            Return a DataTree; a PyMC MultiTrace where False.
        include_transformed : bool, optional
            Keep the unconstrained variables too. Default: the attribute of that name.
        log_p : bool, default False
            Evaluate the log densities of the model and of q at each draw, for ``sample_stats``. With much data this
            takes much longer than the draws.
        **kwargs
            Passed to ``pymc.to_inference_data``, for instance ``coords``, ``dims``. ``log_likelihood=True``, or names
            of observed variables, adds log densities of rows, summed over discrete parameters.

        Returns
        -------
        xarray.DataTree or MultiTrace
            Group ``posterior`` holds free variables on their constrained scale and Deterministics. Of a Bambi model,
            intercepts are at predictors of zero, as in Bambi's own results, for ``model.predict`` and its like;
            ``pm.sample_posterior_predictive`` in the PyMC model would need those at mean predictors. With
            ``log_p=True``, ``sample_stats`` holds ``log_p`` (unnormalised, Jacobian included) and ``log_q``, both on
            the unconstrained scale; ``log_p`` is left out where ``pm.set_data`` changed the data after the fit, since
            the draws are not from the posterior given the new data. For mixtures, ``sample_stats`` has the
            ``component`` of each draw, and a group ``components`` is that of `NGVIApproximation.components`. Attributes
            of the tree and of ``posterior`` say how the fit ended: ``status``, ``family``, ``elbo``, ``elbo_se``,
            ``gap`` and ``verdict``, as far as it was judged by then.

            For an exact or nested posterior, ``log_q`` is not known. Its groups have three more attributes:
            ``effective_sample_size``, of the pool that the draws come from; ``effective_global_draws``, the same for
            global parameters, which repeat more often; and ``distinct_global_draws``, the number of draws that differ
            in these. Draws with equal global parameters have the same number ``global_draw`` in ``sample_stats``; what
            they have beside these differs.

        Raises
        ------
        ValueError
            For a name that the model does not have; for the ``log_likelihood`` of a model that reads minibatches.

        Warns
        -----
        UserWarning
            Where ``pm.set_data`` changed the data after the fit.
        """
        check_options(kwargs)
        kwargs |= {
            "chains": chains, "var_names": var_names, "log_p": log_p, "with_batches": False,
            "include_transformed": include_transformed,
        }  # fmt: skip
        what = self._posterior, draws, self.generator(random_seed)
        drawn = sample_tree(*what, **kwargs) if return_inferencedata else sample_trace(*what, **kwargs)[0]
        self._posterior.warn_of_changed_data()
        return drawn

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

    def sampler_init(
        self, chains: int = N_CHAINS, random_seed: Seed = None, *, covariance: Covariance = "auto"
    ) -> SamplerInit:
        """Return initial points and a mass matrix for NUTS.

        Parameters
        ----------
        chains : int, default 4
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of the starts, which are draws of q.
        covariance : {"auto", "dense", "diagonal"}, default "auto"
            What is taken from the covariance of q. "auto" takes all of it up to 500 dimensions.

        Returns
        -------
        SamplerInit
            ``pm.sample(tune=200, **approx.sampler_init(4).kwargs())`` uses it.

        Raises
        ------
        ValueError
            For bad arguments; for a model that reads minibatches; where log p is not finite at the draws of q, or the
            variance of q is not finite; above 5,000 dimensions with a dense covariance.

        References
        ----------
        .. [1] Hoffman, Gelman (2014). The No-U-Turn sampler. JMLR 15, 1593-1623.
           https://doi.org/10.48550/arXiv.1111.4246
        """
        return sampler_init(self._posterior, chains, self.generator(random_seed), covariance)

    # --- moments ---

    @property
    def mean_flat(self) -> Array:
        """Mean, (n_dim,), unconstrained."""
        return self._distribution.mean()

    @property
    def sd_flat(self) -> Array:
        """Standard deviations, (n_dim,), unconstrained."""
        return self._distribution.sd()

    @property
    def mean_data(self) -> xr.Dataset:
        """Unconstrained mean by name of the value variable; intercepts of a Bambi model are its own."""
        return flat_dataset(self.layout, moments_of(self._posterior)[0])

    @property
    def std_data(self) -> xr.Dataset:
        """Unconstrained standard deviations, like `mean_data`."""
        return flat_dataset(self.layout, moments_of(self._posterior)[1])

    def cov_of(self, names: str | Sequence[str]) -> xr.DataArray:
        """Return the covariance of some variables, unconstrained.

        Parameters
        ----------
        names : str or sequence of str
            Free variables (``sd``) or their unconstrained values (``sd_log__``), labels of single coordinates
            (``beta[3]``).

        Returns
        -------
        xarray.DataArray
            Square, with labels on both axes. That of Deterministics, or on the constrained scale, is one of draws.

        Raises
        ------
        ValueError
            For unknown names; above 5,000 dimensions of q where its family can't give a part of the covariance.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     x = pm.Normal("x", 0.0, [1.0, 2.0])
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.cov_of("x").values.round(4).diagonal().tolist()
        [1.0, 4.0]
        """
        return covariance_of(self._posterior, names)

    @property
    def state(self) -> VIState:
        """Mean and standard deviation of the free variables on their constrained scale, as Datasets.

        ``mean`` is the constrained value of the unconstrained mean, as in PyMC. ``std`` is the standard deviation of
        the constrained variables, from 4,000 draws with a fixed seed, or fewer of more than 8,000 coordinates. (PyMC's
        own ``std`` is the constrained value of the unconstrained standard deviation, which is not the spread of
        anything.)
        """
        return constrained_state(self._posterior)

    # --- fit ---

    elbo: Elbo = _of_record(
        "elbo",
        "Evidence lower bound in nats, on draws that had no part in the fit or by quadrature: ``value`` and ``se``.",
    )
    gap: float = _of_record(
        "gap", "Nats of ELBO still to be gained within the family, estimated on fresh draws or by quadrature."
    )
    status: Status = _of_record("status", "How the fit ended; ``status.sentence`` and ``status.cure`` say more.")
    converged: bool = _of_record("converged", "Whether the fit stopped because it had converged.")
    n_iterations: int = _of_record("n_iterations", "Iterations of the fit.")
    n_gradients: int = _of_record(
        "n_gradients", "Draws at which the gradient of log p was evaluated; without draws, its expectations."
    )
    n_hessians: int = _of_record(
        "n_hessians", "Draws at which the Hessian of log p was evaluated; without draws, its expectations."
    )
    compile_seconds: float = _of_record("compile_seconds", "Wall-clock time that building and compiling graphs took.")
    run_seconds: float = _of_record("run_seconds", "Wall-clock time of the rest of the fit.")
    backend: str = _of_record("backend", 'What evaluated the log density: "quick", "numba", "c" or "jax".')

    def refine(
        self,
        n: int = MOST_ITERATIONS,
        progressbar: bool = True,
        progressbar_theme: Theme | None = None,
        *,
        tol: float | None = None,
        max_draws: int | None = None,
        executor: Executor | object | None = None,
    ) -> Self:
        """Go on with the fit for at most ``n`` iterations, in place, as if it had not stopped.

        Parameters
        ----------
        n : int, default 10_000
        progressbar : bool, default True
        progressbar_theme : rich.theme.Theme, optional
        tol, max_draws : optional
            New values of these options; a fit that has converged goes on only with a smaller ``tol``.

        executor : concurrent.futures.Executor or distributed.Client, optional
            Where shards are evaluated from now on; see `Shards`.

        Returns
        -------
        NGVIApproximation
            This object.

        Raises
        ------
        RuntimeError
            If the approximation was made without a fit, or saved without it.
        ValueError
            For an option that makes no sense, or an executor where there are no shards; where ``pm.set_data`` changed
            the data after the fit.
        """
        if self._next_step is not None and self._record_of("refine").comes_first:
            return self._further(n, tol, max_draws, executor)
        gaussian = self.gaussian
        if gaussian._session is None:
            raise RuntimeError(
                "There is no fit to continue: this approximation was made without one, or saved without it. "
                "Use pm.fit(method='ngvi', start=...)."
            )
        gaussian._posterior.refuse_changed_data("The fit can't continue with other data")
        if executor is not None:
            if not isinstance(gaussian.density, ShardedDensity):
                raise ValueError("The model has no shards: leave executor out.")
            gaussian.density.shards.use(executor)
        anew = () if self._next_step is None else ("the posterior anew, after these iterations",)

        def now() -> tuple[Self, tuple[str, ...]]:
            if not isinstance(session := gaussian._session, FitSession):
                return self, anew
            gaussian._follow(session)
            return self, (*session.undone, *anew)

        with (
            task("Gaussian fit", enabled=progressbar, theme=progressbar_theme, has_numbers=True),
            SoFar[Self]() as so_far,
        ):
            so_far.is_now(now)
            if isinstance(session := gaussian._session, Snapshot):
                session = gaussian._session = session.session(gaussian.density, gaussian._state)
            session.refine(n, tol=tol, max_draws=max_draws)
            gaussian._follow(session)
            so_far.is_now(lambda: (self, anew))
            so_far.result = self if self._next_step is None else self._next_step.again(self)
        report_outcome(gaussian._state, so_far.result._record_of("refine"))
        return so_far.result

    def _further(self, n: int, tol: float | None, max_draws: int | None, executor: object) -> Self:
        """Go on with a nested posterior that no Gaussian fit came before."""
        if tol is not None or max_draws is not None or executor is not None:
            raise ValueError(
                "No Gaussian fit came before this nested posterior: refine() looks at more hyperparameters, and takes "
                "no tol, max_draws or executor. approx.gaussian.refine takes them."
            )
        self._posterior.refuse_changed_data("The posterior can't be refined with other data")
        with SoFar[Self]() as so_far:
            so_far.is_now(lambda: (self, ("more hyperparameters",)))
            step = self._next_step
            so_far.result = step.further(self) if check_n(n) and step is not None else self
        return so_far.result

    # --- diagnosis ---

    @task("Importance weights")
    def khat(self, draws: int | None = None, random_seed: Seed = None) -> float:
        """Return the Pareto k-hat of the importance weights: the shape of their tail.

        Parameters
        ----------
        draws : int, optional
            Default: 10,000, or fewer where these would cost much more than the fit did. A message says so.
        random_seed : int, Generator or None
            Default: a seed that belongs to the fit. Without arguments, k-hat is computed once and kept until q changes.
            With an argument it is computed anew, and varies by about 0.1 at 10,000 draws.

        Returns
        -------
        float
            Up to 0.7, importance weights can correct q. Above 0.7 they can't, unless they are nearly equal.
            `NGVIApproximation.diagnose` and `summary` say whether they are, and give the standard error of k-hat. For
            an exact posterior, the k-hat is that of its pool of global parameters, whatever the arguments.

        Raises
        ------
        ValueError
            For fewer than 100 draws; where ``pm.set_data`` changed the data after the fit.
        """
        ratio = self._log_ratio(draws, random_seed)
        return pareto_khat(ratio, np.zeros(len(ratio)))

    def _log_ratio(self, draws: int | None, random_seed: Seed) -> Array:
        self._posterior.check_weights()
        own = draws is None and random_seed is None
        return log_ratio_of(self._posterior, draws, None if own else self.generator(random_seed))

    @task("Checking the approximation")
    def diagnose(self, *, thorough: bool = False, draws: int | None = None, random_seed: Seed = None) -> Diagnosis:
        """Return whether means and standard deviations of q can be relied on, why not, and what to do.

        Pareto k-hat describes the tails of the weights. It does not show errors in the bulk of q, or that q misses
        a mode. Therefore draws of q are also moved towards the posterior, by a few Hamiltonian trajectories: the error
        of q is at least the change in their moments. Labels are exchanged as well, and signs changed. Where log p stays
        the same then, but q does not, q covers one of several equal modes.

        Parameters
        ----------
        thorough : bool, default False
            Move more draws for longer, look for other modes from dispersed points, and fit once more from a dispersed
            start.
        draws : int, optional
            For k-hat and the effective sample size; at least 100. Fewer are used above 3,300 dimensions. Default:
            10,000, or as many as a budget allows where evaluations are expensive. A number that is given has no budget.
        random_seed : int, Generator or None
            Of a new look, with ``thorough`` or ``draws``; by default, and without these, one that belongs to the fit.

        Returns
        -------
        Diagnosis
            Its ``checks`` are those of the approximation; what a new look finds becomes it. ``reliable``,
            ``reasons``; ``print`` shows the report, ``to_dataset()`` has all figures by variable.

        Raises
        ------
        ValueError
            For fewer than 100 draws; where ``pm.set_data`` changed the data after the fit; for a model that reads
            minibatches.

        Notes
        -----
        A fit to minibatches is "not judged": ask on a model of all of the data, on which `load` puts it.

        A diagnosis takes ``draws`` log densities and up to about 24,000 gradients. ``thorough=True`` takes about 80,000
        gradients more, and another fit. By default there is a budget, about as long as the fit took or some seconds. It
        is a number of evaluations that follows from the graph, the sizes of the data and the evaluations of the fit,
        not from the clock. Where the budget is too small to tell, the verdict is "not judged". The report says what was
        evaluated, and what was left out.

        References
        ----------
        .. [1] Yao, Vehtari, Simpson, Gelman (2018). Yes, but did it work? Evaluating variational inference. ICML.
           https://doi.org/10.48550/arXiv.1802.02538

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     v = pm.Normal("v", 0.0, 3.0)
        ...     x = pm.Normal("x", 0.0, pm.math.exp(v / 2), shape=4)
        ...     approx = pymc_ngvi.fit_ngvi(posterior="gaussian", random_seed=1, progressbar=False)
        >>> diagnosis = approx.diagnose()
        >>> diagnosis.reliable
        False
        >>> "`v`" in diagnosis.reasons[0]
        True
        """
        is_new = thorough or draws is not None
        known = NOT_TESTED if self.record is None or is_new else self.record.judged
        rng = self._generator_of_fit(random_seed, WEIGHTS) if is_new else self._rng
        found = requested_diagnosis(self._posterior, rng, draws, thorough=thorough)
        if known.is_tested and not known.open:
            return replace(found, checks=known)
        return self._judged_by(found)

    def _judged_by(self, diagnosis: Diagnosis) -> Diagnosis:
        """Take the verdict of a diagnosis for that of this approximation."""
        if self.record is not None:
            self.record = replace(self.record, judged=diagnosis.checks)
        return diagnosis

    # --- summary ---

    @task("Summary")
    def summary(
        self,
        draws: int = N_SHOWN,
        *,
        group_effects: bool = False,
        khat_draws: int | None = N_WEIGHED,
        random_seed: Seed = None,
        **kwargs: Any,
    ) -> Summary:
        """Return the outcome of the fit, k-hat and a table of the constrained variables, ready to print.

        The table of a model with groups begins with the parameters of the population, the fixed effects. Standard
        deviations and correlations of the effects of each group follow.

        Parameters
        ----------
        draws : int, default 2_000
            Behind the table.
        group_effects : bool, default False
            Show the effects of each group, too.
        khat_draws : int or None, default 10_000
            None leaves k-hat out, and what a mixture gains over one Gaussian.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Default: a seed that belongs to the fit, so that a second summary has the same numbers.
        **kwargs
            Passed to ``arviz_stats.summary``. ``kind`` is "stats" by default: effective sample sizes and R-hat say
            nothing about independent draws. With ``var_names``, ``filter_vars`` or ``coords`` the table shows just
            what they name.

        Returns
        -------
        Summary

        Notes
        -----
        Which variables are effects of groups is read from the model. Effects have an axis along which they depend on
        each other through other parameters only, and a parameter in their prior or one that multiplies them. Two kinds
        of variables are left out: Deterministics with a value for each of more than 20 observations, and standardised
        effects that others are computed from. A sentence below the table says so.
        """
        return summarise(
            self._posterior, self.record.verdict if self.record and khat_draws is None else self.checks,
            draws, self._generator_of_fit(random_seed, DRAWS), group_effects=group_effects, khat_draws=khat_draws,
            options=kwargs,
        )  # fmt: skip

    def _repr_html_(self) -> str:
        return card_of(self._posterior)

    # --- corrections ---

    @task("Importance weights")
    def corrected(self, draws: int = N_WEIGHED, *, random_seed: Seed = None) -> "NGVIApproximation":
        """Return draws of q with their importance weights, as an approximation that is nearer to the posterior.

        Parameters
        ----------
        draws : int, default 10_000
            Of q; at least 100.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None

        Returns
        -------
        NGVIApproximation
            Weighted draws: ``summary()``, ``sample()`` and all other methods are those of a fit. ``checks`` has k-hat
            and the effective sample size, ``log_marginal_likelihood`` what the weights say of it.

        Raises
        ------
        ValueError
            Where k-hat says that weights can't help; where ``pm.set_data`` changed the data after the fit; for a model
            that reads minibatches; of an exact posterior, which has nothing to correct.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> from pymc_ngvi.results.approximation import NGVIApproximation
        >>> from pymc_ngvi.families import DiagonalState
        >>> from pymc_ngvi.density import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.Normal("x", 0.0, 1.0)
        >>> q = DiagonalState.from_scale(np.array([0.2]), np.array([1.2]))
        >>> better = NGVIApproximation(LogDensity(model), q).corrected(random_seed=1)
        >>> better.sd_flat.round(1)
        array([1.])
        """
        return self._of_weighted(NGVIApproximation, corrected(self._posterior, draws, self.generator(random_seed)))

    def _of_weighted[A: NGVIApproximation](self, cls: type[A], made: Weighted) -> A:
        """Return an approximation that is weighted draws of this one."""
        seed = 0 if self.record is None else self.record.seed
        q = cast(VariationalState, made.state)
        found = cls(made.density, q, random_seed=seed, include_transformed=self.include_transformed)
        record = record_of_pool(made.density, made.state, Elbo(np.nan, np.nan), seed, 0.0)
        found.record = replace(record, kind=made.state.kind, judged=replace(made.state.checks, is_tested=True))
        found._change = made
        return found

    # --- exact ---

    @property
    def is_exact(self) -> bool:
        """Whether this is the posterior up to Monte Carlo error, by `checks`: draws of it, or a Gaussian that is it."""
        return self.checks.is_exact

    @property
    def is_nested(self) -> bool:
        """Whether this is a nested posterior: hyperparameters sampled, latent variables by Gaussians given these."""
        state = self._state
        return isinstance(state, PoolState) and state.is_nested

    @property
    def checks(self) -> Verdict:
        """The verdict: whether the posterior can be relied on, by which conditions, each with its figure.

        All reports have this one. It is made once, when it is first asked for, by tests of draws from the seed of the
        fit; their number follows from the model and the evaluations of the fit. Where they would take too long, it is
        "not judged" until `diagnose` is called. That of an exact, nested or moved posterior has its measurements too.
        """
        record = self.record
        known = NOT_TESTED if record is None else record.verdict
        if known.is_tested or known.failures:
            return known
        if why := self._posterior.why_not_judged:
            return known if self._next_step is not None else replace(known, open=why)
        return self._judged_by(standing_diagnosis(self._posterior)).checks

    @task("Moving draws")
    def chains(self, random_seed: Seed = None) -> xr.DataTree:
        """Return the chains of a moved posterior, as they were moved: many short ones.

        Plain R-hat is too strict for so many short chains; ``approx.checks`` has nested R-hat, by which they were
        judged. `sample` gives draws of all of them.

        Parameters
        ----------
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            For Deterministics that draw random numbers.

        Returns
        -------
        xarray.DataTree
            As from ``pm.sample``; ``sample_stats`` has ``superchain``, the number of the point at which a chain began.
            Chains that stay in several modes have ``mode``, and ``weight``, by which averages over chains are taken.

        Raises
        ------
        ValueError
            Where the posterior is not moved.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     x = pm.Normal("x", shape=2)
        ...     bent = pm.Potential("bent", -((x[0] ** 2 - x[1]) ** 2))
        ...     approx = pymc_ngvi.fit_ngvi(posterior="moved", random_seed=1, progressbar=False)
        >>> approx.chains().posterior.sizes["chain"]
        128
        """
        return chains_tree(self._posterior, self.generator(random_seed))

    @property
    def log_marginal_likelihood(self) -> LogMarginalLikelihood:
        """The log marginal likelihood, log p(y), with its standard error, of an exact, nested or moved posterior.

        Of a moved one, it is found by bridge sampling between a Gaussian and the chains. If the posterior has several
        modes, only those that were found are counted. Where symmetry makes K equal modes,
        add log K. Constants of the likelihood are included, as PyMC has them.

        Raises
        ------
        ValueError
            Where the posterior is none of these, or the value would be arbitrary: with improper priors (``pm.Flat``),
            or with terms without a normalising constant (``pm.ICAR``, a Potential, unless `pymc_ngvi.normalised` says
            otherwise). Where no Gaussian is near enough to the chains.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     p = pm.Beta("p", 1.0, 1.0)
        ...     y = pm.Binomial("y", 4, p, observed=1)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> abs(approx.log_marginal_likelihood.value - -1.609) < 0.03  # 1/5: each number of successes is as likely
        True
        """
        return log_marginal_likelihood(
            self._posterior, is_same=not isinstance(self._state, PoolState) and self.is_exact
        )

    # --- components ---

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
        found = components_dataset(self._mixture("weights", AttributeError), self.layout)
        return found[free_names(self.layout, "weights")[0]].rename("weights")

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
        n = N_PREDICTED if draws is None else draws
        theta = np.asarray(n, dtype=np.float64) if np.ndim(n) else self.draw_flat(cast(int, n), random_seed)
        if theta.ndim != 2 or theta.shape[1] != q.n_dim:
            raise ValueError(
                f"draws should be unconstrained, of shape (n_draws, {q.n_dim}), such as draw_flat(n) returns; "
                f"got {theta.shape}."
            )
        [component] = free_names(self.layout, "component")
        coords = {"draw": np.arange(len(theta)), component: np.arange(q.n_components)}
        return xr.DataArray(q.responsibilities(theta), coords=coords, dims=list(coords), name="responsibilities")

    def worth(
        self, draws: int = N_WEIGHED, random_seed: Seed = None, *, gaussian: VariationalState | None = None
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

    # --- plots ---

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
                "No Gaussian fit came before this posterior: there are no iterations to show. "
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
        ratio = self._log_ratio(draws, random_seed)
        return plot_khat(ratio, np.zeros(len(ratio)), title=khat_title(self._posterior), ax=ax)

    def plot_comparison(
        self,
        reference: xr.DataTree | xr.Dataset,
        var_names: str | Sequence[str] | None = None,
        kind: Kind = "forest",
        draws: int = N_SHOWN,
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
        tree = sample_tree(self._posterior, draws, self.generator(random_seed))
        posterior = tree["posterior"].to_dataset()
        if var_names is None:
            posterior = posterior[[rv.name for rv in self.model.free_RVs]]
        return plot_comparison(posterior, reference, var_names, kind, max_coordinates=max_coordinates, **options)

    # --- predictions ---

    @task("Predictions")
    def predict(
        self,
        new_data: Given | Any = None,
        *,
        groups: Groups = "known",
        var_names: str | Sequence[str] | None = None,
        draws: int = N_PREDICTED,
        random_seed: Seed = None,
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

        Returns
        -------
        xarray.DataTree
            Groups ``predictions``, with 4 chains and the labels of the new data, and ``predictions_constant_data``;
            without new data also ``posterior_predictive`` and ``observed_data``.
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
            For new data that are no dict, or no DataFrame of a Bambi model that is known.

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
        ``groups="new"``. All of them need the elements of the fit before the new ones. Where labels of the fit are in
        equal steps, a gap of six is six steps; no data may have a value for each of them.

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
        (4, 250, 2)
        >>> found["predictions"]["school"].values.tolist()
        ['north', 'south', 'west', 'east']
        >>> approx.predict({"school_of": ["south", "east"]})
        Traceback (most recent call last):
        ValueError: 'effect' has levels 'east' along dim 'school' that were not in the fit. ...
        """
        return self._predictor(draws, random_seed)(new_data, groups, var_names)

    def _predictor(self, draws: int, random_seed: Seed) -> Callable[..., xr.DataTree]:
        """Return what predicts at the same draws, with the same random numbers, whatever the new data are."""
        if self.record is not None:
            self.record.refuse_diverged()
        rng, posterior = self.generator(random_seed), self._posterior
        theta = posterior.draw(draws_of_chains(draws), rng)
        return functools.partial(predictions_at, posterior, theta, seed_of(rng))

    @task("Predictions")
    def average_predictions(
        self,
        at: Settings | None = None,
        *,
        slope: str | None = None,
        by: str | Sequence[str] = (),
        new_data: Given | None = None,
        groups: Groups = "known",
        var_names: str | Sequence[str] | None = None,
        draws: int = N_PREDICTED,
        random_seed: Seed = None,
    ) -> xr.Dataset:
        """Average the expected response over rows, with some data set to values: for comparisons, and slopes.

        Axes beyond the rows of the response, such as the categories of their probabilities, are kept.
        All averages are of the same draws, so that differences of them are draws of contrasts.

        Parameters
        ----------
        at : dict, optional
            What to set data to, in all rows, by the name of a ``pm.Data``: a list of numbers, or of labels for an
            index, one after the other; or a dict of these, or of arrays for all rows, by label. Of several data, all
            combinations. Default: the data are as they are.
        slope : str, optional
            Return derivatives of averages by this ``pm.Data``, moved in all rows together; of a matrix, by each of its
            columns.
        by : str or sequence of str, optional
            What not to average over: dims of what is predicted, whose elements are all kept; or ``pm.Data`` with one
            value for each row, of whose values each has its own average.
        new_data : dict, optional
            Rows to average over, as `predict` takes them. Default: those of the fit.
        groups : {"known", "new", "average"}, default "known"
            As in `predict`.
        var_names : str or sequence of str, optional
            Default: observed variables, of which the mean given the parameters is taken. Of others, such as
            Deterministics, their values.
        draws : int, default 1_000
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None

        Returns
        -------
        xarray.Dataset
            With the dims ``chain``, ``draw``, one for each of the data in ``at``, those of ``by``, and those that are
            kept. ArviZ takes it in the place of draws.

        Raises
        ------
        ValueError
            As in `predict`; for observed variables whose mean PyMC does not know, such as censored and categorical
            ones, which need a Deterministic, named in ``var_names``; for the slope in whole numbers.

        See Also
        --------
        predict : Draws of the response for each row.

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     dose = pm.Data("dose", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
        ...     treated = pm.Data("treated", [0, 1, 0, 1, 0, 1])
        ...     a, b, c = pm.Normal("a"), pm.Normal("b"), pm.Normal("c")
        ...     _ = pm.Bernoulli("cured", logit_p=a + b * dose + c * treated, observed=[0, 0, 0, 1, 1, 1])
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> cured = approx.average_predictions({"treated": [0, 1]}, random_seed=1)["cured"]
        >>> dict(cured.sizes)
        {'chain': 4, 'draw': 250, 'treated': 2}
        >>> risk_difference = cured.sel(treated=1) - cured.sel(treated=0)
        >>> dict(approx.average_predictions(slope="dose", by="treated", random_seed=1).sizes)
        {'chain': 4, 'draw': 250, 'treated': 2}
        """
        predict = functools.partial(self._predictor(draws, random_seed), new_data, groups, var_names)
        return averages(self._posterior, predict, at, slope, by, new_data)

    # --- priors ---

    @task("Another prior")
    def with_prior(
        self,
        priors: Mapping[str, Any] | None = None,
        /,
        *,
        draws: int = N_REWEIGHTED,
        random_seed: Seed = None,
        **by_name: Any,
    ) -> "Reweighted":
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
            Where the result can't be relied on: k-hat is above 0.7, or the draws are worth fewer than 400 independent
            ones, so that the error of a mean is above 0.05 of its standard deviation; or the posterior has doubts of
            its own.

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
        >>> found.checks.is_reliable
        True
        >>> abs(found.sample(4_000, random_seed=1).posterior["p"].mean().item() - 12 / 20) < 0.01
        True
        """
        rng = self._generator_of_fit(random_seed, PRIORS)
        return self._of_weighted(Reweighted, reweighted(self._posterior, {**(priors or {}), **by_name}, draws, rng))

    @task("Other priors")
    def prior_sensitivity(
        self,
        var_names: str | Sequence[str] | None = None,
        *,
        prior_var_names: str | Sequence[str] | None = None,
        likelihood_var_names: str | Sequence[str] | None = None,
        draws: int = N_REWEIGHTED,
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
        threshold : float, default 0.05
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
            self._generator_of_fit(random_seed, PRIORS),
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
        found = self.prior_sensitivity(var_names, **{name: options.pop(name) for name in own if name in options})
        return plot_sensitivity(found.tree, found.table, **options)

    # --- new_rows ---

    @task("Update")
    def update(self, new_data: Given | Any, *, draws: int = N_REWEIGHTED, random_seed: Seed = None) -> "Updated":
        """Return the posterior given new rows as well as those of the fit, without another fit.

        Draws of the posterior are weighted by the density of the new rows [1]_. Under an exact posterior of a model
        with groups, these are draws of the global parameters: groups that have new rows are integrated again, from
        their conditional moments, and so are new groups, from their prior. Discrete variables that were summed out are
        drawn given the rows of the fit, and weighted with the rest.

        Parameters
        ----------
        new_data : dict or DataFrame
            The new rows alone: observations by the name of the observed variable, or of its ``pm.Data``; the other
            ``pm.Data`` of these rows; and lists of labels by the name of a dim with coords, as `predict` takes them. An
            index into variables that have such a dim may be given by labels; labels that were not in the fit are new
            levels, which the verdict names. Data with a value for each row are required; others that are not named are
            those of the fit. For a Bambi model: a DataFrame with the columns of its formula.
        draws : int, default 4_000
            Independent draws that those of the posterior should be worth; at least 100.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Default: a seed that belongs to the fit.

        Returns
        -------
        Updated
            ``sample()``, ``summary()``, ``predict()``, ``khat``, ``effective_sample_size``, ``is_reliable`` and
            ``doubts``, and ``log_predictive_density`` of the new rows given those of the fit.

        Raises
        ------
        TypeError
            For new data that are no dict, or no DataFrame of a Bambi model that is known.
        ValueError
            Where the observations are not there, or have missing values; for names that the model does not have, ragged
            arrays, and lengths that do not agree; where the elements of an observed variable have one distribution
            together, as those of a series; where new elements have no distribution given the others (`predict`).

        Warns
        -----
        UserWarning
            Where a fit of all rows is due: k-hat is above 0.7, or the draws are worth fewer than 400 independent ones;
            a group moves by more than two of its conditional standard deviations, or by 0.25 where its conditional
            distribution is skewed; what new rows say of new levels is known from few candidates; or the posterior has
            doubts of its own.

        Notes
        -----
        An update is one of the fit, not of an earlier update: give all rows since the fit. The rows of the fit need not
        be there. From a file, `load` takes a model that is built with other rows, and warns of them; a Gaussian that is
        not exact can't be compared with log p then, and groups that are skewed are known by their moments only.

        Means and the like by which the model standardises its data are those of the data that the model has.

        References
        ----------
        .. [1] N. Chopin (2002). A sequential particle filter method for static models. Biometrika 89(3), 539-552.
           https://doi.org/10.1093/biomet/89.3.539

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     mu = pm.Normal("mu", 0.0, 10.0)
        ...     _ = pm.Normal("y", mu, 1.0, observed=np.zeros(40))
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> newer = approx.update({"y": np.full(4, 1.0)})
        >>> newer.checks.is_reliable
        True
        >>> mean = newer.sample(4_000, random_seed=1).posterior["mu"].mean().item()
        >>> abs(mean - 4 / 44) < 0.02
        True
        """
        rng = self._generator_of_fit(random_seed, UPDATES)
        return self._of_weighted(Updated, updated(self._posterior, new_data, draws, rng))

    # --- sites ---

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
            under the cavity. It is NaN where there is no cavity, or quadrature is off by more than 0.001. ``influence``
            is the part of the precision of q that is the site's, ``variance * gamma`` where an observation has no other
            predictor: above 0.3, a fit without the observation may predict it otherwise, mostly worse. ``attrs`` has
            ``elpd``, the sum, with its standard error ``elpd_se``; ``n_missing``, how many are NaN; ``n_influential``,
            how many have an influence above 0.3; and ``var_name``.

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

    # --- left_out ---

    @task("Scores of what is left out")
    def leave_out(
        self,
        *,
        groups: str | ArrayLike | None = None,
        folds: int | ArrayLike | None = None,
        future: int | None = None,
        horizon: int = 1,
        var_name: str | None = None,
        refit: bool = True,
        random_seed: Seed = None,
    ) -> "ELPDData":
        """Return predictive densities of parts of the data given the rest, without a fit for each part.

        The draws that are there are weighted by how likely they are without a part, with Pareto-smoothed weights [1]_.
        Under an exact posterior of a model with groups these are draws of the global parameters alone, and the groups
        that a part touches are integrated again without it [2]_. Parts whose weights can't be relied on, by k-hat, are
        left out by a fit of their own: by a mean of densities, or by marginal likelihoods.

        Parameters
        ----------
        groups : str or array, optional
            Leave out one group after the other, and predict all of its rows together. A dim of the observed variable,
            or of effects of which each row has one; or the group of each row, in the shape of the variable.
        folds : int or array, optional
            Leave out one fold after the other, and predict each of its rows. A number of folds, into which rows are put
            at random; or the fold of each row.
        future : int, optional
            Predict from the past: so many times, along the first axis, are always known. For each of the others, it and
            all that come after it are left out.
        horizon : int, default 1
            With ``future``: how many times are predicted, together.
        var_name : str, optional
            The observed variable. Needed where there are several.
        refit : bool, default True
            Whether to fit again without those parts whose k-hat is too large. The log says how many there were.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None

        Returns
        -------
        arviz_stats.ELPDData
            For ``az.compare`` and plots of ArviZ. ``elpd``, the sum of log predictive densities in nats, with its
            standard error ``se``; of each row, group or time, ``elpd_i``, its Monte Carlo error ``["mcse_i"]``, and
            ``pareto_k``, the k-hat of what was averaged. Where this is above ``good_k``, the error is NaN. Of rows and
            groups also ``log_weights``, (chain, draw, ...), with k-hats as their coordinate ``pareto_k``, of the draws
            that `sample` gives for the same seed.

        Raises
        ------
        ValueError
            For groups or folds that do not go with the rows; where rows have no log densities of their own; where data
            are in shards or batches, or have changed since the fit.

        References
        ----------
        .. [1] A. Vehtari, A. Gelman, J. Gabry (2017). Practical Bayesian model evaluation using leave-one-out
           cross-validation and WAIC. Statistics and Computing 27. https://doi.org/10.1007/s11222-016-9696-4
        .. [2] A. Vehtari, T. Mononen, V. Tolvanen, T. Sivula, O. Winther (2016). Bayesian leave-one-out
           cross-validation approximations for Gaussian latent variable models. JMLR 17(103).
           https://jmlr.org/papers/v17/14-540.html

        Examples
        --------
        >>> import numpy as np
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> y = np.random.default_rng(1).normal(size=(20, 3)) + np.arange(20)[:, None] / 10.0
        >>> with pm.Model(coords={"school": np.arange(20)}):
        ...     mu, s = pm.Normal("mu", 0.0, 2.0), pm.HalfNormal("s", 1.0)
        ...     a = pm.Normal("a", mu, s, dims="school")
        ...     _ = pm.Normal("y", a[:, None], 1.0, observed=y)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> approx.leave_out(groups="school", random_seed=1).n_data_points
        20
        """
        return leave_out(
            self._posterior, var_name, self.generator(random_seed), self._fits_of if refit else None,
            horizon=horizon, groups=groups, folds=folds, future=future,
        )  # fmt: skip

    # --- saving ---

    def to_datatree(
        self, draws: int = 0, *, random_seed: Seed = None, resumable: bool = True, **kwargs: Any
    ) -> xr.DataTree:
        """Return the approximation as a tree, from which `pymc_ngvi.load` restores it.

        Parameters
        ----------
        draws : int, default 0
            Posterior draws to add, as groups ``posterior``, ``sample_stats``, ``observed_data``, ... like those of
            `sample`.
        random_seed : int, list of int, SeedSequence, Generator, RandomState or None
            Of these draws.
        resumable : bool, default True
            Keep the state of the fit, for `refine`. Without it the tree is smaller, by a factor that grows with the
            number of draws that the fit ended with.
        **kwargs
            Of `sample`.

        Returns
        -------
        xarray.DataTree
            Group ``approximation`` holds the arrays of q (unconstrained, flat) and, as JSON, the names, shapes, dims,
            coords and transforms of the free variables, the record of the fit and digests of the data; ``fit`` the
            state of the fit; ``unconstrained`` mean and standard deviations by variable. Attributes of the root say
            the versions.

        Raises
        ------
        ValueError
            Where ``pm.set_data`` changed the data after the fit.
        TypeError
            For a q of a class that is not of this package.

        Examples
        --------
        >>> import pymc as pm
        >>> import pymc_ngvi
        >>> with pm.Model():
        ...     x = pm.Normal("x", 1.0, 2.0)
        ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
        >>> tree = approx.to_datatree(draws=100)
        >>> dict(tree["posterior"].sizes)
        {'chain': 4, 'draw': 25}
        >>> tree["unconstrained/x"].values.round(6)
        array([1., 2.])
        """
        if not isinstance(self._data, SavedData):
            self._posterior.refuse_changed_data("Saved, the approximation would go with data that it was not fitted to")
        tree = xr.DataTree()
        if draws:
            kwargs.pop("return_inferencedata", None)
            tree = sample_tree(self._posterior, draws, self.generator(random_seed), **kwargs)
        elif kwargs:
            raise TypeError(f"{', '.join(kwargs)} are of posterior draws: ask for draws, too.")
        posterior, fitted = self._posterior, self._gaussian or self
        content = {
            **_content_of_fit(self),
            "variables": free_variables(self.model, self.layout),
            "data": self._data.saved
            if isinstance(self._data, SavedData)
            else {name: digest(array) for name, array in data_of(self.model).items()},
            "backend": self.density.backend,
        }
        if self._next_step is not None:
            gaussian = None if self._gaussian is None else _content_of_fit(self._gaussian)
            content |= {"gaussian": gaussian, "exact_step": self._next_step}
        tree[APPROXIMATION] = xr.DataTree(group_of(content, inline=False, attrs=readable(posterior)))
        if resumable and (saved := fitted._saved_fit()) is not None:
            tree[FIT] = xr.DataTree(group_of({"snapshot": saved}, inline=True))
        moments = np.stack(moments_of(posterior))
        tree[UNCONSTRAINED] = xr.DataTree(flat_dataset(self.layout, moments, {"moment": ["mean", "sd"]}))
        tree.attrs |= versions()
        return tree

    def save(
        self,
        path: str | os.PathLike[str],
        draws: int | None = None,
        *,
        random_seed: Seed = None,
        resumable: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write the approximation to a file, from which `pymc_ngvi.load` reads it, and ArviZ its draws.

        A file of that name is replaced, once the new one is complete; if writing fails, it is kept as it is.

        Parameters
        ----------
        path : str or PathLike
            Ends in ``.nc``, ``.nc4``, ``.netcdf`` or ``.h5`` (netCDF-4).
        draws : int, optional
            Posterior draws, which ArviZ and xarray read without this package; 0 for none. Default: 1,000, or fewer of
            more than 33,000 coordinates, of which 1,000 would take more than 256 MiB; none of a fit that diverged, and
            none where the data were changed.
        random_seed, resumable, **kwargs
            As of `to_datatree`.

        Raises
        ------
        ValueError
            For another suffix.
        FileNotFoundError, FileExistsError
            If the folder does not exist; if there is something that is no file to be replaced.
        """
        checked = check_path(path)  # before anything is made
        if draws is None:
            is_diverged = self.record is not None and self.record.status is Status.DIVERGED
            most = min(N_PREDICTED, max(HELD // self.layout.n_dim, 1))
            draws = 0 if is_diverged or self._data.changed() else most
        write(self.to_datatree(draws, random_seed=random_seed, resumable=resumable, **kwargs), checked)

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle; of the fit, what it needs to go on."""
        state: Any = super().__getstate__()
        return {**state, "_session": self._saved_fit()}

    def _saved_fit(self) -> Snapshot | None:
        """Return what the fit needs to go on in another process."""
        if not isinstance(self._session, FitSession):
            return self._session
        in_part = self.density.why_in_part or self.density.is_streamed or self._data.changed()
        log_p = None if in_part else float(self.density.logp(self._distribution.mean()[None])[0])
        return self._session.snapshot(log_p)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return a pickle by cloudpickle: PyMC's models hold functions that pickle itself can't take."""
        return cloudpickle.loads, (cloudpickle.dumps(self, protocol),)

    def __copy__(self) -> Self:
        """Return an approximation that shares all parts but the fit."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, _session=None, _reports=copy.copy(self._reports))
        if copied._gaussian is not None:
            copied._gaussian = copy.copy(copied._gaussian)
        return copied


class Reweighted(NGVIApproximation):
    """The posterior under other priors, from `NGVIApproximation.with_prior`: all works with it that works with a fit.

    ``model`` is a copy of the model with these priors and the data of the fit. The verdict is that on the weights of
    its draws; `diagnose` looks at the draws themselves.
    """

    @property
    def log_bayes_factor(self) -> LogMarginalLikelihood:
        """Log p(y) under the new priors minus that under the old ones, with its standard error.

        Raises
        ------
        ValueError
            Where the weights can't be relied on, or a prior, new or old, is improper.
        """
        return self._change.log_density("marginal likelihood")


class Updated(NGVIApproximation):
    """The posterior given new rows, too, from `NGVIApproximation.update`: all works with it that works with a fit.

    ``model`` is a copy of the model with all rows, those of the fit first; where these are not there, with the new
    rows alone. The verdict is that on the weights of its draws; `diagnose` looks at the draws themselves.
    """

    @functools.cached_property
    def log_predictive_density(self) -> LogMarginalLikelihood:
        """Log density of the new rows given those of the fit, in nats, with its standard error.

        Raises
        ------
        ValueError
            Where the weights can't be relied on.
        """
        return self._change.log_density("density")


def _parts(approx: NGVIApproximation) -> tuple[Any, ...]:
    return copyreg.__newobj__, (type(approx),), approx.__getstate__()  # type: ignore[attr-defined]


#: A model stays one where it is pickled beside its approximations.
cloudpickle.CloudPickler.dispatch_table |= dict.fromkeys([NGVIApproximation, Reweighted, Updated], _parts)


def _content_of_fit(approx: NGVIApproximation) -> dict[str, object]:
    return {
        "q": content_of_q(approx._state, approx.record),
        "record": approx.record,
        "hist": approx.hist,
        "gap_hist": approx.gap_hist,
        "generator": content_of_generator(approx._rng),
        "include_transformed": approx.include_transformed,
    }


# --- an approximation from a file, on the user's model ---


def load(
    source: str | os.PathLike[str] | xr.DataTree,
    model: pm.Model | Shards | None = None,
    *,
    backend: str | None = None,
    compile_kwargs: dict[str, Any] | None = None,
) -> NGVIApproximation:
    """Read an approximation that `NGVIApproximation.save` has written, and put it on a model.

    Nothing in a file is executed: it holds numbers, and tags of a few classes of this package.

    Parameters
    ----------
    source : str, PathLike or DataTree
        A netCDF file, or what `NGVIApproximation.to_datatree` returned.
    model : pymc.Model or Shards, optional
        The model that was fitted, made again, or the shards; default: the model of the context.
    backend, compile_kwargs : optional
        Of `LogDensity`; by default the backend that the fit had. With another one, a fit goes on with other roundings.

    Returns
    -------
    NGVIApproximation
        Draws for a seed, densities, record and history have the same bits as those of the one that was saved, on the
        same platform, and so has `refine`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    TypeError
        Without a model.
    ValueError
        If the file is damaged, was not written by this package, or by a newer version of it; if the free variables of
        the model are not those of the file, with a list of what differs.

    Warns
    -----
    UserWarning
        If the observed data, or ``pm.Data``, are not those that were fitted: q is then no approximation of the
        posterior of this model, and `refine`, `khat` and the like are refused.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 1.0, 2.0)
    ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     approx.save(Path(folder) / "approx.nc")
    ...     again = pymc_ngvi.load(Path(folder) / "approx.nc", model)
    >>> bool(again.elbo == approx.elbo)
    True
    """
    if model is None and pm.Model.get_context(error_if_none=False) is None:
        raise TypeError(
            "load puts an approximation on the model that was fitted, which a file does not hold: build it again, and "
            "call load(file, model), or load(file) within `with model:`."
        )
    given = model if isinstance(model, Shards) else modelcontext(model)
    name = "The tree" if isinstance(source, xr.DataTree) else repr(os.fspath(source))
    with contextlib.nullcontext(source) if isinstance(source, xr.DataTree) else reading(source) as tree:
        content, state = content_of_tree(tree, name)
    if backend is None:
        is_given = content["backend"] == "given mode" or "mode" in (compile_kwargs or {})
        backend = "auto" if is_given else content["backend"]
    kind = ShardedDensity if isinstance(given, Shards) else LogDensity
    density: ModelDensity = kind(given, backend=backend, compile_kwargs=compile_kwargs)
    model = density.model
    with damaged(name):
        found = differences(content["variables"], free_variables(model, density.layout))
    if found:
        raise ValueError(f"{name} does not fit the model: " + "; ".join(found) + ".")
    data = SavedData(model, content["data"])
    density.data = data
    if changed := data.changed():
        warn(
            f"{name} was fitted to other data: {', '.join(map(repr, changed))} differ, or are not in both. It "
            "approximates the posterior given those; it can't be refined or judged on this model."
        )
    of_gaussian = content.get("gaussian")
    approx = _approximation(name, content, density, None if of_gaussian else state)
    if of_gaussian:
        approx._gaussian = _approximation(name, of_gaussian, density, state)
    approx._next_step = content.get("exact_step")
    return approx


def _approximation(name: str, content: Content, density: ModelDensity, fit: Content | None) -> NGVIApproximation:
    """Return one approximation of a file, on the density of a model."""
    with damaged(name):
        q = q_of(content["q"], density)
        generator = restored_generator(content["generator"])
    approx = NGVIApproximation(density, q, random_seed=generator, include_transformed=content["include_transformed"])
    approx.record, approx.hist, approx.gap_hist = content["record"], content["hist"], content["gap_hist"]
    approx._data = approx.density.data
    if fit is not None:
        approx._session = fit["snapshot"]
    return approx
