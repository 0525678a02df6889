"""The log density of a model whose data come in batches: the prior, and the likelihood of one batch at a time."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, Never

import numpy as np
import pymc as pm

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.hessians import MatrixHessian
from pymc_ngvi.core.stream import Batch, Place
from pymc_ngvi.core.target import Expectation, RowRules, Spread
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.checks import quoted
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.reuse import CannotReuse
from pymc_ngvi.density.streams.batch import print_of
from pymc_ngvi.density.streams.errors import BatchError
from pymc_ngvi.density.streams.likelihoods import BatchLikelihood, Likelihood, form_of, likelihoods_of
from pymc_ngvi.density.streams.source import Source

#: Likelihoods of batches of different lengths that are kept, at most; their rows together, in those of the longest.
_MOST_KEPT, _MOST_ROWS = 16, 2.5
#: Rows that are kept of a batch that can be read once, at least.
_FEWEST_KEPT = 20
_NO_HESSIAN = "Hessians at points are not to be had of data in batches: take shards=, or the whole data."
_NO_ROWS = (
    "is no sum over rows, each a function of a few linear predictors ({}), which batches= needs. Take pm.Minibatch, or "
    "shards=, or the whole data."
)


class Streamed(NamedTuple):
    """A model, and where its data come from.

    Parameters
    ----------
    model : pymc.Model
    source : Source
    """

    model: pm.Model
    source: Source


class StreamDensity(LogDensity):
    """Log density of a model whose data come in batches; see `LogDensity`.

    Parameters
    ----------
    streamed : Streamed
    backend, compile_kwargs
        See `LogDensity`.

    Raises
    ------
    ValueError
        For a model that is no prior and likelihoods of batches.
    BatchError
        Where the first batch is not what the model needs.
    """

    is_streamed = True

    def __init__(
        self, streamed: Streamed, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None
    ) -> None:
        model, self._source = streamed
        self._form = form_of(model)
        data = self._source.look()
        first = self._form.arrays(data, "The first batch")
        self._likelihoods = likelihoods_of(model, first)
        sizes = {part.name: part.total_size for part in self._likelihoods}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The likelihoods have different total_size: {sizes}. Give all of them the same rows.")
        self.total_size = next(iter(sizes.values()))
        self._form = replace(self._form, names=tuple(first), by_row=self._by_row(model, first))
        first = self._form.arrays(data, "The first batch")
        super().__init__(model, backend, compile_kwargs)
        if self.rows is None:
            raise ValueError(f"The prior {_NO_ROWS.format(self.by_rows.why_not)}")
        self._kept = OrderedDict[tuple[tuple[int, ...], ...], BatchLikelihood]()
        self._parts: dict[int, Mapping[str, AnyArray]] = {}
        self._arrays: Mapping[str, AnyArray] = first
        self._batch = self._likelihood_of(first, "The first batch")
        self._n_first = self._batch.n_rows[0]

    def _by_row(self, model: pm.Model, first: Mapping[str, AnyArray]) -> tuple[str, ...]:
        """Return the names of data whose first axis is that of rows; see that none is missing."""
        lengths = {name: shape[0] for name, shape in self._form.shapes.items() if shape}
        n_rows = {int(part.value.shape[0].eval()) for part in self._likelihoods}
        missing = [
            name
            for name, length in lengths.items()
            if name not in first and length in n_rows and _are_used(model, name, self._likelihoods)
        ]
        if missing:
            raise BatchError(
                f"The first batch lacks {quoted(missing)}; it has {quoted(first)}. In the model, {quoted(missing)} "
                "has as many rows as the observed values: give it in each batch, or as an array, no pm.Data, if its "
                "rows are not those of the data."
            )
        return tuple(name for name in first if lengths.get(name) in n_rows)

    def _graph_of(self, model: pm.Model) -> Variable:
        streamed = {part.name for part in self._likelihoods}
        fixed = [rv for rv in model.observed_RVs if rv.name not in streamed]
        return model.logp(vars=[*model.free_RVs, *fixed, *model.potentials])

    def again(self, backend: str = "auto", compile_kwargs: Mapping[str, object] | None = None) -> Never:
        """Raise: the first batch is to be read anew."""
        raise CannotReuse("its data come in batches")

    # --- batches ---

    @property
    def is_read_once(self) -> bool:
        """Whether there is one pass through the data, and no other."""
        return self._source.is_read_once

    @property
    def is_random(self) -> bool:
        """Whether each pass has a random order of its own."""
        return self._source.is_random

    def read(self, seed: int, place: Place) -> Batch:
        """Read the batch at a place; see `StreamTarget`.

        Raises
        ------
        BatchError
            Where it can't be read or used, or where the pass has another number of rows than ``total_size``.
        """
        raw = self._source.read(seed, place)
        if raw is None:
            raise self._another_size(place, f"has {place.n_before:,} rows")
        where = f"Batch {place.position + 1} of pass {place.number + 1}"
        self._arrays = arrays = self._form.arrays(raw.data, where)
        self._batch = self._likelihood_of(arrays, where)
        n_rows = self._batch.n_rows[0]
        n_read, following = place.n_before + n_rows, place._replace(position=place.position + 1)
        is_last = n_read >= self.total_size
        if n_read > self.total_size or (is_last and self._source.has_more(seed, following)):
            raise self._another_size(place, f"has more than {self.total_size:,} rows")
        return Batch(raw.which, n_rows, is_last, print_of(arrays))

    def _another_size(self, place: Place, has: str) -> BatchError:
        return BatchError(
            f"Pass {place.number + 1} through the batches {has}, and total_size is {self.total_size:,}: give the "
            "model the number of rows that all batches have together."
        )

    def keep(self, which: int, q: Spread) -> tuple[int, Expectation]:
        """Keep some rows of the batch that was read last, evenly spread; see `StreamTarget`."""
        n_rows = self._batch.n_rows[0]
        n_kept = min(n_rows, max(_FEWEST_KEPT, round(n_rows * self._n_first / self.total_size)))
        rows = np.linspace(0.0, n_rows - 1.0, n_kept).astype(np.intp)
        self._parts[which] = {
            name: array[rows] if name in self._form.by_row else array for name, array in self._arrays.items()
        }
        return n_kept, self.of_kept(which, q)

    def of_kept(self, which: int, q: Spread) -> Expectation:
        """Return the expectation of the log likelihood of rows that were kept of a batch, under a Gaussian."""
        rows = self._likelihood_of(self._parts[which], f"Batch {which + 1}").rows
        assert rows is not None
        return rows.under(q)

    def _likelihood_of(self, arrays: Mapping[str, AnyArray], where: str) -> BatchLikelihood:
        """Return the log likelihood of a batch; that of the last batch of the same shapes serves again."""
        shapes = tuple(array.shape for array in arrays.values())
        if shapes in self._kept:
            self._kept[shapes].take(arrays)
        else:
            self._kept[shapes] = BatchLikelihood(self.model, self._likelihoods, arrays)
        self._kept.move_to_end(shapes)
        found = self._kept[shapes]
        self._forget_some()
        if found.rows is None:
            raise BatchError(f"{where} can't be used: its log likelihood {_NO_ROWS.format(found.by_rows.why_not)}")
        if len(set(found.n_rows)) > 1:
            raise BatchError(f"{where} has other numbers of rows by likelihood: {found.n_rows}.")
        return found

    def _forget_some(self) -> None:
        """Forget likelihoods that were not used for long, where they are many, or large."""
        while len(self._kept) > 2:
            n_rows = [batch.n_rows[0] for batch in self._kept.values()]
            if len(n_rows) <= _MOST_KEPT and sum(n_rows) <= _MOST_ROWS * max(n_rows):
                break
            self._kept.popitem(last=False)

    def of_prior(self, q: Spread) -> Expectation:
        """Return the expectation of what is no likelihood of a batch, under a Gaussian."""
        return super().expected(q)

    def of_batch(self, q: Spread, rules: RowRules | None = None) -> Expectation:
        """Return the expectation of the log likelihood of the batch that was read last; see `StreamTarget`."""
        rows = self._batch.rows
        assert rows is not None
        return rows.under(q, rules=rules, adapt=rules is not None)

    def _all_batches(self) -> Iterator[BatchLikelihood]:
        """Go through all batches once more."""
        for number, data in enumerate(self._source.all()):
            where = f"Batch {number + 1}"
            yield self._likelihood_of(self._form.arrays(data, where), where)

    # --- all of the data: a pass each ---

    @property
    def rows(self) -> Expectations | None:
        """Rows of the prior; None where log p is no sum over rows."""
        return super().rows

    @property
    def seen_from_rows(self) -> None:
        """None: rows are not gathered in one place."""
        return

    @property
    def pattern(self) -> None:
        """None: which entries of the Hessian can differ from 0 depends on data that were not read."""
        return

    @property
    def structural_pattern(self) -> None:
        """None: see `pattern`."""
        return

    @property
    def summed(self) -> None:
        """None: see `pattern`."""
        return

    @property
    def is_small(self) -> bool:
        """Whether a batch of draws is too little work to share among threads."""
        return False

    @property
    def why_in_part(self) -> str:
        """Why log p is not to be had with all of the data; empty where another pass gives it."""
        return "its data could be read once" if self.is_read_once else ""

    @property
    def has_hessian(self) -> bool:
        """False: expectations of Hessians are those of batches."""
        return False

    def mean_hessian(self, theta: Array) -> Never:
        """Raise: see `has_hessian`."""
        raise ValueError(_NO_HESSIAN)

    def mean_hessians(self, draws: list[Array]) -> Never:
        """Raise: see `has_hessian`."""
        raise ValueError(_NO_HESSIAN)

    def hessian_products(self, theta: Array, directions: Array) -> Never:
        """Raise: see `has_hessian`."""
        raise ValueError(_NO_HESSIAN)

    def gauss_newton(self, theta: Array) -> Never:
        """Raise: see `has_hessian`."""
        raise ValueError(_NO_HESSIAN)

    @property
    def gradient_seconds(self) -> float:
        """Estimated time of log p and its gradient at one point, without that of reading."""
        n_batches = self.total_size / self._batch.n_rows[0]
        return super().gradient_seconds + n_batches * self._batch.gradient_seconds

    def logp(self, theta: Array) -> Array:
        """Evaluate the log density, (n_draws,), at points (n_draws, n_dim): a pass through the data."""
        result: Array = sum((batch.logp(theta) for batch in self._all_batches()), super().logp(theta))
        return result

    def logp_grad(self, theta: Array) -> tuple[Array, Array]:
        """Evaluate the log density and its gradient: a pass through the data."""
        logp, grad = super().logp_grad(theta)
        for batch in self._all_batches():
            part = batch.logp_grad(theta)
            logp, grad = logp + part[0], grad + part[1]
        return logp, grad

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian: a pass through the data, by rules that q needs."""
        own = super().expected(q)
        value, error, grad, hessian = own.value, own.error, own.grad, own.hessian.products(np.eye(self.n_dim))
        for batch in self._all_batches():
            assert batch.rows is not None
            part = batch.rows.under(q)
            value, error, grad = value + part.value, error + part.error, grad + part.grad
            hessian = hessian + part.hessian.products(np.eye(self.n_dim))
        return Expectation(value, error, grad, MatrixHessian(hessian), own.rules)


def _are_used(model: pm.Model, name: str, likelihoods: list[Likelihood]) -> bool:
    return model[name] in set(ancestors([part.rv for part in likelihoods] + [part.value for part in likelihoods]))
