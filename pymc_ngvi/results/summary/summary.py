"""What a fit says of itself and of the parameters, as a text and a table."""

import importlib
import math
import shutil
import textwrap
import threading

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html import escape
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.density.shards.density import ShardedDensity
from pymc_ngvi.marginal.verdict import SAID_ERROR
from pymc_ngvi.reading.roles import Extent, Roles, find_roles
from pymc_ngvi.results.convert import to_datatree, to_multitrace
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.sampling import Sampling, sample_tree
from pymc_ngvi.results.summary.card import html_card
from pymc_ngvi.results.summary.sections import ShownVariables, arranged, names_of_terms, plan_sections
from pymc_ngvi.results.summary.table import Rows, as_html, as_text, rows_of
from pymc_ngvi.results.summary.verdict import verdict_on

#: Rows of the table that a summary prints, about; ``table`` has them all.
_MAX_ROWS = 60
#: Characters in a line of a printed summary, at most; fewer on a narrow terminal.
_MAX_WIDTH = 100
#: Draws behind the table of a card, their seed, rows, and coordinates of q up to which there is one.
_CARD_DRAWS, _CARD_SEED, _CARD_ROWS, _CARD_DIM = 1_000, 20_250_301, 24, 5_000
#: Numbers that are held at once, at most, where not all of them are shown.
_MOST_HELD = 2**24
#: Standard deviations that few draws decide, and that are named, at most.
_MOST_NAMED = 3
#: Arguments of ``arviz_stats.summary`` that choose variables, or another kind of result: all of it is one table then.
_CHOOSING = ("var_names", "filter_vars", "coords", "group", "fmt")


