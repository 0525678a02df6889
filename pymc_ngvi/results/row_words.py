"""The rows of a model in words: how many, of which variable, and functions of what."""

from collections.abc import Sequence

import numpy as np

from pymc_ngvi.density.row_kinds import ModelRows, NoRows, PredictorKind, RowKind
from pymc_ngvi.graphs.layout import Layout

#: Kinds of one variable that have lines of their own; names in a list; both at most.
_N_KINDS, _N_NAMES = 3, 6
#: Share of entries from which on X is called dense.
_DENSE = 0.999


def rows_in_words(rows: ModelRows, layout: Layout) -> list[str]:
    """Return lines that say what the rows are; names in backticks.

    Parameters
    ----------
    rows : ModelRows
    layout : Layout
        Of the coordinates.
    """
    n = sum(kind.n for kind in rows.kinds)
    if not (n or rows.why_not or rows.rest):
        return []
    if not n:
        return [f"No rows: {rows.why_not or _rest(rows.rest)}."]
    lines = [f"Log p is a sum over {count(n, 'row')}:"]
    if rows.rest:
        lines = [f"Not all of log p is a sum over rows: {_rest(rows.rest)}. The other parts are:"]
    lines += [f"- {words}" for _, words in kinds_in_words(rows.kinds, layout)]
    lines.append(_matrix(rows))
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
        few = len(group) <= _N_KINDS
        words += [([kind], _kind(kind, layout)) for kind in group] if few else [(group, _many(group))]
    if alone:
        names = list(dict.fromkeys(f"`{kind.variable}`" for kind in alone))
        prior = "prior" if len(names) == 1 else "priors"
        n = sum(kind.n for kind in alone)
        said = f"{count(n, 'row')} of the {prior} of {_listed(names)}, each a function of one coordinate"
        words.append((alone, said))
    return words


def _kind(kind: RowKind, layout: Layout) -> str:
    k = len(kind.predictors)
    each = ", each a function" if kind.n > 1 else ", a function"
    fewer = f" that varies in {count(kind.n_directions, 'direction')}" if kind.n_directions < k else ""
    of = f"{count(k, 'predictor')}{fewer}: {_predictors(kind, layout)}"
    return f"{count(kind.n, 'row')} of {_of(kind)}{each} of {of}"


def _many(group: list[RowKind]) -> str:
    numbers = [len(kind.predictors) for kind in group]
    n = sum(kind.n for kind in group)
    predictors = count(max(numbers), "predictor")
    how_many = predictors if min(numbers) == max(numbers) else f"{min(numbers)} to {predictors}"
    return f"{count(n, 'row')} of {_of(group[0])}, functions of {how_many}, of {len(group)} kinds"


def _predictors(kind: RowKind, layout: Layout) -> str:
    """Return what the predictors of a kind are, those that all rows share last."""
    own: dict[str, int] = {}
    shared = []
    for predictor in kind.predictors:
        if kind.n > 1 and predictor.n_different == 1:
            shared.append(_shared(predictor, layout))
        else:
            words = _own(predictor, layout, kind.n)
            own[words] = own.get(words, 0) + 1
    parts = [f"{n} {words}" if n > 1 else words for words, n in own.items()]
    parts = [_plural(part) for part in parts]
    if shared:
        parts.append(f"{_listed(shared)}, shared by all" if kind.n > 1 else _listed(shared))
    return "; ".join(parts)


def _own(predictor: PredictorKind, layout: Layout, n_rows: int) -> str:
    if predictor.is_coordinate and n_rows == 1:
        return f"`{layout.label(int(predictor.coordinates[0]))}`"
    names = _names(predictor, layout)
    return f"element of {names}" if predictor.is_coordinate else f"linear in {names}"


def _plural(part: str) -> str:
    """Put an article or a plural to a part."""
    first, _, rest = part.partition(" ")
    if first.isdigit():
        return f"{first} elements {rest.removeprefix('element ')}" if rest.startswith("element") else f"{first} {rest}"
    return f"an {part}" if first == "element" else f"one {part}" if first == "linear" else part


def _shared(predictor: PredictorKind, layout: Layout) -> str:
    if predictor.is_coordinate:
        return f"`{layout.label(int(predictor.coordinates[0]))}`"
    return f"one linear in {_names(predictor, layout)}"


def _names(predictor: PredictorKind, layout: Layout) -> str:
    at = predictor.coordinates
    names = [f"`{v.value_name}`" for v in layout.variables if np.any((at >= v.where.start) & (at < v.where.stop))]
    return _listed(names)


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


def _listed(words: Sequence[str]) -> str:
    shown = list(words)
    if len(shown) > _N_NAMES:
        shown = [*shown[: _N_NAMES - 1], f"{len(shown) - _N_NAMES + 1} more"]
    return ", ".join(shown[:-1]) + " and " + shown[-1] if len(shown) > 1 else shown[0]
