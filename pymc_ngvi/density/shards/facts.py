"""What there is to know of the model of a shard: its variables, its prior, whether it has data of its own."""

import hashlib
import math

from collections.abc import Hashable, Iterable, Iterator

import numpy as np
import pymc as pm

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.shards.errors import ShardError
from pymc_ngvi.density.shards.requests import ModelFacts, Potential, Signature, VariableForm
from pymc_ngvi.graphs.backends import without_c
from pymc_ngvi.reading.factors import factors_of, logp_of
from pymc_ngvi.reading.observations import n_axes


def facts_of(key: Hashable, model: pm.Model, theta: Array) -> ModelFacts:
    """Return the facts of a shard's model, with its prior at points, (n_points, n_dim).

    Raises
    ------
    ShardError
        Where the model has no observed values.
    """
    shapes = {rv: tuple(rv.shape.eval()) for rv in model.observed_RVs}
    if not any(map(math.prod, shapes.values())) and not model.potentials:
        raise ShardError(f"Shard {key!r} is empty: its model has no observed values. Leave its key out.", key)
    observations = {str(rv.name): math.prod(shape[: n_axes(rv, len(shape))]) for rv, shape in shapes.items()}
    signature, lacking, free = signature_of(model), lacking_of(model), model.free_RVs
    deterministics = {str(term.name): digest_of(term, free) for term in model.deterministics}
    n_dim = sum(form.size for form in signature.values())
    if n_dim != theta.shape[1]:  # the caller compares signatures
        return ModelFacts(signature, observations, np.empty(0), {}, deterministics, lacking)
    factors = factors_of(model, [*free, *model.potentials])
    with without_c(model):
        terms = [logp_of(part) for part in (factors[: len(free)], *([factor] for factor in factors[len(free) :]))]
        function = model.compile_fn(terms, inputs=model.value_vars, mode="FAST_COMPILE", point_fn=True)
        values = [function(_point(signature, row)) for row in theta]
    prior, *others = np.array(values, dtype=np.float64).reshape(len(theta), -1).T
    potentials = {
        str(term.name): Potential(at_points, digest_of(term, free))
        for term, at_points in zip(model.potentials, others, strict=True)
    }
    return ModelFacts(signature, observations, prior, potentials, deterministics, lacking)


def signature_of(model: pm.Model) -> Signature:
    """Return the shape, transform, dims and coordinates of each free variable."""
    point = model.initial_point(random_seed=0)
    result = dict[str, VariableForm]()
    for value in model.value_vars:
        rv = model.values_to_rvs[value]
        dims = tuple(model.named_vars_to_dims.get(rv.name) or ())
        coords = tuple((dim, tuple(_comparable(model.coords.get(dim) or ()))) for dim in dims)
        result[value.name] = VariableForm(rv.name, np.shape(point[value.name]), dims, coords)
    return result


def lacking_of(model: pm.Model) -> tuple[str, ...]:
    """Return the names of observed variables that lack values: PyMC makes these free variables."""
    observed, free = ({str(rv.name) for rv in rvs} for rvs in (model.observed_RVs, model.free_RVs))
    names = (name.removesuffix("_observed") for name in sorted(observed) if name.endswith("_observed"))
    return tuple(name for name in names if f"{name}_unobserved" in free)


def bytes_of(model: pm.Model) -> int:
    """Return the bytes of the arrays of a model, those that are the same object counted once."""
    values = [value for value in model.rvs_to_values.values() if value is not None]
    found = {id(array): array.nbytes for array in _arrays([*model.basic_RVs, *model.potentials, *values])}
    return sum(found.values())


def digest_of(term: Variable, free: Iterable[Variable]) -> str:
    """Return a digest of all data that a term reads, but for those of the prior of free variables."""
    digests = {hashlib.blake2b(np.ascontiguousarray(array).tobytes()).digest() for array in _arrays([term], free)}
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=16).hexdigest()


def _arrays(of: Iterable[Variable], but: Iterable[Variable] = ()) -> Iterator[AnyArray]:
    for var in ancestors(list(of), list(but)):
        array = getattr(var, "data", None) if isinstance(var, Constant) else None
        array = var.get_value(borrow=True) if isinstance(var, SharedVariable) else array
        if isinstance(array, np.ndarray):
            yield array


def _comparable(values: Iterable[object]) -> Iterator[object]:
    """Yield values that are equal to themselves, which nan is not."""
    return ("nan" if value != value else value for value in values)


def _point(signature: Signature, row: Array) -> dict[str, Array]:
    """Return values by name of a flat vector."""
    point, start = {}, 0
    for name, form in signature.items():
        point[name] = row[start : start + form.size].reshape(form.shape)
        start += form.size
    return point
