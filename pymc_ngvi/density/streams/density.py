"""The log density of a model whose data come in batches: the prior, and the likelihood of one batch at a time."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pymc as pm

from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.hessians import MatrixHessian
from pymc_ngvi.core.stream import Batch, Place
from pymc_ngvi.core.target import Expectation, RowRules, Spread
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.checks import quoted
from pymc_ngvi.density.logdensity import LogDensity
from pymc_ngvi.density.row_kinds import ModelRows
from pymc_ngvi.density.streams.batch import print_of
from pymc_ngvi.density.streams.errors import BatchError
from pymc_ngvi.density.streams.likelihoods import BatchLikelihood, Likelihood, batch_form, likelihoods_of
from pymc_ngvi.density.streams.source import BatchSource
from pymc_ngvi.density.sum import Sum
from pymc_ngvi.reading.factors import Factor, factors_of

#: Likelihoods of batches of different lengths that are kept, at most; their rows together, in those of the longest.
_MOST_KEPT, _MOST_ROWS = 16, 2.5
#: Rows that are kept of a batch that can be read once, at least.
_FEWEST_KEPT = 20
_NO_ROWS = (
    "is no sum over rows, each a function of a few linear predictors ({}), which batches= needs. Take pm.Minibatch, or "
    "shards=, or the whole data."
)


class Streamed(NamedTuple):
    """A model, and where its data come from.

    Parameters
    ----------
    model : pymc.Model
    source : BatchSource
    """

    model: pm.Model
    source: BatchSource


class StreamDensity(Sum):
    """Log density of a model whose data come in batches; see `ModelDensity`. All of the data take a pass each time.

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
        self._form = batch_form(model)
        data = self._source.look()
        first = self._form.arrays(data, "The first batch")
        self._likelihoods = likelihoods_of(model, first)
        sizes = {part.name: part.total_size for part in self._likelihoods}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The likelihoods have different total_size: {sizes}. Give all of them the same rows.")
        self.total_size = next(iter(sizes.values()))
        self._form = replace(self._form, names=tuple(first), by_row=self._by_row(model, first))
        first = self._form.arrays(data, "The first batch")
        super().__init__(LogDensity(model, backend, compile_kwargs, factors=self._factors_of))
        if self.n_directions is None:
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

    def _factors_of(self, model: pm.Model) -> tuple[Factor, ...]:
        streamed = {part.name for part in self._likelihoods}
        fixed = [rv for rv in model.observed_RVs if rv.name not in streamed]
        return factors_of(model, [*model.free_RVs, *fixed, *model.potentials])

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
        return self._likelihood_of(self._parts[which], f"Batch {which + 1}").rows.under(q)

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
        if found.log_p.rows is None:
            why = found.log_p.by_rows.why_not
            raise BatchError(f"{where} can't be used: its log likelihood {_NO_ROWS.format(why)}")
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
        return self.prior.expected(q)

    def of_batch(self, q: Spread, rules: RowRules | None = None) -> Expectation:
        """Return the expectation of the log likelihood of the batch that was read last; see `StreamTarget`."""
        return self._batch.rows.under(q, rules=rules, adapt=rules is not None)

    def _all_batches(self) -> Iterator[BatchLikelihood]:
        """Go through all batches once more."""
        for number, data in enumerate(self._source.all()):
            where = f"Batch {number + 1}"
            yield self._likelihood_of(self._form.arrays(data, where), where)

    # --- all of the data: a pass each ---

    @property
    def why_in_part(self) -> str:
        """Why log p is not to be had with all of the data; empty where another pass gives it."""
        return "its data could be read once" if self.is_read_once else ""

    @property
    def likelihood_seconds(self) -> float:
        """Estimated time of the likelihoods of all batches at one point, without that of reading."""
        return self.total_size / self._batch.n_rows[0] * self._batch.log_p.gradient_seconds

    def log_likelihoods(self, theta: Array) -> Iterator[Array]:
        """Evaluate the likelihoods of batches, (n_draws,) each."""
        return (batch.log_p.logp(theta) for batch in self._all_batches())

    def log_likelihoods_and_grads(self, theta: Array) -> Iterator[tuple[Array, Array]]:
        """Evaluate the likelihoods of batches and their gradients, (n_draws,) and (n_draws, n_dim)."""
        return (batch.log_p.logp_grad(theta) for batch in self._all_batches())

    def described_rows(self) -> ModelRows | None:
        """Return what the rows are of the prior, and of the batch that was read last."""
        prior, batch = self.prior.described_rows(), self._batch.log_p.described_rows()
        return prior if prior is None or batch is None else prior.beside(batch)

    def expected(
        self, q: Spread, rules: RowRules | None = None, *, adapt: bool = False, least: float = -np.inf
    ) -> Expectation:
        """Return the expectation of log p under a Gaussian, by rules that q needs."""
        own = self.of_prior(q)
        value, error, grad, hessian = own.value, own.error, own.grad, own.hessian.products(np.eye(self.n_dim))
        for batch in self._all_batches():
            part = batch.rows.under(q)
            value, error, grad = value + part.value, error + part.error, grad + part.grad
            hessian = hessian + part.hessian.products(np.eye(self.n_dim))
        return Expectation(value, error, grad, MatrixHessian(hessian), own.rules)


def _are_used(model: pm.Model, name: str, likelihoods: list[Likelihood]) -> bool:
    return model[name] in set(ancestors([part.rv for part in likelihoods] + [part.value for part in likelihoods]))
