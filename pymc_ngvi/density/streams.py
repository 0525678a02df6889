"""The log density of a model whose data come in batches: the prior, and the likelihood of one batch at a time."""

import hashlib

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor

from pymc.data import MinibatchOp
from pymc.logprob.basic import transformed_conditional_logp
from pymc.variational.minibatch_rv import MinibatchRandomVariable
from pytensor.graph import Constant, Variable, ancestors, graph_replace
from pytensor.tensor import as_tensor

from pymc_ngvi.core.messages import shortened, suggestion
from pymc_ngvi.core.status import format_gap
from pymc_ngvi.core.stored import stored
from pymc_ngvi.core.types import AnyArray, Array, Expectation, Indices, MatrixHessian, RowRules, Spread
from pymc_ngvi.density.by_rows import ModelRows
from pymc_ngvi.density.expectations import Expectations
from pymc_ngvi.density.info import data_in, quoted
from pymc_ngvi.density.logdensity import LogDensity, Sum
from pymc_ngvi.graphs.backends import quickly
from pymc_ngvi.reading.predictors import Factor, factors_of

# --- data that are read batch by batch: where a fit is, and what it has to say of them ---


@stored("stream.place")
class Place(NamedTuple):
    """Which batch is the next one."""

    #: Of the pass through the data, from 0.
    number: int = 0
    #: In that pass, from 0.
    position: int = 0
    #: Rows of that pass that were read before.
    n_before: int = 0


class Batch(NamedTuple):
    """A batch that was read."""

    #: Tells batches of a pass apart; the same in each pass.
    which: int
    n_rows: int
    #: Whether it is the last one of its pass.
    is_last: bool
    #: Other data have another one.
    print: str


@stored("stream.report")
@dataclass(frozen=True)
class StreamReport:
    """What a fit has to say of data in batches."""

    #: Through all of the data.
    n_passes: int
    #: Batches of another pass that was not ended.
    n_more: int
    #: That were read.
    n_batches: int
    n_rows: int
    #: Nats that the last of several passes has gained: less is left. After the only pass, the nats that another one
    #: is to be expected to gain.
    gap: float
    #: How far means have moved by the last pass, or would by another one, in posterior standard deviations, at most.
    moved: float
    #: Whether there was one pass only, because the data could not be read again.
    was_read_once: bool
    #: Whether q moved at the ends of passes alone, because batches differ from pass to pass.
    is_held: bool
    #: What speaks for an order of the data, in a clause; empty where nothing does.
    ordered: str

    def __str__(self) -> str:
        """Return the same in sentences."""
        more = f" and {self.n_more} batches" if self.n_more else ""
        passes = f"{self.n_passes} pass{'es'[: 2 * (self.n_passes != 1)]}{more}"
        said = [f"{passes} through {self.n_batches} batches of {self.n_rows:,} rows."]
        sds, gap = f"up to {self.moved:.2g} posterior standard deviations", format_gap(self.gap, " nats")
        if self.gap < float("inf") and self.was_read_once:
            said.append(f"Another pass is expected to move means by {sds}, and to gain {gap}.")
        elif self.gap < float("inf"):
            said.append(f"The last one moved means by {sds} and gained {gap}; less is left.")
        if self.is_held:
            said.append("Batches differ from pass to pass: q was updated at the end of each pass only.")
        if self.ordered:
            said.append(f"The data seem to be ordered: {self.ordered}.")
        return " ".join(said)

    @property
    def warning(self) -> str:
        """What is to be warned of; empty where nothing is."""
        if not (self.ordered and self.was_read_once):
            return ""
        return (
            f"The data seem to be ordered ({self.ordered}), and could be read once: the first batches are not like the "
            "others. Give batches that can be read again, or shuffle the rows."
        )


# --- what can go wrong with data in batches ---


class BatchError(RuntimeError):
    """A batch can't be used: it could not be read, or is not what the model needs.

    Attributes
    ----------
    approx : NGVIApproximation or None
        What the fit had come to, if it had begun: ``approx.refine()`` goes on with the batch that failed.
    """

    approx: object = None


#: Number of the random streams behind orders of batches.
_ORDERS = 7
_WHAT = (
    "batches should be an iterable of dicts {name of a pm.Data: array}, such as a list, a generator, an object with "
    "__iter__, or one with __len__ and __getitem__"
)
_NO_OTHER = (
    "batches is an iterator, which can be read only once: there is no other pass through the data. Give an object "
    "whose iter() begins anew."
)


