"""The log density of a model whose data are in shards: the prior here, the likelihood where its rows are."""

import dataclasses
import functools
import uuid

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pymc as pm

from numpy.typing import NDArray
from pytensor.graph.basic import Variable

from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.refusal import RowsGivenUp
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.target import Expectation, Later, MatrixHessian, MeanHessian, PatternHessian, RowRules, Spread
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.info import ModelInfo, initial_point_function, terms_by_variable
from pymc_ngvi.density.logdensity import LogDensity, Sum
from pymc_ngvi.density.shards.shard import Expect, Outline, Reference, Request, Shard, ShardExpectation, of_likelihood
from pymc_ngvi.density.shards.shards import Shards
from pymc_ngvi.density.sparse_hessian import is_dense
from pymc_ngvi.graphs.graph import MissingDerivativeError
from pymc_ngvi.reading.factors import Factor, factors_of


@stored("shard_rules")
@dataclass(frozen=True)
class ShardRules(RowRules):
    """Which rules of quadrature expectations of shards are taken by.

    Shards choose theirs for a Gaussian, and choose them again where they have lost them: nothing grows with the data.
    """

    #: Of the prior's rows.
    prior: RowRules
    #: Gaussians for which shards have chosen.
    references: tuple[Reference, ...]
    #: That of each shard; shape (n_shards,).
    which: NDArray[np.intp]

    @classmethod
    def of(cls, prior: RowRules, parts: list[ShardExpectation], new: Reference, before: "ShardRules | None") -> Self:
        """Return the rules behind parts, those before these given."""
        references = () if before is None else before.references
        which = np.zeros(len(parts), dtype=np.intp) if before is None else before.which
        which = np.where([part.is_new for part in parts], len(references), which)
        used, which = np.unique(which, return_inverse=True)
        level = np.concatenate([prior.level, [part.rules for part in parts]])
        return cls(level, prior.sd, prior, tuple((*references, new)[at] for at in used), which)


