"""What a model is made of, in words and as a table: the border, the blocks, the rows, and whose they are."""

import functools

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from numpy.typing import NDArray

from pymc_ngvi.core.messages import N_NAMED
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.density.by_rows import ModelRows, NoRows, PredictorKind, RowKind
from pymc_ngvi.families.dissection import find_blocks
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.graphs.layout import Layout

# --- the rows of a model in words: how many, of which variable, and functions of what ---

#: Names in a list, at most.
_N_IN_WORDS = 6
#: Share of entries from which on X is called dense.
_DENSE = 0.999


def rows_in_words(rows: ModelRows, layout: Layout) -> list[str]:
    """Return lines that say what the rows are; names in backticks."""
    n = sum(kind.n for kind in rows.kinds)
    if not (n or rows.why_not or rows.rest):
        return []
    if not n:
        return [f"No rows: {rows.why_not or _rest(rows.rest)}."]
    not_all = f"Not all of log p is a sum over rows: {_rest(rows.rest)}. The other parts are:"
    lines = [not_all if rows.rest else f"Log p is a sum over {count(n, 'row')}:"]
    lines += [*(f"- {words}" for _, words in kinds_in_words(rows.kinds, layout)), _matrix(rows)]
    if rows.why_not and not rows.rest:
        lines.append(f"No expectations are taken by rows: {rows.why_not}.")
    return lines


def _rest(rest: Sequence[NoRows]) -> str:
    return "; ".join(f"{_of(part)} is none ({part.why})" for part in rest)


def _of(part: RowKind | NoRows) -> str:
    before = {"observed": "", "prior": "the prior of ", "potential": "the Potential "}[part.role]
    return f"{before}`{part.variable}`"


def kinds_in_words(kinds: Sequence[RowKind], layout: Layout) -> list[tuple[list[RowKind], str]]:
    """Return kinds of rows that are said together, and the words; priors of single coordinates are."""
    of_variable: dict[tuple[str, str], list[RowKind]] = {}
    alone = [
        kind
        for kind in kinds
        if kind.role == "prior" and len(kind.predictors) == 1 and kind.predictors[0].is_coordinate
    ]
    for kind in kinds:
        if kind not in alone:
            of_variable.setdefault((kind.role, kind.variable), []).append(kind)
    words = []
    for group in of_variable.values():
        few = len(group) <= N_NAMED
        words += [([kind], _kind(kind, layout)) for kind in group] if few else [(group, _many(group))]
    if alone:
        names = list(dict.fromkeys(f"`{kind.variable}`" for kind in alone))
        prior = "prior" if len(names) == 1 else "priors"
        n = sum(kind.n for kind in alone)
        said = f"{count(n, 'row')} of the {prior} of {_in_words(names)}, each a function of one coordinate"
        words.append((alone, said))
    return words


def _kind(kind: RowKind, layout: Layout) -> str:
    k = len(kind.predictors)
    each = ", each a function" if kind.n > 1 else ", a function"
    fewer = f" that varies in {count(kind.n_directions, 'direction')}" if kind.n_directions < k else ""
    of = f"{count(k, 'predictor')}{fewer}: {_predictors(kind, layout)}"
    return f"{count(kind.n, 'row')} of {_of(kind)}{each} of {of}"


def _many(group: list[RowKind]) -> str:
    least, *_, most = sorted(len(kind.predictors) for kind in group)
    how_many = f"{least} to " * (least < most) + count(most, "predictor")
    rows = count(sum(kind.n for kind in group), "row")
    return f"{rows} of {_of(group[0])}, functions of {how_many}, of {len(group)} kinds"