#: What a source gave: the number of the batch, of the item or of its place in the order of the source, and its data.
type Raw = tuple[int, Any]


class BatchSource:
    """An iterable of batches."""

    def __init__(self, given: Any) -> None:
        self.given = given
        is_factory = callable(given) and not hasattr(given, "__iter__") and not hasattr(given, "__getitem__")
        is_list = hasattr(given, "__getitem__") and hasattr(given, "__len__")
        is_usable = is_factory or is_list or hasattr(given, "__iter__")
        if isinstance(given, Mapping | str | bytes | np.ndarray) or not is_usable:
            raise TypeError(f"{_WHAT}; got {shortened(given)}.")
        self._iterate: Callable[[], Iterator[Any]] = (lambda: iter(given())) if is_factory else (lambda: iter(given))
        #: None where a pass has the order of the source, and no order of its own.
        self.n_batches = len(given) if is_list else None
        self.is_read_once = isinstance(given, Iterator)
        self._open: Iterator[Any] | None = None
        self._next = Place()
        self._ahead: Raw | None = None
        self._last: tuple[Place, Raw] | None = None  # of what can be read once
        self._order: tuple[tuple[int, int], Indices] | None = None

    def look(self) -> Any:
        """Return the first batch, which will be read once more by `read`."""
        if self.n_batches is not None:
            if not self.n_batches:
                raise BatchError("batches is empty: its len() is 0.")
            return self._item(0, Place())
        if self._ahead is None:
            if self.is_read_once and self._open is not None:
                raise BatchError(
                    "batches is an iterator, which can be read only once, and was read by an earlier fit: give another "
                    "one, or an object whose iter() begins anew."
                )
            found = self._following(Place())
            if found is None:
                once = " Iterators can be read only once: this one may be used up." if self.is_read_once else ""
                raise BatchError(f"batches is empty: it gave nothing.{once}")
            self._ahead = found
        return self._ahead[1]

    def read(self, seed: int, place: Place) -> Raw | None:
        """Return the batch at a place; None after the last one of a pass."""
        if self.n_batches is not None:
            if self._order is None or self._order[0] != (seed, place.number):
                order = np.random.default_rng([seed, place.number, _ORDERS]).permutation(self.n_batches)
                self._order = (seed, place.number), order
            order = self._order[1]
            if place.position >= len(order):
                return None
            which = int(order[place.position])
            return which, self._item(which, place)
        if self._last is not None and self._last[0] == place:  # a visit that was cut short
            return self._last[1]
        found, self._ahead = (self._ahead if place[:2] == (0, 0) else None), None
        found = found or self._following(place)
        self._last = (place, found) if self.is_read_once and found is not None else None
        return found

    def has_more(self, seed: int, place: Place) -> bool:
        """Tell whether a pass goes on at a place, which is not to be read then."""
        if self.n_batches is not None:
            return place.position < self.n_batches
        return self._following(place) is not None

    def all(self) -> Iterator[Any]:
        """Go through all batches, in the source's own order."""
        if self.is_read_once:
            raise BatchError(
                "batches is an iterator, which can be read only once: what needs log p of all the data can't be had. "
                "Give an object whose iter() begins anew."
            )
        if self.n_batches is not None:
            for which in range(self.n_batches):
                yield self._item(which, Place(position=which))
            return
        try:
            yield from self._iterate()
        except Exception as error:
            raise BatchError(f"A batch can't be read: {type(error).__name__}: {error}") from error

    def _item(self, which: int, place: Place) -> Any:
        try:
            return self.given[which]
        except Exception as error:
            raise _unreadable(place, error, f", batches[{which}],") from error

    def _following(self, place: Place) -> Raw | None:
        """Return the batch at a place of the source's own order, going there where that is not the next one."""
        try:
            if self._open is None or self._next[:2] != place[:2] or (self.is_read_once and place.number):
                if self.is_read_once and (self._open is not None or place.number):
                    raise BatchError(_NO_OTHER)
                self._open = self._iterate()
                for _ in range(place.position):
                    next(self._open)
            assert self._open is not None
            data = next(self._open)
        except StopIteration:
            self._next = Place(place.number + 1)
            if not self.is_read_once:
                self._open = None
            return None
        except BatchError:
            raise
        except Exception as error:
            if not self.is_read_once:
                self._open = None
            raise _unreadable(place, error) from error
        self._next = Place(place.number, place.position + 1)
        return place.position, data


