"""Whether shards are parts of one model: the same variables, the same prior, data in each."""

from collections.abc import Hashable, Sequence

import numpy as np

from pymc_ngvi.core.messages import shortened
from pymc_ngvi.core.types import Array
from pymc_ngvi.density.shards.errors import ShardError
from pymc_ngvi.density.shards.requests import ModelFacts, Signature

#: Relative difference of two log densities that is rounding.
_ROUNDING = 1e-9
_DIFFER = dict.fromkeys(("dims", "coordinates"), "differ")


def check_same(keys: Sequence[Hashable], facts: Sequence[ModelFacts]) -> None:
    """Compare each shard with the first.

    Raises
    ------
    ShardError
        Naming the first that has other variables, or another prior.
    """
    first = facts[0]
    if len(keys) > 1:
        _check_complete(keys, facts)
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


def common_potentials(keys: Sequence[Hashable], facts: Sequence[ModelFacts]) -> tuple[str, ...]:
    """Return the potentials that are the same in all shards: parts of the prior.

    Raises
    ------
    ShardError
        Where that can't be told.
    """
    if len(facts) == 1:
        return ()
    return tuple(name for name in facts[0].potentials if _is_common(name, keys, facts))


def common_deterministics(facts: Sequence[ModelFacts]) -> frozenset[str]:
    """Return the names of Deterministics that read the same data in all shards."""
    first, *others = (of_shard.deterministics.items() for of_shard in facts)
    return frozenset(name for name, _ in set(first).intersection(*others))


def _is_common(name: str, keys: Sequence[Hashable], facts: Sequence[ModelFacts]) -> bool:
    first, *others = (of_shard.potentials[name] for of_shard in facts)
    if not all(_same(first.values, other.values) for other in others):
        return False
    for key, other in zip(keys[1:], others, strict=True):
        if other.data != first.data:
            raise ShardError(
                f"The potential {name!r} has the same values in all shards, but reads other data in {key!r} than in "
                f"{keys[0]!r}: it can't be told whether it is part of the prior, and counts once. If it is a "
                "likelihood, make it an observed variable, such as a pm.CustomDist.",
                key,
            )
    return True


def _check_complete(keys: Sequence[Hashable], facts: Sequence[ModelFacts]) -> None:
    for key, of_shard in zip(keys, facts, strict=True):
        if of_shard.lacking:
            raise ShardError(
                f"{of_shard.lacking[0]!r} lacks values in shard {key!r}. They are free variables, and those of shards "
                "have to be the same. Leave out the rows that lack them.",
                key,
            )


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
                    f"The {what} of {name!r} {_DIFFER.get(what, 'differs')} between the shards {one!r} "
                    f"({shortened(here)}) and {key!r} ({shortened(there)}). Where these follow from the data, such "
                    "as groups or levels of a factor, they have to be those of the whole data.",
                    key,
                )


def _same(one: Array, other: Array) -> bool:
    return len(one) == len(other) and bool(np.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True))


def _listed(values: Array) -> str:
    return f"({', '.join(f'{value:.6g}' for value in values)})"
