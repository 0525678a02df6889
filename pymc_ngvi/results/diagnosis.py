"""Whether an approximation can be relied on: what its checks found, how they are made, and what they cost."""

import contextlib
import copy
import functools
import math
import shutil
import textwrap

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import xarray as xr

from scipy.special import bdtrc, expit

from pymc_ngvi.core.draws import chunks, draws_of
from pymc_ngvi.core.importance import MIN_KHAT_DRAWS, MOST_KHAT, Weights, WeightVerdict, khat_limit, weigh
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.messages import N_NAMED, logger, percent
from pymc_ngvi.core.prices import fit_seconds, in_words
from pymc_ngvi.core.sizes import (
    AT_ONCE,
    HELD,
    MAX_DENSE_DIM,
    N_SHOWN,
    N_WEIGHED,
    STREAMED,
    WEIGHTS,
    check_draws,
    seed_of,
)
from pymc_ngvi.core.status import Elbo, format_gap
from pymc_ngvi.core.types import Array, Indices
from pymc_ngvi.core.verdict import NOT_TESTED, Against, Condition, Verdict, Word
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.density.constrain import Functionals, functionals_of
from pymc_ngvi.density.one_mode import has_one_mode
from pymc_ngvi.families import DENSE, SEVERAL_MODES, STRUCTURED, FullState, Traits, name_of, traits_of
from pymc_ngvi.fitting.modes import ModeSearch
from pymc_ngvi.fitting.progress import announced, few_threads
from pymc_ngvi.fitting.record import LOG_OUTSIDE, MOSTLY, MUCH, N_DRAWS, FitRecord, OtherMode, of_modes
from pymc_ngvi.posteriors.kinds import KINDS, if_available
from pymc_ngvi.posteriors.plan import Decision
from pymc_ngvi.results.distributions import Distribution, Posterior, costs_of, distribution_of, flat_dataset, free_names
from pymc_ngvi.results.drifts import (
    FAMILY_WISE,
    FEWEST,
    LEAST_ACCEPTANCE,
    LEAST_FAR,
    LEAST_MOVED,
    LIMITS,
    MOST_EVALUATIONS,
    MOST_STEPS,
    N_COMPARED,
    NOT_MOVED,
    Drift,
    EqualModes,
    Estimates,
    JointDrift,
    Moved,
    critical,
    diffused,
    equal_modes,
    functional_drift_of,
    joint_drift_of,
    move,
    moved_drift_of,
    on_scale_of,
    weighted_shift_of,
)

#: By what quantities are seen to be off, in a clause that they end.
MOVED = "draws that are moved towards the posterior drift"
SCORED = "gradients of log p at draws tell of a drift"


#: Characters in a line at most, fewer on a narrow terminal; coordinates in the table.
_MAX_WIDTH, _N_ROWS = 100, 8
#: What is left out where evaluations are too few to compare log p with its images.
SYMMETRIES = "symmetries of log p"