def _unreadable(place: Place, error: Exception, which: str = "") -> BatchError:
    return BatchError(
        f"Batch {place.position + 1} of pass {place.number + 1}{which} can't be read: {type(error).__name__}: {error}"
    )


# --- what a model takes of a batch: arrays for its data, of the right names, shapes and types ---

#: Rows whose values tell batches apart.
_N_PRINTED = 512


@dataclass(frozen=True)
class BatchForm:
    """What a model needs of each batch."""

    #: Of the data in the model, by name.
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, np.dtype[Any]]
    #: Of those that a batch has.
    names: tuple[str, ...] = ()
    #: Of those whose first axis is that of the rows.
    by_row: tuple[str, ...] = ()

    def arrays(self, data: Any, where: str) -> dict[str, AnyArray]:
        """Return the arrays of a batch."""
        arrays = {name: self._array(name, value, where) for name, value in self._named(data, where).items()}
        lengths = {name: len(arrays[name]) for name in self.by_row if name in arrays}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} {n}" for name, n in lengths.items())
            raise BatchError(f"{where} has arrays with different numbers of rows: {listed}.")
        if lengths and not min(lengths.values()):
            raise BatchError(f"{where} is empty: it has no rows. Leave it out.")
        return arrays

    def _named(self, data: Any, where: str) -> Mapping[str, Any]:
        if isinstance(data, np.ndarray) and len(self.shapes) == 1:
            data = {next(iter(self.shapes)): data}
        if not isinstance(data, Mapping):
            names = quoted(self.names or self.shapes)
            raise BatchError(
                f"{where} is a {type(data).__name__}; it should be a dict of arrays with the names of the model's "
                f"pm.Data ({names})."
            )
        unknown = [name for name in data if name not in self.shapes]
        if unknown:
            raise BatchError(
                f"{where} has {unknown[0]!r}, which is no pm.Data of the model: "
                f"{suggestion(unknown[0], list(self.shapes))}"
            )
        missing = [name for name in self.names if name not in data]
        if missing:
            raise BatchError(f"{where} lacks {quoted(missing)}; it has {quoted(data) or 'nothing'}.")
        extra = [name for name in data if self.names and name not in self.names]
        if extra:
            raise BatchError(f"{where} has {quoted(extra)}, which the first batch has not.")
        return data

    def _array(self, name: str, value: Any, where: str) -> AnyArray:
        array, own = np.asarray(value), self.shapes[name]
        if array.ndim != len(own) or array.shape[1:] != own[1:]:
            wanted = ", ".join(["rows", *map(str, own[1:])]) if own else ""
            raise BatchError(f"{where} has {name!r} of shape {array.shape}; the model's pm.Data has ({wanted}).")
        if array.dtype.kind not in "biuf":
            raise BatchError(
                f"{where} has {name!r} of type {array.dtype}; the model's pm.Data has {self.dtypes[name]}."
            )
        if array.dtype.kind == "f" and (bad := np.isnan(array)).any():
            row = int(np.argwhere(bad)[0][0]) if array.ndim else 0
            raise BatchError(
                f"{where} has {int(bad.sum())} NaN in {name!r}, the first in row {row}. Leave these rows out, or fill "
                "in what is missing."
            )
        converted = array.astype(self.dtypes[name], order="C")
        if array.dtype.kind == "f" and converted.dtype.kind != "f" and not np.array_equal(converted, array):
            raise BatchError(
                f"{where} has {name!r} with fractions; the model's pm.Data has {self.dtypes[name]}: make it float."
            )
        return converted


# --- which parts of a model are about batches, and what they say of one batch: its log likelihood, not scaled ---


class Likelihood(NamedTuple):
    """An observed variable whose rows come in batches."""

    name: str
    #: Without its scale.
    rv: Variable
    value: Variable
    total_size: int


def batch_form(model: pm.Model) -> BatchForm:
    """Return what the model has in the place of batches: all of its ``pm.Data``."""
    values = [value for value in model.rvs_to_values.values() if value is not None]
    if any(v.owner is not None and isinstance(v.owner.op, MinibatchOp) for v in ancestors([*model.basic_RVs, *values])):
        raise ValueError(
            "The model reads pm.Minibatch data, which are all in memory, and batches are given: take one of them. With "
            "batches, put pm.Data in the place of pm.Minibatch."
        )
    data = {name: var.get_value(borrow=True) for name, var in data_in(model).items()}
    if not data:
        raise ValueError(
            "batches are dicts of arrays for the model's pm.Data, and the model has none: write, for example, "
            "X = pm.Data('X', first_rows)."
        )
    return BatchForm({name: a.shape for name, a in data.items()}, {name: a.dtype for name, a in data.items()})