@dataclass(frozen=True)
class Summary:
    """What `NGVIApproximation.summary` returns: prints as text, and as HTML in notebooks.

    Parameters
    ----------
    lines : tuple of str
        Outcome of the fit, cure where it did not converge, k-hat and what it means.
    table : pandas.DataFrame
        Mean, standard deviation and interval of each constrained variable that is shown, section after section.
    khat : float or None
        None where it was not computed.
    sections : dict of str to DataFrame
        Parts of the table by heading; one, "", for a model without groups.
    notes : tuple of str
        Sentences below the table: numbers of observations and levels, what was left out.
    by_sd : bool, default False
        Whether numbers are printed to the second digit of their standard deviation.
    max_rows : int, optional
        Rows to print, about.
    """

    lines: tuple[str, ...]
    table: pd.DataFrame
    khat: float | None
    sections: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    by_sd: bool = False
    max_rows: int | None = None

    def __str__(self) -> str:
        """Return the text, its sentences wrapped to the width of the terminal."""
        table = as_text(list(self.table.columns), self._rows()) if self.sections else str(self.table)
        above, below = (_wrapped(lines) for lines in (self.lines, (*self._cut(), *self.notes)))
        return "\n".join([*above, "", table, *([""] if below else []), *below])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = as_html(list(self.table.columns), self._rows()) if self.sections else self.table.to_html()
        return paragraphs(self.lines) + str(table) + paragraphs((*self._cut(), *self.notes))

    def _rows(self) -> dict[str, Rows]:
        """Return the rows to show of each section: all, or as many as its share of the table, and at least ten."""
        n, limit = len(self.table), self._limit
        limits = {
            heading: max(limit * len(part) // max(n, 1), min(10, limit)) for heading, part in self.sections.items()
        }
        return {
            heading: rows_of(part, by_sd=self.by_sd, limit=n if n <= limit else limits[heading])
            for heading, part in self.sections.items()
        }

    @property
    def _limit(self) -> int:
        return _MAX_ROWS if self.max_rows is None else self.max_rows

    def _cut(self) -> list[str]:
        """Return the line that says that the table is longer than what is shown, where it is."""
        where = ".table" if self.max_rows is None else "summary().table"
        return [f"({len(self.table):,} rows; all of them are in {where})"] if len(self.table) > self._limit else []


def _wrapped(lines: tuple[str, ...]) -> list[str]:
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    return [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines]


def paragraphs(lines: tuple[str, ...]) -> str:
    """Return sentences as HTML, a paragraph each."""
    return "".join(f'<p style="margin:.4em 0">{escape(line)}</p>' for line in lines)


def summarise(
    posterior: Posterior,
    kept: Kept,
    draws: int,
    rng: np.random.Generator,
    *,
    group_effects: bool,
    khat_draws: int | None,
    options: dict[str, Any],
) -> Summary:
    """Return a summary; see `NGVIApproximation.summary`."""
    _check_names(posterior, options)
    with posterior.with_data_of_fit():
        made = summary_of_draws(posterior, kept, draws, rng, group_effects, options)
    lines, khat = verdict_on(posterior, kept, khat_draws, rng)
    if said := posterior.of_changed_data():
        lines = (f"{said}: this is the posterior given those of the fit.", *lines)
    return replace(made, lines=lines, khat=khat)


def _check_names(posterior: Posterior, options: dict[str, Any]) -> None:
    """Raise ValueError for a variable to show that the model has not."""
    given = options.get("var_names")
    if given is None or options.get("filter_vars") is not None:
        return
    valid = [v.name for v in posterior.layout.variables] + [d.name for d in posterior.density.deterministics]
    valid += posterior.density.summed_out_shown
    if posterior.include_transformed:
        valid += [v.value_name for v in posterior.layout.variables]
    for name in [given] if isinstance(given, str) else given:
        if name not in valid and name.removeprefix("~") not in valid:
            raise ValueError(f"var_names has {name!r}, which the model has not: {suggestion(name, valid)}")


def card_of(posterior: Posterior, kept: Kept) -> str:
    """Return an approximation as notebooks show it: HTML that takes no evaluation of log p."""
    record, n_dim, body = posterior.record, posterior.layout.n_dim, "<p>summary() shows the parameters.</p>"
    if n_dim <= _CARD_DIM:
        with posterior.with_data_of_fit():
            made = summary_of_draws(posterior, kept, _CARD_DRAWS, np.random.default_rng(_CARD_SEED), False, {})
        body = replace(made, max_rows=_CARD_ROWS)._repr_html_()
    kind = posterior.distribution.name if record is None or record.is_pool else f"{record.family} family"
    return html_card(f"{kind}, {n_dim:,} free parameters", record, kept.verdict, body)


@dataclass(frozen=True)
class Planned:
    """Which variables of a model are shown of a posterior, and how.

    Parameters
    ----------
    roles : Roles
    plan : ShownVariables
    sizes : mapping of str to int
        Numbers of elements of all variables.
    few : xarray.Dataset
        Two draws of all of them.
    """

    roles: Roles
    plan: ShownVariables
    sizes: Mapping[str, int]
    few: xr.Dataset

    @classmethod
    def of(cls, posterior: Posterior, *, group_effects: bool) -> "Planned":
        """Plan what is shown."""
        few = two_points(posterior)
        sizes = {str(name): values.size // 2 for name, values in few.data_vars.items()}
        roles = roles_of(posterior, few)
        return cls(roles, plan_sections(roles, sizes, group_effects=group_effects), sizes, few)

    def arranged(self, draws: xr.Dataset) -> tuple[xr.Dataset, dict[str, slice]]:
        """Return the draws that are shown, and the rows of each section."""
        scales = {name for g in self.roles.groups for name in g.scales}
        return arranged(draws, self.plan, scales, names_of_terms(self.few, self.roles.groups))


def summary_of_draws(
    posterior: Posterior,
    kept: Kept,
    draws: int,
    rng: np.random.Generator,
    group_effects: bool,
    options: dict[str, Any],
) -> Summary:
    """Return a summary without sentences above the table."""
    table_of = imported("arviz_stats").summary  # .7 s
    by_sd = options.get("kind", "stats") == "stats" and options.get("round_to", "auto") == "auto"
    chosen = any(options.get(name) is not None for name in _CHOOSING)
    options = {"kind": "stats", **options}
    if chosen:
        table = table_of(sample_tree(posterior, kept, draws, rng), **options)
        sections = {"": table} if options.get("fmt", "wide") == "wide" else {}
        return Summary((), table, None, sections, (), by_sd)
    planned = Planned.of(posterior, group_effects=group_effects)
    wide = draws * sum(planned.sizes.values()) > _MOST_HELD
    made = sample_tree(posterior, kept, draws, rng, Sampling(var_names=planned.plan.names if wide else None))
    shown, where = planned.arranged(made["posterior"].to_dataset())
    table = table_of(xr.DataTree.from_dict({"posterior": shown}), **options)
    sections = {heading: table.iloc[rows] for heading, rows in where.items()}
    notes = (*planned.plan.notes, _error_sentence(posterior, draws), *_thin_tails(posterior))
    return Summary((), table, None, sections, notes, by_sd)


def imported(name: str) -> ModuleType:
    """Import a module in a thread of its own, and return it.

    Some packages look at every frame of the stack for each of their lazy modules: deep inside a fit, ArviZ would take
    two seconds in the place of one.
    """
    worker = threading.Thread(target=importlib.import_module, args=(name,))
    worker.start()
    worker.join()
    return importlib.import_module(name)


def _error_sentence(posterior: Posterior, draws: int) -> str:
    """Return the Monte Carlo error of means over draws, as a sentence."""
    effective = posterior.distribution.effective(draws)
    weighted = posterior.distribution.kept_log_weights() is not None
    which = f" with an effective sample size of {effective:,.0f}" if weighted else ""
    own = f"From {draws:,} draws{which}: the Monte Carlo error of a mean is {1 / math.sqrt(effective):.2g} of its sd"
    of_globals = posterior.distribution.effective_globals(draws)
    if of_globals >= effective:
        return f"{own}."
    return f"{own}, that of a hyperparameter {1 / math.sqrt(of_globals):.2g} at most."


def _thin_tails(posterior: Posterior) -> list[str]:
    """Return a sentence on the standard deviations that few weighted draws decide, where there are such."""
    errors = posterior.distribution.sd_errors()
    if errors is None or not (errors > SAID_ERROR).any():
        return []
    worst = np.argsort(-np.nan_to_num(errors))[: min(_MOST_NAMED, int((errors > SAID_ERROR).sum()))]
    known = ", ".join(f"of `{posterior.layout.label(int(i))}` within {100 * errors[i]:.0f} %" for i in worst)
    return [f"Few draws are in thin tails: the standard deviation is known {known} only."]


def two_points(posterior: Posterior) -> xr.Dataset:
    """Return all variables at one point, twice, as if these were draws: enough to tell sizes, and so roles.

    A draw of q takes a search for modes where effects are relative to these.
    """
    values = posterior.values(np.tile(posterior.density.initial_point(), (2, 1)), _CARD_SEED)
    trace = to_multitrace(posterior.model, values, {}, 1)
    shown = posterior.include_transformed
    tree = to_datatree(trace, posterior.model, dims=posterior.dims, include_transformed=shown)
    return tree["posterior"].to_dataset()


def roles_of(posterior: Posterior, few: xr.Dataset) -> Roles:
    """Return the roles of the variables, whose axes are taken from any draws."""
    extents = {}
    for name, draws in few.data_vars.items():
        dims = [d for d in draws.dims if d not in ("chain", "draw")]
        named = [None if str(d).startswith(f"{name}_dim_") else str(d) for d in dims]
        extents[str(name)] = Extent(tuple(named), tuple(draws.sizes[d] for d in dims))
    pattern, summed = posterior.density.structural_pattern, posterior.density.summed
    if pattern is None and summed is not None:
        pattern = summed.among
    density = posterior.density
    roles = find_roles(posterior.model, posterior.layout, pattern, extents)
    of_rows = [
        name
        for name in density.summed_out_shown
        if math.prod(extents[name].shape) > 1 and math.prod(extents[name].shape) in roles.observations.values()
    ]
    roles = replace(roles, rows=(*roles.rows, *of_rows))
    return replace(roles, observations=density.observations) if isinstance(density, ShardedDensity) else roles
