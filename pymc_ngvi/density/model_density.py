"""What fits and results ask of the log density of a model, wherever its data are."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pytensor.graph.basic import Variable

from pymc_ngvi.core.pattern import Pattern, SummedPattern
from pymc_ngvi.core.refusal import Reason, Refused
from pymc_ngvi.core.types import AnyArray, Array, Expectation, MeanHessian, RowRules, Spread
from pymc_ngvi.density.by_rows import ByRows, ModelRows
from pymc_ngvi.density.discrete.summing import DiscreteDraws, SummedOut
from pymc_ngvi.density.expectations import SeenFromRows
from pymc_ngvi.density.flat import Functions
from pymc_ngvi.density.info import Minibatches, ModelInfo, terms_by_variable
from pymc_ngvi.graphs.graph import MissingDerivativeError
from pymc_ngvi.graphs.layout import Layout


class ModelDensity(ABC):
    """The log density of a PyMC model on one flat unconstrained vector, batched over draws.

    `LogDensity` has all of the data here. Others are sums of a prior, which is a `LogDensity`, and of likelihoods of
    data that are elsewhere. What only some have is None, or empty, unless they say otherwise.

    Attributes
    ----------
    info : ModelInfo
        Model, layout, data and start, as they were when the object was made.
    functions : Functions
    by_rows : ByRows
        Rows that are here: of log p, or of the prior.
    minibatches : Minibatches
        Their rows in use.
    summed_out : SummedOut or None
        Discrete variables that were summed out of the user's model; None where it has none.
    n_gradients, n_hessians : int
        Draws at which the gradient, and the Hessian (along any number of directions), were evaluated so far.
    """

    info: ModelInfo
    functions: Functions
    by_rows: ByRows
    minibatches: Minibatches
    n_gradients: int
    n_hessians: int
    summed_out: SummedOut | None = None
    #: Whether the data are in shards, of which there is no part here.
    is_sharded = False
    #: Whether the data come in batches, one of which is here.
    is_streamed = False
    _seconds_before = 0.0  # spent for earlier fits

    # --- what is known of the model ---

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.info.n_dim

    @property
    def model(self) -> pm.Model:
        """The PyMC model that is fitted, without discrete variables."""
        return self.info.model

    @property
    def given(self) -> pm.Model:
        """The user's model."""
        return self.model if self.summed_out is None else self.summed_out.given

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
        """Spent so far on building and compiling graphs here."""
        return self.functions.seconds - self._seconds_before

    @property
    @abstractmethod
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, from the graph and the sizes of the data alone."""

    @property
    def is_small(self) -> bool:
        """Whether a batch of draws is too little work to share among threads."""
        return False

    @property
    def why_in_part(self) -> str:
        """Why log p is not to be had with all of the data, in a clause; empty where it is."""
        return "the model reads pm.Minibatch data" if self.has_minibatch else ""

    @property
    def positive(self) -> list[NDArray[np.intp]]:
        """Coordinates that are logarithms, an array for each positive variable."""
        found = [v for v in self.layout.variables if v.value_name.endswith("_log__")]
        return [np.arange(v.where.start, v.where.stop) for v in found]

    def initial_point(self) -> Array:
        """Return the model's initial point, flat and unconstrained, (n_dim,)."""
        return self.info.start.copy()

    @property
    def deterministics(self) -> list[Variable]:
        """The model's Deterministics, those that can be evaluated here."""
        return list(self.model.deterministics)

    def terms(self, theta: Array) -> dict[str, float]:
        """Return the terms of log p by the names of their variables, at a point (n_dim,)."""
        return terms_by_variable(self.model, self.layout.unflatten(theta))

    @property
    def summed_out_names(self) -> tuple[str, ...]:
        """Names of the discrete variables that were summed out."""
        return () if self.summed_out is None else self.summed_out.names

    @property
    def summed_out_shown(self) -> tuple[str, ...]:
        """The same, then names of Deterministics that depend on them."""
        return () if self.summed_out is None else self.summed_out.shown

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
        summed = self.summed_out
        if summed is None:
            return {}
        draws = self.functions.once(self.functions.made.discrete, lambda: DiscreteDraws(summed))
        assert isinstance(draws, DiscreteDraws)
        return draws(values, random_seed)

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

    def rules_of_level(self, level: int) -> RowRules:
        """Return rules that are the same for all rows, by their code."""
        rows = self.by_rows.found
        assert rows is not None
        return rows.rules_of_level(level)

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        rows = self.by_rows.found
        if rows is None or not rows.leaves_out_conditions:
            return rows is not None
        theta = draw()
        return rows.agrees(theta, self.by_rows.logp(theta), everywhere=True)

    @property
    def seen_from_rows(self) -> SeenFromRows | None:
        """Log p in the space of its rows, where these are far fewer than coordinates with fixed normal priors."""
        return None

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
        raise Refused(Reason.NO_HESSIANS, "Hessians at points are not to be had of these data.")

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
