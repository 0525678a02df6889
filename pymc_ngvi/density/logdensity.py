"""The log density of a PyMC model on one flat unconstrained vector."""

import functools
import time
import warnings

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pymc as pm

from pytensor.graph.basic import Variable

from pymc_ngvi.core import prices
from pymc_ngvi.core.memory import keep_freed_memory
from pymc_ngvi.core.messages import Refused
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.sizes import STREAMED
from pymc_ngvi.core.sparsity import CACHED_ELEMENTS, slices
from pymc_ngvi.core.types import AnyArray, Array, CountedElsewhere, Expectation, Indices, MeanHessian, RowRules, Spread
from pymc_ngvi.density.by_rows import NO_ROWS, NOT_LOG_P, ByRows, ModelRows, described_rows
from pymc_ngvi.density.discrete.summing import DiscreteDraws, SummedOut, summed_out
from pymc_ngvi.density.expectations import Expectations, Pointwise, SeenFromRows
from pymc_ngvi.density.flat import FlatGraphs, Functions, jets_of
from pymc_ngvi.density.gauss_newton import GaussNewton, GaussNewtonHessian
from pymc_ngvi.density.hessians import GraphHessian, ModelHessian, RowsHessian
from pymc_ngvi.density.info import (
    CAN_NOT_DRAW,
    CannotReuse,
    DataSnapshot,
    Minibatches,
    ModelState,
    check_model,
    drawing,
    initial_point_function,
    same_options,
    terms_by_variable,
    unconstrained_variables,
)
from pymc_ngvi.density.over_draws import MOST_AT_ONCE
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import BACKENDS, COMPILED, WITH_ROWS, check_installed, without_c
from pymc_ngvi.graphs.graph import MissingDerivativeError
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.graphs.loops import MOST_DRAWS, draws_in_call
from pymc_ngvi.ops import cost
from pymc_ngvi.reading.predictors import Factor, factors_of
from pymc_ngvi.rows.engines import ENGINES


