"""The graphs of a model on the flat vector, and the functions that are compiled of them."""

import contextlib
import functools

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pymc as pm
import pytensor.tensor as pt

from pymc.pytensorf import compile as pymc_compile
from pytensor.compile import Function
from pytensor.graph.basic import Variable
from pytensor.scan.op import Scan

from pymc_ngvi.core.messages import Refused
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.progress import task
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.info import Minibatches
from pymc_ngvi.graphs import graph, loops, odes
from pymc_ngvi.graphs.backends import (
    COMPILED,
    WITH_ROWS,
    InFloat64,
    compile_flags,
    compile_options,
    filled_up,
    in_float64,
    quickly,
    without_c,
)
from pymc_ngvi.graphs.layout import Layout
from pymc_ngvi.graphs.loops import hold_by_rows
from pymc_ngvi.graphs.rewrites import has_op
from pymc_ngvi.ops.cost import Cost, estimate, estimate_of_jets
from pymc_ngvi.ops.jets import MOST_DIMENSIONS, Jets, Program, forward_mode
from pymc_ngvi.reading.predictors import DataSeen, Factor, Reading, Terms
from pymc_ngvi.rows.programs import CannotFollow


@dataclass
class RowsFound:
    """The rows of a log density, or why it has none."""

    #: Log p taken apart, with whatever data; None where it did not come apart.
    reading: Reading | None = None
    #: The same for expectations.
    parts: Expectations | None = None
    #: Those that were seen to be all of log p.
    agreed: Terms | None = None
    #: Why there are no rows with the data that are in ``seen``.
    refused: Refused | None = None
    seen: DataSeen | None = None
    #: Whether second derivatives of rows were found to be wrong.
    no_hessian: bool = False
    #: Of the Hessian by rows, with whatever data.
    last_structure: Pattern | None = None
    #: What follows from rows, by name, with the terms that it is of.
    of_terms: dict[str, tuple[Terms, Any]] = field(default_factory=dict)


#: How many times as many points there are in the next shape that JAX compiles a function for.
_PER_SHAPE = 4
#: Symbolic outputs of a graph.
Outputs = list[Variable]


