"""A log density as a sum over rows: found when it is first asked for, checked, and what follows from it."""

import contextlib
import functools

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from pymc_ngvi.core.messages import NotApart, Refused, RowsGivenUp, logger
from pymc_ngvi.core.pattern import Pattern, SummedPattern, is_dense
from pymc_ngvi.core.sparsity import Ints
from pymc_ngvi.core.types import Array, RowRules, Spread
from pymc_ngvi.density.expectations import Expectations, Pointwise, SeenFromRows, seen_from_rows
from pymc_ngvi.density.flat import FlatGraphs, Functions, RowsFound
from pymc_ngvi.graphs import graph
from pymc_ngvi.reading.predictors import DataSeen, Reading, Role, is_smooth
from pymc_ngvi.rows.linear_map import Seen
from pymc_ngvi.rows.row_hessian import (
    FEW_PREDICTORS,
    PredictorMeanHessian,
    SecondDerivatives,
    by_predictors,
    curvature_agrees,
    pattern_of_rows,
)

#: Points about the start, and how far from it, at which rows are compared with log p.
N_CHECKED, AROUND = 3, 0.3
#: Standard deviations of a Gaussian about a point, in those of a fit: much narrower ones are lost in rounding.
_NARROW = 1e-3
#: Elements of log p from which on it pays to compile second derivatives of rows of many predictors.
_MANY_ROWS = 10_000
#: Of models that have none.
NO_ROWS = (
    "This model's log density is no sum over rows, each a function of a few linear predictors: leave "
    "estimator='quadrature' out."
)
#: Of models whose graph is not looked at.
TOO_LARGE = "a recursion is written out in the graph"
#: Of rows that are given up.
NOT_LOG_P = "the rows are not all of log p"
_MINIBATCHES = "the data are minibatches"