def _predictors(kind: RowKind, layout: Layout) -> str:
    """Return what the predictors of a kind are, those that all rows share last."""
    # How many there are, by the words for one, and for several.
    own, shared = Counter[tuple[str, str]](), []
    for predictor in kind.predictors:
        names, is_coordinate = _names(predictor, layout), predictor.is_coordinate
        label = f"`{layout.label(int(predictor.coordinates[0]))}`" if is_coordinate else f"one linear in {names}"
        if kind.n > 1 and len(np.unique(predictor.number)) == 1:
            shared.append(label)
        elif is_coordinate and kind.n > 1:
            own[f"an element of {names}", f"elements of {names}"] += 1
        else:
            own[label, f"linear in {names}"] += 1
    parts = [one if n == 1 else f"{n} {several}" for (one, several), n in own.items()]
    if shared:
        parts.append(f"{_in_words(shared)}, shared by all" if kind.n > 1 else _in_words(shared))
    return "; ".join(parts)


def _names(predictor: PredictorKind, layout: Layout) -> str:
    at = predictor.coordinates
    inside = (v for v in layout.variables if np.any((at >= v.where.start) & (at < v.where.stop)))
    return _in_words([f"`{v.value_name}`" for v in inside])


def _matrix(rows: ModelRows) -> str:
    """Return how large X is, and how dense."""
    if not rows.n_linear:
        return "All predictors are coordinates themselves."
    n, n_dim = rows.n_linear, rows.n_dim
    per_row = rows.n_entries / n
    shape = f"X, which makes the linear predictors: {n:,} x {n_dim:,}"
    return f"{shape}, dense." if per_row >= _DENSE * n_dim else f"{shape}, {per_row:.3g} entries a row."