def wrap(text: str, first: str = "", then: str = "") -> str:
    """Return a text in lines of the width of the terminal, with what these begin with."""
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `NGVIApproximation.diagnose` returns.

    Parameters
    ----------
    checks : Verdict
        That of the approximation: all reports have the same one.
    outcome : str
        How the fit ended.
    gap : float
        Nats still to be gained within the family; NaN where unknown.
    elbo : Elbo
        On fresh draws.
    weights : Weights
        Pareto k-hat and effective sample size of importance weights.
    by_coordinate : dict of str to ndarray, shape (n_dim,)
        ``mean_drift`` in standard deviations of q, ``sd_drift`` relative to them, each with its standard error,
        ``_se``.
    log_p_drift : Elbo
        Drift of E[log p], nats.
    acceptance : float
        Of the trajectories that moved draws.
    n_moved, n_trajectories : int
        Draws that were moved, and how often.
    thorough : bool
        Whether other modes and fits were looked for.
    n_gradients, n_log_p : int
        Evaluations that it took: gradients, and log densities alone.
    layout : Layout
    left_out : tuple of str
        What was left out for want of evaluations within the budget.
    is_pool : bool
        Whether draws are weighted: outcome, gap and ELBO are then of the Gaussian fit before them.
    joint, computed : str
        What moved draws show of log p, and how many Deterministics and linear predictors were compared, in words.
    searched : bool
        Whether the fit looked for other modes.
    has_one_mode : bool
        Whether log p is known to have one alone.
    n_scored : int
        Draws at which gradients of log p were looked at.

    Examples
    --------
    >>> import pymc as pm
    >>> import pymc_ngvi
    >>> with pm.Model():
    ...     x = pm.Normal("x", 1.0, 2.0)
    ...     approx = pymc_ngvi.fit_ngvi(random_seed=1, progressbar=False)
    >>> diagnosis = approx.diagnose(random_seed=1)
    >>> diagnosis.reliable, diagnosis.reasons
    (True, [])
    """

    checks: Verdict
    outcome: str
    gap: float
    elbo: Elbo
    weights: Weights
    by_coordinate: dict[str, Array]
    log_p_drift: Elbo
    acceptance: float
    n_moved: int
    n_trajectories: int
    thorough: bool
    n_gradients: int
    n_log_p: int
    layout: Layout = field(repr=False)
    left_out: tuple[str, ...] = ()
    is_pool: bool = False
    joint: str = ""
    computed: str = ""
    searched: bool = False
    has_one_mode: bool = False
    n_scored: int = 0

    @property
    def verdict(self) -> Word:
        """The verdict in a word: "exact", "exact, few draws", "reliable", "not judged" or "not reliable"."""
        return self.checks.word

    @property
    def reliable(self) -> bool:
        """Whether means, standard deviations and limits can be relied on, as far as tests see."""
        return self.checks.is_reliable

    @property
    def reasons(self) -> list[str]:
        """Why q is not reliable: sentences that name variables and a cure; empty where it is."""
        return [str(condition) for condition in self.checks.failed]

    @property
    def remarks(self) -> list[str]:
        """What else was found, of less weight."""
        return [str(c) for c in self.checks.found if c.against is not Against.RELIABLE and not c.holds]

    @property
    def khat(self) -> float:
        """Pareto k-hat of the importance weights."""
        return self.weights.khat

    def to_dataset(self) -> xr.Dataset:
        """Return what is known of each coordinate.

        Returns
        -------
        xarray.Dataset
            By value name (``sd_log__``), with dims ``diagnostic`` (the names in ``by_coordinate``) and those of the
            variable; a dim of the model that is called ``diagnostic`` puts ``q_`` before it. Verdict, k-hat and the
            rest are in ``attrs``.
        """
        names = list(self.by_coordinate)
        (dim,) = free_names(self.layout, "diagnostic")
        result = flat_dataset(self.layout, np.stack([self.by_coordinate[n] for n in names]), {dim: names})
        attrs = {
            "reliable": int(self.reliable),
            "verdict": self.verdict.value,
            "reasons": self.reasons,
            "khat": self.khat,
            "gap": self.gap,
        }
        attrs |= {"elbo": self.elbo.value, "elbo_se": self.elbo.se, "effective_sample_size": self.weights.effective}
        return result.assign_attrs(attrs)

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each coordinate, by label."""
        return pd.DataFrame(self.by_coordinate, index=[self.layout.label(i) for i in range(self.layout.n_dim)])

    # --- in words ---

    def __str__(self) -> str:
        """Return the report, wrapped to the width of the terminal."""
        parts = [wrap(self.headline())]
        parts += [wrap(text, f"  {i}. ", "     ") for i, text in enumerate((c.text for c in self.checks.failed), 1)]
        parts += [wrap(cure, "  -> ", "     ") for cure in self.checks.cures]
        if remarks := self.remarks:
            parts += ["", "Also:", *(wrap(text, "  - ", "    ") for text in remarks)]
        pad = max(len(name) for name, _ in self._rows()) + 2
        parts += ["", *(wrap(text, name.ljust(pad), " " * pad) for name, text in self._rows())]
        how = "By how much draws of q change when they are moved towards the posterior: the least by which q is off"
        if self.n_scored:
            how = "By how much q is off, as gradients of log p at draws tell"
        which = f" The worst {_N_ROWS} of {self.layout.n_dim:,} coordinates:" if self.layout.n_dim > _N_ROWS else ""
        return "\n".join([*parts, "", wrap(f"{how} (unconstrained).{which}"), self._table().to_string()])

    __repr__ = __str__

    def headline(self) -> str:
        """Return the verdict in a sentence."""
        if n := len(self.reasons):
            return f"Not reliable, for {n} reason{'s'[: n != 1]}:"
        of_modes = f" Other modes were {self._search()} (thorough=True)."
        if self.has_one_mode:
            of_modes = " The posterior has one mode, as its log density is concave."
        elif self.searched:
            of_modes = " A search found no other modes."
        return f"{self.checks.sentence}{of_modes * (self.reliable and not self.thorough)}"

    def _search(self) -> str:
        if self.has_one_mode:
            return "none, as the log density is concave"
        if self.searched:
            return "looked for after the fit"
        compared = self.n_log_p and SYMMETRIES not in self.left_out
        return "not looked for, but for those by symmetry" if compared else "not looked for"

    def _rows(self) -> list[tuple[str, str]]:
        """Return what was measured, by name."""
        w = self.weights
        lost = f", {w.n_lost:,} of them lost" if w.n_lost else ""
        moved = f"{self.n_moved:,} draws, {self.n_trajectories} trajectories each, acceptance {self.acceptance:.2f}"
        gap = "" if self.is_pool else f", gap {format_gap(self.gap, ' nats')}"
        rows = [("Gaussian fit" if self.is_pool else "Fit", f"{self.outcome}{gap}, ELBO {self.elbo}")]
        if w.n_draws and not (self.is_pool and w.khat == -np.inf):  # draws of chains have no weights
            limit, verdict = khat_limit(w.n_draws), w.verdict(self.layout.n_dim)
            meaning = f": importance weights {'can' if verdict.helps else "can't"} correct q (limit {limit:.2f})"
            if self.is_pool:
                meaning = " of the weights of the global parameters"
            elif verdict is WeightVerdict.EVEN:
                meaning = ": of no weight, as importance weights are nearly equal"
            rows.append(("Pareto k-hat", f"{w.khat_text()}{meaning}"))
            rows.append(("Weighted draws", f"{w.n_draws:,} are worth {w.effective:,.0f}{lost}"))
        if self.n_moved:
            rows.append(("Moved draws", moved))
        scored = f"at {self.n_scored:,} draws" * (self.n_scored > 0)
        texts = (("Gradients", scored), ("Joint density", self.joint), ("Computed", self.computed))
        rows += [(name, text) for name, text in texts if text]
        rows.append(("Other modes", "looked for from dispersed starts" if self.thorough else self._search()))
        rows.append(("Cost", f"{self.n_gradients:,} gradients, {self.n_log_p:,} log densities"))
        if self.left_out:
            text = "; ".join(self.left_out)
            rows.append(("Left out", f"{text} (evaluations of this model are dear; diagnose(draws=10_000) has them)"))
        return rows

    def _table(self) -> pd.DataFrame:
        known, columns = self.by_coordinate, {}
        sizes = [np.abs(known[f"{name}_drift"]) / LIMITS[name] for name in ("mean", "sd")]
        worst = np.argsort(-np.nan_to_num(np.fmax(*sizes)), kind="stable")[:_N_ROWS]
        for name in ("mean", "sd"):
            pairs = zip(known[f"{name}_drift"][worst], known[f"{name}_drift_se"][worst], strict=True)
            unit = "%" if name == "sd" else "sd"
            cells = [in_figures(name, *of).removesuffix(f" {unit}") if np.isfinite(of[0]) else "-" for of in pairs]
            columns[f"{name}, {unit}"] = cells
        return pd.DataFrame(columns, index=[self.layout.label(int(i)) for i in worst])


# --- what is wrong with an approximation, in words, with what to do ---

#: Largest dimension for which a mixture of dense components is worth a try.
_MOST_MIXED = 300
#: Blocks from which on local coordinates count as effects of groups; global coordinates beside these at most.
_FEWEST_GROUPS, _MOST_GLOBAL = 3, 30