class ModelDensity(ABC):
    """The log density of a PyMC model on one flat unconstrained vector, batched over draws.

    `LogDensity` has all of the data here. Others are sums of a prior, which is a `LogDensity`, and of likelihoods of
    data that are elsewhere. What only some have is None, or empty, unless they say otherwise.

    Attributes
    ----------
    model : pymc.Model
        The one that is fitted, without discrete variables.
    layout : Layout
        Where each variable is in the flat vector.
    data : DataSnapshot
        The data that the model had when the object was made.
    start : ndarray, shape (n_dim,)
        The model's initial point then, unconstrained.
    functions : Functions
    by_rows : ByRows
        Rows that are here: of log p, or of the prior.
    minibatches : Minibatches
        Their rows in use.
    summed_out : SummedOut
        Discrete variables that were summed out of the user's model, if it has any.
    n_gradients, n_hessians : int
        Draws at which the gradient, and the Hessian (along any number of directions), were evaluated so far.
    """

    model: pm.Model
    layout: Layout
    data: DataSnapshot
    start: Array
    functions: Functions
    by_rows: ByRows
    minibatches: Minibatches
    n_gradients: int
    n_hessians: int
    summed_out: SummedOut
    #: Whether the data are in shards, of which there is no part here.
    is_sharded = False
    #: Whether the data come in batches, one of which is here.
    is_streamed = False
    #: Why log p is that of other draws, and only rows and data of its model are of use, in a clause.
    elsewhere = ""
    _seconds_before = 0.0  # spent for earlier fits

    # --- what is known of the model ---

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.layout.n_dim

    @property
    def given(self) -> pm.Model:
        """The user's model."""
        return self.summed_out.given

    @property
    def backend(self) -> str:
        """The backend in use; "given mode" where ``compile_kwargs`` has a ``mode``."""
        return self.functions.backend

    @property
    def compile_seconds(self) -> float:
        """Spent so far on building and compiling graphs here."""
        return self.functions.seconds - self._seconds_before

    @property
    @abstractmethod
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, from the graph and the sizes of the data alone."""

    @property
    def value_seconds(self) -> float:
        """Estimated time of log p at one of many points."""
        return prices.of_value(self.gradient_seconds)

    @property
    def is_small(self) -> bool:
        """Whether a batch of draws is too little work to share among threads."""
        return False

    @property
    def why_in_part(self) -> str:
        """Why log p is not to be had with all of the data, in a clause; empty where it is."""
        return self.elsewhere or ("the model reads pm.Minibatch data" if self.has_minibatch else "")

    @property
    def positive(self) -> list[Indices]:
        """Coordinates that are logarithms, an array for each positive variable: where a fit may have lost a scale."""
        found = [v for v in self.layout.variables if v.value_name.endswith("_log__")]
        return [np.arange(v.where.start, v.where.stop) for v in found]

    def initial_point(self) -> Array:
        """Return the model's initial point, flat and unconstrained, (n_dim,)."""
        return self.start.copy()

    def prior_draws(self, n_draws: int, seed: int) -> Array:
        """Draw from the prior, (n, n_dim), unconstrained: finite draws alone; none where it can't be drawn from.

        One function serves all fits of a model: it reads the data as they are when it is called.
        """
        names = [v.name for v in self.layout.variables]
        try:
            with without_c(self.model), warnings.catch_warnings(action="ignore"):  # of draws that are not finite
                draw = self.functions.once("prior", lambda: drawing(unconstrained_variables(self.model, names)))
                drawn = list(zip(*draw(n_draws, seed), strict=True))
        except CAN_NOT_DRAW:
            return np.empty((0, self.n_dim))
        flat = np.concatenate([np.asarray(d, dtype=np.float64).reshape(n_draws, -1) for d in drawn], axis=1)
        return flat[np.isfinite(flat).all(axis=1)]

    @property
    def deterministics(self) -> list[Variable]:
        """The model's Deterministics, those that can be evaluated here."""
        return list(self.model.deterministics)

    def terms(self, theta: Array) -> dict[str, float]:
        """Return the terms of log p by the names of their variables, at a point (n_dim,)."""
        return terms_by_variable(self.model, self.layout.unflatten(theta))

    def discrete_given(self, values: dict[str, AnyArray], random_seed: int | None) -> dict[str, AnyArray]:
        """Draw the discrete variables that were summed out, given draws of the others.

        Parameters
        ----------
        values : dict of str to ndarray, (n_draws, ...)
            Free variables on their constrained scale.
        random_seed : int or None

        Returns
        -------
        dict
            Draws of each, then the Deterministics that depend on them; empty where nothing was summed out.
        """
        if not self.summed_out.names:
            return {}
        return self.functions.once("discrete", lambda: DiscreteDraws(self.summed_out))(values, random_seed)

    # --- minibatches ---

    @property
    def has_minibatch(self) -> bool:
        """Whether the log density depends on ``pm.Minibatch`` data."""
        return bool(self.minibatches)

    def next_batch(self, rng: np.random.Generator) -> None:
        """Draw the rows of the next minibatch by ``rng``, as ``pm.Minibatch`` does: uniformly, with replacement."""
        self.minibatches.next_batch(rng)

    def take_batch(self, seed: int, number: int) -> None:
        """Take a minibatch, numbered from 0, of passes through the data, each of which has each row once, at random."""
        self.minibatches.take_batch(seed, number)

    @property
    def n_batches(self) -> int:
        """Minibatches in one pass through the data; 1 where the model reads none."""
        return self.minibatches.n_batches

    # --- values and gradients ---

    @abstractmethod
    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Evaluate the log density and its gradient.

        Parameters
        ----------
        theta : ndarray, shape (n_draws, n_dim)
            Unconstrained.

        Returns
        -------
        logp : ndarray, shape (n_draws,)
            Jacobian included; may be -inf or NaN.
        grad : ndarray, shape (n_draws, n_dim)
        """

    @abstractmethod
    def logp(self, theta: Array) -> Array:
        """Evaluate the log density alone, (n_draws,), at points (n_draws, n_dim)."""

    def grad(self, theta: Array) -> Array:
        """Evaluate the gradient alone, (n_draws, n_dim)."""
        return self.logp_grad(theta)[1]

    # --- by rows ---

    @property
    def rows(self) -> Expectations | None:
        """Log p as a sum over rows, each a function of a few linear predictors; None where it has other parts.

        None as well where they are not all in one place.
        """
        return None if self.is_sharded or self.is_streamed else self.by_rows.found

    @property
    def n_directions(self) -> int | None:
        """Directions in which the functions of rows vary, at most.

        None where log p is no sum over rows, each a function of a few linear predictors.
        """
        rows = self.by_rows.found
        return None if rows is None else rows.n_directions

    @abstractmethod
    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian, by quadrature; it counts as a gradient and a Hessian.

        See `RowsTarget` for the parameters. Rows are checked whenever rules are chosen.

        Raises
        ------
        ValueError
            Where log p is no sum over rows.
        RowsGivenUp
            Where the rows don't add up to log p: they are given up.
        """

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        rows = self.by_rows.found
        if rows is None or not rows.reading.leaves_out_conditions:
            return rows is not None
        theta = draw()
        return rows.agrees(theta, self.by_rows.logp(theta), everywhere=True)

    @property
    def seen_from_rows(self) -> SeenFromRows | None:
        """Log p in the space of its rows, where these are far fewer than coordinates with fixed normal priors."""
        return None if self.rows is None else self.by_rows.seen

    def described_rows(self) -> ModelRows | None:
        """Return what the rows are, for people to read; None where they are not read in one place."""
        return None

    # --- second derivatives ---

    @property
    def has_hessian(self) -> bool:
        """Whether Hessians can be evaluated: every operation of the model has a second derivative."""
        return False

    @abstractmethod
    def hessian_error(self) -> MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""

    @property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        return None

    @property
    def structural_pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0, whether or not `pattern` has any use of it.

        None where they are not known, or too many to hold.
        """
        return None

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        return None

    def widen(self, theta: Array) -> bool:
        """Add the entries that `pattern` lacks at the rows of ``theta``; tell whether there are any.

        Where these are too many to look at, the Hessian counts as dense from now on.
        """
        return False

    @property
    @abstractmethod
    def n_products(self) -> int:
        """Products with a vector that take as long as one Hessian."""

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of the Hessian over draws, (n_draws, n_dim): an object that evaluates what it is asked for.

        Raises
        ------
        Refused
            Where there are no Hessians at points.
        """
        raise Refused("Hessians at points are not to be had of these data.")

    def hessian_products(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessian at each draw with each direction.

        Parameters
        ----------
        theta : ndarray, shape (n_draws, n_dim)
        directions : ndarray, shape (n_directions, n_dim)

        Returns
        -------
        ndarray, shape (n_draws, n_directions, n_dim)
        """
        return np.stack([self.mean_hessian(draw[None]).products(directions) for draw in theta])

    def hessian(self, theta: Array) -> Array:
        """Return the dense symmetric Hessian at each draw, (n_draws, n_dim, n_dim)."""
        products = self.hessian_products(theta, np.eye(self.n_dim))
        return 0.5 * (products + products.swapaxes(-1, -2))


# --- the log density of a PyMC model on one flat unconstrained vector ---


def checked_backend(backend: str, compile_kwargs: Mapping[str, object] | None) -> str:
    """Return the backend in use, "given mode" where the user gave a mode.

    Raise ValueError for one that is not known, and for one beside a mode; ImportError for one that is not installed.
    """
    known = dict.fromkeys((*BACKENDS, *ENGINES))
    if backend not in known:
        raise ValueError(f"backend should be one of {', '.join(map(repr, known))}; got {backend!r}.")
    options = compile_kwargs or {}
    if backend != "auto" and "mode" in options:
        raise ValueError(
            f"backend={backend!r} and compile_kwargs['mode']={options['mode']!r} both choose how to compile; "
            "give one of them."
        )
    if backend == "jax":
        check_installed()
    if "mode" in options:
        return "given mode"
    return "quick" if backend == "auto" else backend


#: Elements of a temporary in one batch: more than the cache has, as most temporaries of a model are smaller.
_BATCH_ELEMENTS = 4 * CACHED_ELEMENTS
#: Estimated seconds of evaluating gradients, beyond which a function for log p alone is compiled.
_LOGP_SECONDS = 0.5
#: Relative difference of two values of log p that may be rounding, wherever points are.
_APART = 1e-6
#: Times that log p and its gradient take of log p alone: the median of the users' battery, by the graphs of both.
_OF_LOGP = 1.9
#: NumPy passes over the elements of a node of the gradient's graph, most of which have several inputs of as many
#: elements: the median of models without rows.
_PASSES = 2


#: Pairs of coordinates in sums, beyond which no pattern that has them all is made for reading.
_MOST_PAIRS = 10_000_000


class LogDensity(ModelDensity):
    """Log density, gradient and Hessian-vector products of a model, batched over draws.

    Names, order, shapes and coords are frozen when the object is made. The space is unconstrained: every transformed
    variable counts with its Jacobian. All arithmetic is in float64, whatever ``pytensor.config.floatX``.

    Where the model reads ``pm.Minibatch`` data, everything is evaluated on the same batch until `next_batch`; the
    first one is made with a fixed seed. Likelihoods are scaled by their ``total_size``.

    Parameters
    ----------
    model : pymc.Model
        Discrete free variables are summed out of it, where that is possible: `model` is the one without them.
    backend : {"auto", "quick", "numba", "c", "jax"}, default "auto"
        "quick", which is meant by "auto", evaluates by NumPy calls and compiles nothing.
    compile_kwargs : dict, optional
        Options of ``pytensor.function``.
    factors : callable, optional
        From the model to the factors that log p is the sum of. Default: all of them.
    checks_derivatives : bool, default True
        Whether to see at once that all derivatives can be had. Rows are read for it, which draws alone need not.

    Attributes
    ----------
    graphs : FlatGraphs
    factors_from : callable or None
        What ``factors`` was.

    Raises
    ------
    ValueError
        For models that can't be fitted, naming the variables; for an unknown backend; for ``backend`` beside
        ``compile_kwargs["mode"]``.
    MissingDerivativeError
        If an operation of the model has no gradient (a ValueError).

    Examples
    --------
    >>> import pymc as pm
    >>> from pymc_ngvi.density import LogDensity
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 1.0, 2.0, shape=3)
    >>> density = LogDensity(model)
    >>> logp, grad = density.logp_grad(density.initial_point()[None])
    >>> grad.shape
    (1, 3)
    """

    @task("Reading the model")
    def __init__(
        self,
        model: pm.Model,
        backend: str = "auto",
        compile_kwargs: Mapping[str, object] | None = None,
        *,
        factors: Callable[[pm.Model], Sequence[Factor]] | None = None,
        checks_derivatives: bool = True,
    ) -> None:
        backend = checked_backend(backend, compile_kwargs)
        check_model(model)
        self._state = ModelState.of(model)
        self.factors_from = factors
        self.summed_out = summed_out(model, is_whole=factors is None)
        model = self.summed_out.model
        keep_freed_memory()
        began = time.perf_counter()
        self._seconds_before = 0.0
        self.n_gradients = self.n_hessians = 0
        find_point, made = initial_point_function(model), (factors or factors_of)(model)
        with without_c():
            self._take(model, find_point())
        self.graphs = FlatGraphs(model, self.layout, made, may_be_large=backend not in COMPILED)
        self.minibatches = self.graphs.minibatches
        self.functions = Functions(model, backend, compile_kwargs, is_large=self.graphs.is_large)
        self.functions.made["initial point"] = find_point
        self.by_rows, self._n_by_rows = ByRows(self.graphs, self.functions, self.start), 0
        if checks_derivatives and self.graphs.forward is None and self._pointwise is None:
            self.graphs.raw_grad  # noqa: B018 (made once; raises MissingDerivativeError)
        self.functions.seconds = time.perf_counter() - began

    def _take(self, model: pm.Model, point: dict[str, AnyArray]) -> None:
        """Note what a model is now, with its initial point by unconstrained values."""
        self.model, self.layout, self.data = model, Layout.from_model(model, point), DataSnapshot(model)
        self.start = self.layout.flatten(point)

    def again(self, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None) -> "LogDensity":
        """Return the log density for another fit, with the data as they are now, building nothing anew.

        It gives what a new object would give, and shares what is compiled with this one. Evaluations and seconds are
        counted from 0; the counters, pattern and coords of this object stay as they are.

        Parameters
        ----------
        backend, compile_kwargs
            As those of the class.

        Raises
        ------
        CannotReuse
            Where a new object is needed: for another backend; after a change of the model, or of the shapes of the
            data; where the model reads minibatches.
        """
        other_backend = self.backend != checked_backend(backend, compile_kwargs)
        if other_backend or not same_options(compile_kwargs, self.functions.compile_kwargs):
            raise CannotReuse("other options of the compilation were given")
        if self.has_minibatch:
            raise CannotReuse("it reads minibatches, whose rows are part of its functions")
        self._state.check(ModelState.of(self.given))
        other = LogDensity.__new__(LogDensity)
        other.__dict__.update(self.__dict__)  # a copy would be without the functions, as a pickle is
        find_point = self.functions.once("initial point", lambda: initial_point_function(self.model))
        other._take(self.model, find_point())
        if other.layout.variables != self.layout.variables:
            raise CannotReuse("the shapes or dims of its variables have changed")
        other.n_gradients = other.n_hessians = 0
        other._seconds_before = self.functions.seconds
        other.by_rows = ByRows(self.graphs, self.functions, other.start)
        other._n_by_rows = 0
        other.__dict__.pop("gradient_seconds", None)
        return other

    # --- evaluation: by rows where these are all of log p, by compiled functions elsewhere ---

    @property
    def _pointwise(self) -> Pointwise | None:
        """Log p by rows; None where a graph serves."""
        is_compiled = self.functions.backend in WITH_ROWS
        return None if is_compiled or self.graphs.forward is not None else self.by_rows.pointwise

    @functools.cached_property
    def batch_size(self) -> int:
        """Points evaluated in one call."""
        widest = max(self.graphs.cost.widest, 1)
        in_cache = int(np.clip(_BATCH_ELEMENTS // widest, 1, MOST_AT_ONCE))
        return max(in_cache, draws_in_call(widest)) if self.graphs.shares_calls else in_cache

    @property
    def is_small(self) -> bool:
        """Whether a batch is too little work to share among threads."""
        return self.graphs.cost_of_logp.widest * self.graphs.layout.n_dim < STREAMED

    @functools.cached_property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, from the graph and the sizes of the data alone."""
        return self.functions.once(("gradient seconds", self._pointwise is not None), self._estimated_seconds)

    @property
    def value_seconds(self) -> float:
        """Estimated time of log p at one of many points: each derivative that is carried along takes half as long."""
        if self.graphs.forward is None:
            return super().value_seconds
        return 2.0 * self.gradient_seconds / (2.0 + self.n_dim)

    def _estimated_seconds(self) -> float:
        graphs = self.graphs
        if graphs.forward is not None:
            return graphs.cost.quick_seconds
        compiled = self.functions.backend not in ("quick", "c")
        if self._pointwise is not None:
            return _OF_LOGP * cost.evaluation_seconds([graphs.logp], along=graphs.theta, compiled=compiled)
        at_once = min(self.batch_size, MOST_DRAWS)
        return cost.evaluation_seconds(
            graphs.logp_grad, batch=at_once, passes=_PASSES, along=graphs.theta, compiled=compiled
        )

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Evaluate the log density, (n_draws,), and its gradient, (n_draws, n_dim), at points (n_draws, n_dim)."""
        self.n_gradients += len(theta)
        prices.count(len(theta) * self.gradient_seconds)
        rows = self._pointwise
        if rows is not None:
            logp, grad = rows.logp_grad(theta)
            if self._add_up(theta, logp):
                return logp, grad
        results = [self._batch("logp_grad", theta[rows]) for rows in slices(len(theta), self.batch_size)]
        return np.concatenate([r[0] for r in results]), np.concatenate([r[1] for r in results])

    def logp(self, theta: Array) -> Array:
        """Evaluate the log density alone, (n_draws,), at points (n_draws, n_dim)."""
        prices.count(len(theta) * self.value_seconds)
        rows = self._pointwise
        if rows is not None:
            logp = rows.logp(theta)
            if self._add_up(theta, logp):
                return logp
        # Gradients that nobody asked for cost less than compiling another function, but for much data, and for
        # equations, whose derivatives are equations themselves.
        takes_long = self.graphs.has_equations or len(theta) * self.graphs.cost.quick_seconds > _LOGP_SECONDS
        name = "logp" if takes_long or jets_of(self.graphs, self.functions) is not None else "logp_grad"
        parts = [self._batch(name, theta[rows])[0] for rows in slices(len(theta), self.batch_size)]
        return np.concatenate(parts)

    def _add_up(self, theta: Array, logp: Array) -> bool:
        """Tell whether rows add up to log p: at the best and the middle one of points, now and then.

        It is seen to at the first call, the second, fourth, eighth, ...; where they don't, they are given up.
        """
        self._n_by_rows += 1
        finite = np.flatnonzero(np.isfinite(logp))
        if self._n_by_rows & (self._n_by_rows - 1) or not len(finite):
            return True
        ranked = finite[np.argsort(logp[finite])]
        some = ranked[[-1, len(ranked) // 2]]
        is_right = bool(
            np.all(np.abs(self.by_rows.logp(theta[some]) - logp[some]) <= _APART * (1.0 + np.abs(logp[some])))
        )
        if not is_right:
            self.by_rows.give_up(NOT_LOG_P)
        return is_right

    def _batch(self, name: str, theta: Array) -> tuple[Array, ...]:
        function = self.functions.once(name, lambda: self.compiled(name))
        with np.errstate(all="ignore"):
            outputs = function(self.functions.filled_up(np.ascontiguousarray(theta, dtype=np.float64)))
        return tuple(np.asarray(out)[: len(theta)] for out in outputs)

    def compiled(self, name: str) -> Callable[[Array], Sequence[Array]]:
        """Compile a function of points, (n_points, n_dim): "logp" or "logp_grad"."""
        graphs = self.graphs
        if (jets := jets_of(graphs, self.functions)) is not None:
            return functools.partial(jets, order=0 if name == "logp" else 1)
        outputs = [graphs.logp] if name == "logp" else graphs.logp_grad
        draws, batched = graph.over_draws(outputs, graphs.theta)
        return self.functions.compile([draws], batched)

    # --- by rows ---

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian; see `ModelDensity`."""
        rows = self.rows
        if rows is None:
            raise ValueError(NO_ROWS)
        if rules is None:
            self.by_rows.check(q.location)
        self.count_expectation()
        return rows.under(q, self, rules, adapt=adapt, least=least)

    def directions(self, rows: Indices) -> Array:
        """Return the slopes of the only predictor of each of some rows; see `RowsTarget`."""
        assert self.rows is not None
        return self.rows.directions(rows)

    def count_expectation(self) -> None:
        """Count an expectation: as a gradient and a Hessian."""
        self.n_gradients += 1
        self.n_hessians += 1

    def described_rows(self) -> ModelRows | None:
        """Return what the rows are, variable by variable, for people to read."""
        return described_rows(self.graphs, self.by_rows)

    # --- second derivatives: by rows where these give them, from the graph elsewhere ---

    @functools.cached_property
    def second(self) -> GraphHessian:
        """Second derivatives from the graph of log p; fits that reuse a model share them."""
        return GraphHessian(self.graphs.logp, self.graphs, self.functions, self.start)

    @functools.cached_property
    def by_observation(self) -> GaussNewton:
        """Gradients of the log densities of single observations; fits that reuse a model share them."""
        return GaussNewton(self.graphs, self.functions, self.start)

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return (self.by_rows.gives_pattern and self.by_rows.is_smooth) or self.hessian_error() is None

    def hessian_error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        return None if self.by_rows.gives_hessians else self.second.error()

    @property
    def n_products(self) -> int:
        """Products with a vector that take as long as one Hessian."""
        return self.by_rows.n_products if self.by_rows.gives_hessians else self.second.n_products

    @property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        return self.by_rows.pattern if self.by_rows.gives_pattern else self.second.pattern

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        return self.by_rows.summed

    @property
    def structural_pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0 as the graph tells, whether or not `pattern` has any use of it.

        None only where they are too many to hold or to read.
        """
        if self.by_rows.gives_pattern:
            many = self.summed is not None and self.summed.n_pairs > _MOST_PAIRS
            return None if many else self.by_rows.structure
        return self.pattern or self.second.pattern_by_graph

    def widen(self, theta: Array) -> bool:
        """Add the entries that `pattern` lacks at the rows of ``theta``; tell whether there are any."""
        # That of rows is wide enough as long as they add up to log p, which is seen to when they are evaluated.
        return not self.by_rows.gives_pattern and self.second.widen(np.atleast_2d(theta))

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of the Hessian over draws, (n_draws, n_dim): an object that evaluates what it is asked for.

        Examples
        --------
        >>> import pymc as pm
        >>> from pymc_ngvi.density import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.Normal("x", 1.0, 2.0, shape=3)
        >>> density = LogDensity(model)
        >>> density.mean_hessian(density.initial_point()[None]).diagonal()
        array([-0.25, -0.25, -0.25])
        """
        whole = ModelHessian(self, self.second, [theta])
        return RowsHessian(self, self.by_rows, theta, whole) if self.by_rows.gives_pattern else whole

    def mean_hessians(self, draws: list[Array]) -> list[MeanHessian]:
        """Return the mean of the Hessian over each of several sets of draws; loops run once for all of them."""
        if self.by_rows.gives_pattern or len(draws) < 2 or not self.graphs.shares_calls:
            return [self.mean_hessian(theta) for theta in draws]
        found: dict[bytes, list[Array]] = {}
        return [ModelHessian(self, self.second, draws, k, found) for k in range(len(draws))]

    def hessian_products(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessian at each draw with each direction; see `ModelDensity`."""
        self.n_hessians += len(theta)
        return self.second.at_draws(theta, directions)

    def gauss_newton(self, theta: Array) -> MeanHessian:
        """Return the mean over draws of the Gauss-Newton matrix, in the place of the Hessian.

        At each draw it is the Hessian of the rest of log p (priors with their Jacobians, and variables imputed for
        missing data) less the sum over observations i of s_i g_i g_i^T. g_i is the gradient of the log density of one
        element of an observed variable, and s_i its factor ``total_size`` / batch size (1 without). It estimates
        E[hess log p]: the expectations agree where the data come from the model.

        Parameters
        ----------
        theta : ndarray, shape (n_draws, n_dim)

        Returns
        -------
        MeanHessian
            To be evaluated, which raises ValueError for models with Potentials, without observed variables, or with
            multivariate ones.
        """
        return GaussNewtonHessian(lambda: self.by_observation, theta, self)


# --- the log density of a model whose data are not in one place: a prior here, and likelihoods of parts of them ---


class Sum(CountedElsewhere, ModelDensity):
    """The sum of a prior and of likelihoods, which say what they are at points."""

    def __init__(self, prior: LogDensity) -> None:
        self.prior = self.counter = prior
        self.model, self.layout, self.data, self.start = prior.model, prior.layout, prior.data, prior.start
        self.functions, self.by_rows, self.minibatches = prior.functions, prior.by_rows, prior.minibatches
        self.summed_out = prior.summed_out

    # --- of the likelihoods ---

    @property
    @abstractmethod
    def likelihood_seconds(self) -> float:
        """Estimated time of the likelihoods and their gradients at one point."""

    @abstractmethod
    def each(self, function: Callable[[LogDensity, Array], Any], theta: Array) -> Iterable[Any]:
        """Evaluate a function of each likelihood at points, (n_draws, n_dim)."""

    # --- sums ---

    def logp(self, theta: Array) -> Array:
        """Evaluate the log density alone, (n_draws,), at points (n_draws, n_dim)."""
        prices.count(len(theta) * prices.of_value(self.likelihood_seconds))
        return sum(self.each(LogDensity.logp, theta), self.prior.logp(theta))

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Evaluate the log density and its gradient; see `ModelDensity`."""
        prices.count(len(theta) * self.likelihood_seconds)
        logp, grad = self.prior.logp_grad(theta)
        for of_part, grad_of_part in self.each(LogDensity.logp_grad, theta):
            logp, grad = logp + of_part, grad + grad_of_part
        return logp, grad

    @property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point."""
        return self.prior.gradient_seconds + self.likelihood_seconds

    @property
    def n_products(self) -> int:
        """Products with a vector that take as long as one Hessian."""
        return self.prior.n_products

    def hessian_error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        return self.prior.hessian_error()