def count(n: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _in_words(words: Sequence[str]) -> str:
    return _listed(words, "and", _N_IN_WORDS)


# --- what a model is made of, in words and as a table: the border, the blocks, the rows, and whose they are ---

Integers = NDArray[np.intp]

#: Names and groups of blocks listed at most.
_N_NAMES, _N_GROUPS = 8, 4
#: Part of the coordinates in blocks, below which there is nothing to say of these.
_LEAST_LOCAL = 0.1


class Part(NamedTuple):
    """Coordinates that play the same part.

    Parameters
    ----------
    kind : {"blocks", "cut", "alone", "separators", "global"}
        The first three are local: blocks; blocks cut out of a variable; coordinates that touch no other.
    variables : tuple of int
        Places in the layout.
    coordinates : ndarray of int
        Block after block.
    sizes : ndarray of int
        Of the blocks; empty in the border.
    """

    kind: Literal["blocks", "cut", "alone", "separators", "global"]
    variables: tuple[int, ...]
    coordinates: Integers
    sizes: Integers


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

    Raises
    ------
    ValueError
        If the three are not of one number of coordinates.

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
    sums: tuple[Integers, ...] = ()

    def __post_init__(self) -> None:
        for part in (self.pattern, self.arrow):
            if part is not None and part.n_dim != self.n_dim:
                kind = type(part).__name__
                raise ValueError(f"The layout has {self.n_dim} coordinates, the {kind} {part.n_dim}.")
        if self.arrow is None and self.pattern is not None:
            object.__setattr__(self, "arrow", find_blocks(self.pattern))

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.layout.n_dim

    @property
    def n_global(self) -> int:
        """Coordinates in the border: global parameters and separators; all where the Hessian is dense."""
        return self.n_dim if self.arrow is None else self.arrow.n_border

    @property
    def n_blocks(self) -> int:
        """Blocks that are independent given the border."""
        return len(self.block_sizes)

    @property
    def block_sizes(self) -> Integers:
        """Coordinates in each block, (n_blocks,), ascending."""
        return np.empty(0, dtype=np.intp) if self.arrow is None else self.arrow.sizes

    @functools.cached_property
    def globals(self) -> list[str]:
        """Labels of the coordinates in the border: ``beta[3]``, ``sd_log__``."""
        return [self.layout.label(int(i)) for i in self.border]

    @property
    def border(self) -> Integers:
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
        """The coordinates by the part they play: those of blocks, then separators and global parameters by variable."""
        none, parts = np.empty(0, dtype=np.intp), []
        for v in np.unique(self._variable[self.border]):
            kind: Literal["separators", "global"] = "separators" if self._cut[v] else "global"
            parts.append(Part(kind, (int(v),), self.border[self._variable[self.border] == v], none))
        return (*self._local_parts(), *sorted(parts, key=lambda p: (p.kind == "global", p.variables)))

    @functools.cached_property
    def _variable(self) -> Integers:
        """Of each coordinate: the place of its variable in the layout."""
        return np.repeat(np.arange(len(self.layout.variables)), [v.size for v in self.layout.variables])

    @functools.cached_property
    def _block(self) -> Integers:
        """Of each coordinate: its block, -1 in the border."""
        result = np.full(self.n_dim, -1, dtype=np.intp)
        if self.arrow is not None:
            result[self.arrow.order[: self.arrow.n_local]] = np.repeat(np.arange(self.n_blocks), self.block_sizes)
        return result

    @functools.cached_property
    def _alone(self) -> NDArray[np.bool_]:
        """Which local coordinates touch no other."""
        if self.pattern is None:  # that of the structure: nothing tells, but where there is no border
            single = np.isin(self._block, np.flatnonzero(self.block_sizes == 1))
            return single if self.n_global == 0 else np.zeros_like(single)
        below = self.pattern.off_diagonal
        touching = np.concatenate([self.pattern.rows[below], self.pattern.cols[below]])
        untouched: NDArray[np.bool_] = np.bincount(touching, minlength=self.n_dim) == 0
        return untouched & (self._block >= 0)

    @functools.cached_property
    def _cut(self) -> NDArray[np.bool_]:
        """Which variables are cut by coordinates of their own: half of them at most, which touch blocks of the rest."""
        n = len(self.layout.variables)
        in_border = np.bincount(self._variable[self._block < 0], minlength=n)
        inside = np.bincount(self._variable[(self._block >= 0) & ~self._alone], minlength=n)
        return (in_border > 0) & (inside >= in_border) & self._touches_own

    @functools.cached_property
    def _touches_own(self) -> NDArray[np.bool_]:
        """Which variables have coordinates in the border that touch blocks with others of theirs."""
        n, block = len(self.layout.variables), self._block
        if self.pattern is None:  # the border touches every block
            return np.ones(n, dtype=np.bool_)
        i = np.concatenate([self.pattern.rows, self.pattern.cols])
        j = np.concatenate([self.pattern.cols, self.pattern.rows])
        across = (block[i] < 0) & (block[j] >= 0)
        local = np.flatnonzero(block >= 0)
        # Pairs of a variable and a block, as codes: touched from the border, and with coordinates inside.
        touched = self._variable[i[across]] + n * block[j[across]]
        return np.isin(np.arange(n), np.intersect1d(touched, self._variable[local] + n * block[local]) % n)

    def _local_parts(self) -> list[Part]:
        """Return the blocks, those of the same variables together."""
        if self.arrow is None or not self.n_blocks:
            return []
        order, block = self.arrow.order[: self.arrow.n_local], self._block
        # Of each block: a number that is the same for blocks of the same variables; 0 for coordinates alone, 1 where a
        # variable is cut.
        group, alone = np.full(self.n_blocks, 2), block[self._alone]
        for v in np.unique(self._variable[order]):
            has = np.zeros(self.n_blocks, dtype=np.intp)
            has[block[(self._variable == v) & (block >= 0)]] = 1
            group = np.where(has == 1, 1, group) if self._cut[v] else group
            group = np.where(group > 1, 2 + np.unique(2 * group + has, return_inverse=True)[1], group)
        group[alone] = 0
        parts = []
        for g in np.unique(group):
            inside = order[group[block[order]] == g]
            kind: Literal["alone", "cut", "blocks"] = "alone" if g == 0 else "cut" if g == 1 else "blocks"
            parts.append(Part(kind, self._variables_of(inside), inside, self.block_sizes[group == g]))
        return sorted(parts, key=lambda p: (("blocks", "cut", "alone").index(p.kind), p.variables))

    def _variables_of(self, coordinates: Integers) -> tuple[int, ...]:
        return tuple(np.unique(self._variable[coordinates]).tolist())

    # --- in words ---

    def __str__(self) -> str:
        return "\n".join([self.in_blocks, *([] if self.rows is None else rows_in_words(self.rows, self.layout))])

    @property
    def in_blocks(self) -> str:
        """Which coordinates are independent of each other given which others, in a sentence."""
        n = self.n_dim
        if n < 2:
            return f"{count(n, 'coordinate')}."
        if self.n_entries == n * (n + 1) // 2:
            return f"Dense: the Hessian of log p couples all {n:,} coordinates."
        if self.n_blocks < 2 or self.n_dim - self.n_global < _LEAST_LOCAL * n:
            share = f"{min(100 * self.density, 99.9):.3g} % of the entries of the Hessian of log p can differ from 0"
            return f"Treated as dense: {share}, and to cut its {n:,} coordinates into blocks would not pay."
        kinds = [self._of_kind(kind) for kind in ("global", "blocks", "cut", "alone")]
        n_globals = sum(len(p.coordinates) for p in kinds[0])
        of_globals = f"{count(n_globals, 'global parameter')} ({self._numbers(kinds[0])})" if n_globals else ""
        sentences = [of_globals, *self._blocks(kinds[1]), self._cuts(kinds[2]), self._singles(kinds[3])]
        for inside in self.sums:  # they couple their coordinates, all with all
            names = _listed([self.name(v) for v in self._variables_of(inside)], "and")
            sentences.append(f"beside these, a sum over {count(len(inside), 'coordinate')} of {names}")
        return "; ".join(filter(None, sentences)) + "."

    __repr__ = __str__

    def _repr_html_(self) -> str:
        words = escape(str(self)).replace("\n", "<br>").split("`")  # names, in code
        return f"<p>{''.join(f'<code>{w}</code>' if i % 2 else w for i, w in enumerate(words))}</p>"

    def _of_kind(self, kind: str) -> list[Part]:
        return [part for part in self.parts if part.kind == kind]

    def _blocks(self, parts: list[Part]) -> list[str]:
        if len(parts) > _N_GROUPS:
            coordinates = np.concatenate([p.coordinates for p in parts])
            sizes = np.concatenate([p.sizes for p in parts])
            parts = [Part("blocks", self._variables_of(coordinates), coordinates, sizes)]
        return [
            f"{count(len(p.sizes), 'independent block' if len(p.sizes) > 1 else 'block')} of size {_range(p.sizes)} "
            f"from {_listed([self.name(v) for v in p.variables])}"
            for p in parts
        ]

    def _cuts(self, parts: list[Part]) -> str:
        if not parts:
            return ""
        [part] = parts
        separators = self._of_kind("separators")
        whole = _listed([f"{self.name(v)} ({self.layout.variables[v].size:,})" for v in part.variables], "and")
        if len(part.variables) == 1 == len(separators):
            by = f"{len(separators[0].coordinates):,} of its own coordinates"
        else:
            each = [f"{len(p.coordinates):,} of {self.name(p.variables[0])}" for p in separators]
            by = f"coordinates of their own, {_listed(each, 'and')}"
        sizes = f"size {part.sizes[0]:,}" if part.sizes[0] == part.sizes[-1] else f"up to {part.sizes.max():,}"
        return f"{whole}: cut into {count(len(part.sizes), 'block')} of {sizes} by {by}"

    def _singles(self, parts: list[Part]) -> str:
        n = sum(len(p.coordinates) for p in parts)
        verb = "depends" if n == 1 else "depend"
        if not n:
            return ""
        split = [
            p._replace(variables=(v,), coordinates=p.coordinates[self._variable[p.coordinates] == v])
            for p in parts
            for v in p.variables
        ]
        return f"{count(n, 'coordinate')} that {verb} on no other ({self._numbers(split)})"

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


def _range(sizes: Integers) -> str:
    least, most = int(sizes.min()), int(sizes.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _listed(words: Sequence[str], last: str = "", most: int = _N_NAMES) -> str:
    """Join words by commas, the last one by a word of its own; of many, the first few."""
    shown = list(words)
    if len(shown) > most:
        shown, last = [*shown[: most - 1], f"{len(shown) - most + 1} more"], "and"
    return f" {last} ".join([", ".join(shown[:-1]), shown[-1]]) if last and len(shown) > 1 else ", ".join(shown)