class FlatGraphs:
    """Log density and gradient as graphs of one flat vector, simplified. The gradient is made when it is asked for."""

    def __init__(self, model: pm.Model, layout: Layout, factors: Sequence[Factor], *, may_be_large: bool) -> None:
        self.model, self.layout, self.factors = model, layout, factors
        self.is_large = False
        with without_c():  # constants are computed by running their graphs
            self.theta = pt.vector("theta", dtype="float64", shape=(layout.n_dim,))
            sums = [factor.logp.sum() for factor in factors]
            self.minibatches = Minibatches(sums)
            sums = self.on_flat_vector(sums)
            self.is_large = may_be_large and loops.is_large(pt.add(pt.constant(0.0), *sums))
            self.parts = self.simplify(sums)
            if has_op(self.parts, Scan):
                self.parts = loops.with_short_steps(self.parts, self.simplify)
            self.logp = pt.add(pt.constant(0.0), *self.parts)

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: rules are made again."""
        return {name: value for name, value in self.__dict__.items() if name != "forward"}

    @functools.cached_property
    def forward(self) -> tuple[Program, Outputs] | None:
        """Log p as rules on jets; None where derivatives by PyTensor serve better, or a rule is missing."""
        if not self.shares_calls or self.has_equations or self.layout.n_dim > MOST_DIMENSIONS:
            return None
        try:
            with without_c():
                return forward_mode(self.logp, self.theta)
        except CannotFollow:
            return None

    @functools.cached_property
    def raw_grad(self) -> Variable:
        """The gradient as it is made; MissingDerivativeError if an operation of the model has none."""
        with without_c():
            return graph.gradient(self.logp, self.theta)

    @functools.cached_property
    def logp_grad(self) -> Outputs:
        """Log p and its gradient, simplified together."""
        with without_c():
            return self.simplify([self.logp, self.raw_grad])

    @property
    def grad(self) -> Variable:
        """The gradient."""
        return self.logp_grad[1]

    @functools.cached_property
    def cost(self) -> Cost:
        """Estimated cost of log p and its gradient."""
        if self.forward is not None:
            return estimate_of_jets([self.logp], self.layout.n_dim)
        return estimate(self.logp_grad, along=self.theta)

    @functools.cached_property
    def cost_of_logp(self) -> Cost:
        """Estimated cost of log p alone."""
        return estimate([self.logp], along=self.theta)

    @functools.cached_property
    def shares_calls(self) -> bool:
        """Whether a call takes about as long for one draw as for many: loops, equations, thousands of nodes."""
        return self.is_large or self.has_equations or has_op([self.logp], Scan)

    @functools.cached_property
    def has_equations(self) -> bool:
        """Whether log p has differential equations."""
        return has_op([self.logp], odes.Solution)

    def on_flat_vector(self, outputs: Outputs) -> Outputs:
        """Return functions of the value variables as functions of theta, on the minibatch in use."""
        outputs = hold_by_rows(self.minibatches.hold(outputs), self.minibatches.rows)
        return graph.on_flat_vector(self.model, self.layout, outputs, self.theta)

    def simplify(self, outputs: Outputs) -> Outputs:
        """Canonicalise and stabilise graphs."""
        return graph.simplify(outputs, check_bounds=self.model.check_bounds, is_large=self.is_large)


class Functions:
    """Compiles graphs of a model, and keeps what is compiled; fits that reuse a model share it."""

    def __init__(
        self,
        model: pm.Model,
        backend: str,
        compile_kwargs: Mapping[str, object] | None,
        *,
        is_large: bool,
    ) -> None:
        #: The backend in use; "given mode" where the user gave a mode.
        self.backend = backend
        self._model, self._is_large = model, is_large
        self.compile_kwargs = compile_kwargs
        #: What was built of the model, by what it is.
        self.made: dict[object, Any] = {}
        self.rows = RowsFound()
        self.seconds = 0.0

    def __getstate__(self) -> dict[str, object]:
        """Return what to pickle: compiled functions are made again when they are needed."""
        return {**self.__dict__, "made": {}, "rows": RowsFound()}

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of what is built inside."""
        with task("Compiling") as compiling:
            try:
                yield
            finally:
                self.seconds += compiling.elapsed or 0.0

    def once[T](self, what: object, make: Callable[[], T]) -> T:
        """Return something of `made`, or make it."""
        if what not in self.made:
            with self.timed():
                self.made[what] = make()
        found: T = self.made[what]
        return found

    def compile_for_few(self, inputs: list[Variable], outputs: Variable | Outputs) -> Callable[..., Any]:
        """Return a function that is called some tens of times, or with arrays of other shapes each time.

        It is compiled where the user chose how, and not for JAX, which would compile it anew for each shape.
        """
        if not self.compile_kwargs and self.backend not in WITH_ROWS:
            return quickly(inputs, outputs)
        return self.compile(inputs, outputs)

    def filled_up(self, rows: Array) -> Array:
        """Return what to give a function in the place of rows: for JAX, the last is repeated, for few numbers of them.

        So are then those of the results.
        """
        return filled_up(rows, _PER_SHAPE, 1) if self.backend == "jax" else rows

    def compile(self, inputs: list[Variable], outputs: Variable | Outputs) -> Function:
        """Compile a function."""
        # PyMC's own compile advances random generators in the graph; the model's context carries `check_bounds`.
        backend, is_jax = self.backend, self.backend == "jax"
        with self._model, compile_flags(backend), in_float64() if is_jax else contextlib.nullcontext():
            function: Function = pymc_compile(
                inputs,
                outputs,
                on_unused_input="ignore",
                trust_input=True,
                **compile_options(backend, self.compile_kwargs, is_large=self._is_large),
            )
        return cast(Function, InFloat64(function)) if is_jax else function


def jets_of(graphs: FlatGraphs, functions: Functions) -> Jets | None:
    """Return what evaluates log p with its derivatives carried along; None where functions are compiled of graphs."""
    forward = graphs.forward
    if forward is None or functions.backend in COMPILED:
        return None
    return functions.once("jets", lambda: Jets(*forward, functions.compile))
