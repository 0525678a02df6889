"""The table of parameters, with what was found out about the approximation."""

import functools
import importlib
import itertools
import math
import re

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from pymc_ngvi.core.importance import (
    MOST_KHAT,
    WeightVerdict,
    khat_limit,
    pareto_khat,
    smoothed_tail,
    tail_length,
    weigh,
)
from pymc_ngvi.core.messages import N_NAMED, checked_names, listed, percent
from pymc_ngvi.core.sizes import (
    AT_ONCE,
    FIXED_SEED,
    MAX_COV_DIM,
    N_PREDICTED,
    N_WEIGHED,
    SLIGHT,
    check_draws,
    seed_of,
)
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.verdict import NOT_TESTED, Against, Verdict, Word
from pymc_ngvi.density.constrain import Constrainer, log_densities, term_sums
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.pooled import PoolState, evenly_picked
from pymc_ngvi.reading.roles import Grouping, Roles, top_level_priors
from pymc_ngvi.results.diagnosis import (
    budget_of,
    log_ratio_of,
    own_generator,
    wrap,
)
from pymc_ngvi.results.distributions import (
    Posterior,
    in_numbers,
    one_chain,
    roles_of,
    to_datatree,
    to_multitrace,
    two_points,
)
from pymc_ngvi.results.reweighted import joint_draws
from pymc_ngvi.results.sampling import Names, sample_tree


def verdict_lines(record: FitRecord | None, verdict: Verdict) -> list[str]:
    """Return the sentences above the table."""
    if record is None:
        return [str(verdict)]
    says_it = verdict.failures and not record.is_pool  # how the fit ended is among them
    lines = ["The model has no observed variables: this is its prior."] * record.is_prior
    if not (record.is_prior and verdict.word is Word.RELIABLE):  # of a prior, its checks say nothing of a fit to data
        lines.append(str(verdict))
    return [*lines, "" if says_it else record.remark]


def notes_on(
    posterior: Posterior, verdict: Verdict, khat_draws: int | None, rng: np.random.Generator
) -> tuple[list[str], float | None]:
    """Return sentences of less weight, for below the table, and k-hat."""
    record, seed, q, weights = posterior.record, seed_of(rng), posterior.distribution, None
    notes = [] if record is None else [record.of_discrete, record.of_posterior if record.on_request else ""]
    notes += [c.text for c in verdict.found if c.name == "equal modes" and c.against is Against.NOTHING]
    if khat_draws is not None and not posterior.why_not_judged:
        of_fit, weighted = khat_draws == N_WEIGHED, q.kept_log_weights() is not None
        n = budget_of(posterior).n_weights if of_fit else khat_draws
        if n or weighted:
            new = None if of_fit else np.random.default_rng(seed)
            weights = weigh(log_ratio_of(posterior, n, new))[1]
        if weights is not None and not weighted:
            again = own_generator(record) if of_fit else np.random.default_rng(seed)
            is_use = weights.verdict() is WeightVerdict.USABLE
            notes.append(weights.sentence() if is_use else "")
            notes.append(q.remark(posterior.density, record, weights.n_draws, again))
    return notes, None if weights is None else weights.khat


# --- tables of a summary as lines of text and as HTML, with as many digits as the draws can tell ---

#: Standard deviations outside of these are shown in powers of ten.
_LEAST, _MOST = 1e-4, 1e6
#: Stands for rows that are left out.
_GAP = "..."
Rows = list[tuple[str, list[str]]]


def rows_of(table: pd.DataFrame, *, by_sd: bool, limit: int) -> Rows:
    """Return labels and cells of a table, of long variables only the first elements and the last."""
    places = kept_rows(_variables(table), limit)
    some = table.iloc[[i for i in places if i is not None]]
    cells = iter(_by_sd(some) if by_sd and "sd" in some else _as_printed(some))
    labels = iter(some.index)
    gap = _GAP, [_GAP] * len(table.columns)
    return [gap if i is None else (str(next(labels)), next(cells)) for i in places]