class ShardedDensity(Sum):
    """Log density of a model whose data are in shards; see `ModelDensity`."""

    is_sharded = True

    def __init__(
        self, shards: Shards, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None
    ) -> None:
        self.shards = shards
        model = shards.model(shards.keys[0])
        info = ModelInfo.of(model, initial_point_function(model)())
        steps = np.random.default_rng(0).uniform(-0.5, 0.5, (2, len(info.start)))
        self._common, self._derived, self.observations = shards.look(info.start + steps)
        super().__init__(LogDensity(model, backend, compile_kwargs, factors=self._factors_of))
        self._outlines: list[Outline] = shards.ask(Request(Shard.outline))

    def _factors_of(self, model: pm.Model) -> tuple[Factor, ...]:
        return factors_of(model, [*model.free_RVs, *(model[name] for name in self._common)])

    @property
    def deterministics(self) -> list[Variable]:
        """The Deterministics that are no functions of a shard's own data."""
        return [term for term in super().deterministics if term.name in self._derived]

    def terms(self, theta: Array) -> dict[str, float]:
        """Return the terms of log p by the names of their variables, and of shards, at a point (n_dim,)."""
        common = {str(rv.name) for rv in self.model.free_RVs} | set(self._common)
        point, found = self.layout.unflatten(theta), dict[str, float]()
        for key, terms in self.shards.map(lambda _, model: terms_by_variable(model, point)):
            found |= {name if name in common else f"{name} of shard {key!r}": value for name, value in terms.items()}
        return found

    # --- values and gradients ---

    @property
    def likelihood_seconds(self) -> float:
        """Estimated time of the likelihoods and their gradients at one point."""
        return sum(outline.gradient_seconds for outline in self._outlines)

    def log_likelihoods(self, theta: Array) -> Sequence[Array]:
        """Evaluate the likelihoods of shards, (n_draws,) each."""
        return self.shards.ask(of_likelihood(LogDensity.logp, theta))

    def log_likelihoods_and_grads(self, theta: Array) -> Sequence[tuple[Array, Array]]:
        """Evaluate the likelihoods of shards and their gradients, (n_draws,) and (n_draws, n_dim)."""
        return self.shards.ask(of_likelihood(LogDensity.logp_grad, theta))

    # --- by rows ---

    @property
    def n_directions(self) -> int | None:
        """Directions in which the functions of rows vary, at most."""
        own, parts = super().n_directions, [outline.n_directions for outline in self._outlines]
        known = [n for n in (own, *parts) if n is not None]
        return max(known) if len(known) > len(parts) else None

    @functools.cached_property
    def _n_rows_in_all(self) -> int:
        return (0 if (own := self.prior.rows) is None else own.n_rows) + sum(
            outline.n_rows or 0 for outline in self._outlines
        )

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian; see `ModelDensity`."""
        given = rules if isinstance(rules, ShardRules) else None
        rows = self.prior.rows
        if rows is not None:
            rows.n_rows_in_all = self._n_rows_in_all
        own = self.prior.expected(q, None if given is None else given.prior, adapt=adapt)
        new = Reference(q, uuid.uuid4().hex)
        references, which = ((), None) if given is None else (given.references, given.which)
        names = tuple(reference.named for reference in references)
        asked = Expect(q, new.name, names, which, adapt, self.pattern is None, self._n_rows_in_all)
        parts: list[ShardExpectation] = self.shards.ask(Request(Shard.expected, (asked,)))
        if any(part is None for part in parts):  # a shard that was made again has no rules
            parts = self.shards.ask(Request(Shard.expected, (dataclasses.replace(asked, references=references),)))
        wrong = [key for key, part in zip(self.shards.keys, parts, strict=True) if not part.agrees]
        if wrong:
            self.by_rows.give_up(why := f"the rows of shard {wrong[0]!r} are not all of its log likelihood")
            raise RowsGivenUp(why)
        return Expectation(
            own.value + sum(part.value for part in parts),
            own.error + sum(part.error for part in parts),
            sum((part.grad for part in parts), own.grad),
            self._sum_of_hessians(own.hessian, [part.hessian for part in parts]),
            ShardRules.of(own.rules, parts, new, given),
        )

    def rules_of_level(self, level: int) -> RowRules:
        """Return rules that are the same for all rows, by their code."""
        own, n = super().rules_of_level(level), len(self.shards.keys)
        levels = np.concatenate([own.level, np.full(n, level)])
        return ShardRules(levels, own.sd, own, (Reference(level, uuid.uuid4().hex),), np.zeros(n, dtype=np.intp))

    def rows_cover(self, draw: Callable[[], Array]) -> bool:
        """Tell whether rows are all of log p at draws; see `RowsTarget`."""
        are_all = not any(outline.leaves_out_conditions for outline in self._outlines)
        return super().rows_cover(draw) and (are_all or all(self.shards.ask(of_likelihood(_cover, draw()))))

    # --- second derivatives ---

    @property
    def has_hessian(self) -> bool:
        """Whether every operation of the model has a second derivative."""
        return self.prior.has_hessian and self.hessian_error() is None

    def hessian_error(self) -> MissingDerivativeError | None:
        """Return the error that names the operation without a second derivative, if there is one."""
        error = next((outline.derivative_error for outline in self._outlines if outline.derivative_error), "")
        return MissingDerivativeError(error) if error else super().hessian_error()

    @functools.cached_property
    def structural_pattern(self) -> Pattern | None:
        """Entries of the Hessian that can differ from 0; None where they are too many."""
        patterns = [self.prior.structural_pattern, *(outline.pattern for outline in self._outlines)]
        known = [pattern for pattern in patterns if pattern is not None]
        if len(known) < len(patterns):
            return None
        return Pattern.of(sum((p.matrix.astype(np.float64) for p in known[1:]), known[0].matrix.astype(np.float64)))

    @functools.cached_property
    def pattern(self) -> Pattern | None:
        """The same; None where the Hessian counts as dense."""
        return None if is_dense(self.structural_pattern) else self.structural_pattern

    def mean_hessian(self, theta: Array) -> MeanHessian:
        """Return the mean of the Hessian over draws, (n_draws, n_dim), which evaluates what it is asked for."""

        def evaluated() -> MeanHessian:
            parts = self.shards.ask(Request(Shard.mean_hessian, (theta, self.pattern is None)))
            return self._sum_of_hessians(self.prior.mean_hessian(theta), parts)

        return Later(self.pattern, evaluated)

    def _sum_of_hessians(self, own: MeanHessian, parts: list[Array]) -> MeanHessian:
        """Add the Hessians of shards, as they send them, to that of the prior."""
        pattern = self.pattern
        if pattern is None:
            return MatrixHessian(sum(parts, own.products(np.eye(self.n_dim))))
        if own.pattern is None:
            result = own.products(np.eye(self.n_dim))[pattern.rows, pattern.cols]
        else:
            result = np.zeros(len(pattern.rows))
            result[self._places_of(own.pattern)] = own.values()
        for part, outline in zip(parts, self._outlines, strict=True):
            assert outline.pattern is not None
            result[self._places_of(outline.pattern)] += part
        return PatternHessian(pattern, result)

    def _places_of(self, pattern: Pattern) -> NDArray[np.intp]:
        """Return where the entries of a pattern are among those of all."""
        assert self.pattern is not None
        return np.searchsorted(
            self.pattern.rows * self.n_dim + self.pattern.cols, pattern.rows * pattern.n_dim + pattern.cols
        )


def _cover(likelihood: LogDensity, theta: Array) -> bool:
    return likelihood.rows_cover(lambda: theta)
