"""The log density of a PyMC model on one flat unconstrained vector."""

import functools
import time

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pymc as pm

from pytensor.compile import Function

from pymc_ngvi.core.heap import keep_freed_memory
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array, Expectation, MeanHessian, RowRules, Spread
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.model.by_rows import TOO_DENSE, ByRows, PatternedHessian, RowsHessian
from pymc_ngvi.model.checks import check_model
from pymc_ngvi.model.data import DataSnapshot
from pymc_ngvi.model.flat import FlatGraphs, Functions
from pymc_ngvi.model.graphs import cost, graph
from pymc_ngvi.model.graphs.backends import BACKENDS, without_c
from pymc_ngvi.model.info import ModelInfo
from pymc_ngvi.model.initial import initial_point_function
from pymc_ngvi.model.layout import Layout
from pymc_ngvi.model.minibatch import Minibatches
from pymc_ngvi.model.predictors.expectations import Expectations
from pymc_ngvi.model.predictors.row_space import SeenFromRows
from pymc_ngvi.model.reuse import CannotReuse, ModelState
from pymc_ngvi.model.row_kinds import ModelRows, kinds_of_rows
from pymc_ngvi.model.rows import Rows
from pymc_ngvi.model.second_order import ModelHessian, SecondOrder
from pymc_ngvi.model.sparsity.dependence_sets import TooDenseError
from pymc_ngvi.model.sparsity.hessian import CACHED_ELEMENTS, slices

#: Evaluations that `backend="auto"` expects of a fit: gradients, and draws at which a dense Hessian is needed.
_EXPECTED_GRADIENTS, _EXPECTED_HESSIANS = 1_600, 1_200
#: Dimensions up to which it looks at the sparsity of the Hessian.
_MOST_COLOURED = 100_000
#: Elements of a temporary in one batch.
_BATCH_ELEMENTS = CACHED_ELEMENTS
#: Estimated seconds of evaluating gradients, beyond which a function for log p alone is compiled.
_LOGP_SECONDS = 0.5
#: Elements of the largest intermediate times the dimension, below which one thread does best.
_SMALL = 1_000_000
#: Times that a gradient takes of log p alone, at most.
_MOST_TIMES = 10
#: Of models that have none.
NO_ROWS = (
    "This model's log density is no sum over rows, each a function of a few linear predictors: leave "
    "estimator='quadrature' out."
)