def kept_rows(variables: Sequence[str], limit: int) -> list[int | None]:
    """Return the places of the rows to show; None stands for those that are left out."""
    n = len(variables)
    if n <= limit:
        return list(range(n))
    spans = list(itertools.pairwise([0, *(i for i in range(1, n) if variables[i] != variables[i - 1]), n]))
    # Elements of a variable, the last one included: as many as there is room for, and two at least.
    keep = max((k for k in range(2, limit) if sum(min(b - a, k) for a, b in spans) <= limit), default=2)
    result: list[int | None] = []
    for a, b in spans:
        result += range(a, b) if b - a <= keep else [*range(a, a + keep - 1), None, b - 1]
    if sum(i is not None for i in result) > limit:  # of many variables
        half = limit // 2
        result = [*result[:half], None, *result[len(result) - half :]]
    return result


def _variables(table: pd.DataFrame) -> list[str]:
    """Return the variable that each row is of."""
    return [str(label).split("[")[0] for label in table.index]


def _by_sd(table: pd.DataFrame) -> list[list[str]]:
    """Return cells with digits to the second of the standard deviation, as many for all of a vector where that fits."""
    values, sd, variables = table.to_numpy(dtype=np.float64), table["sd"].to_numpy(), np.array(_variables(table))
    # After the point; -1 for four significant ones.
    digits = [max(0, 1 - math.floor(math.log10(s))) if _LEAST <= s < _MOST else -1 for s in sd]
    for name in dict.fromkeys(variables):
        of = [digits[i] for i in np.flatnonzero(variables == name)]
        if min(of) >= 0 and max(of) - min(of) == 1:
            digits = [max(of) if v == name else d for v, d in zip(variables, digits, strict=True)]
    return [[_number(x, d) for x in row] for row, d in zip(values, digits, strict=True)]


def _number(x: float, digits: int) -> str:
    text = f"{x:.4g}" if digits < 0 or not math.isfinite(x) else f"{x:,.{digits}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.,") else text  # no -0.00


def _as_printed(table: pd.DataFrame) -> list[list[str]]:
    """Return cells as the table shows them: ArviZ rounds each in its own way."""
    columns = [table[[c]].to_string(index=False, header=False).split("\n") for c in table.columns]
    return [[cell.strip() for cell in row] for row in zip(*columns, strict=True)]


def as_text(columns: Sequence[str], sections: Mapping[str, Rows]) -> str:
    """Return one table with a heading above each section, the columns of all of them aligned."""
    indent = "  " if len(sections) > 1 or "" not in sections else ""
    rows = [row for part in sections.values() for row in part]
    labels = max([len(label) for label, _ in rows], default=0) + len(indent)
    widths = [max(map(len, column)) for column in zip(columns, *(cells for _, cells in rows), strict=True)]
    lines = [("", list(columns))]
    for heading, part in sections.items():
        lines += [(heading, [])] * bool(heading) + [(indent + label, cells) for label, cells in part]
    of_cells = [(label, [c.rjust(w) for c, w in zip(cells, widths, strict=False)]) for label, cells in lines]
    return "\n".join("  ".join([label.ljust(labels), *cells]).rstrip() for label, cells in of_cells)


# --- what a summary shows, and in which order: parameters of the population, then those of each group, then effects ---

#: Heading of what belongs to no group.
POPULATION = "Population-level parameters"
#: Names that Bambi gives to the weights of splines and of Gaussian processes on a basis.
_BASIS = re.compile(r"(\w+_)?((bs|cr|cc)\(.*\)|hsgp\(.*\)_weights(_raw)?)")
#: Axes of draws.
_SAMPLE = ("chain", "draw")


def _counts(roles: Roles) -> list[str]:
    """Return a sentence with the numbers of observations and of levels."""
    of = list(roles.observations.items())
    counts = [f"{n:,} observation{'' if n == 1 else 's'}{f' of {name}' * (len(of) > 1)}" for name, n in of]
    counts += [f"{g.n_levels:,} levels of {g.name}" for g in roles.groups]
    return [f"{'; '.join(counts)}."] if counts else []