def likelihoods_of(model: pm.Model, names: Iterable[str]) -> list[Likelihood]:
    """Return the observed variables that depend on data in batches."""
    names = list(names)
    data, variables = {model[name] for name in names}, set(model.basic_RVs)
    free = [rv.name for rv in model.free_RVs if not data.isdisjoint(ancestors(rv.owner.inputs, variables))]
    if free:
        raise ValueError(
            f"Free variables {quoted(free)} depend on data in batches ({quoted(names)}): each batch would have another "
            "prior, or other variables. Let only observed variables depend on these."
        )
    potentials = [term.name for term in model.potentials if not data.isdisjoint(ancestors([term], variables))]
    if potentials:
        raise ValueError(
            f"Potentials {quoted(potentials)} depend on data in batches ({quoted(names)}), and have no total_size: "
            "write them as observed variables (pm.CustomDist)."
        )
    found = [
        rv
        for rv in model.observed_RVs
        if not data.isdisjoint(ancestors([*rv.owner.inputs, model.rvs_to_values[rv]], variables))
    ]
    if not found:
        raise ValueError(f"No observed variable depends on the data in batches ({quoted(names)}).")
    fixed = [rv.name for rv in found if data.isdisjoint(ancestors([model.rvs_to_values[rv]], variables))]
    if fixed:
        raise ValueError(
            f"The observed values of {quoted(fixed)} are not in the batches, which have {quoted(names)}: make them "
            "pm.Data, and give them in each batch."
        )
    return [Likelihood(rv.name, rv.owner.inputs[0], model.rvs_to_values[rv], _total_size(rv)) for rv in found]


def _total_size(rv: Any) -> int:
    if not isinstance(rv.owner.op, MinibatchRandomVariable):
        raise ValueError(
            f"{rv.name!r} depends on data in batches and has no total_size: give it total_size=, the number of rows of "
            "all batches together."
        )
    first, *others = (None if isinstance(n, Constant) and n.data is None else n for n in rv.owner.inputs[1:])
    if first is None or any(n is not None for n in others) or not rv.type.ndim:
        raise ValueError(
            f"total_size of {rv.name!r} should be one number, of the rows of all batches together; batches are along "
            "the first axis."
        )
    return int(np.asarray(first.data if isinstance(first, Constant) else first.eval()))


class BatchLikelihood:
    """The log likelihood of a batch, which may be replaced by others of the same shapes."""

    def __init__(self, model: pm.Model, likelihoods: list[Likelihood], arrays: Mapping[str, AnyArray]) -> None:
        self._likelihoods = likelihoods
        self._data: dict[str, Any] = {
            name: pytensor.shared(array, name, shape=model[name].type.shape, borrow=True)
            for name, array in arrays.items()
        }
        self.log_p = LogDensity(model, factors=self._factors_of)

    def _factors_of(self, model: pm.Model) -> tuple[Factor, ...]:
        values = {rv: model.rvs_to_values[rv] for rv in model.free_RVs}
        observed = {part.rv: part.value for part in self._likelihoods}
        transforms = {**model.rvs_to_transforms, **dict.fromkeys(observed)}
        logps = transformed_conditional_logp(
            list(observed), rvs_to_values={**values, **observed}, rvs_to_transforms=transforms
        )
        lengths = [part.value.shape[0] for part in self._likelihoods]
        own = {model[name]: var for name, var in self._data.items()}
        logps, lengths = (graph_replace(outputs, own, strict=False) for outputs in (logps, lengths))
        self._lengths = quickly([], lengths)
        logps = [as_tensor(logp, allow_xtensor_conversion=True) for logp in logps]
        return tuple(Factor(part.rv, "observed", logp) for part, logp in zip(self._likelihoods, logps, strict=True))

    @property
    def rows(self) -> Expectations:
        """Those that it is a sum over."""
        assert self.log_p.rows is not None
        return self.log_p.rows

    @property
    def n_rows(self) -> list[int]:
        """Rows of the batch, by likelihood."""
        return [int(n) for n in self._lengths()]

    def take(self, arrays: Mapping[str, AnyArray]) -> None:
        """Go to another batch."""
        for name, array in arrays.items():
            self._data[name].set_value(array, borrow=True)