class ByRows:
    """The rows of a log density, where they are all of it.

    What was found serves all fits of a model, which share what is compiled.
    """

    def __init__(self, graphs: FlatGraphs, functions: Functions, start: Array) -> None:
        self._graphs, self._functions, self._start = graphs, functions, start
        self._n_calls = 0

    @property
    def reading(self) -> Reading | None:
        """Log p taken apart, whatever became of its rows; None where it does not come apart."""
        self._refused  # noqa: B018 (looks for them)
        return None if self._graphs.is_large else self._kept.reading

    @property
    def are_known(self) -> bool:
        """Whether rows were found already, and log p is no more than these; nothing is looked for."""
        kept = self._kept
        return kept.parts is not None and kept.refused is None and not self._graphs.minibatches

    @property
    def found(self) -> Expectations | None:
        """The rows; None where log p has other parts, and on minibatches, whose rows are not all there are."""
        return self._kept.parts if not self._graphs.minibatches and self._refused is None else None

    @property
    def why_not(self) -> str:
        """Why there are none, in a clause; empty where there are."""
        if self._graphs.minibatches:
            return _MINIBATCHES
        return "" if self._refused is None else str(self._refused)

    def give_up(self, why: str) -> None:
        """Go without rows from now on, as long as the data are these."""
        self._refuse(Refused(why))

    def _refuse(self, refused: Refused) -> None:
        kept = self._kept
        kept.refused, kept.agreed, kept.seen = refused, None, DataSeen([self._graphs.logp])

    @property
    def _kept(self) -> RowsFound:
        return self._functions.rows

    @property
    def _refused(self) -> Refused | None:
        """Why there are no rows with the data as they are, which may be others than when it was last asked."""
        if self._graphs.is_large:
            return Refused(TOO_LARGE)
        kept = self._kept
        if kept.refused is None:
            self._look()
        elif not self._graphs.minibatches and kept.seen is not None and not kept.seen.are_current():
            kept.refused = None
            self._look(anew=True)
        return kept.refused

    def _look(self, *, anew: bool = False) -> None:
        """Take log p apart with the data as they are, or note why it does not come apart."""
        kept = self._kept
        try:
            rows = kept.parts = self._taken_apart(anew)
            if rows.terms is kept.agreed:
                return
            refused = self._what_is_missing(rows)
            if refused is not None and kept.agreed is not None and not anew:  # with these data, others may be rows
                rows = kept.parts = self._taken_apart(anew=True)
                refused = self._what_is_missing(rows)
        except NotApart as reason:
            refused = reason
        except ValueError as error:  # of an operation whose values can't be computed
            refused = Refused(str(error))
        else:
            kept.agreed = rows.terms if refused is None else None
        if refused is not None:
            self._refuse(refused)

    def _taken_apart(self, anew: bool) -> Expectations:
        rows = self._kept.parts
        if rows is None:
            functions, graphs = self._functions, self._graphs
            simplify = functools.partial(graph.simplify, check_bounds=False)
            with functions.timed():
                compile_, backend = functions.compile_for_few, functions.backend
                self._kept.reading = Reading(graphs.parts, graphs.theta, simplify, compile_)
                return Expectations(self._kept.reading, compile_, backend)
        if anew or not self._graphs.minibatches:
            rows.refresh(anew=anew)
        return rows

    def _what_is_missing(self, rows: Expectations) -> Refused | None:
        """Return why rows are not all of log p; None where they are."""
        if rows.terms.rest:
            return Refused("log p has a part that is no row")
        around = np.random.default_rng(0).standard_normal((N_CHECKED, len(self._start)))
        theta = self._start + AROUND * np.concatenate([np.zeros((1, len(self._start))), around])
        logp = self.logp(theta)
        if np.isfinite(logp[0]) and rows.anchor(theta, logp):
            return None
        return Refused("rows don't add up to log p near the start")

    def logp(self, theta: Array) -> Array:
        """Evaluate log p alone, (n_points,), by a function that is compiled quickly."""
        function = self._functions.once(
            "logp at few",
            lambda: self._functions.compile_for_few([self._graphs.theta], self._graphs.logp),
        )
        with np.errstate(all="ignore"):
            return np.array([function(point) for point in theta])

    def check(self, point: Array) -> None:
        """See whether the rows add up to log p at a point, (n_dim,)."""
        rows = self.found
        if rows is not None and not rows.agrees(point[None], self.logp(point[None])):
            self.give_up(NOT_LOG_P)
            raise RowsGivenUp(NOT_LOG_P)

    @property
    def seen(self) -> SeenFromRows | None:
        """Log p in the space of its rows, where these are far fewer than coordinates with fixed normal priors."""
        return self._of_terms("space", seen_from_rows)

    @property
    def pointwise(self) -> Pointwise | None:
        """Log p and its gradient at points; None without rows, or where these have no derivatives here."""
        if self.found is None:
            return None
        return self._of_terms("pointwise", lambda rows: Pointwise.of(rows, self._functions.compile_for_few))

    # --- second derivatives ---

    @property
    def gives_pattern(self) -> bool:
        """Whether the pattern of the Hessian follows from rows: where these are arithmetic with numbers alone."""
        return self.found is not None and not any(rows.is_whole for rows in self._rows.terms.rows)

    @property
    def gives_hessians(self) -> bool:
        """Whether Hessians at draws come from rows, too.

        They do where rows have few predictors, or are many. Else compiling second derivatives by all pairs of
        predictors takes longer than it saves.
        """
        if not self.gives_pattern or self._kept.no_hessian:
            return False
        few = self.n_products <= FEW_PREDICTORS or self._graphs.cost_of_logp.widest >= _MANY_ROWS
        return few and None not in self._derivatives

    @property
    def is_smooth(self) -> bool:
        """Whether rows are made of operations alone that are known to have second derivatives: no graph is made."""
        return self._of_terms("are smooth", lambda rows: all(map(is_smooth, rows.terms.rows)))

    @property
    def structure(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where they are too many to hold."""
        return self._of_terms("structure", self._structure)

    @property
    def pattern(self) -> Pattern | None:
        """The same; None where the Hessian counts as dense."""
        return None if is_dense(self.structure) else self.structure

    @property
    def summed(self) -> SummedPattern | None:
        """Entries that can differ from 0 beside sums over many coordinates; None where there are no such sums."""
        if self.found is None or self._rows.joint is None or not self.gives_pattern:
            return None
        return self._of_terms("structure with sums", self._with_sums)

    @property
    def n_products(self) -> int:
        """Products with a vector that take as long as one Hessian."""
        return max((rows.index.shape[1] for rows in self._rows.terms.rows), default=1)

    def evaluated(self, theta: Array) -> PredictorMeanHessian | None:
        """Return the mean of the Hessian over draws, (n_draws, n_dim).

        None where a check shows that they are not those of log p. It is made at the first call, the second, fourth,
        eighth, ... Rows that do not add up to log p are given up; those with kinks serve for expectations yet.
        """
        if self.found is None or self._kept.no_hessian:
            return None
        linear, derivatives = self._rows.linear_map, [kind for kind in self._derivatives if kind is not None]
        self._n_calls += 1
        if len(theta) and self._n_calls & (self._n_calls - 1) == 0:
            point = theta.mean(axis=0)
            agree = self._rows.agrees(point[None], self.logp(point[None]))
            rng, mean = np.random.default_rng(self._n_calls), by_predictors(linear, derivatives, point[None])
            if not (agree and curvature_agrees(linear, mean, point, self._rows.at, rng)):
                logger.debug("The Hessian by rows is not that of log p: it is found from all coordinates.")
                self._kept.no_hessian = True
                if not agree:
                    self.give_up(NOT_LOG_P)
                return None
        return PredictorMeanHessian(linear, by_predictors(linear, derivatives, theta), self)

    def about(self, point: Array, q: Spread) -> PredictorMeanHessian | None:
        """Return the Hessian at a point, (n_dim,), by what expectations are taken with: nothing is compiled for it.

        It is the mean under a Gaussian there, with a small part of the standard deviations of q; None without rows.
        """
        rows = self.found
        if rows is None:
            return None
        eta, covariances = rows.linear_map(point[None]), rows.seen(q).covariances
        narrow = Seen(eta, [_NARROW**2 * of_pairs for of_pairs in covariances])
        coarsest = RowRules(np.zeros(rows.n_rows, dtype=np.int16), np.zeros(rows.n_rows, dtype=np.float32))
        return cast(PredictorMeanHessian, rows.under(narrow, self, coarsest).hessian)

    @property
    def _rows(self) -> Expectations:
        rows = self.found
        assert rows is not None
        return rows

    @property
    def _derivatives(self) -> list[SecondDerivatives | None]:
        return self._of_terms(
            "derivatives", lambda rows: [rows.engine.derivatives(part, SecondDerivatives) for part in rows.terms.rows]
        )

    def _of_terms[T](self, name: str, make: Callable[[Expectations], T]) -> T:
        """Return what follows from the rows, made once for the same data."""
        rows, known = self._rows, self._kept.of_terms.get(name)
        if known is None or known[0] is not rows.terms:
            # For other data, nothing is compiled.
            with self._functions.timed() if known is None else contextlib.nullcontext():
                known = self._kept.of_terms[name] = rows.terms, make(rows)
        made: T = known[1]
        return made

    def _structure(self, rows: Expectations) -> Pattern | None:
        new, kept = pattern_of_rows(rows.functions, rows.predictors.dependence), self._kept
        if new is None or kept.last_structure is None or not new.equals(kept.last_structure):
            kept.last_structure = new
        return kept.last_structure  # the same object as with data before: what was made of it serves again

    def _with_sums(self, rows: Expectations) -> SummedPattern | None:
        assert rows.joint is not None
        pattern, weights = pattern_of_rows(rows.functions, rows.joint.dependence), rows.joint.linear_map.weights
        return None if pattern is None or weights is None else SummedPattern(pattern, weights)


# --- what the rows of a model are: of which of its variables. For people to read ---


@dataclass(frozen=True, eq=False)
class RowsOf:
    """Rows of the log density of a variable, and the numbers of the predictors that they are functions of."""

    variable: str
    role: Role
    n: int
    predictors: Ints


@dataclass(frozen=True)
class NoRows:
    """A variable whose log density is no sum over rows, and why."""

    variable: str
    role: Role
    why: str


@dataclass(frozen=True)
class ModelRows:
    """Log p as a sum over rows, as far as it is one.

    Parameters
    ----------
    parts : tuple of RowsOf
        Those of observed variables first.
    rest : tuple of NoRows
        Variables with parts that are no rows.
    why_not : str
        Why no expectations are taken by rows, where they are not; empty where they are.
    """

    parts: tuple[RowsOf, ...] = ()
    rest: tuple[NoRows, ...] = ()
    why_not: str = ""

    def beside(self, other: "ModelRows") -> "ModelRows":
        """Return these, and those of another part of log p."""
        return ModelRows(_in_order(self.parts + other.parts), self.rest + other.rest, self.why_not or other.why_not)


def described_rows(graphs: FlatGraphs, by_rows: ByRows) -> ModelRows:
    """Return what the rows of a model are, or why there are none; variable by variable."""
    reading = by_rows.reading
    if reading is None:
        return ModelRows(why_not=by_rows.why_not)
    try:
        parts, rest = list[RowsOf](), list[NoRows]()
        for part, factor in enumerate(graphs.factors):
            kinds, why = reading.terms.of_part(part)
            if n := sum(len(rows.index) for rows in kinds):
                numbers = np.unique(np.concatenate([rows.index.ravel() for rows in kinds]))
                parts.append(RowsOf(factor.name, factor.role, n, numbers))
            rest += [NoRows(factor.name, factor.role, reason) for reason in why[:1]]
        return ModelRows(_in_order(parts), tuple(rest), by_rows.why_not)
    except NotApart:  # with sums over many coordinates, rows may be too wide to be told of
        return ModelRows(why_not=by_rows.why_not)


def _in_order(parts: Iterable[RowsOf]) -> tuple[RowsOf, ...]:
    return tuple(sorted(parts, key=lambda part: ("observed", "potential", "prior").index(part.role)))