def _left_out(roles: Roles, sizes: Mapping[str, int], *, group_effects: bool) -> list[str]:
    """Return sentences that say what the summary leaves out, and how to see it."""
    sentences = []
    effects = [] if group_effects else [name for g in roles.groups for name in g.effects or g.offsets]
    if effects:
        sentences.append(
            f"Not shown: {sum(sizes[name] for name in effects):,} group effects ({', '.join(effects)}); "
            "see summary(group_effects=True)."
        )
    offsets = [name for g in roles.groups if g.effects for name in g.offsets]
    basis = [name for name in sizes if _BASIS.fullmatch(name)]
    others = {
        f"{sum(sizes[name] for name in basis):,} basis weights": basis,
        "standardised effects": [*offsets, *roles.raw],
        "packed Cholesky factors": [name for g in roles.groups for name in g.packed],
        "values for each observation": list(roles.rows),
    }
    parts = [f"{kind} ({', '.join(names)})" for kind, names in others.items() if names]
    if parts:
        last = [name for names in others.values() for name in names][-1]
        start = "Also not shown" if effects else "Not shown"
        sentences.append(f'{start}: {", ".join(parts)}; see summary(var_names=["{last}"]).')
    return sentences


def names_of_terms(few: xr.Dataset, groups: Sequence[Grouping]) -> dict[str, list[str]]:
    """Return the names of the terms that standard deviations and correlations belong to, by name of these.

    They are those of the axis of the effects that is not the axis of levels; a Cholesky factor has plain axes.
    """
    result = {}
    for g in groups:
        labels = None
        for name in (n for n in (*g.effects, *g.offsets) if n in few):
            axes = [few[d] for d in few[name].dims if d in few.coords and d not in _SAMPLE]
            named = [a.values.astype(str).tolist() for a in axes if a.size != g.n_levels and a.dtype.kind in "OUST"]
            labels = named[0] if len(named) == 1 else labels
        if labels is not None:
            result.update(dict.fromkeys(g.scales, labels))
    return result


def _labelled(draws: xr.DataArray, labels: Sequence[str]) -> xr.DataArray:
    """Give plain axes of as many entries as there are labels these labels."""
    plain = [d for d in draws.dims if str(d).startswith(f"{draws.name}_dim_") and draws.sizes[d] == len(labels)]
    return draws.assign_coords({d: list(labels) for d in plain})


def _is_correlation(draws: xr.DataArray) -> bool:
    """Tell whether draws are symmetric matrices with ones on their diagonal."""
    values = draws.transpose(*_SAMPLE, ...).to_numpy()
    if values.ndim != len(_SAMPLE) + 2 or values.shape[-1] != values.shape[-2]:
        return False
    unit = np.allclose(np.diagonal(values, axis1=-1, axis2=-2), 1.0)
    return bool(unit and np.allclose(values, values.swapaxes(-1, -2), equal_nan=True))


def _below_diagonal(draws: xr.DataArray) -> xr.DataArray:
    """Return the correlations below the diagonal of a matrix, each named by its column and its row."""
    rows, columns = (draws.get_index(dim) for dim in draws.dims if dim not in _SAMPLE)
    dim, (later, earlier) = f"{draws.name}_pair", np.tril_indices(len(rows), -1)
    found = draws.isel({rows.name: xr.DataArray(later, dims=dim), columns.name: xr.DataArray(earlier, dims=dim)})
    pairs = [f"{columns[j]}, {rows[i]}" for i, j in zip(later, earlier, strict=True)]
    return found.drop_vars([rows.name, columns.name], errors="ignore").assign_coords({dim: pairs})


# --- what a fit says of itself and of the parameters, as a text and a table ---