@dataclass(frozen=True)
class Context:
    """What cures depend on."""

    layout: Layout
    record: FitRecord | None
    #: What is known of the family.
    traits: Traits
    #: Whether effects of groups are independent given global parameters.
    has_groups: bool
    has_hessian: bool
    #: Whether Bambi made its group effects non-centred.
    of_bambi: bool = False
    #: Returns the option ``posterior`` that was left out for its cost, or because a Gaussian was asked for, and is
    #: worth a try; else what goes with any model, with its price, where that was not tried; empty where none is.
    other_posterior: Callable[[], str] = str
    #: Whether effects of groups can be fitted relative to their conditional modes in reasonable time.
    can_be_relative: bool = True

    #: Whether draws are weighted ones of a proposal: those of an exact or a nested posterior.
    is_pool: bool = False
    #: Whether effects of groups are relative to their conditional modes.
    relative: bool = False

    def shape_cure(self) -> str:
        """Return what may help where q has not the shape of the posterior."""
        options = [*filter(None, [self.other_posterior()])]
        if not self.traits.has_all_correlations:
            options.append(f"family={STRUCTURED if self.has_groups else DENSE!r}")
        if self.of_bambi:
            options.append("noncentered=False in bmb.Model")
        if self.has_groups and not self.relative:
            if self.can_be_relative:
                options.append("reparam='rvb2'")
            if not self.of_bambi:
                options.append("another parametrisation (non-centred in place of centred, or the reverse)")
        if self.traits.has_components:
            options.append("more components (n_components)")
        elif self.has_hessian and not self.relative and (self.has_groups or self.layout.n_dim <= _MOST_MIXED):
            options.append(f"family={SEVERAL_MODES!r}")
        if not options:
            options.append("another parametrisation of the model")
        return f"Try {', '.join(options)}, or pm.sample."

    def mode_cure(self) -> str:
        """Return what may help where q misses a mode."""
        others = "pm.sample with several chains"
        if self.traits.has_components:
            return f"Try more components (n_components), a wider start_sigma, or {others}."
        if self.has_hessian and not self.relative:
            others = f"family={SEVERAL_MODES!r}, which can cover a few, or {others}"
        return f"Bar all modes but one by an ordering or a prior, or try {others}."


def context_of(posterior: Posterior) -> Context:
    """Return what cures depend on."""
    record, layout, structure, q = posterior.record, posterior.layout, posterior.structure, posterior.distribution.q
    border = {v for part in structure.parts if part.kind == "global" for v in part.variables}
    # Not those of a chain that is cut, nor of a field.
    blocks = [part for part in structure.parts if part.kind == "blocks" and border.isdisjoint(part.variables)]
    local = sum(len(part.sizes) for part in blocks)
    # Of crossed effects, those of one factor are global: each costs two gradients of every draw. Their scale is a
    # block, which has no mode where all of them are 0, as at a start.
    of_groups = structure.n_global <= _MOST_GLOBAL and all(len(part.sizes) >= _FEWEST_GROUPS for part in blocks)
    family = getattr(q, "kind", None) or name_of(q) if record is None or record.is_pool else record.family
    return Context(
        layout=layout,
        record=record,
        traits=traits_of(family),
        has_groups=local >= _FEWEST_GROUPS and bool(border),
        has_hessian=posterior.density.has_hessian,
        of_bambi=any("|" in v.name and v.name.endswith("_offset") for v in layout.variables),
        other_posterior=functools.cache(lambda: _other_posterior(posterior)),
        can_be_relative=not posterior.density.is_streamed and of_groups,
        is_pool=family in KINDS,
        relative=family == "pushforward" or (record is not None and record.reparam is not None),
    )


def _other_posterior(posterior: Posterior) -> str:
    """Return the option that asks for a posterior worth a try: the likeliest exact, else what goes with any model."""
    density, record, best, option = posterior.density, posterior.record, 0.0, ""
    if record is None or record.is_pool or record.reparam is not None or density.is_streamed:
        return ""
    if not (traits_of(record.family).is_gaussian and record.status.can_be_followed):
        return ""
    for name, kind in KINDS.items():
        planned = None if record.plan is None else record.plan.of(name)
        is_left = not record.of_posterior or record.on_request == name  # not tried, or left out for its seconds
        if kind.is_last and planned is not None and planned.outcome in (Decision.TOO_DEAR, Decision.NOT_NEEDED):
            is_left = True
        if best == 1.0 or (kind.is_last and option) or not is_left:
            continue
        if (found := if_available(kind.possible, density)) is not None and (chance := kind.chance(found)) > best:
            seconds = kind.price(found, density, by_rows=density.n_directions is not None).seconds
            best, option = chance, f"posterior={name!r}" + f" ({in_words(seconds)})" * kind.is_last
    return option


# --- what was found, in sentences, and what may help: each names variables and a cure ---

#: Nats of a gap that are much for each coordinate, those of a mean that is off by 0.15; in any case.
_GAP_EACH, _GAP_MUCH = 0.01, 0.5
#: Part of the square of the distance between independent draws that moved draws move by, on average, before they count
#: as moved.
_FORGOTTEN = 0.5
#: How to keep one of several equal modes.
_FIXED = {
    "labels": "Order a vector of these (transform=pm.distributions.transforms.ordered, increasing initval).",
    "sign": "Fix the sign by a positive prior (pm.HalfNormal) of one of these variables, or of one entry of it.",
}


def findings_of(
    context: Context,
    gap: float,
    weights: Weights,
    moved: Moved,
    drift: Drift | None,
    equal: Sequence[EqualModes],
    places: Sequence[OtherMode],
    q: Distribution,
    further: Sequence[Condition] = (),
    seen: str = MOVED,
) -> tuple[Condition, ...]:
    """Return all findings, the serious ones first."""
    modes = [] if context.record is None else [m for m in context.record.modes if not (m.is_equal and equal)]
    if any(p.share > MUCH for p in places):
        context = replace(context, other_posterior=str)  # they would miss the same modes
    found = [
        *of_fit(context, gap),
        *_of_equal_modes(context, equal),
        *of_modes([*modes, *(p for p in places if p.share > MUCH)], q, context.layout, context.mode_cure()),
        *_of_support(context, weights),
        *([] if drift is None or _stuck(moved) else of_drift(context, drift, seen)),
        *([] if _stuck(moved) else further),
        *_of_movement(context, moved, drift),
        *_of_weights(context, weights, moved),
    ]
    return tuple(sorted(found, key=lambda c: c.against is not Against.RELIABLE))


def of_fit(context: Context, gap: float) -> list[Condition]:
    """Return what stands against a fit for how it ended."""
    n_dim, found = context.layout.n_dim, [] if context.record is None else context.record.of_fit
    much = min(_GAP_EACH * n_dim, max(_GAP_MUCH, 0.5 * _GAP_EACH * n_dim))
    said = f"a better q of the same family is {format_gap(gap)} nats away, which is much in {n_dim:,} dimensions"
    cure = "Go on with approx.refine(n, tol=...) and a smaller tol."
    return found if math.isnan(gap) else [*found, Condition("gap", gap, much, said, cure=cure)]


