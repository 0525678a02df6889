"""The log density of a PyMC model on one flat unconstrained vector."""

import time

from collections.abc import Callable, Mapping

import numpy as np
import pymc as pm

from pytensor.graph.basic import Variable

from pymc_ngvi.core.heap import keep_freed_memory
from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.backend_choice import check_backend, fastest_backend
from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.checks import check_model, of_batches
from pymc_ngvi.density.evaluations import Evaluations
from pymc_ngvi.density.flat import FlatGraphs, Functions
from pymc_ngvi.density.gauss_newton.matrix import GaussNewtonHessian
from pymc_ngvi.density.hessians import Hessians
from pymc_ngvi.density.info import ModelInfo, terms_of
from pymc_ngvi.density.initial import initial_point_function
from pymc_ngvi.density.minibatch import Minibatches
from pymc_ngvi.density.reuse import CannotReuse, ModelState, same_options
from pymc_ngvi.density.row_kinds import ModelRows, described_rows
from pymc_ngvi.density.row_methods import ByRowsMethods
from pymc_ngvi.density.rows import Rows
from pymc_ngvi.density.second_order import SecondOrder
from pymc_ngvi.graphs import graph
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.ops import cost


class LogDensity(ByRowsMethods):
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
    >>> from pymc_ngvi.density import LogDensity
    >>> with pm.Model() as model:
    ...     x = pm.Normal("x", 1.0, 2.0, shape=3)
    >>> density = LogDensity(model)
    >>> logp, grad = density.logp_grad(density.initial_point()[None])
    >>> grad.shape
    (1, 3)
    """

    #: Whether the data are in shards, of which there is no part here.
    is_sharded = False
    #: Whether the data come in batches, one of which is here.
    is_streamed = False
    #: Whether Hessians are to be expected, for the choice of a backend: compiling may pay for these alone.
    needs_hessians = True

    def __init__(
        self, model: pm.Model, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None
    ) -> None:
        check_backend(backend, compile_kwargs)
        check_model(model)
        keep_freed_memory()
        began = time.perf_counter()
        self._requested, self._state, self._seconds_before = backend, ModelState.of(model), 0.0
        observed = Rows.of(model)
        self.n_gradients = self.n_hessians = 0
        self._find_point: Callable[[], dict[str, AnyArray]] | None = initial_point_function(model)
        point = self._find_point()
        with without_c(model):
            logp = self._graph_of(model)
        with without_c():
            self.info = ModelInfo.of(model, point)
        given = bool(compile_kwargs and "mode" in compile_kwargs)
        self.graphs = FlatGraphs(model, self.layout, logp, may_be_large=backend in ("auto", "quick") and not given)
        self.functions = Functions(
            model, "given mode" if given else backend, compile_kwargs, is_large=self.graphs.is_large,
            choose=self._choose,
        )  # fmt: skip
        start = self.info.start
        self.by_rows = ByRows(self.graphs, self.functions, start)
        self._evaluations = Evaluations(self.graphs, self.functions, self.by_rows)
        self._evaluations.see_to_gradient()
        self._hessians = Hessians(self.graphs, self.functions, observed, self.by_rows, self._evaluations, start)
        self.functions.seconds = time.perf_counter() - began

    def _graph_of(self, model: pm.Model) -> Variable:
        """Return log p as a function of the value variables."""
        return model.logp()

    def _choose(self) -> str:
        """Return the backend."""
        if self._requested != "auto" or self.functions.is_given:
            return self.functions.backend
        needs_hessians = self.needs_hessians
        return fastest_backend(self.graphs, self.by_rows, self._hessians, self.n_dim, needs_hessians=needs_hessians)

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
        check_backend(backend, compile_kwargs)
        if backend != self._requested or not same_options(compile_kwargs, self.functions.compile_kwargs):
            raise CannotReuse("other options of the compilation were given")
        if self.has_minibatch:
            raise CannotReuse("it reads minibatches, whose rows are part of its functions")
        self._state.check(ModelState.of(self.model))
        other = LogDensity.__new__(LogDensity)
        other.__dict__.update(self.__dict__)  # a copy would be without the functions, as a pickle is
        other._find_point = self._find_point or initial_point_function(self.model)
        other.info = ModelInfo.of(self.model, other._find_point(), self.info.prior)
        if other.layout.variables != self.layout.variables:
            raise CannotReuse("the shapes or dims of its variables have changed")
        other.n_gradients = other.n_hessians = 0
        other._seconds_before = self.functions.seconds
        other.by_rows = ByRows(self.graphs, self.functions, other.info.start)
        other._evaluations = Evaluations(self.graphs, self.functions, other.by_rows)
        other._hessians = self._hessians.again(other.by_rows, other._evaluations, other.info.start)
        if self.functions.is_chosen and other._choose() != self.backend:
            raise CannotReuse("with these data, another backend is faster")
        return other

    @property
    def second(self) -> SecondOrder:
        """Second derivatives from the graph of log p."""
        return self._hessians.second

    @property
    def cost(self) -> cost.Cost:
        """Estimated from the graph."""
        return self.graphs.cost

    @property
    def batch_size(self) -> int:
        """Draws evaluated in one call."""
        return self._evaluations.batch_size

    @property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, from the graph and the sizes of the data alone."""
        return self._evaluations.gradient_seconds

    @property
    def is_small(self) -> bool:
        """Whether a batch is too little work to share among threads."""
        return self._evaluations.is_small

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

    @property
    def why_in_part(self) -> str:
        """Why log p is not to be had with all of the data, in a clause; empty where it is."""
        return "the model reads pm.Minibatch data" if self.has_minibatch else ""

    def initial_point(self) -> Array:
        """Return the model's initial point, flat and unconstrained, (n_dim,)."""
        return self.info.start.copy()

    @property
    def deterministics(self) -> list[Variable]:
        """The model's Deterministics, those that can be evaluated here."""
        return list(self.model.deterministics)

    @property
    def of_batches(self) -> frozenset[str]:
        """The names of the Deterministics that have the rows of one minibatch."""
        return of_batches(self.model)

    def terms(self, theta: Array) -> dict[str, float]:
        """Return the terms of log p by the names of their variables, at a point (n_dim,)."""
        return terms_of(self.model, self.layout.unflatten(theta))

    # --- evaluation ---

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
        return self._evaluations.logp_grad(theta)

    def logp(self, theta: Array) -> Array:
        """Evaluate the log density alone, (n_draws,), at points (n_draws, n_dim)."""
        return self._evaluations.logp(theta)

    def grad(self, theta: Array) -> Array:
        """Evaluate the gradient alone, (n_draws, n_dim)."""
        return self.logp_grad(theta)[1]

    # --- by rows ---

    def described_rows(self) -> ModelRows | None:
        """Return what the rows are, for people to read; this takes log p apart once more, variable by variable."""
        return described_rows(self.model, self.graphs, self.functions, self.by_rows)

    # --- second derivatives ---

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return self._hessians.exist

    def hessian_error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        return self._hessians.error()

    @property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense."""
        return self._hessians.pattern

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        return self._hessians.summed

    @property
    def structural_pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0 as the graph tells, whether or not `pattern` has any use of it.

        None only where it would have too many to hold.
        """
        return self._hessians.structural_pattern

    def widen(self, theta: Array) -> bool:
        """Add the entries that `pattern` lacks at the rows of ``theta``; tell whether there are any.

        Where these are too many to look at, the Hessian counts as dense from now on.
        """
        return self._hessians.widen(theta)

    @property
    def n_products(self) -> int:
        """Products with a vector that take as long as one Hessian."""
        return self._hessians.n_products

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
        return self._hessians.mean(theta, self)

    def mean_hessians(self, draws: list[Array]) -> list[MeanHessian]:
        """Return the mean of the Hessian over each of several sets of draws; loops run once for all of them."""
        return self._hessians.means(draws, self)

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

        def count(n: int) -> None:
            self.n_hessians += n

        return GaussNewtonHessian(self.second.gauss_newton, theta, count)
