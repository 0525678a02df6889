"""Second derivatives of a log density: products, mean Hessians, and what a known sparsity saves of them."""

import contextlib
import functools
import logging
import time

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scipy import sparse

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Array, MeanHessian
from pymc_ngvi.model.graphs import graph
from pymc_ngvi.model.graphs.backends import without_c
from pymc_ngvi.model.graphs.cost import Cost
from pymc_ngvi.model.minibatch import Minibatches
from pymc_ngvi.model.predictors.hessian import PredictorHessian, predictor_hessian
from pymc_ngvi.model.predictors.linear_map import LinearMap
from pymc_ngvi.model.sparsity.hessian import ColouredHessian, PatternWidened, SparseHessian, batch, slices

logger = logging.getLogger("pymc.ngvi")

#: Draws that one call should take of a small dense Hessian.
_LEAST_BATCH = 4
#: Products of a Hessian in gradients, and the seconds of one from which on it may be worth looking for predictors.
_PRODUCT, _WORTH = 0.4, 2e-3
#: How many products by coordinates one by predictors has to save.
_FEWER = 2
#: Relative difference of two products with a random vector that is rounding.
_ROUNDING = 1e-8


class SecondOrder:
    """The part of `LogDensity` that evaluates second derivatives; the rest of it gives what is declared here."""

    n_dim: int
    n_gradients: int
    n_hessians: int
    compile_seconds: float
    minibatches: Minibatches
    _logp: Any
    _grad: Any
    _theta: Any
    _initial_point: Array
    _cost: Cost
    _pad: bool
    _is_large: bool  # whether log p is a recursion that is written out
    _functions: dict[str, Callable[..., Any]]
    _n_directions: Any  # directions in one call at one draw
    _no_hessian: graph.MissingDerivativeError | None = None  # why there are no second derivatives
    _n_by_predictors: int = 0
    has_minibatch: bool
    gradient_seconds: Any
    _compile: Callable[..., Any]

    def grad(self, theta: Array) -> Array:
        """Evaluate the gradient."""
        raise NotImplementedError

    def _function(self, name: str) -> Callable[..., Any]:
        """Return a compiled function."""
        raise NotImplementedError

    def _simplify(self, outputs: list[Any]) -> list[Any]:
        """Canonicalise and stabilise a graph."""
        raise NotImplementedError

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return self.hessian_error() is None

    def hessian_error(self) -> graph.MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        if "_product" not in self.__dict__ and self._no_hessian is None:
            start = time.perf_counter()
            try:
                self._product  # noqa: B018 (made once)
            except graph.MissingDerivativeError as error:
                self._no_hessian = error.with_traceback(None)
            finally:
                self.compile_seconds += time.perf_counter() - start
        return self._no_hessian

    @functools.cached_property
    def _product(self) -> tuple[Any, Any]:
        """A direction, and the graph of the Hessian times it."""
        direction = self._theta.type("direction")
        with without_c():
            simplify = graph.simplify_little if self._is_large else self._simplify
            [product] = simplify([graph.hessian_product(self._grad, self._theta, direction)])
        return direction, product

    @functools.cached_property
    def _sparse(self) -> SparseHessian:
        rows = [index.rows for index in self.minibatches._indices.values()]
        evaluate, error = self._products_of_draws, self.hessian_error
        return SparseHessian(
            self._logp, self._theta, self._initial_point, rows, evaluate, error, self._cost.widest, self._pad
        )

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
        products = np.empty((len(theta), len(directions), self.n_dim))
        self.n_hessians += len(theta)
        for out, point in zip(products, theta, strict=True):
            out[:] = self._products(point, directions)
        return products

    @property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where it counts as dense.

        It is found when it is first asked for, from the graph of log p. Where an operation is not understood, and
        would make all entries count, it is found by evaluating dense Hessians.
        """
        coloured = self._sparse.coloured
        return None if coloured is None else coloured.pattern

    @property
    def structural_pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0 as the graph tells, whether or not `pattern` has any use of it.

        None only where it would have too many to hold.
        """
        known = self.pattern
        return self._sparse.pattern_by_graph if known is None else known

    @property
    def n_widened(self) -> int:
        """Times that the pattern turned out to lack entries."""
        return self._sparse.n_widened

    def mean_hessian(self, theta: Array) -> "ModelHessian":
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
        return ModelHessian(self, theta)

    def check_hessian(self, point: Array, rng: np.random.Generator) -> bool:
        """Tell whether the Hessian by its pattern, at a point (n_dim,), gives its product with a random vector."""
        return self._sparse.check(point, rng)

    def widen(self, theta: Array) -> bool:
        """Add the entries that `pattern` lacks at the rows of ``theta``; tell whether there are any.

        Where these are too many to look at, the Hessian counts as dense from now on.
        """
        return self._sparse.widen(np.atleast_2d(theta))

    # --- by predictors ---

    @functools.cached_property
    def _predictors(self) -> PredictorHessian | None:
        """Makes Hessians from fewer products than `pattern` does; None where that is not worth its while."""
        n_directions = self.directions_of_hessian
        seconds = _PRODUCT * n_directions * self.gradient_seconds
        if self.has_minibatch or self._pad or self._is_large or seconds < _WORTH or not self.has_hessian:
            return None
        start = time.perf_counter()
        found = predictor_hessian(self._logp, self._theta, self._simplify, self._compile)
        self.compile_seconds += time.perf_counter() - start
        return found if found is not None and _FEWER * found.n_colours <= n_directions else None

    def _by_predictors(self, theta: Array) -> tuple[LinearMap, sparse.csr_array] | None:
        """Return the predictors, and the mean Hessian with respect to them; None where they are not used.

        A check, now and then, sees whether that is the derivative of the gradient.
        """
        if self._predictors is None or not len(theta):
            return None
        self._n_by_predictors += 1
        if self._n_by_predictors & (self._n_by_predictors - 1) == 0:
            rng = np.random.default_rng([self._n_by_predictors])
            before = self.n_gradients
            agrees = self._predictors.agrees(theta[rng.integers(len(theta))], self.grad, rng)
            self.n_gradients = before
            if not agrees:
                logger.info("The Hessian by linear predictors is not that of log p: it is found from all coordinates.")
                self._predictors = None
                return None
        return self._predictors.linear_map, self._predictors.mean(theta)

    # --- by coordinates ---

    def _mean_products(self, theta: Array, directions: Array) -> Array:
        found = self._by_colours(theta, len(directions))
        if found is not None:
            return found[0].times(found[1], directions)
        coloured = self._sparse.coloured
        if coloured is not None:  # the function is there, or will be needed
            return coloured.mean_products(theta, directions)
        n_draws, n_directions = batch(self._cost.widest, len(directions))
        total = np.zeros((len(directions), self.n_dim))
        if n_directions < len(directions) or not self._takes_draws:
            for point in theta:
                total += self._products(point, directions)
        else:  # calls take longer than the work: many draws in each
            for rows in slices(len(theta), n_draws):
                total += self._products_of_draws(theta[rows], directions).sum(axis=0)
        return total / len(theta)

    def _mean_diagonal(self, theta: Array) -> Array:
        found = self._by_colours(theta, self.n_dim)
        if found is not None:
            return found[0].diagonal(found[1])
        total = np.zeros(self.n_dim)
        for point in theta:
            for at, axes in self._axes():
                total[at] += self._evaluate_products(point, axes)[np.arange(len(at)), at]
        return total / len(theta)

    @property
    def directions_of_hessian(self) -> int:
        """Products that one Hessian takes by coordinates: one for each, or for each colour of `pattern`."""
        coloured = self._sparse.coloured
        return self.n_dim if coloured is None else coloured.n_colours

    def _by_colours(self, theta: Array, n_directions: int) -> tuple[ColouredHessian, Array] | None:
        """Return the mean Hessian at the entries of the pattern; None where that saves less than half of the work."""
        while (coloured := self._sparse.coloured) is not None and 2 * coloured.n_colours < n_directions:
            with contextlib.suppress(PatternWidened):
                return coloured, self._sparse.mean_values(theta)
        return None

    def mean_gauss_newton_diagonal(self, theta: Array) -> Array:
        """Return the mean over draws of the Gauss-Newton diagonal, (n_dim,).

        At each draw it is the sum over observations i of s_i g_i^2, minus the diagonal of the Hessian of the rest of
        log p: priors with their Jacobians, and variables imputed for missing data. g_i is the gradient of the log
        density of one element of an observed variable, and s_i its factor ``total_size`` / batch size (1 without). It
        estimates -E[diag hess log p]: the expectations agree where the data come from the model.

        Parameters
        ----------
        theta : ndarray, shape (n_draws, n_dim)

        Returns
        -------
        ndarray, shape (n_dim,)

        Raises
        ------
        ValueError
            For models with Potentials, without observed variables, or with multivariate ones.
        """
        function = self._function("gauss_newton")
        total = np.zeros(self.n_dim)
        for point in theta:
            self.n_hessians += 1
            for at, axes in self._axes():
                with np.errstate(all="ignore"):
                    total[at] += np.asarray(function(np.ascontiguousarray(point), axes))
        return total / len(theta)

    def _axes(self) -> Iterator[tuple[Any, Array]]:
        """Go through the coordinate axes, (n_axes, n_dim), a block at a time, with their indices."""
        for rows in slices(self.n_dim, self._n_directions):
            at = np.arange(rows.start, rows.stop)
            axes = np.zeros((len(at), self.n_dim))
            axes[at - rows.start, at] = 1.0
            yield at, axes

    def hessian(self, theta: Array) -> Array:
        """Return the dense symmetric Hessian at each draw, (n_draws, n_dim, n_dim)."""
        products = self.hessian_products(theta, np.eye(self.n_dim))
        symmetric: Array = 0.5 * (products + products.swapaxes(-1, -2))
        return symmetric

    def _products(self, point: Array, directions: Array) -> Array:
        # One draw, many directions in a call: they fill the cache already, and the part that does not depend on them
        # is done once.
        blocks = slices(len(directions), self._n_directions)
        parts = [self._evaluate_products(point, directions[rows]) for rows in blocks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _evaluate_products(self, point: Array, directions: Array) -> Array:
        """Multiply the Hessian at one draw with directions, (n_directions, n_dim), in one call."""
        products: Array
        if self._takes_draws:
            products = self._products_of_draws(point[None], directions)[0]
            return products
        function = self._function("products")
        with np.errstate(all="ignore"):  # far from the mode, densities overflow: the caller sees what is not finite
            products = np.asarray(function(np.ascontiguousarray(point), np.ascontiguousarray(directions)))
        return products

    @property
    def _takes_draws(self) -> bool:
        """Whether one function, over draws and directions, serves for all products.

        It does where the pattern needs it, and where calls of a function for one draw would take longer than the work.
        What is compiled depends on the model alone: evaluations have the same bits, in whatever order they come.
        """
        if self._sparse.needs_products:
            return True
        return not self._pad and batch(self._cost.widest, self.n_dim)[0] >= _LEAST_BATCH

    def _products_of_draws(self, theta: Array, directions: Array) -> Array:
        """Multiply the Hessians at draws with directions in one call, (n_draws, n_directions, n_dim)."""
        function = self._function("coloured")
        with np.errstate(all="ignore"):
            products: Array = np.asarray(function(np.ascontiguousarray(theta), np.ascontiguousarray(directions)))
        return products


class ModelHessian(MeanHessian):
    """The mean over draws of the Hessian of a model's log density.

    It counts as one evaluation at each of its draws, in however many calls.

    Parameters
    ----------
    density : LogDensity
    theta : ndarray, shape (n_draws, n_dim)
    """

    def __init__(self, density: SecondOrder, theta: Array) -> None:
        self._density, self._theta = density, theta
        self._counted = False

    @property
    def pattern(self) -> Pattern | None:
        """Entries that can differ from 0; None where the matrix counts as dense."""
        return self._density.pattern

    def products(self, directions: Array) -> Array:
        """Return the matrix times each direction, (n_directions, n_dim)."""
        self._count()
        if self._by_predictors is None:
            return self._density._mean_products(self._theta, directions)
        if 2 * len(directions) < self._density.n_dim:
            linear, matrix = self._by_predictors
            return linear.quadratic_times(matrix, directions)
        result: Array = directions @ self._dense
        return result

    def diagonal(self) -> Array:
        """Return the diagonal, (n_dim,).

        It takes a product for each coordinate, for each colour of `pattern`, or for each predictor of a row, but never
        holds a matrix of all of them.
        """
        self._count()
        if self._by_predictors is None:
            return self._density._mean_diagonal(self._theta)
        linear, matrix = self._by_predictors
        return linear.quadratic_diagonal(matrix)

    def values(self) -> Array:
        """Return the entries of `pattern`, (n_entries,): the lower triangle, in the order of the pattern.

        It takes one product for each of a few sums of columns, whose entries don't overlap.

        Raises
        ------
        PatternWidened
            Where a check, now and then, found that the pattern lacked entries: it has them now.
        ValueError
            Where the Hessian counts as dense.
        """
        values = self._values_by_predictors()
        if values is None:
            values = self._density._sparse.mean_values(self._theta)
        self._count()
        return values

    def _values_by_predictors(self) -> Array | None:
        """Return them by predictors; None without these, and where the pattern lacks entries that these have."""
        pattern = self.pattern
        if self._by_predictors is None or pattern is None:
            return None
        linear, matrix = self._by_predictors
        values = linear.quadratic_entries(matrix, pattern)
        probe = np.random.default_rng(0).standard_normal((1, pattern.n_dim))
        expected, found = linear.quadratic_times(matrix, probe)[0], pattern.symmetric(values) @ probe[0]
        scale = np.abs(expected).max(initial=0.0)
        return values if np.abs(found - expected).max(initial=0.0) <= _ROUNDING * scale else None

    @functools.cached_property
    def _by_predictors(self) -> tuple[LinearMap, sparse.csr_array] | None:
        return self._density._by_predictors(self._theta)

    @functools.cached_property
    def _dense(self) -> Array:
        assert self._by_predictors is not None
        linear, matrix = self._by_predictors
        return linear.quadratic(matrix)

    def _count(self) -> None:
        if not self._counted:
            self._density.n_hessians += len(self._theta)
            self._counted = True