def _of_support(context: Context, weights: Weights) -> list[Condition]:
    if not weights.n_lost or context.is_pool:  # draws of a proposal may lie anywhere
        return []
    part = weights.n_lost / weights.n_draws
    lost = f"{weights.n_lost:,} of {weights.n_draws:,} draws of q ({percent(part, '.2g')})"
    said = f"log p or log q is not finite at {lost}"
    cure = "Give the variables their support by a prior or a transform rather than by a Potential or by the data."
    return [Condition("support", part, 0.0, said, Against.RELIABLE if part > MUCH else Against.NOTHING, cure=cure)]


# --- moved draws ---


#: What drifts, and how that is said.
_MEASURES = {
    "mean": "mean",
    "sd": "standard deviation",
    "lower": "lower 89 % limit",
    "upper": "upper 89 % limit",
}


def in_figures(measure: str, value: float, se: float) -> str:
    """Return a shift with its error: of a standard deviation in percent, else in posterior standard deviations."""
    if measure == "sd":
        return f"{percent(value, '+.0f').removesuffix(' %')} ± {percent(se)}"
    return f"{value:+.2f} ± {se:.2f} sd"


def _named(drift: Drift, layout: Layout | None, measure: str, columns: Indices) -> str:
    """Return what stands out, by variable: the first of each with figures, the others by their number."""
    of, estimates, groups = drift.functionals, drift.measures[measure], dict[str, tuple[str, int, list[int]]]()
    for column in columns.tolist():
        if of is not None:
            group, place = of.where(column)
            name, label, size = group.name, group.label(place), group.n_columns
        else:
            assert layout is not None
            variable = next(v for v in layout.variables if v.where.start <= column < v.where.stop)
            name, label, size = variable.name, f"`{layout.label(column)}`", variable.size
        groups.setdefault(name, (label, size, []))[2].append(column)
    names = []
    for label, size, own in list(groups.values())[:N_NAMED]:
        more = f" and {len(own) - 1:,} more of {size:,}" if len(own) > 1 else ""
        figures = in_figures(measure, float(estimates.value[own[0]]), float(estimates.se[own[0]]))
        names.append(f"{label}{more} ({figures})")
    if others := list(groups.values())[N_NAMED:]:
        n_more = sum(len(own) for *_, own in others)
        names.append(f"{n_more:,} more coordinates" if of is None else f"{len(others):,} others")
    return ", ".join(names)


def of_drift(context: Context, drift: Drift, seen: str) -> list[Condition]:
    """Return what is off in coordinates, or in what is computed of draws; ``seen``: by what, as a clause."""
    found = []
    for measure, columns in drift.off().items():
        names = _named(drift, context.layout, measure, columns)
        of = "q" if drift.functionals is None else drift.functionals.kind_of(columns)
        said = f"the {_MEASURES[measure]} of {of} is off: {seen} in {names}"
        worst = abs(float(drift.measures[measure].value[columns[0]]))
        found.append(Condition(measure, worst, LIMITS[measure], said, cure=context.shape_cure()))
    return found


def not_moved(moved: Moved) -> bool:
    """Tell whether no draws were moved for want of evaluations."""
    return moved.n_trajectories == 0 and not moved.n_lost


def _stuck(moved: Moved) -> bool:
    return moved.acceptance < LEAST_ACCEPTANCE


def _of_movement(context: Context, moved: Moved, drift: Drift | None) -> list[Condition]:
    """Say where moved draws tell nothing: of weighted draws, which have conditions of their own, that is no reason."""
    if not_moved(moved) or (drift is not None and not _stuck(moved)):
        return []
    if drift is None:
        said = "log p or its gradient is finite at too few draws of q to move them towards the posterior"
    else:
        said = (
            f"draws of q can hardly be moved towards the posterior (acceptance {moved.acceptance:.2f}): q is far from "
            "it, or log p has kinks or cliffs"
        )
    against = Against.NOTHING if context.is_pool else Against.RELIABLE
    return [
        Condition("acceptance", moved.acceptance, LEAST_ACCEPTANCE, said, against, True, False, context.shape_cure())
    ]


# --- weights ---


def _of_weights(context: Context, weights: Weights, moved: Moved) -> list[Condition]:
    """Say that weights are uneven: of a Gaussian, a reason where no draws have moved far enough to tell more.

    Those of a pool are judged with how many of them are effective, among its own conditions.
    """
    verdict = weights.verdict(context.layout.n_dim)
    if verdict.helps or verdict is WeightVerdict.UNKNOWN or context.is_pool:
        return []
    untold = context.traits.is_gaussian and weights.khat > MOST_KHAT and not (not_moved(moved) or _forgot(moved))
    serious = untold or verdict is WeightVerdict.FAR
    against, cure = (Against.RELIABLE, context.shape_cure()) if serious else (Against.NOTHING, "")
    said = weights.sentence(context.layout.n_dim).rstrip(".")
    return [Condition("k-hat", weights.khat, MOST_KHAT, said, against, cure=cure)]


def _forgot(moved: Moved) -> bool:
    """Tell whether moved draws have forgotten where they began, in each coordinate."""
    if len(moved.end) < 2 or _stuck(moved):
        return False
    square = np.mean((moved.end - moved.start) ** 2, axis=0)
    return bool(np.all(square >= _FORGOTTEN * (moved.end.var(axis=0) + moved.start.var(axis=0))))


def _of_equal_modes(context: Context, equal: Sequence[EqualModes]) -> list[Condition]:
    """Say what is symmetric where q is not."""
    result = []
    for kind in ("labels", "sign"):
        of_kind = [e for e in equal if e.kind == kind]
        if not of_kind:
            continue
        what, covers_all = ", or ".join(_changed(e) for e in of_kind[:N_NAMED]), of_kind[0].covered == "all"
        number = math.prod(e.number for e in of_kind)
        part = "some" if context.traits.has_components else of_kind[0].covered
        covers, against = f"{part} of {number:,} equal modes", Against.RELIABLE
        others, cure = f"what does not depend on the {kind}, such as predictions, is not affected", _FIXED[kind]
        if covers_all:
            covers, against = "all equal modes", Against.NOTHING
            others = f"means over all of them say little of what depends on the {kind}"
        else:
            cure = f"{cure} {context.mode_cure()}"
        said = f"log p stays the same when {what}: q covers {covers}, and {others}"
        result.append(Condition("equal modes", number, 1, said, against, cure=cure))
    return result


