"""Whether shards are parts of one model: the same variables, the same prior, data in each."""

from collections.abc import Hashable, Sequence

import numpy as np

from pymc_ngvi.core.types import Array
from pymc_ngvi.model.shards.errors import ShardError
from pymc_ngvi.model.shards.requests import Facts, Signature

#: Relative difference of two log densities that is rounding.
_ROUNDING = 1e-9


def check_same(keys: Sequence[Hashable], facts: Sequence[Facts]) -> None:
    """Compare each shard with the first.

    Raises
    ------
    ShardError
        Naming the first that has other variables, or another prior.
    """
    first = facts[0]
    for key, other in zip(keys[1:], facts[1:], strict=True):
        _check_variables(keys[0], first.signature, key, other.signature)
        if not _same(first.log_prior, other.log_prior):
            raise ShardError(
                f"The priors of shards {keys[0]!r} and {key!r} differ: at the same points, their log densities are "
                f"{_listed(first.log_prior)} and {_listed(other.log_prior)}. Priors that are scaled to the data, and "
                "predictors that are standardised, have to be so by the numbers of the whole data.",
                key,
            )
        if first.potentials.keys() != other.potentials.keys():
            raise ShardError(f"Shards {keys[0]!r} and {key!r} have other potentials.", key)


def common_potentials(facts: Sequence[Facts]) -> tuple[str, ...]:
    """Return the potentials that are the same in all shards: parts of the prior."""
    if len(facts) == 1:
        return ()
    first = facts[0].potentials
    return tuple(name for name in first if all(_same(first[name], other.potentials[name]) for other in facts[1:]))


def _check_variables(one: Hashable, first: Signature, key: Hashable, other: Signature) -> None:
    if list(first) != list(other):
        raise ShardError(
            f"Shard {one!r} has the free variables {', '.join(first)}, and shard {key!r} has {', '.join(other)}: give "
            "all shards the same variables, in the same order.",
            key,
        )
    for name, parts in first.items():
        for what, here, there in zip(parts._fields, parts, other[name], strict=True):
            if here != there:
                raise ShardError(
                    f"The {what} of {name!r} differs between the shards {one!r} ({_short(here)}) and {key!r} "
                    f"({_short(there)}). Where these follow from the data, such as groups or levels of a factor, they "
                    "have to be those of the whole data.",
                    key,
                )


def _same(one: Array, other: Array) -> bool:
    return len(one) == len(other) and bool(np.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True))


def _listed(values: Array) -> str:
    return f"({', '.join(f'{value:.6g}' for value in values)})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