class LogDensity:
    """Log density, gradient and Hessian-vector products of a model, batched over draws.

    Names, order, shapes and coords are frozen when the object is made. The space is unconstrained: every transformed
    variable counts with its Jacobian. All arithmetic is in float64, whatever ``pytensor.config.floatX``.

    Where the model reads ``pm.Minibatch`` data, everything is evaluated on the same batch until `next_batch`; the
    first one is made with a fixed seed. Likelihoods are scaled by their ``total_size``.

    Parameters
    ----------
    model : pymc.Model
        Continuous free variables only.
    backend : {"auto", "quick", "numba", "c", "jax"}, default "auto"
        "quick" evaluates by NumPy calls and compiles nothing. "auto" is "quick" unless the estimated work, from the
        graph, the sizes of the data and the sparsity of the Hessian, would take longer than compiling with Numba. The
        choice is in `backend`.
    compile_kwargs : dict, optional
        Options of ``pytensor.function``.

    Attributes
    ----------
    info : ModelInfo
        Model, layout, data and start, as they were when the object was made.
    graphs : FlatGraphs
    functions : Functions
    by_rows : ByRows
    n_gradients, n_hessians : int
        Draws at which the gradient, and the Hessian (along any number of directions), were evaluated so far.

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
    >>> from pymc_ngvi.model import LogDensity
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 1.0, 2.0, shape=3)
    >>> density = LogDensity(model)
    >>> logp, grad = density.logp_grad(density.initial_point()[None])
    >>> grad.shape
    (1, 3)
    """

    def __init__(
        self, model: pm.Model, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None
    ) -> None:
        _check_backend(backend, compile_kwargs)
        check_model(model)
        keep_freed_memory()
        began = time.perf_counter()
        self._requested, self._state = backend, ModelState.of(model)
        rows = Rows.of(model)
        data = DataSnapshot(model)
        self.n_gradients = self.n_hessians = 0
        self._find_point: Callable[[], dict[str, AnyArray]] | None = initial_point_function(model)
        point = self._find_point()
        with without_c(model):
            logp = model.logp()
        with without_c():
            layout = Layout.from_model(model, point)
            start = layout.flatten(point)
        self.info = ModelInfo(model, layout, data, start)
        given = bool(compile_kwargs and "mode" in compile_kwargs)
        self.graphs = FlatGraphs(model, layout, logp, may_be_large=backend in ("auto", "quick") and not given)
        self.functions = Functions(
            model, "given mode" if given else backend, compile_kwargs, is_large=self.graphs.is_large,
            choose=self._choose,
        )  # fmt: skip
        self.by_rows = ByRows(self.graphs, self.functions, start)
        self._observed, self._seconds_before = rows, 0.0
        self.functions.seconds = time.perf_counter() - began

    def _choose(self) -> str:
        """Return the backend."""
        if self._requested != "auto" or self.functions.is_given:
            return self.functions.backend
        if self.graphs.is_large:
            return "quick"  # compilers take longer still for thousands of nodes
        # Where compiling would not pay anyway, no gradient is made. Sparsity and rows only ever make for less work.
        if not self._may_prefer_numba(self.n_dim):
            return "quick"
        n_products = self.n_dim
        if self.by_rows.gives_hessians:
            n_products = self.n_products
        elif self.n_dim <= _MOST_COLOURED and self.cost.prefers_numba(_work(self.n_dim)):
            n_products = self.second.sparse.n_colours_by_graph()
        numba = self._may_prefer_numba(n_products) and self.cost.prefers_numba(_work(n_products))
        return "numba" if numba else "quick"

    def _may_prefer_numba(self, n_products: int) -> bool:
        """Tell whether compiling may pay, from the graph of log p alone."""
        return self.graphs.cost_of_logp.prefers_numba(_MOST_TIMES * _work(n_products))

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: compiled functions are made again when they are needed."""
        return {**self.__dict__, "_find_point": None}

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
            data; where the model reads minibatches; or if a change of the data makes another backend the faster one.
        """
        _check_backend(backend, compile_kwargs)
        if backend != self._requested or not _equal(compile_kwargs, self.functions.compile_kwargs):
            raise CannotReuse("other options of the compilation were given")
        if self.has_minibatch:
            raise CannotReuse("it reads minibatches, whose rows are part of its functions")
        now = ModelState.of(self.model)
        self._state.check(now)
        other = LogDensity.__new__(LogDensity)
        other.__dict__.update(self.__dict__)  # a copy would be without the functions, as a pickle is
        other._find_point = self._find_point or initial_point_function(self.model)
        point = other._find_point()
        layout = Layout.from_model(self.model, point)
        if layout.variables != self.layout.variables:
            raise CannotReuse("the shapes or dims of its variables have changed")
        start = layout.flatten(point)
        other.info = ModelInfo(self.model, layout, DataSnapshot(self.model), start)
        other.n_gradients = other.n_hessians = 0
        other._seconds_before = self.functions.seconds
        other.by_rows = ByRows(self.graphs, self.functions, start)
        if "second" in other.__dict__:
            other.second = self.second.again(start, other._grad)
        if self.functions.is_chosen and other._choose() != self.backend:
            raise CannotReuse("with these data, another backend is faster")
        return other

    @functools.cached_property
    def second(self) -> SecondOrder:
        """Second derivatives from the graph of log p."""
        graphs, functions = self.graphs, self.functions
        return SecondOrder(graphs, functions, self._observed, self.info.start, self.cost, self._grad)

    @property
    def cost(self) -> cost.Cost:
        """Estimated from the graph."""
        return self.graphs.cost

    @functools.cached_property
    def batch_size(self) -> int:
        """Draws evaluated in one call."""
        return int(np.clip(_BATCH_ELEMENTS // max(self.cost.widest, 1), 1, 64))

    @property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, from the graph and the sizes of the data alone."""
        return self.second.gradient_seconds

    @property
    def is_small(self) -> bool:
        """Whether a batch is too little work to share among threads."""
        return self.graphs.cost_of_logp.widest * self.n_dim < _SMALL

    # --- what is known of the model ---

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.info.n_dim

    @property
    def model(self) -> pm.Model:
        """The PyMC model."""
        return self.info.model

    @property
    def layout(self) -> Layout:
        """Where each variable is in the flat vector."""
        return self.info.layout

    @property
    def backend(self) -> str:
        """The backend in use; "given mode" where ``compile_kwargs`` has a ``mode``."""
        return self.functions.backend

    @property
    def backend_in_use(self) -> str:
        """That of the functions compiled so far: a fit by rows needs none for which a compiler would pay."""
        return self.backend if self.functions.is_chosen else "quick"

    @property
    def compile_seconds(self) -> float:
        """Spent so far on building and compiling graphs."""
        return self.functions.seconds - self._seconds_before

    @property
    def minibatches(self) -> Minibatches:
        """The rows in use."""
        return self.graphs.minibatches

    @property
    def has_minibatch(self) -> bool:
        """Whether the log density depends on ``pm.Minibatch`` data."""
        return bool(self.graphs.minibatches)

    def initial_point(self) -> Array:
        """Return the model's initial point, flat and unconstrained, (n_dim,)."""
        return self.info.start.copy()

    # --- evaluation ---

    def next_batch(self, rng: np.random.Generator) -> None:
        """Draw the rows of the next minibatch, as ``pm.Minibatch`` does: uniformly, with replacement.

        Parameters
        ----------
        rng : numpy.random.Generator
            The only source of randomness; untouched where the model reads no minibatch.
        """
        self.minibatches.next_batch(rng)

    def take_batch(self, seed: int, number: int) -> None:
        """Take one of the minibatches that make passes through the data, each row once in a pass, in random order.

        Parameters
        ----------
        seed : int
            Of the orders.
        number : int
            Of the batch, counted from 0 over all passes.
        """
        self.minibatches.take_batch(seed, number)

    @property
    def n_batches(self) -> int:
        """Minibatches in one pass through the data; 1 where the model reads none."""
        return self.minibatches.n_batches

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
        self.n_gradients += len(theta)
        results = [self._batched("logp_grad", theta[rows]) for rows in slices(len(theta), self.batch_size)]
        return np.concatenate([r[0] for r in results]), np.concatenate([r[1] for r in results])

    def logp(self, theta: Array) -> Array:
        """Evaluate the log density alone, (n_draws,), at points (n_draws, n_dim)."""
        # Gradients that nobody asked for cost less than compiling another function, but for much data.
        name = "logp" if len(theta) * self.cost.quick_seconds > _LOGP_SECONDS else "logp_grad"
        parts = [self._batched(name, theta[rows])[0] for rows in slices(len(theta), self.batch_size)]
        return np.concatenate(parts)

    def grad(self, theta: Array) -> Array:
        """Evaluate the gradient alone, (n_draws, n_dim)."""
        return self.logp_grad(theta)[1]

    def _grad(self, theta: Array) -> Array:
        """Evaluate the gradient without counting it."""
        return self._batched("logp_grad", theta)[1]

    def _batched(self, name: str, theta: Array) -> tuple[Array, ...]:
        n_draws = len(theta)
        if self.functions.fixed_size and n_draws < self.batch_size:
            theta = np.concatenate([theta, np.repeat(theta[-1:], self.batch_size - n_draws, axis=0)])
        function = self.functions.named(name, lambda: self._compile(name))
        with np.errstate(all="ignore"):
            outputs = function(np.ascontiguousarray(theta, dtype=np.float64))
        return tuple(np.asarray(out)[:n_draws] for out in outputs)

    def _compile(self, name: str) -> Function:
        graphs = self.graphs
        outputs = [graphs.logp] if name == "logp" else graphs.logp_grad
        draws, batched = graph.over_draws(outputs, graphs.theta)
        return self.functions.compile([draws], batched)

    # --- by rows ---

    @property
    def rows(self) -> Expectations | None:
        """Log p as a sum over rows, each a function of a few linear predictors; None where it has other parts."""
        return self.by_rows.found

    @property
    def seen_from_rows(self) -> SeenFromRows | None:
        """Log p in the space of its rows, where these are far fewer than coordinates with fixed normal priors."""
        return self.by_rows.seen

    def described_rows(self) -> ModelRows:
        """Return what the rows are, for people to read; this takes log p apart once more, variable by variable."""
        if self.graphs.is_large:  # thousands of nodes, each of which would be looked at
            return ModelRows(why_not="a recursion is written out in the graph")
        try:
            found = kinds_of_rows(self.model, self.graphs)
        except (ValueError, TooDenseError) as error:
            found = ModelRows(why_not=str(error) or TOO_DENSE)
        if self.functions.fixed_size or self.has_minibatch:
            why = "the data are minibatches" if self.has_minibatch else "backend='jax' has none"
            return replace(found, why_not=why)
        if self.rows is None and not found.why_not:
            return replace(found, why_not=self.by_rows.why_not)
        return found

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian, by quadrature; it counts as a gradient and a Hessian.

        See `RowsTarget` for the parameters. Rows are checked whenever rules are chosen.

        Raises
        ------
        ValueError
            Where log p is no sum over rows.
        PatternWidened
            Where the rows don't add up to log p: they are given up.
        """
        rows = self.rows
        if rows is None:
            raise ValueError(NO_ROWS)
        if rules is None:
            self.by_rows.check(q.location)
        self.count_expectation()
        return rows.under(q, self.pattern, rules, adapt=adapt, least=least)

    def check_rows(self, theta: Array) -> None:
        """Compare rows with log p at a point, (n_dim,).

        Raises
        ------
        PatternWidened
            Where the rows don't add up to log p: they are given up.
        """
        self.by_rows.check(theta)

    def rows_cover(self, theta: Array) -> bool:
        """Tell whether rows are all of log p at draws, (n_draws, n_dim); see `RowsTarget`."""
        return self.by_rows.cover(theta)

    def count_expectation(self) -> None:
        """Count an expectation: as a gradient and a Hessian."""
        self.n_gradients += 1
        self.n_hessians += 1

    # --- second derivatives ---

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return (self.by_rows.gives_pattern and self.by_rows.is_smooth) or self.hessian_error() is None

    def hessian_error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        return self.by_rows.error() if self.by_rows.gives_hessians else self.second.error()

    @property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        return self.by_rows.pattern if self.by_rows.gives_pattern else self.second.sparse.pattern

    @property
    def structural_pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0 as the graph tells, whether or not `pattern` has any use of it.

        None only where it would have too many to hold.
        """
        if self.by_rows.gives_pattern:
            return self.by_rows.structure
        return self.pattern or self.second.sparse.pattern_by_graph

    def widen(self, theta: Array) -> bool:
        """Add the entries that `pattern` lacks at the rows of ``theta``; tell whether there are any.

        Where these are too many to look at, the Hessian counts as dense from now on.
        """
        # That of rows is wide enough as long as they add up to log p, which is seen to when they are evaluated.
        return not self.by_rows.gives_pattern and self.second.sparse.widen(np.atleast_2d(theta))

    @property
    def n_products(self) -> int:
        """Products with a vector that take as long as one Hessian."""
        return self.by_rows.n_products if self.by_rows.gives_hessians else self.second.n_products

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of the Hessian over draws, (n_draws, n_dim): an object that evaluates what it is asked for.

        Examples
        --------
        >>> import pymc as pm
        >>> from pymc_ngvi.model import LogDensity
        >>> with pm.Model() as model:
        ...     x = pm.Normal("x", 1.0, 2.0, shape=3)
        >>> density = LogDensity(model)
        >>> density.mean_hessian(density.initial_point()[None]).diagonal()
        array([-0.25, -0.25, -0.25])
        """
        from_graph = functools.partial(self._hessian_from_graph, theta)
        if self.by_rows.gives_hessians:
            return RowsHessian(self, self.by_rows, theta, from_graph)
        whole = from_graph()
        return PatternedHessian(self.by_rows, whole, self.n_dim) if self.by_rows.gives_pattern else whole

    def _hessian_from_graph(self, theta: Array) -> ModelHessian:
        return ModelHessian(self, self.second, theta)

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
        self.n_hessians += len(theta)
        return self.second.at_draws(theta, directions)

    def hessian(self, theta: Array) -> Array:
        """Return the dense symmetric Hessian at each draw, (n_draws, n_dim, n_dim)."""
        products = self.hessian_products(theta, np.eye(self.n_dim))
        symmetric: Array = 0.5 * (products + products.swapaxes(-1, -2))
        return symmetric

    def mean_gauss_newton_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the Gauss-Newton diagonal, (n_dim,); see `SecondOrder`."""
        self.n_hessians += len(theta)
        return self.second.mean_gauss_newton_diagonal(theta)


def _work(n_directions: int) -> int:
    """Return the evaluations expected of a fit, in gradients."""
    # A product along one of many directions costs about .4 of a gradient: the rest is shared among them.
    return _EXPECTED_GRADIENTS + int(0.4 * n_directions * _EXPECTED_HESSIANS)


def _equal(one: Mapping[str, object] | None, other: Mapping[str, object] | None) -> bool:
    """Tell whether options are the same; where their values can't be compared, they must be the same objects."""
    one, other = one or {}, other or {}
    return one.keys() == other.keys() and all(one[k] is other[k] or _is_true(one[k] == other[k]) for k in one)


def _is_true(comparison: object) -> bool:
    return isinstance(comparison, bool) and comparison


def _check_backend(backend: str, compile_kwargs: Mapping[str, object] | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend should be one of {', '.join(map(repr, BACKENDS))}; got {backend!r}.")
    if backend != "auto" and compile_kwargs and "mode" in compile_kwargs:
        raise ValueError(
            f"backend={backend!r} and compile_kwargs['mode']={compile_kwargs['mode']!r} both choose how to compile; "
            "give one of them."
        )