def _changed(equal: EqualModes) -> str:
    """Return what a symmetry does, as a clause."""
    *others, last = (f"`{name}`" for name in equal.names)
    names = f"{', '.join(others)} and {last}" if others else last
    if equal.kind == "labels":
        return f"the labels of {names} are exchanged"
    changes = "change sign together" if others else "changes sign"
    return f"{names} {changes}{' at one label' if equal.by_label else ''}"


def of_joint(context: Context, joint: JointDrift, moments: Drift) -> list[Condition]:
    """Say where log p drifts: of a minority of draws; or of all, or of most, where no coordinate tells as much."""
    cure, n = context.shape_cure(), len(joint.rises)
    by_chance = bdtrc(n - 1, n + joint.n_falls, 0.5)  # that so many rise, were falls as likely
    if n - joint.n_falls > LEAST_FAR * joint.n_draws and by_chance < FAMILY_WISE:
        said = (
            f"a part of the draws is far from the posterior: as they are moved towards it, log p rises by more than "
            f"{joint.far:.0f} nats at {n:,} of {joint.n_draws:,} ({percent(n / joint.n_draws)}), by "
            f"{np.median(joint.rises):,.0f} in the median of these, and falls as far at {joint.n_falls:,}"
        )
        return [Condition("draws far away", n, joint.n_falls, said, cure=cure)]
    drift = joint.mean
    said = (
        f"the joint density is off: log p drifts by {drift} nats as draws are moved, more than {joint.limit:.1f}, "
        "though no single coordinate stands out"
    )
    is_much = abs(drift.value) > max(joint.limit, critical(1) * drift.se)
    is_excused = moments.stands_out or not is_much
    return [Condition("log p", abs(drift.value), joint.limit, said, is_excused=is_excused, cure=cure)]


# --- posterior mass far from where q is, at other modes of log p ---


def other_modes(density: ModelDensity, q: Distribution, elbo: float, rng: np.random.Generator) -> list[OtherMode]:
    """Look for modes once more, from other points; return those outside q, each with its part of the mass of both."""
    search, mean, sd = ModeSearch(density, seed_of(rng), "", "hessians"), q.mean(), q.sd()
    sd = np.where(np.isfinite(sd), sd, 1.0)
    # A Gaussian of a form whose curvatures can be had.
    around = FullState.from_scale(mean, sd) if q.n_dim <= MAX_DENSE_DIM else q.gaussian.with_scale(mean, sd)
    found = search.after(around, elbo, 0, 0, is_sound=True)
    if found is None:
        return []
    density.n_gradients += found.n_gradients
    result = []
    for candidate in (mode.gaussian for mode in found.modes):
        theta = draws_of(candidate, N_DRAWS, rng)
        with np.errstate(invalid="ignore"):
            log_p, log_q = density.logp(theta), q.log_density(theta)
            outside = np.isfinite(log_p) & ~(log_q >= log_p - elbo - LOG_OUTSIDE)
        if outside.mean() >= MOSTLY:
            ratio = log_p[outside] - candidate.log_density(theta[outside])
            result.append(OtherMode(candidate, float(expit(logsumexp(ratio) - np.log(len(theta)) - elbo))))
    return sorted(result, key=lambda mode: -mode.share)


# --- importance weights of draws of q, within a budget of evaluations ---

#: Estimated seconds that a diagnosis may take in any case, and as a part of the fit.
SECONDS, PART = 2.0, 0.5
#: Part of a budget for importance weights.
_OF_WEIGHTS = 0.25
#: Importance weights of fewer draws are not judged within a budget.
FEWEST_WEIGHED = 1_000
#: Part of the gradients for comparing log p with its mirror images; with too few for two of these, there are none.
_OF_SYMMETRIES = 0.05


def _seconds_of(posterior: Posterior) -> float:
    """Return the estimated seconds that a diagnosis may take."""
    record, took = posterior.record, 0.0
    if record is not None:
        took = fit_seconds(posterior.density, record.n_gradients, record.n_hessians, record.estimator)
    return max(SECONDS, PART * took)


@dataclass(frozen=True)
class Budget:
    """What a report may evaluate."""

    #: Draws for importance weights; 0: none.
    n_weights: int
    #: For moved draws, about.
    n_gradients: int
    #: Whether moved draws get less than they do where evaluations are cheap.
    cut: bool = False
    #: The same of importance weights.
    weights_cut: bool = False


def n_own(posterior: Posterior) -> int:
    """Return how many draws belong to the fit: those of a diagnosis, or where it has none, what costs as much."""
    costs, n = costs_of(posterior), budget_of(posterior).n_weights
    n = n or int(np.clip(_seconds_of(posterior) / costs.weight, MIN_KHAT_DRAWS, FEWEST_WEIGHED))
    if n < most_weighed(posterior, N_WEIGHED):
        logger.info(f"Importance weights of {n:,} draws: evaluations of this model are dear, ask for more by draws=.")
    return n