# --- the log density of a model whose data come in batches: the prior, and the likelihood of one batch at a time ---

#: Likelihoods of batches of different lengths that are kept, at most; their rows together, in those of the longest.
_MOST_KEPT, _MOST_ROWS = 16, 2.5
#: Rows that are kept of a batch that can be read once, at least.
_FEWEST_KEPT = 20
_NO_ROWS = (
    "is no sum over rows, each a function of a few linear predictors ({}), which batches= needs. Take pm.Minibatch, or "
    "shards=, or the whole data."
)


class StreamDensity(Sum):
    """Log density of a model whose data come in batches; see `ModelDensity`. All of the data take a pass each time."""

    is_streamed = True

    def __init__(
        self,
        model: pm.Model,
        source: BatchSource,
        backend: str = "auto",
        compile_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self._source = source
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
        used = set(ancestors([var for part in self._likelihoods for var in (part.rv, part.value)]))
        missing = [n for n, length in lengths.items() if n not in first and length in n_rows and model[n] in used]
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

    def read(self, seed: int, place: Place) -> Batch:
        """Read the batch at a place; where there are passes in random orders, ``seed`` tells these."""
        raw = self._source.read(seed, place)
        if raw is None:
            raise self._another_size(place, f"has {place.n_before:,} rows")
        which, data = raw
        where = f"Batch {place.position + 1} of pass {place.number + 1}"
        self._arrays = arrays = self._form.arrays(data, where)
        self._batch = self._likelihood_of(arrays, where)
        n_rows = self._batch.n_rows[0]
        n_read, following = place.n_before + n_rows, place._replace(position=place.position + 1)
        is_last = n_read >= self.total_size
        if n_read > self.total_size or (is_last and self._source.has_more(seed, following)):
            raise self._another_size(place, f"has more than {self.total_size:,} rows")
        digest = hashlib.blake2b()  # of shapes, and of the first rows
        for name, array in arrays.items():
            digest.update(f"{name}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array[:_N_PRINTED]).tobytes() if array.ndim else array.tobytes())
        return Batch(which, n_rows, is_last, digest.hexdigest())

    def _another_size(self, place: Place, has: str) -> BatchError:
        return BatchError(
            f"Pass {place.number + 1} through the batches {has}, and total_size is {self.total_size:,}: give the "
            "model the number of rows that all batches have together."
        )

    def keep(self, which: int, q: Spread) -> tuple[int, Expectation]:
        """Keep some rows of the batch that was read last, evenly spread; return their number, and their `of_kept`.

        Of all batches together, these are about as many as one batch has.
        """
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
        while len(self._kept) > 2:
            n_rows = [batch.n_rows[0] for batch in self._kept.values()]
            if len(n_rows) <= _MOST_KEPT and sum(n_rows) <= _MOST_ROWS * max(n_rows):
                break
            self._kept.popitem(last=False)
        if found.log_p.rows is None:
            why = found.log_p.by_rows.why_not
            raise BatchError(f"{where} can't be used: its log likelihood {_NO_ROWS.format(why)}")
        if len(set(found.n_rows)) > 1:
            raise BatchError(f"{where} has other numbers of rows by likelihood: {found.n_rows}.")
        return found

    def of_prior(self, q: Spread) -> Expectation:
        """Return the expectation of what is no likelihood of a batch, under a Gaussian."""
        return self.prior.expected(q)

    def of_batch(self, q: Spread, rules: RowRules | None = None) -> Expectation:
        """Return the expectation of the log likelihood of the batch that was read last, under a Gaussian."""
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
        return self.elsewhere or ("its data could be read only once" if self.is_read_once else "")

    @property
    def likelihood_seconds(self) -> float:
        """Estimated time of the likelihoods of all batches at one point, without that of reading."""
        return self.total_size / self._batch.n_rows[0] * self._batch.log_p.gradient_seconds

    def each(self, function: Callable[[LogDensity, Array], Any], theta: Array) -> Iterator[Any]:
        """Evaluate a function of the likelihood of each batch at points, (n_draws, n_dim)."""
        return (function(batch.log_p, theta) for batch in self._all_batches())

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