#: Rows of the table that a summary prints, about; ``table`` has them all.
_MAX_ROWS = 60
#: Rows of the table of a card.
_CARD_ROWS = 24
#: Part of all squares that one draw has where a few may decide a mean.
_FEW_DECIDE = 0.05


@dataclass(frozen=True)
class Summary:
    """What `NGVIApproximation.summary` returns: prints as text, and as HTML in notebooks.

    Parameters
    ----------
    lines : tuple of str
        The verdict, and what may help where it is a bad one.
    table : pandas.DataFrame
        Mean, standard deviation and interval of each constrained variable that is shown, section after section.
    khat : float or None
        None where it was not computed.
    sections : dict of str to DataFrame
        Parts of the table by heading; one, "", for a model without groups.
    notes : tuple of str
        Sentences below the table: numbers of observations and levels, what is not shown, Monte Carlo error.
    by_sd : bool, default False
        Whether numbers are printed to the second digit of their standard deviation.
    max_rows : int, default 60
        Rows to print, about.
    """

    lines: tuple[str, ...]
    table: pd.DataFrame
    khat: float | None
    sections: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    by_sd: bool = False
    max_rows: int = _MAX_ROWS

    def __str__(self) -> str:
        """Return the text, its sentences wrapped to the width of the terminal."""
        table = as_text(list(self.table.columns), self._rows()) if self.sections else str(self.table)
        below = [wrap(line) for line in (*self._cut(), *self.notes)]
        return "\n".join([*map(wrap, self.lines), "", table, *([""] if below else []), *below])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        headed = ([(heading, [""] * self.table.shape[1])] * bool(heading) + of for heading, of in self._rows().items())
        rows = [row for part in headed for row in part]
        table = pd.DataFrame([cells for _, cells in rows], [label for label, _ in rows], self.table.columns)
        shown = table if self.sections else self.table
        body = f'<div style="overflow-x:auto">{shown.to_html(border=0)}</div>'
        return paragraphs(self.lines) + body + paragraphs((*self._cut(), *self.notes))

    def _rows(self) -> dict[str, Rows]:
        """Return the rows to show of each section: all, or as many as its share of the table, and at least ten."""
        n, limit = len(self.table), self.max_rows
        limits = {
            heading: max(limit * len(part) // max(n, 1), min(10, limit)) for heading, part in self.sections.items()
        }
        return {
            heading: rows_of(part, by_sd=self.by_sd, limit=n if n <= limit else limits[heading])
            for heading, part in self.sections.items()
        }

    def _cut(self) -> list[str]:
        """Return the line that says that the table is longer than what is shown, where it is."""
        where = ".table" if self.max_rows == _MAX_ROWS else "summary().table"
        return [f"({len(self.table):,} rows; all of them are in {where})"] if len(self.table) > self.max_rows else []


def paragraphs(lines: tuple[str, ...]) -> str:
    """Return sentences as HTML, a paragraph each."""
    return "".join(f'<p style="margin:.4em 0">{escape(line)}</p>' for line in lines)


def summarise(
    posterior: Posterior,
    verdict: Verdict,
    draws: int,
    rng: np.random.Generator,
    *,
    group_effects: bool,
    khat_draws: int | None,
    options: dict[str, Any],
) -> Summary:
    """Return a summary; see `NGVIApproximation.summary`."""
    if (given := options.get("var_names")) is not None and options.get("filter_vars") is None:
        valid = [v.name for v in posterior.layout.variables] + [d.name for d in posterior.density.deterministics]
        valid += posterior.density.summed_out.shown
        if posterior.include_transformed:
            valid += [v.value_name for v in posterior.layout.variables]
        names = [given] if isinstance(given, str) else given
        if unknown := [name for name in names if name.removeprefix("~") not in valid]:
            checked_names(unknown, valid)
    with posterior.with_data_of_fit():
        made = summary_of_draws(posterior, draws, rng, group_effects, options)
    notes, khat = notes_on(posterior, verdict, khat_draws, rng)
    said = posterior.of_changed_data()
    lines = [f"{said}: this is the posterior given those of the fit." if said else ""]
    lines += verdict_lines(posterior.record, verdict)
    return replace(made, lines=tuple(filter(None, lines)), notes=(*made.notes, *filter(None, notes)), khat=khat)


def card_of(posterior: Posterior) -> str:
    """Return an approximation as notebooks show it, as HTML that takes no evaluation of log p."""
    record, n_dim, table = posterior.record, posterior.layout.n_dim, "<p>summary() shows the parameters.</p>"
    if n_dim <= MAX_COV_DIM:
        with posterior.with_data_of_fit():
            made = summary_of_draws(posterior, N_PREDICTED, np.random.default_rng(FIXED_SEED), False, {})
        table = replace(made, max_rows=_CARD_ROWS)._repr_html_()
    kind = posterior.distribution.name if record is None or record.is_pool else f"{record.family} family"
    lines = verdict_lines(record, NOT_TESTED if record is None else record.verdict)
    return paragraphs(tuple(filter(None, [*lines, f"{kind}, {n_dim:,} free parameters"]))) + table


@dataclass(frozen=True)
class Planned:
    """Which variables of a model a summary shows, and how."""

    roles: Roles
    #: Names by heading, in the order in which they are shown; one heading, "", where there are no groups.
    sections: Mapping[str, tuple[str, ...]]
    #: Numbers of elements of all variables.
    sizes: Mapping[str, int]
    #: Two draws of all of them.
    few: xr.Dataset
    #: Sentences below the table: numbers of observations and of levels, what was left out.
    notes: tuple[str, ...]

    @classmethod
    def of(cls, posterior: Posterior, *, group_effects: bool) -> "Planned":
        """Plan what is shown."""
        few = two_points(posterior)
        sizes, roles = {str(name): of.size // 2 for name, of in few.data_vars.items()}, roles_of(posterior, few)
        apart = {*roles.rows, *roles.raw, *filter(_BASIS.fullmatch, sizes)}
        apart.update(name for g in roles.groups for name in (*g.scales, *g.packed, *g.effects, *g.offsets))
        sections = {POPULATION: [name for name in sizes if name not in apart]}
        for g in roles.groups:
            correlated = g.packed or any("corr" in name for name in g.scales)
            what = "Standard deviations and correlations" if correlated else "Standard deviations"
            sections[f"{what}: {g.name} ({g.n_levels:,} levels)"] = g.scales
        if group_effects:
            for g in roles.groups:
                sections[f"Effects: {g.name} ({g.n_levels:,} levels)"] = g.effects or g.offsets
        shown = {heading: tuple(names) for heading, names in sections.items() if names} or {"": tuple(sizes)}
        if not roles.groups:
            shown = {"": tuple(name for names in shown.values() for name in names)}
        said = " ".join([*_counts(roles), *_left_out(roles, sizes, group_effects=group_effects)])
        return cls(roles, shown, sizes, few, (said,) if said else ())

    @property
    def names(self) -> list[str]:
        """All names that are shown."""
        return [name for names in self.sections.values() for name in names]

    def arranged(self, posterior: xr.Dataset) -> tuple[xr.Dataset, dict[str, slice]]:
        """Return the draws that are shown, and where the rows of each section will be.

        Of matrices of correlations among scales of groups, only the entries below the diagonal are kept, each once.
        """
        scales = {name for g in self.roles.groups for name in g.scales}
        terms, kept, where, start = names_of_terms(self.few, self.roles.groups), {}, {}, 0
        for heading, names in self.sections.items():
            stop = start
            correlations = {name for name in names if name in scales and _is_correlation(posterior[name])}
            for name in sorted(names, key=lambda n: n in correlations):  # standard deviations first
                draws = _labelled(posterior[name], terms.get(name, ()))
                draws = _below_diagonal(draws) if name in correlations else draws
                n = math.prod(draws.sizes[d] for d in draws.dims if d not in _SAMPLE)
                if n:
                    kept[name] = draws
                    stop += n
            where[heading] = slice(start, stop)
            start = stop
        # Coords that variables share are equal; those of others would only be in the way.
        return xr.Dataset(kept), where


def summary_of_draws(
    posterior: Posterior,
    draws: int,
    rng: np.random.Generator,
    group_effects: bool,
    options: dict[str, Any],
) -> Summary:
    """Return a summary without sentences above the table."""
    draws, table_of = check_draws(draws), importlib.import_module("arviz_stats").summary  # 0.7 s
    by_sd = options.get("kind", "stats") == "stats" and options.get("round_to", "auto") == "auto"
    # Variables are chosen, or another kind of result: all of it is one table then.
    chosen = any(options.get(name) is not None for name in ("var_names", "filter_vars", "coords", "group", "fmt"))
    options = {"kind": "stats", **options}
    if chosen:
        tree = sample_tree(posterior, draws, rng)
        tree["posterior"] = xr.DataTree(in_numbers(tree["posterior"].to_dataset()))
        table = table_of(tree, **options)
        sections = {"": table} if options.get("fmt", "wide") == "wide" else {}
        return Summary((), table, None, sections, (), by_sd)
    planned = Planned.of(posterior, group_effects=group_effects)
    wide = draws * sum(planned.sizes.values()) > AT_ONCE
    tree = sample_tree(posterior, draws, rng, var_names=planned.names if wide else None)
    shown, where = planned.arranged(in_numbers(tree["posterior"].to_dataset()))
    table = table_of(xr.DataTree.from_dict({"posterior": shown}), **options)
    sections = {heading: table.iloc[rows] for heading, rows in where.items()}
    notes = (*planned.notes, *_heavy_tails(shown), _error_sentence(posterior, draws), *_thin_tails(posterior))
    return Summary((), table, None, sections, notes, by_sd)


def _error_sentence(posterior: Posterior, draws: int) -> str:
    """Return the Monte Carlo error of means over draws, as a sentence."""
    effective = posterior.distribution.effective(draws)
    of_globals = posterior.distribution.effective(draws, of_globals=True)
    more = f", {1 / math.sqrt(of_globals):.2g} at most for a hyperparameter" * (of_globals < effective)
    worth = f", worth {effective:,.0f}" * (effective < draws)
    return f"Monte Carlo error of a mean: {1 / math.sqrt(effective):.2g} of its sd{more} ({draws:,} draws{worth})."


def _thin_tails(posterior: Posterior) -> list[str]:
    """Return a sentence on the standard deviations that few weighted draws decide, where there are such."""
    state, label = posterior.distribution.q, posterior.layout.label
    errors = state.sd_errors if isinstance(state, PoolState) else np.empty(0)
    worst = [i for i in np.argsort(-errors)[:N_NAMED] if errors[i] > SLIGHT]
    known = ", ".join(f"`{label(int(state.globals_[i]))}` to within {percent(errors[i])}" for i in worst)
    return [f"Standard deviations that few draws decide are known only roughly: {known}."] if worst else []


def _heavy_tails(shown: xr.Dataset) -> list[str]:
    """Return a sentence on what a few draws decide the mean of, where there is such: it may have none."""
    heavy = []
    with np.errstate(all="ignore"):
        for name, of in shown.data_vars.items():
            values = of.transpose(*_SAMPLE, ...).to_numpy().reshape(of.sizes["chain"] * of.sizes["draw"], -1)
            squares = (values - values.mean(axis=0)) ** 2
            few = values[:, squares.max(axis=0) > _FEW_DECIDE * squares.sum(axis=0)]
            tails = np.log(np.abs(few - np.median(few, axis=0)))
            # Where fewer draws than make a tail are elsewhere than most, they tell no shape of it.
            is_tail = np.isfinite(tails).sum(axis=0) > tail_length(len(tails))
            khats = [smoothed_tail(tail)[1] for tail in tails[:, is_tail].T]
            heavy += [name] * bool(max(khats, default=0.0) > MOST_KHAT)
    said = f"{listed(heavy, '`{}`', N_NAMED)} may have no mean: a few extreme draws decide the mean and the sd shown"
    return [f"{said}. Use quantiles."] if heavy else []


# --- how much a posterior depends on its priors, and on the data ---

#: Powers between which sensitivity is measured: those of ArviZ, and of the R package priorsense.
_POWERS = (0.99, 1.01)
#: Parts of the draws without which errors are told; digits of their sensitivities, and of errors.
_N_PARTS, _DIGITS, _SHOWN = 8, 9, 3


@dataclass(frozen=True, eq=False)
class PriorSensitivity:
    """What `NGVIApproximation.prior_sensitivity` returns; it prints as a table.

    Parameters
    ----------
    table : pandas.DataFrame
        Columns ``prior`` and ``likelihood``, the sensitivities, with standard errors ``prior_se`` and
        ``likelihood_se``, and ``diagnosis``, in words of ArviZ; a row for each element.
    khat : dict of str to float
        The larger k-hat of both powers, of ``prior`` and ``likelihood``.
    priors : tuple of str
        Variables whose priors were scaled.
    likelihoods : tuple of str
        Variables that were scaled as likelihood.
    tree : xarray.DataTree
        Groups ``posterior``, ``log_prior`` and ``log_likelihood``, the last two with one sum a draw: for
        ``arviz_stats.psense`` and ``arviz_plots.plot_psense_dist``.
    doubts : tuple of str
        What stands against relying on it, in clauses.
    """

    table: pd.DataFrame
    khat: Mapping[str, float]
    priors: tuple[str, ...]
    likelihoods: tuple[str, ...]
    tree: xr.DataTree
    doubts: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """What was scaled, and how far it can be relied on."""
        priors, likelihoods = (", ".join(f"`{name}`" for name in of) for of in (self.priors, self.likelihoods))
        scaled = f"Power scaling of the priors of {priors}, and of the likelihood of {likelihoods}."
        khats = ", ".join(f"{name} {value:.2f}" for name, value in self.khat.items())
        doubts = f"Not reliable: {'; '.join(self.doubts)}." if self.doubts else ""
        return tuple(filter(None, (scaled, f"Pareto k-hat: {khats}.", doubts)))

    def __str__(self) -> str:
        """Return the sentences, and the table."""
        return "\n".join(
            [*self.lines, "", self.table.to_string(header=["prior", "+-", "likelihood", "+-", "diagnosis"])]
        )

    __repr__ = __str__


def prior_sensitivity(
    posterior: Posterior,
    draws: int,
    rng: np.random.Generator,
    *,
    var_names: Names,
    prior_var_names: Names,
    likelihood_var_names: Names,
    threshold: float,
) -> PriorSensitivity:
    """Return sensitivities by power scaling; see `NGVIApproximation.prior_sensitivity`."""
    posterior.check_weighable(draws, "Power scaling takes")
    if why := posterior.density.why_in_part:
        raise ValueError(f"Power scaling needs the likelihood of all data: {why}. Ask a model of all rows.")
    posterior.refuse_changed_data("Power scaling would be about another posterior")
    priors, likelihoods = _scaled(posterior, prior_var_names, likelihood_var_names)
    # Draws of equal weight, corrected by importance weights where these help.
    made, doubts = joint_draws(posterior, draws, rng)
    rows = evenly_picked(np.exp(weigh(made.log_weights)[0]), draws, rng.random())
    theta = made.theta[rng.permutation(rows)]
    of_prior = term_sums(posterior.model, posterior.layout, lambda: log_densities(posterior.model, priors), theta)
    of_likelihood = _log_likelihood(posterior, theta, likelihoods, is_all=likelihood_var_names is None)
    shown = _shown(posterior, theta, var_names, seed_of(rng))
    tree = xr.DataTree.from_dict(
        {
            "posterior": shown,
            "log_prior": one_chain({"prior": of_prior}),
            "log_likelihood": one_chain({"likelihood": of_likelihood}),
        }
    )
    khat = {  # the larger of both powers; -inf where weights are equal
        name: max(pareto_khat((power - 1.0) * of, np.zeros_like(of)) for power in _POWERS)
        for name, of in (("prior", of_prior), ("likelihood", of_likelihood))
    }
    limit = khat_limit(draws)
    doubts = (*doubts, *(f"k-hat of {name} is above {limit:.2g}" for name, value in khat.items() if value > limit))
    summary = functools.partial(importlib.import_module("arviz_stats").psense_summary, alphas=_POWERS)
    table = summary(tree, threshold=threshold)
    # Jackknife: without each of some parts of the draws.
    parts = [tree.isel(draw=np.arange(draws) % _N_PARTS != k) for k in range(_N_PARTS)]
    kinds = ["prior", "likelihood"]
    without = np.array([summary(part, threshold=np.inf, round_to=_DIGITS)[kinds].to_numpy(float) for part in parts])
    errors = np.sqrt(_N_PARTS - 1) * without.std(axis=0)
    for i, kind in enumerate(kinds):
        table.insert(2 * i + 1, f"{kind}_se", errors[:, i].round(_SHOWN))
    return PriorSensitivity(table, khat, tuple(priors), tuple(likelihoods), tree, doubts)


def _scaled(posterior: Posterior, priors: Names, likelihoods: Names) -> tuple[list[str], list[str]]:
    """Return the variables whose priors are scaled, and those of the likelihood."""
    model, free = posterior.model, [v.name for v in posterior.layout.variables]
    potentials = [term.name for term in model.potentials]
    observed = [rv.name for rv in model.observed_RVs]
    why = "which can't be scaled as such"
    asked = None if priors is None else checked_names(priors, [*free, *potentials], why, "prior_var_names")
    of_prior = asked or top_level_priors(model, free)
    if likelihoods is not None:
        return of_prior, checked_names(likelihoods, [*observed, *potentials], why, "likelihood_var_names")
    if not observed:
        raise ValueError(
            "The model has no observed variable: name the Potentials that are its likelihood, likelihood_var_names=..."
            if potentials
            else "The model has no observed variable, and no likelihood to scale."
        )
    return of_prior, observed


def _log_likelihood(posterior: Posterior, theta: Array, names: Sequence[str], *, is_all: bool) -> Array:
    """Return the log likelihood of each draw: what log p has beside priors and Potentials, or that of some variables.

    Log p is compiled, knows rows, and reaches data that are elsewhere.
    """
    model, layout = posterior.model, posterior.layout
    if not is_all:
        return term_sums(model, layout, lambda: log_densities(model, names), theta)
    others = [*(v.name for v in layout.variables), *(term.name for term in model.potentials)]
    of_others = term_sums(model, layout, lambda: log_densities(model, others, jacobian=True), theta)
    return posterior.density.logp(theta) - of_others


def _shown(posterior: Posterior, theta: Array, var_names: Names, seed: int) -> xr.Dataset:
    """Return the variables in the table, at draws."""
    planned = None
    if var_names is None:
        planned = Planned.of(posterior, group_effects=False)
        names = planned.names
    else:
        known = [v.name for v in posterior.layout.variables] + [d.name for d in posterior.density.deterministics]
        names = checked_names(var_names, known)
    values = Constrainer.of(posterior.density, names=frozenset(names))(theta, random_seed=seed)
    tree = to_datatree(to_multitrace(posterior.model, values, {}), posterior.model, include_transformed=False)
    made = in_numbers(tree["posterior"].to_dataset())
    shown = made[names] if planned is None else planned.arranged(made)[0]
    return shown[[name for name, of in shown.data_vars.items() if (np.ptp(of.to_numpy(), axis=(0, 1)) > 0.0).any()]]
