"""What a model is made of, in words and as a table: the border, the blocks, the rows, and whose they are."""

import functools

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from pymc_ngvi.core.messages import percent
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.types import Indices
from pymc_ngvi.density.by_rows import ModelRows
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.families.sparse import find_blocks
from pymc_ngvi.graphs.layout import Layout

#: At most of a Hessian that is not dense.
_DENSE = 0.999


def rows_in_words(rows: ModelRows) -> list[str]:
    """Return lines that say what the rows are; names in backticks."""
    before = {"observed": "", "prior": "the prior of ", "potential": "the Potential "}
    rest = "; ".join(f"{before[part.role]}`{part.variable}` is none ({part.why})" for part in rows.rest)
    if not rows.parts:
        why = rows.why_not or rest
        return [f"No rows: {why}."] if why else []
    own = [f"{part.n:,} of {before[part.role]}`{part.variable}`" for part in rows.parts if part.role != "prior"]
    of_priors = [f"{part.n:,} of `{part.variable}`" for part in rows.parts if part.role == "prior"]
    parts = "; ".join(filter(None, [_listed(own), f"of priors, {_listed(of_priors)}" if of_priors else ""]))
    if rest:
        return [f"Not all of log p is a sum over rows: {rest}. The other parts are: {parts}."]
    lines = [f"Log p is a sum over {count(sum(part.n for part in rows.parts), 'row')}: {parts}."]
    return [*lines, f"No expectations are taken by rows: {rows.why_not}."] if rows.why_not else lines