def most_weighed(posterior: Posterior, draws: int) -> int:
    """Return how many of some draws can be held at once."""
    return min(draws, max(FEWEST_WEIGHED, HELD // max(posterior.layout.n_dim, 1)))


def own_generator(record: FitRecord | None, stream: int = WEIGHTS) -> np.random.Generator:
    """Return the generator of draws that belong to a fit."""
    return np.random.default_rng([stream, 0 if record is None else record.seed])


def draws_in_chunks(posterior: Posterior, n: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield draws that are weighed, in chunks: the same ones whenever the generator is in the same state."""
    for chunk in chunks(n, posterior.layout.n_dim):
        yield posterior.distribution.draw(chunk, rng)


def weighed(posterior: Posterior, n: int, rng: np.random.Generator) -> Array:
    """Return log weights of draws, (n,)."""
    q, density = posterior.distribution, posterior.density
    return np.concatenate([q.log_weights(theta, density) for theta in draws_in_chunks(posterior, n, rng)])


def log_ratio_of(posterior: Posterior, draws: int | None, rng: np.random.Generator | None) -> Array:
    """Return log p - log q at draws of q, (n_draws,).

    Without a generator, these belong to the fit: they are as many at least, and evaluated once for a q.
    """
    if (of_pool := posterior.distribution.kept_log_weights()) is not None:
        return of_pool
    if rng is not None:
        n = N_WEIGHED if draws is None else check_draws(draws)
        with announced("Importance weights", n * costs_of(posterior).weight):
            return weighed(posterior, n, rng)
    n = n_own(posterior) if draws is None else draws
    if posterior.log_ratio is None or len(posterior.log_ratio) < n:
        posterior.log_ratio = weighed(posterior, n, own_generator(posterior.record))
    return posterior.log_ratio


def weights_and_elbo(log_ratio: Array) -> tuple[Weights, Elbo]:
    """Return what log p - log q at draws says of weights, and the ELBO."""
    finite = np.isfinite(log_ratio)
    n = int(finite.sum())
    with np.errstate(over="ignore"):  # far draws of a proposal may have next to no density
        value = float(log_ratio[finite].mean()) if n else -np.inf
        se = float(log_ratio[finite].std(ddof=1) / np.sqrt(n)) if n > 1 else np.inf
    return weigh(log_ratio)[1], Elbo(value, se)


# --- gradients of log p at draws: how fast what is computed of these would drift, if they diffused ---

#: Draws that are moved, and trajectories of each; as many times as many where a diagnosis is thorough. Gradients are
#: looked at, at most, at as many draws as there are trajectories: 4 errors of a limit are then less than what counts.
_MOVED, _TRAJECTORIES = 1_024, 4
#: Time over which the diffusion is followed where what is computed is not linear: its bias is about as large.
_TIME = 1e-3


@dataclass(frozen=True)
class Drifts:
    """Moved draws, and what drifts."""

    moved: Moved
    #: Of coordinates, by gradients at draws where these are looked at, else of moved ones; None where too few could be.
    moments: Drift | None = None
    #: Of what is computed of draws; None where there is nothing, or it would take too long.
    functionals: Drift | None = None
    #: None where too few draws could be moved.
    joint: JointDrift | None = None
    #: Draws at which gradients are looked at.
    n_scored: int = 0

    @property
    def stands_out(self) -> bool:
        """Whether something is off by much."""
        return any(drift is not None and drift.stands_out for drift in (self.moments, self.functionals))

    def confirmed_by(self, moved: "Drifts") -> "Drifts":
        """Return what moved draws do not rule out: where log p jumps, means of gradients are no 0."""
        assert self.moments is not None
        of = None if self.functionals is None else self.functionals.confirmed_by(moved.functionals)
        return replace(self, moved=moved.moved, moments=self.moments.confirmed_by(moved.moments), functionals=of)


def score_drift_of(
    posterior: Posterior, rng: np.random.Generator, n: int, functionals: Functionals | None
) -> Drifts | None:
    r"""Return what gradients at draws say of coordinates, and of what is computed of draws.

    None where they are finite at too few of them.

    Notes
    -----
    Draws of the posterior that diffuse by :math:`\Sigma \nabla \log p` a unit of time, and noise of variance
    :math:`2 \Sigma`, stay draws of the posterior, so that :math:`E[L f] = 0` for all functions of these, L being the
    generator of the diffusion [1]_. It takes one gradient a draw, where moved draws take dozens. Of a coordinate,
    :math:`L f` is known; of others, it is the mean of two small steps with noise of opposite signs.

    References
    ----------
    .. [1] J. Gorham and L. Mackey (2015). Measuring sample quality with Stein's method. NeurIPS.
       https://doi.org/10.48550/arXiv.1506.03039
    """
    q = posterior.distribution
    plan = q.plan(posterior.density)
    n = min(n, max(LEAST_MOVED, AT_ONCE // max(q.n_dim, 1)))
    gaussian, theta = plan.gaussian, plan.draw(q.base(n, rng))
    with np.errstate(all="ignore"):
        step = gaussian.draws(gaussian.whiten(plan.target.logp_grad(theta)[1])) - gaussian.mean()
    finite = np.isfinite(theta).all(axis=1) & np.isfinite(step).all(axis=1)
    theta, step = theta[finite], step[finite]
    if len(theta) < FEWEST:
        return None
    source, sd = q.sources(theta), q.sd()
    spread = np.broadcast_to((gaussian.sd() / sd) ** 2, theta.shape)
    moments = Drift(diffused((theta - q.mean()) / sd, step / sd, spread, source))
    of_moments = Drifts(NOT_MOVED, moments, n_scored=len(theta))
    if functionals is None:
        return of_moments
    n = min(len(theta), functionals.affordable(n * posterior.density.gradient_seconds) // 2)
    if n < FEWEST:
        return of_moments
    noise = np.sqrt(2.0 * _TIME) * (gaussian.draws(rng.standard_normal((n, q.n_dim))) - gaussian.mean())
    ends = (theta[:n] + _TIME * step[:n] + noise, theta[:n] + _TIME * step[:n] - noise)
    try:
        before, *after = (functionals.at(x) for x in (theta[:n], *ends))
    except Exception:  # it may fail at some draws alone
        return of_moments
    before, *after = on_scale_of(before, before, *after)
    rate, noise = (sum(after) - 2.0 * before) / (2.0 * _TIME), 0.5 * (after[0] - after[1])
    spread = noise**2 / (2.0 * _TIME)
    return replace(of_moments, functionals=Drift(diffused(before, rate, spread, source[:n]), functionals))


# --- draws moved towards the posterior, and all that drifts: moments, log p, and what is computed of draws ---


def most_moved(n_dim: int, n_draws: int = _MOVED) -> int:
    """Return how many of some draws can be moved at once."""
    return min(n_draws, max(LEAST_MOVED, STREAMED // max(n_dim, 1)))


def drifts_of(
    posterior: Posterior,
    rng: np.random.Generator,
    n_trajectories: int,
    budget: Budget,
    functionals: Functionals | None,
) -> Drifts:
    """Return what drifts: by gradients at draws of a pool, or by moved draws.

    Gradients at draws of a Gaussian that has converged have the mean 0, whatever the posterior is.
    """
    q, density, record = posterior.distribution, posterior.density, posterior.record
    scored, left, n_moved = None, budget.n_gradients, most_moved(q.n_dim)
    if record is not None and record.is_pool and left >= FEWEST:
        scored = score_drift_of(posterior, rng, min(_MOVED * _TRAJECTORIES, left), functionals)
    if scored is not None:
        if not scored.stands_out:
            return scored
        # Of many draws that are moved once, chance is known best.
        left, n_moved, n_trajectories = left - scored.n_scored, most_moved(q.n_dim, scored.n_scored), 1
    base, plan = q.base(n_moved, rng), q.plan(density)
    moved = move(density, plan, base, rng, n_trajectories=n_trajectories, max_gradients=left)
    by_moves = Drifts(moved)
    if len(moved.end) >= FEWEST:
        columns = (np.concatenate([moved.control, moved.end]) - q.mean()) / q.sd()
        took = moved.n_gradients * density.gradient_seconds
        of = None if functionals is None else functional_drift_of(functionals, moved, took)
        by_moves = Drifts(moved, moved_drift_of(moved, columns), of, joint_drift_of(moved))
    return by_moves if scored is None else scored.confirmed_by(by_moves)


# --- a diagnosis of an approximate posterior, made of its parts: weights, moved draws, and mass elsewhere ---

_NO_BUDGET = "approx.diagnose() has more, diagnose(draws=10_000) no budget"


def full_budget(posterior: Posterior, draws: int = N_WEIGHED, *, thorough: bool = False) -> Budget:
    """Return what a diagnosis takes where nothing is dear."""
    has_weights = posterior.distribution.kept_log_weights() is not None
    n_gradients = MOST_STEPS * _MOVED * (_TRAJECTORIES if thorough else 1)
    return Budget(0 if has_weights else most_weighed(posterior, draws), n_gradients)


def budget_of(posterior: Posterior) -> Budget:
    """Return as much of a diagnosis as can be had in the seconds for it."""
    costs, wanted = costs_of(posterior), full_budget(posterior)
    seconds = _seconds_of(posterior)
    n_weights = min(wanted.n_weights, int(_OF_WEIGHTS * seconds / costs.weight))
    if n_weights < min(FEWEST_WEIGHED, wanted.n_weights):
        n_weights = 0
    n_gradients = min(wanted.n_gradients, int((seconds - n_weights * costs.weight) / costs.gradient))
    return Budget(n_weights, n_gradients, n_gradients < wanted.n_gradients, n_weights < wanted.n_weights)


def diagnose(
    posterior: Posterior,
    budget: Budget,
    of_weights: np.random.Generator,
    rng: np.random.Generator,
    *,
    is_of_fit: bool = False,
    thorough: bool = False,
) -> Diagnosis:
    """Make a diagnosis; log weights of the draws that belong to the fit are kept."""
    density, record, layout = posterior.density, posterior.record, posterior.layout
    before = density.n_gradients
    equal, n_compared = _equal_modes(posterior, budget)
    if budget.cut:
        budget = replace(budget, n_gradients=max(budget.n_gradients - n_compared, 0))
    costs = costs_of(posterior)
    with announced("Judging q", budget.n_weights * costs.weight + budget.n_gradients * costs.gradient):
        again = copy.deepcopy(of_weights)
        weights, elbo, ratio = _weights_of(posterior, budget, of_weights, is_of_fit=is_of_fit)
        often = _TRAJECTORIES ** (2 if thorough else 1)
        functionals = functionals_of(density, posterior.constrain)
        found = drifts_of(posterior, rng, often, budget, functionals)
    moved, drift = found.moved, found.moments
    some = len(moved.end) + moved.n_lost < most_moved(layout.n_dim)
    fewer = budget.cut and not found.n_scored and (some or moved.n_trajectories < often)
    places = other_modes(density, posterior.distribution, elbo.value, rng) if thorough else []
    gap = float("nan") if record is None or record.is_pool else record.gap
    q, of = posterior.distribution, None if found.functionals is None else found.functionals.functionals
    context, seen = context_of(posterior), SCORED if found.n_scored else MOVED
    # What moved draws and weights show beside moments of coordinates.
    further = [] if found.joint is None or drift is None else of_joint(context, found.joint, drift)
    further += [] if found.functionals is None else of_drift(context, found.functionals, seen)
    if not found.stands_out:
        for shift in _weighted_shifts(posterior, functionals, weights, ratio, again):
            further += of_drift(context, shift, "importance weights move it")
    findings = findings_of(context, gap, weights, moved, drift, equal, places, q, further, seen)
    own = NOT_TESTED if record is None or not record.is_pool else record.judged
    cure = context.shape_cure()
    if record is not None and record.is_nested:
        cure = "Give the hyperparameters more informative priors, fit with another random_seed, or use pm.sample."
    verdict = replace(
        own,
        found=findings,
        open=_open(budget, found) if fewer and not context.is_pool else "",
        cure=cure if own.failures else "",
        is_tested=True,
    )
    return Diagnosis(
        checks=verdict,
        outcome="not made by a fit" if record is None else str(record.status),
        gap=gap,
        elbo=elbo,
        weights=weights,
        by_coordinate=_columns(drift, layout.n_dim),
        log_p_drift=Elbo(np.nan, np.nan) if found.joint is None else found.joint.mean,
        acceptance=moved.acceptance,
        n_moved=len(moved.end),
        n_trajectories=moved.n_trajectories,
        n_scored=found.n_scored,
        thorough=thorough,
        n_gradients=density.n_gradients - before,
        n_log_p=weights.n_draws + n_compared,
        layout=layout,
        is_pool=context.is_pool,
        left_out=_left_out(budget, found, often if fewer else 0, n_compared > 0, q.kept_log_weights() is not None),
        joint="" if found.joint is None else found.joint.in_words(),
        computed="" if of is None else of.of_elements(),
        searched=record is not None and record.searched,
        has_one_mode=record is not None and record.estimator == "quadrature" and has_one_mode(density),
    )


def standing_diagnosis(posterior: Posterior) -> Diagnosis:
    """Return the diagnosis that belongs to the fit, made with seeds of its own; made once, unless q changes."""
    if posterior.diagnosis is None:
        with few_threads(posterior.density):
            rngs = own_generator(posterior.record), own_generator(posterior.record, WEIGHTS + 1)
            posterior.diagnosis = diagnose(posterior, budget_of(posterior), *rngs, is_of_fit=True)
    return posterior.diagnosis


def requested_diagnosis(
    posterior: Posterior, rng: np.random.Generator, draws: int | None, *, thorough: bool
) -> Diagnosis:
    """Return a diagnosis as `NGVIApproximation.diagnose` takes its arguments; the standing one without any.

    Another one takes its place.
    """
    if draws is not None and check_draws(draws) < MIN_KHAT_DRAWS:
        raise ValueError(f"A diagnosis needs at least {MIN_KHAT_DRAWS} draws; got {draws}. Take 10,000.")
    if posterior.density.has_minibatch:
        return _not_judged(posterior)
    posterior.check_weights()
    if draws is None and not thorough:
        return standing_diagnosis(posterior)
    budget = full_budget(posterior, N_WEIGHED if draws is None else draws, thorough=thorough)
    with few_threads(posterior.density):
        posterior.diagnosis = diagnose(posterior, budget, rng, rng, thorough=thorough)
    return posterior.diagnosis


def _not_judged(posterior: Posterior) -> Diagnosis:
    """Return what is known of a fit to minibatches: how it ended."""
    record, layout, unknown = posterior.record, posterior.layout, Elbo(np.nan, np.nan)
    gap = float("nan") if record is None else record.gap
    return Diagnosis(
        checks=Verdict(
            found=tuple(of_fit(context_of(posterior), gap)),
            open="the model reads pm.Minibatch data, and log p is that of one batch. Load what `save` writes on a "
            "model of all of the data, pymc_ngvi.load(file, model), and ask there",
        ),
        outcome="not made by a fit" if record is None else str(record.status),
        gap=gap,
        elbo=unknown if record is None else record.elbo,
        weights=Weights(np.nan, np.nan, 0, 0),
        by_coordinate=_columns(None, layout.n_dim),
        log_p_drift=unknown,
        acceptance=float("nan"),
        n_moved=0,
        n_trajectories=0,
        thorough=False,
        n_gradients=0,
        n_log_p=0,
        layout=layout,
    )


def _weights_of(
    posterior: Posterior, budget: Budget, rng: np.random.Generator, *, is_of_fit: bool
) -> tuple[Weights, Elbo, Array]:
    """Return weights, the ELBO, and log weights of draws."""
    record, n, own = posterior.record, budget.n_weights, posterior.distribution.kept_log_weights()
    if own is not None or not n:
        weights = Weights(np.nan, np.nan, 0, 0) if own is None else weights_and_elbo(own)[0]
        return weights, Elbo(np.nan, np.nan) if record is None else record.elbo, np.empty(0)
    ratio = log_ratio_of(posterior, n, None) if is_of_fit else weighed(posterior, n, rng)
    return *weights_and_elbo(ratio), ratio


def _weighted_shifts(
    posterior: Posterior,
    functionals: Functionals | None,
    weights: Weights,
    ratio: Array,
    rng: np.random.Generator,
) -> Iterator[Drift]:
    """Yield what importance weights say of coordinates and functionals, where they help and are not all but equal.

    The generator is in the state in which it made the draws that were weighed.
    """
    if not len(ratio) or not weights.verdict().helps:
        return
    # No mean moves by more than the root of their relative variance, in standard deviations.
    if weights.n_draws < FEWEST_WEIGHED or weights.uneven < LIMITS["mean"] ** 2:
        return
    took = costs_of(posterior).weight * len(ratio)
    n = min(N_SHOWN, len(ratio))
    theta, finite = np.concatenate(list(draws_in_chunks(posterior, len(ratio), rng)))[:n], np.isfinite(ratio[:n])
    theta, ratio = theta[finite], ratio[:n][finite]
    yield weighted_shift_of(theta, ratio, None)
    if functionals is not None and functionals.affordable(took) >= n:
        with contextlib.suppress(Exception):  # what a Deterministic raises at single draws is not for this to tell
            yield weighted_shift_of(functionals.at(theta), ratio, functionals)


def _equal_modes(posterior: Posterior, budget: Budget) -> tuple[tuple[EqualModes, ...], int]:
    """Look for symmetries that q does not have; also return how many log densities that took."""
    rng, most = own_generator(posterior.record, WEIGHTS + 2), MOST_EVALUATIONS
    if budget.cut:
        most = int(min(most, _OF_SYMMETRIES * budget.n_gradients))
    if most < 2 * N_COMPARED:
        return (), 0
    q = posterior.distribution
    modes, n_compared = [distribution_of(mode) for mode in getattr(q.q, "in_modes", ())], 0
    for part in modes or [q]:
        theta = part.draw(N_COMPARED, rng)
        found, n = equal_modes(posterior.density, q, theta, posterior.layout, most // max(len(modes), 1))
        n_compared += n
        if found or not modes:
            return tuple(replace(of, covered="some" if modes else "one") for of in found), n_compared
    # The image of each mode is another one: which symmetry that is, one of them tells.
    found, n = equal_modes(posterior.density, modes[0], modes[0].draw(N_COMPARED, rng), posterior.layout, most)
    return tuple(replace(of, covered="all") for of in found), n_compared + n


def _columns(drift: Drift | None, n_dim: int) -> dict[str, Array]:
    result, unknown = dict[str, Array](), Estimates(np.full(n_dim, np.nan), np.full(n_dim, np.nan))
    for measure in ("mean", "sd"):
        known = unknown if drift is None else drift.measures[measure]
        result |= {f"{measure}_drift": known.value, f"{measure}_drift_se": known.se}
    return result


def _left_out(budget: Budget, found: Drifts, often: int, compared: bool, has_weights: bool) -> tuple[str, ...]:
    """Return what a budget does not allow; ``often``: trajectories that were wanted, 0 where all draws were moved."""
    result, moved = [], found.moved
    if budget.n_weights == 0 and not has_weights:
        result.append("importance weights and their k-hat")
    elif budget.weights_cut:
        result.append(f"importance weights of more than {budget.n_weights:,} draws")
    if not compared:
        result.append(SYMMETRIES)
    if not_moved(moved) and not found.n_scored:
        result.append("moved draws")
    elif often:
        times = f", {moved.n_trajectories} trajectories each" if moved.n_trajectories < often else ""
        result.append(f"more than {len(moved.end)} moved draws{times}")
    return tuple(result)


def _open(budget: Budget, found: Drifts) -> str:
    """Return, in a clause, why few evaluations leave the verdict open; empty where they do not."""
    if found.moments is not None and found.moments.is_settled:
        return ""
    if not_moved(found.moved):
        return (
            f"too few evaluations within the budget, {budget.n_gradients:,} gradients, to move draws of q towards the "
            f"posterior ({_NO_BUDGET})"
        )
    return (
        f"{len(found.moved.end)} moved draws, all that the budget of {budget.n_gradients:,} gradients allows, do not "
        f"tell whether means and standard deviations are right ({_NO_BUDGET})"
    )
