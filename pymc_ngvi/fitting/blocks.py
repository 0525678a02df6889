"""From names of variables to the blocks of a block-diagonal covariance."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.graphs.layout import Layout, Variable

_EXPECTED = "blocks should be a sequence of sequences of names, such as [['a', 'b'], ['c']]"


def block_labels(layout: Layout, blocks: Sequence[Sequence[str]] | None = None) -> NDArray[np.intp]:
    """Return which block each coordinate belongs to.

    Parameters
    ----------
    layout : Layout
    blocks : sequence of sequences of str, optional
        Each inner sequence names the coordinates of one block. A name is that of a free variable (``sd``), of its
        value variable (``sd_log__``), or the label of one coordinate (``beta[3]``). What is left of each variable
        forms a block of its own; by default each variable does.

    Returns
    -------
    ndarray of int, shape (n_dim,)
        Labels from 0 on, in the order of each block's first coordinate.

    Raises
    ------
    ValueError
        If ``blocks`` is no sequence of sequences of names, a block is empty, a name is unknown, or a coordinate is in
        two blocks.
    """
    parsed = _parsed(blocks)
    labels = np.full(layout.n_dim, -1, dtype=np.intp)
    for block, names in enumerate(parsed):
        for name in names:
            where = _coordinates(layout, name)
            taken = where[(labels[where] >= 0) & (labels[where] != block)]
            if len(taken):
                other = labels[taken[0]]
                raise ValueError(
                    f"blocks[{other}] = {parsed[other]} and blocks[{block}] = {names} share "
                    f"{layout.label(taken[0])!r}; each coordinate should be in one block."
                )
            labels[where] = block
    for i, v in enumerate(layout.variables):
        part = labels[v.where]  # a view
        part[part < 0] = len(parsed) + i
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def _parsed(blocks: object) -> list[list[str]]:
    """Return the names in each block."""
    if blocks is None:
        return []
    parsed: list[list[str]] = []
    for block in _checked(blocks, "blocks"):
        names = _checked(block, f"blocks[{len(parsed)}]")
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"{_EXPECTED}; in blocks[{len(parsed)}] there is {name!r}, no name.")
        if not names:
            raise ValueError(f"blocks[{len(parsed)}] is empty; a block should name one coordinate at least.")
        parsed.append(names)
    return parsed


def _checked(value: object, what: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{_EXPECTED}; {what} is {value!r}.")
    return list(value)


def _coordinates(layout: Layout, name: str) -> NDArray[np.intp]:
    """Return the flat coordinates that a name stands for."""
    by_name: dict[str, Variable] = {v.value_name: v for v in layout.variables}
    by_name |= {v.name: v for v in layout.variables}
    if name in by_name:
        where = by_name[name].where
        return np.arange(where.start, where.stop)
    base, _, index = name.removesuffix("]").rpartition("[")
    owner = by_name.get(base)
    if owner is None:
        raise ValueError(f"blocks names {name!r}, which is no free variable: {suggestion(name, by_name)}")
    try:
        if base != owner.value_name or not name.endswith("]"):
            raise ValueError
        position = np.ravel_multi_index([int(i) for i in index.split(",")], owner.shape)
    except ValueError:
        shape = f"its value {owner.value_name!r} has shape {owner.shape}"
        if owner.shape and owner.size:
            first, last = (layout.label(i) for i in (owner.where.start, owner.where.stop - 1))
            shape += f", coordinates from {first!r} to {last!r}"
        raise ValueError(f"blocks names {name!r}, which is no coordinate of {owner.name!r}: {shape}.") from None
    return np.array([owner.where.start + position], dtype=np.intp)