def count(n: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


# --- what a model is made of, in words and as a table: the border, the blocks, the rows, and whose they are ---


#: Groups of blocks listed at most.
_N_GROUPS = 4
#: Part of the coordinates in blocks, below which there is nothing to say of these.
_LEAST_LOCAL = 0.1


class Part(NamedTuple):
    """Coordinates that play the same part: those of the border of one variable, or blocks of the same variables.

    Parameters
    ----------
    kind : {"blocks", "global"}
    variables : tuple of int
        Places in the layout.
    coordinates : ndarray of int
        Block after block.
    sizes : ndarray of int
        Of the blocks; empty in the border.
    """

    kind: Literal["blocks", "global"]
    variables: tuple[int, ...]
    coordinates: Indices
    sizes: Indices


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """Which coordinates of a model are independent of each other given which others, and what log p is a sum over.

    ``print`` says it in words. The *border* are coordinates that blocks may depend on: global parameters, and
    separators that cut a chain or a field. Given the border, blocks are independent of each other.

    Parameters
    ----------
    layout : Layout
    pattern : Pattern, optional
        Of the Hessian of log p; without it, that of ``arrow``, and dense without either.
    arrow : Partition, optional
        Without it, the one that `find_blocks` finds in ``pattern``.
    rows : ModelRows, optional
        What log p is a sum over; nothing is said of rows without it.
    sums : tuple of ndarray of int
        Coordinates of each sum over many that couples these beside what ``pattern`` has.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_ngvi.graphs.layout import Variable
    >>> beta = Variable("beta", "beta", (2,), slice(0, 2), None)
    >>> b = Variable("b", "b", (40,), slice(2, 42), None)
    >>> hessian = np.eye(42)
    >>> hessian[:2] = 1.0
    >>> structure = ModelStructure(Layout((beta, b), {}), Pattern.of(hessian))
    >>> print(structure)
    2 global parameters (`beta` 2); 40 independent blocks of size 1 from `b`.
    >>> structure.globals
    ['beta[0]', 'beta[1]']
    >>> structure.to_frame()["role"].tolist()
    ['global', 'local']
    """

    layout: Layout
    pattern: Pattern | None = None
    arrow: Partition | None = None
    rows: ModelRows | None = None
    sums: tuple[Indices, ...] = ()

    def __post_init__(self) -> None:
        if self.arrow is None and self.pattern is not None:
            object.__setattr__(self, "arrow", find_blocks(self.pattern))

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.layout.n_dim

    @property
    def n_global(self) -> int:
        """Coordinates in the border: global parameters and separators; all where the Hessian is dense."""
        return self.n_dim if self.arrow is None else len(self.arrow.border)

    @property
    def n_blocks(self) -> int:
        """Blocks that are independent given the border."""
        return len(self.block_sizes)

    @property
    def block_sizes(self) -> Indices:
        """Coordinates in each block, (n_blocks,), ascending."""
        return np.empty(0, dtype=np.intp) if self.arrow is None else self.arrow.sizes

    @functools.cached_property
    def globals(self) -> list[str]:
        """Labels of the coordinates in the border: ``beta[3]``, ``sd_log__``."""
        return [self.layout.label(int(i)) for i in self.border]

    @property
    def border(self) -> Indices:
        """Coordinates in the border, ascending."""
        return np.arange(self.n_dim) if self.arrow is None else self.arrow.border

    @property
    def n_entries(self) -> int:
        """Entries in the lower triangle of the Hessian, the diagonal included, that can differ from 0, sums aside."""
        if self.pattern is not None:
            return self.pattern.n_entries
        return self.n_dim * (self.n_dim + 1) // 2 if self.arrow is None else self.arrow.pattern.n_entries

    @property
    def density(self) -> float:
        """Part of the entries of the Hessian that can differ from 0, both triangles counted."""
        return (2 * self.n_entries - self.n_dim) / max(self.n_dim, 1) ** 2

    # --- who plays which part ---

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The coordinates by the part they play: blocks of the same variables, then the border by variable."""
        border, order, block = self.border, np.flatnonzero(self._block >= 0), self._block
        order = order[np.argsort(block[order], kind="stable")]
        has = np.zeros((self.n_blocks, len(self.layout.variables)), dtype=np.bool_)
        has[block[order], self._variable[order]] = True
        kinds, group = np.unique(has, axis=0, return_inverse=True)
        parts = [
            Part(
                "blocks",
                tuple(np.flatnonzero(of).tolist()),
                order[group[block[order]] == g],
                self.block_sizes[group == g],
            )
            for g, of in enumerate(kinds)
        ]
        for v in np.unique(self._variable[border]).tolist():
            parts.append(Part("global", (v,), border[self._variable[border] == v], np.empty(0, dtype=np.intp)))
        return tuple(sorted(parts, key=lambda p: (p.kind, p.variables)))

    @functools.cached_property
    def _variable(self) -> Indices:
        """Of each coordinate: the place of its variable in the layout."""
        return np.repeat(np.arange(len(self.layout.variables)), [v.size for v in self.layout.variables])

    @functools.cached_property
    def _block(self) -> Indices:
        """Of each coordinate: its block, -1 in the border."""
        result = np.full(self.n_dim, -1, dtype=np.intp)
        if self.arrow is not None:
            result[self.arrow.order[: len(self.arrow.locals_)]] = np.repeat(np.arange(self.n_blocks), self.block_sizes)
        return result

    # --- in words ---

    def __str__(self) -> str:
        return "\n".join([self.in_blocks, *([] if self.rows is None else rows_in_words(self.rows))])

    @property
    def in_blocks(self) -> str:
        """Which coordinates are independent of each other given which others, in a sentence."""
        n = self.n_dim
        if n < 2:
            return f"{count(n, 'coordinate')}."
        if self.n_entries == n * (n + 1) // 2:
            return f"Dense: the Hessian of log p couples all {n:,} coordinates."
        if self.n_blocks < 2 or self.n_dim - self.n_global < _LEAST_LOCAL * n:
            share = (
                f"{percent(min(self.density, _DENSE), '.3g')} of the entries of the Hessian of log p can differ from 0"
            )
            return f"Treated as dense: {share}, and to cut its {n:,} coordinates into blocks would not pay."
        border, blocks = ([part for part in self.parts if part.kind == kind] for kind in ("global", "blocks"))
        if len(blocks) > _N_GROUPS:
            coordinates, sizes = (np.concatenate(of) for of in zip(*(part[2:] for part in blocks), strict=True))
            blocks = [Part("blocks", self._variables_of(coordinates), coordinates, sizes)]
        parts = [f"{count(self.n_global, 'global parameter')} ({self._numbers(border)})"] if border else []
        for part in blocks:
            noun = "independent block" if len(part.sizes) > 1 else "block"
            names = _listed([self.name(v) for v in part.variables])
            parts.append(f"{count(len(part.sizes), noun)} of size {_range(part.sizes)} from {names}")
        for inside in self.sums:  # they couple their coordinates, all with all
            names = _listed([self.name(v) for v in self._variables_of(inside)], "and")
            parts.append(f"beside these, a sum over {count(len(inside), 'coordinate')} of {names}")
        return "; ".join(parts) + "."

    def _variables_of(self, coordinates: Indices) -> tuple[int, ...]:
        return tuple(np.unique(self._variable[coordinates]).tolist())

    __repr__ = __str__

    def name(self, variable: int) -> str:
        """Return the name of a variable of the layout, in backticks."""
        return f"`{self.layout.variables[variable].value_name}`"

    def _numbers(self, parts: list[Part]) -> str:
        """Return variables with how many of their coordinates are in each part."""
        words = []
        for part in parts:
            [v], n = part.variables, len(part.coordinates)
            size = self.layout.variables[v].size
            words.append(self.name(v) + (f" {n:,} of {size:,}" if n < size else f" {n:,}" if n > 1 else ""))
        return _listed(words)

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each variable.

        Returns
        -------
        pandas.DataFrame
            ``name``; ``size``, the number of coordinates; ``role``: "global" (in the border), "local" (in blocks),
            "both", or "none" for a variable without entries; ``block_sizes`` in words, such as "1" or "3 to 41".
        """
        rows = []
        for v, variable in enumerate(self.layout.variables):
            block = self._block[self._variable == v]
            inside = np.unique(block[block >= 0])
            in_border = bool((block < 0).any())
            role = ("both" if in_border else "local") if len(inside) else "global" if in_border else "none"
            sizes = _range(self.block_sizes[inside]) if len(inside) else ""
            rows.append((variable.value_name, variable.size, role, sizes))
        return pd.DataFrame(rows, columns=["name", "size", "role", "block_sizes"])


def _range(sizes: Indices) -> str:
    least, most = int(sizes.min()), int(sizes.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


#: Words in a list, at most.
_N_NAMES = 8


def _listed(words: Sequence[str], last: str = "") -> str:
    """Join words by commas, the last one by a word of its own; of many, the first few."""
    shown = list(words)
    if len(shown) > _N_NAMES:
        shown, last = [*shown[: _N_NAMES - 1], f"{len(shown) - _N_NAMES + 1} more"], "and"
    return f" {last} ".join([", ".join(shown[:-1]), shown[-1]]) if last and len(shown) > 1 else ", ".join(shown)
