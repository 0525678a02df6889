"""The log density of a PyMC model on one flat unconstrained vector."""

import functools
import time

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pymc.pytensorf import compile as pymc_compile

from pymc_ngvi.core.types import Array
from pymc_ngvi.model.checks import check_model
from pymc_ngvi.model.data import DataSnapshot
from pymc_ngvi.model.graphs import cost, graph, large
from pymc_ngvi.model.graphs.backends import BACKENDS, compile_flags, compile_options, without_c
from pymc_ngvi.model.initial import initial_point_function
from pymc_ngvi.model.layout import Layout
from pymc_ngvi.model.minibatch import Minibatches
from pymc_ngvi.model.prior import prior_draws
from pymc_ngvi.model.reuse import CannotReuse, ModelState
from pymc_ngvi.model.rows import Rows
from pymc_ngvi.model.second_order import SecondOrder
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


class LogDensity(SecondOrder):
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
    layout : Layout
    n_dim : int
    has_minibatch : bool
        Whether the log density depends on ``pm.Minibatch`` data.
    minibatches : Minibatches
        The rows in use.
    data : DataSnapshot
        The data that the model had when the object was made.
    backend : str
        The one in use; "given mode" where ``compile_kwargs`` has a ``mode``.
    compile_seconds : float
        Spent so far on building and compiling graphs.
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

    def __init__(self, model: pm.Model, backend: str = "auto", compile_kwargs: dict[str, Any] | None = None) -> None:
        _check_backend(backend, compile_kwargs)
        check_model(model)
        start = time.perf_counter()
        self.model = model
        self._requested, self._state = backend, ModelState.of(model)
        self._rows = Rows.of(model)
        self.data = DataSnapshot(model)
        self.n_gradients = self.n_hessians = 0
        self._find_point: Callable[[], dict[str, Any]] | None = initial_point_function(model)
        point = self._find_point()
        with without_c(model):
            logp = model.logp()
        with without_c():  # constants are computed by running their graphs
            self.layout = Layout.from_model(model, point)
            self.n_dim = self.layout.n_dim
            self._initial_point = self.layout.flatten(point)
            self._theta = graph.flat_input(self.layout)
            self.minibatches = Minibatches([logp])
            self.has_minibatch = bool(self.minibatches)
            [logp] = self._on_flat_vector([logp])
            python = backend in ("auto", "quick") and not (compile_kwargs and "mode" in compile_kwargs)
            self._is_large = python and large.is_large(logp)
            [logp] = self._simplify([logp])
            grad = graph.gradient(logp, self._theta)
            self._logp, self._grad = self._simplify([logp, grad])
        self._cost = cost.estimate([self._logp, self._grad])
        self._compile_kwargs = compile_kwargs
        self._functions: dict[str, Callable[..., Any]] = {}
        self._pad = backend == "jax"  # a new shape would be compiled anew
        self.backend = self._choose(backend)
        self.compile_seconds = time.perf_counter() - start

    def _on_flat_vector(self, outputs: list[Any]) -> list[Any]:
        outputs = self.minibatches.hold(outputs)
        return graph.on_flat_vector(self.model, self.layout, outputs, self._theta)

    def _simplify(self, outputs: list[Any]) -> list[Any]:
        return graph.simplify(outputs, check_bounds=self.model.check_bounds, is_large=self._is_large)

    def _choose(self, backend: str) -> str:
        if self._compile_kwargs and "mode" in self._compile_kwargs:
            return "given mode"
        if backend != "auto":
            return backend
        if self._is_large:
            return "quick"  # compilers take longer still for thousands of nodes
        # Sparsity only ever makes for less work: where compiling would not pay anyway, it is not looked for.
        numba = self._cost.prefers_numba(_work(self.n_dim))
        if numba and self.n_dim <= _MOST_COLOURED:
            numba = self._cost.prefers_numba(_work(self._sparse.n_colours_by_graph()))
        return "numba" if numba else "quick"

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: compiled functions are made again when they are needed."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_predictors"}
        return {**kept, "_functions": {}, "_find_point": None}

    def again(self, backend: str = "auto", compile_kwargs: dict[str, Any] | None = None) -> "LogDensity":
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
        if backend != self._requested or not _equal(compile_kwargs, self._compile_kwargs):
            raise CannotReuse("other options of the compilation were given")
        if self.has_minibatch:
            raise CannotReuse("it reads minibatches, whose rows are part of its functions")
        now = ModelState.of(self.model)
        self._state.check(now)
        other = LogDensity.__new__(LogDensity)
        other.__dict__.update(self.__dict__)  # a copy would be without the functions, as a pickle is
        other._find_point = self._find_point or initial_point_function(self.model)
        point = other._find_point()
        other.layout = Layout.from_model(self.model, point)
        if other.layout.variables != self.layout.variables:
            raise CannotReuse("the shapes or dims of its variables have changed")
        other._initial_point = other.layout.flatten(point)
        other.n_gradients = other.n_hessians = 0
        other.compile_seconds = 0.0
        other.data = DataSnapshot(self.model)
        if "_sparse" in self.__dict__:
            other._sparse = self._sparse.again(other._initial_point, other._products_of_draws, other.hessian_error)
        if other._choose(backend) != self.backend:
            raise CannotReuse("with these data, another backend is faster")
        return other

    @functools.cached_property
    def batch_size(self) -> int:
        """Draws evaluated in one call."""
        return int(np.clip(_BATCH_ELEMENTS // max(self._cost.widest, 1), 1, 64))

    @functools.cached_property
    def _n_directions(self) -> int:
        """Directions in one call."""
        return int(np.clip(2 * _BATCH_ELEMENTS // max(self._cost.widest, 1), 16, 4096))

    @functools.cached_property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, from the graph and the sizes of the data alone."""
        compiled = self.backend not in ("quick", "c")
        return cost.evaluation_seconds([self._logp, self._grad], self._cost, compiled)

    @property
    def is_small(self) -> bool:
        """Whether a batch is too little work to share among threads."""
        return self._cost.widest * self.n_dim < _SMALL

    def initial_point(self) -> Array:
        """Return the model's initial point, flat and unconstrained, (n_dim,)."""
        return self._initial_point.copy()

    @property
    def positive(self) -> list[NDArray[np.intp]]:
        """Coordinates that are logarithms, an array for each positive variable."""
        found = [v for v in self.layout.variables if v.value_name.endswith("_log__")]
        return [np.arange(v.where.start, v.where.stop) for v in found]

    def prior_draws(self, n_draws: int, seed: int) -> Array:
        """Draw from the prior, (n, n_dim), unconstrained; fewer draws, or none, where it can't be drawn from."""
        return prior_draws(self.model, self.layout, n_draws, seed)

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
        name = "logp" if len(theta) * self._cost.quick_seconds > _LOGP_SECONDS else "logp_grad"
        parts = [self._batched(name, theta[rows])[0] for rows in slices(len(theta), self.batch_size)]
        return np.concatenate(parts)

    def grad(self, theta: Array) -> Array:
        """Evaluate the gradient alone, (n_draws, n_dim)."""
        return self.logp_grad(theta)[1]

    def _batched(self, name: str, theta: Array) -> tuple[Array, ...]:
        n_draws = len(theta)
        if self._pad and n_draws < self.batch_size:
            theta = np.concatenate([theta, np.repeat(theta[-1:], self.batch_size - n_draws, axis=0)])
        function = self._function(name)
        with np.errstate(all="ignore"):
            outputs = function(np.ascontiguousarray(theta, dtype=np.float64))
        return tuple(np.asarray(out)[:n_draws] for out in outputs)

    def _function(self, name: str) -> Callable[..., Any]:
        if name not in self._functions:
            start = time.perf_counter()
            self._functions[name] = {
                "logp_grad": lambda: self._compile_over_draws([self._logp, self._grad]),
                "logp": lambda: self._compile_over_draws([self._logp]),
                "products": self._compile_products,
                "coloured": self._compile_coloured,
                "gauss_newton": self._compile_gauss_newton,
            }[name]()
            self.compile_seconds += time.perf_counter() - start
        return self._functions[name]

    def _compile_over_draws(self, outputs: list[Any]) -> Callable[..., Any]:
        draws, batched = graph.over_draws(outputs, self._theta)
        return self._compile([draws], batched)

    def _compile_products(self) -> Callable[..., Any]:
        direction, product = self._product
        with without_c():
            directions, batched = graph.over_directions(product, direction)
        return self._compile([self._theta, directions], batched)

    def _compile_coloured(self) -> Callable[..., Any]:
        direction, product = self._product
        with without_c():
            draws, directions, batched = graph.over_draws_and_directions(product, self._theta, direction)
        return self._compile([draws, directions], batched)

    def _compile_gauss_newton(self) -> Callable[..., Any]:
        direction = self._theta.type("direction")
        with without_c():
            rows, scales, rest = self._rows.graphs()
            *rows, rest = self._simplify(self._on_flat_vector([*rows, *scales, rest]))
            rows, scales = rows[: len(scales)], rows[len(scales) :]
            [along] = self._simplify([graph.gauss_newton(rows, scales, rest, self._theta, direction)])
            directions, batched = graph.over_directions(along, direction)
        return self._compile([self._theta, directions], batched)

    def _compile(self, inputs: list[Any], outputs: Any) -> Callable[..., Any]:
        # PyMC's own compile advances random generators in the graph; the model's context carries `check_bounds`.
        with self.model, compile_flags(self.backend):
            function: Callable[..., Any] = pymc_compile(
                inputs,
                outputs,
                on_unused_input="ignore",
                trust_input=True,
                **compile_options(self.backend, self._compile_kwargs, is_large=self._is_large),
            )
        return function


def _work(n_directions: int) -> int:
    """Return the evaluations expected of a fit, in gradients."""
    # A product along one of many directions costs about .4 of a gradient: the rest is shared among them.
    return _EXPECTED_GRADIENTS + int(0.4 * n_directions * _EXPECTED_HESSIANS)


def _equal(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Tell whether options are the same; where their values can't be compared, they must be the same objects."""
    one, other = one or {}, other or {}
    return one.keys() == other.keys() and all(one[k] is other[k] or _is_true(one[k] == other[k]) for k in one)


def _is_true(comparison: Any) -> bool:
    return isinstance(comparison, bool) and comparison


def _check_backend(backend: str, compile_kwargs: dict[str, Any] | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend should be one of {', '.join(map(repr, BACKENDS))}; got {backend!r}.")
    if backend != "auto" and compile_kwargs and "mode" in compile_kwargs:
        raise ValueError(
            f"backend={backend!r} and compile_kwargs['mode']={compile_kwargs['mode']!r} both choose how to compile; "
            "give one of them."
        )
