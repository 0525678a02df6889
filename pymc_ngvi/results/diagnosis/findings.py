"""What is wrong with an approximation, in words, with what to do."""

import functools
import math

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numpy.typing import NDArray

from pymc_ngvi.core.elbo import format_gap
from pymc_ngvi.core.prices import in_words
from pymc_ngvi.core.psis import Weights, WeightVerdict
from pymc_ngvi.core.types import Array
from pymc_ngvi.density import Layout
from pymc_ngvi.density.constrain import PREDICTORS
from pymc_ngvi.families import DENSE, SEVERAL_MODES, STRUCTURED, Traits, traits_of
from pymc_ngvi.fitting.record import FitRecord, OtherMode
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.kinds.kind import if_available
from pymc_ngvi.posteriors.kinds.trees import MANY_GLOBALS
from pymc_ngvi.posteriors.plan import Decision
from pymc_ngvi.results.diagnosis.diagnosis import MOVED, Finding
from pymc_ngvi.results.diagnosis.drifts import (
    COMPUTED,
    COMPUTED_SLIGHT,
    LEAST_ACCEPTANCE,
    SERIOUS,
    SLIGHT,
    Drift,
    JointDrift,
    Moved,
)
from pymc_ngvi.results.diagnosis.equal_modes import EqualModes
from pymc_ngvi.results.distributions import Distribution, Posterior

#: Largest dimension for which a mixture of dense components is worth a try.
_MOST_MIXED = 300
#: Blocks from which on local coordinates count as effects of groups.
_FEWEST_GROUPS = 3


@dataclass(frozen=True)
class Context:
    """What cures depend on."""

    layout: Layout
    record: FitRecord | None
    family: str
    #: Whether effects of groups are independent given global parameters.
    has_groups: bool
    has_hessian: bool
    #: Whether Bambi made its group effects non-centred.
    of_bambi: bool = False
    #: Returns the option ``posterior`` that was left out for its cost, or because a Gaussian was asked for, and is
    #: worth a try; empty where none is.
    other_posterior: Callable[[], str] = str
    #: Returns what goes with any model and is worth a try where no other posterior is, with its price; empty where it
    #: was tried.
    last_resort: Callable[[], str] = str
    #: Whether effects of groups can be fitted relative to their conditional modes in reasonable time.
    can_be_relative: bool = True

    @property
    def is_pool(self) -> bool:
        """Whether draws are weighted ones of a proposal: those of an exact or a nested posterior."""
        return self.family in KINDS

    @property
    def traits(self) -> Traits:
        """What is known of the family."""
        return traits_of(self.family)

    @property
    def relative(self) -> bool:
        """Whether group effects are relative to their conditional modes."""
        return self.family == "pushforward" or (self.record is not None and self.record.reparam is not None)

    def shape_cure(self) -> str:
        """Return what may help where q has not the shape of the posterior."""
        other = self.other_posterior()
        options = [f"posterior={other!r}"] if other else [*filter(None, [self.last_resort()])]
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

    def several_modes_cure(self) -> str:
        """Return what covers several modes."""
        if self.traits.has_components:
            return "More components (n_components) may cover all of them."
        if self.has_hessian and not self.relative:
            return f"family={SEVERAL_MODES!r} can cover a few modes."
        return "pm.sample with several chains shows them all."

    def mode_cure(self) -> str:
        """Return what may help where q misses a mode."""
        if self.traits.has_components:
            return "Try more components (n_components), a wider start_sigma, or pm.sample with several chains."
        if self.has_hessian and not self.relative:
            return f"Try family={SEVERAL_MODES!r}, or rule out all but one mode by an ordering or a prior."
        return "Bar one of the modes by an ordering or a prior, or try pm.sample with several chains."


def context_of(posterior: Posterior) -> Context:
    """Return what cures depend on."""
    record, layout, structure = posterior.record, posterior.layout, posterior.structure
    blocks = [part for part in structure.parts if part.kind == "blocks"]
    local = sum(len(part.sizes) for part in blocks)
    # Of crossed effects, those of one factor are global: each costs two gradients of every draw. Their scale is a
    # block, which has no mode where all of them are 0, as at a start.
    of_groups = structure.n_global <= MANY_GLOBALS and all(len(part.sizes) >= _FEWEST_GROUPS for part in blocks)
    return Context(
        layout=layout,
        record=record,
        family=posterior.distribution.family if record is None or record.is_pool else record.family,
        # Not a chain that is cut, nor a field.
        has_groups=local >= _FEWEST_GROUPS and any(part.kind == "global" for part in structure.parts),
        has_hessian=posterior.density.has_hessian,
        of_bambi=any("|" in v.name and v.name.endswith("_offset") for v in layout.variables),
        other_posterior=functools.cache(lambda: _other_posterior(posterior)),
        last_resort=functools.cache(lambda: _last_resort(posterior)),
        can_be_relative=not posterior.density.is_streamed and of_groups,
    )


def _last_resort(posterior: Posterior) -> str:
    """Return the option that asks for what goes with any model, with its price."""
    density, plan = posterior.density, None if posterior.record is None else posterior.record.plan
    for kind in KINDS.values():
        planned = None if plan is None else plan.of(kind.name)
        is_open = planned is not None and planned.outcome in (Decision.TOO_DEAR, Decision.NOT_NEEDED)
        if not kind.is_last or not (_may_follow(posterior) if is_open else _is_left(posterior, kind.name)):
            continue
        if (found := if_available(kind.possible, density)) is not None:
            seconds = kind.price(found, density, by_rows=density.n_directions is not None).seconds
            return f"posterior={kind.name!r} ({in_words(seconds)})"
    return ""


def _may_follow(posterior: Posterior) -> bool:
    """Tell whether another posterior can follow the fit."""
    record = posterior.record
    if record is None or record.is_pool or record.reparam is not None or posterior.density.is_streamed:
        return False
    return traits_of(record.family).is_gaussian and record.status.can_be_followed


def _is_left(posterior: Posterior, kind: str) -> bool:
    """Tell whether another posterior can follow the fit and was not tried."""
    record = posterior.record
    # Not tried, or left out for its seconds.
    return _may_follow(posterior) and record is not None and (not record.posterior or record.on_request == kind)


def _other_posterior(posterior: Posterior) -> str:
    """Return the kind of posterior that is worth a try: that which is likeliest exact, of equals the first."""
    best, name = 0.0, ""
    for kind in KINDS.values():
        found = None
        if best < 1.0 and not kind.is_last and _is_left(posterior, kind.name):
            found = if_available(kind.possible, posterior.density)
        if found is not None and kind.chance(found) > best:
            best, name = kind.chance(found), kind.name
    return name


# --- what there is to say of modes beside the one that an approximation is at, in sentences ---

#: Part of the mass elsewhere, or of draws that are lost, from which on it counts; square of a standard deviation,
#: relative, that other modes may add.
_MUCH, _WIDER = 0.02, 0.2
#: Coordinates that a sentence names at most; those that are farther apart than a part of the farthest.
_N_MODES_NAMED, _NEAR_FARTHEST = 3, 0.3


def of_modes(context: Context, q: Distribution, *, has_symmetries: bool) -> list[Finding]:
    """Say which modes a fit found beside its own, and that are not covered."""
    known = () if context.record is None else context.record.modes
    modes = [mode for mode in known if not (mode.is_equal and has_symmetries)]
    if not modes:
        return []
    mean, sd, total = q.mean(), q.sd(), sum(mode.share for mode in modes)
    shifts = np.array([(np.asarray(mode.q.mean()) - mean) / sd for mode in modes])
    added = np.array([mode.share for mode in modes]) @ shifts**2
    if total < _MUCH and added.max() < _WIDER:
        return []
    where = place_of(context.layout, np.asarray(modes[0].q.mean()), mean, sd)
    if len(modes) == 1:
        what = f"another mode, with {_percent(total)} of the mass, at {where}"
    else:
        what = f"{len(modes)} other modes, with {_percent(total)} of the mass, the largest at {where}"
    text = f"The posterior has {what}. q covers the one with {_percent(1.0 - total)}."
    return [Finding(text, context.mode_cure(), True)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def place_of(layout: Layout, point: Array, mean: Array, sd: Array) -> str:
    """Return the coordinates in which a place is farthest from q."""
    apart = np.abs(point - mean) / sd
    far = np.argsort(-apart)[:_N_MODES_NAMED]
    far = far[apart[far] > _NEAR_FARTHEST * apart[far[0]]]
    return ", ".join(f"`{layout.label(int(i))}` = {point[i]:.3g} (q: {mean[i]:.3g})" for i in far)


# --- what was found, in sentences, and what may help: each names variables and a cure ---

#: Nats of a gap that are much in any case.
_GAP_MUCH = 0.5
#: k-hat of a Gaussian's own weights that is a reason where moved draws tell nothing; part of the square of the distance
#: between independent draws that these move by, on average, before they count as moved.
_HEAVY, _FORGOTTEN = 0.7, 0.5
#: Variables that a sentence names at most.
_N_NAMED = 3
#: Equal modes that are counted; of more, it is said that they are many.
_MOST_COUNTED = 1_000
#: What equal modes leave as it is, and how to keep one of them.
_UNAFFECTED = {
    "labels": "What does not depend on the labels, such as predictions, is not affected.",
    "sign": "What does not depend on the sign, such as predictions, is not affected.",
}
_AFFECTED = {
    "labels": "Means over all of them say little of what depends on the labels.",
    "sign": "Means over all of them say little of what depends on the sign.",
}
_FIXED = {
    "labels": "Order a vector of these (transform=pm.distributions.transforms.ordered, increasing initval).",
    "sign": "Fix the sign by a positive prior (pm.HalfNormal) of one of these variables, or of one entry of it.",
}

#: What to do about a nested posterior that is not known well enough.
_NESTED_CURE = "Give the hyperparameters more informative priors, fit with another random_seed, or use pm.sample."


def findings_of(
    context: Context,
    gap: float,
    weights: Weights,
    moved: Moved,
    drift: Drift | None,
    equal: Sequence[EqualModes],
    places: Sequence[OtherMode],
    q: Distribution,
    further: Sequence[Finding] = (),
    seen: str = MOVED,
) -> tuple[Finding, ...]:
    """Return all findings, the serious ones first."""
    if any(p.share > _MUCH for p in places):
        context = replace(context, other_posterior=str, last_resort=str)  # they would miss the same modes
    found = [
        *of_fit(context, gap),
        *_of_equal_modes(context, equal),
        *of_modes(context, q, has_symmetries=bool(equal)),
        *_of_support(context, weights),
        *([] if drift is None or _stuck(moved) else _of_drift(context, drift, seen)),
        *([] if _stuck(moved) else further),
        *([] if not_moved(moved) else _of_movement(context, moved, drift)),
        *_of_weights(context, weights, moved),
        *_of_places(context, places, q),
    ]
    return tuple(sorted(found, key=lambda f: not f.serious))


def of_fit(context: Context, gap: float) -> list[Finding]:
    """Return what stands against a fit for how it ended."""
    record, n_dim = context.record, context.layout.n_dim
    result = []
    # Even weights of a pool make up for a fit before it that has not converged.
    if record is not None and not (record.converged or record.is_exact):
        result.append(
            Finding(f"The fit did not converge ({record.status}): {record.sentence}", record.status.cure, True)
        )
    if record is not None:
        kind, cure = ("nested", _NESTED_CURE) if record.is_nested else ("exact", context.shape_cure())
        result += [Finding(f"Of the {kind} posterior, {doubt}.", cure, True) for doubt in record.doubts]
    if gap > min(0.5 * SLIGHT["mean"] ** 2 * n_dim, max(_GAP_MUCH, 0.01 * _GAP_MUCH * n_dim)):
        text = f"A better q of the same family is {format_gap(gap)} nats away, which is much in {n_dim:,} dimensions."
        result.append(Finding(text, "Go on with approx.refine(n, tol=...) and a smaller tol.", True))
    return result


def _of_support(context: Context, weights: Weights) -> list[Finding]:
    if not weights.n_lost or context.is_pool:  # draws of a proposal may lie anywhere
        return []
    part = weights.n_lost / weights.n_draws
    text = f"log p or log q is not finite at {weights.n_lost:,} of {weights.n_draws:,} draws of q ({100 * part:.2g} %)."
    cure = "Give the variables their support by a prior or a transform rather than by a Potential or by the data."
    return [Finding(text, cure, part > _MUCH)]


# --- moved draws ---


def in_sds(value: float, se: float) -> str:
    """Return a shift in posterior standard deviations, with its error."""
    return f"{value:+.2f} ± {se:.2f} sd"


#: What drifts, and how that is said.
_MEASURES: dict[str, tuple[str, Callable[[float, float], str]]] = {
    "mean": ("mean", in_sds),
    "sd": ("standard deviation", lambda value, se: f"{100 * value:+.0f} ± {100 * se:.0f} %"),
    "skewness": ("skewness", lambda value, se: f"{value:+.1f} ± {se:.1f}"),
    "lower": ("lower 89 % limit", in_sds),
    "upper": ("upper 89 % limit", in_sds),
}


def _named(drift: Drift, layout: Layout | None, measure: str, columns: NDArray[np.intp]) -> str:
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
    for label, size, own in list(groups.values())[:_N_NAMED]:
        more = f" and {len(own) - 1:,} more of {size:,}" if len(own) > 1 else ""
        figures = _MEASURES[measure][1](float(estimates.value[own[0]]), float(estimates.se[own[0]]))
        names.append(f"{label}{more} ({figures})")
    if others := list(groups.values())[_N_NAMED:]:
        n_more = sum(len(own) for *_, own in others)
        names.append(f"{n_more:,} more coordinates" if of is None else f"{len(others):,} others")
    return ", ".join(names)


def _of_drift(context: Context, drift: Drift, seen: str) -> list[Finding]:
    """Return what is off by much, or, where nothing is, by little; ``seen``: by what, as a clause."""
    for sizes, certain, how in ((SERIOUS, 1.0, ""), (SLIGHT, 0.0, "slightly ")):
        found = []
        for measure, columns in drift.off(sizes, certain).items():
            names = _named(drift, context.layout, measure, columns)
            text = f"The {_MEASURES[measure][0]} of q is {how}off: {seen} in {names}."
            slight = "Take care with intervals there." * (measure == "skewness")
            found.append(Finding(text, slight if how else context.shape_cure(), not how))
        if found:
            return found
    return []


def not_moved(moved: Moved) -> bool:
    """Tell whether no draws were moved for want of evaluations."""
    return moved.n_trajectories == 0 and not moved.n_lost


def _stuck(moved: Moved) -> bool:
    return moved.acceptance < LEAST_ACCEPTANCE


def _of_movement(context: Context, moved: Moved, drift: Drift | None) -> list[Finding]:
    """Say where moved draws tell nothing."""
    if drift is None:
        text = "log p or its gradient is finite at too few draws of q to move them towards the posterior."
    elif _stuck(moved):
        text = (
            f"Draws of q can hardly be moved towards the posterior (acceptance {moved.acceptance:.2f}): q is far from "
            "it, or log p has kinks or cliffs."
        )
    else:
        return []
    return [Finding(text, context.shape_cure(), True)]


# --- weights, and other places ---


def _of_weights(context: Context, weights: Weights, moved: Moved) -> list[Finding]:
    """Say that weights are uneven: of a Gaussian, a reason where no draws have moved far enough to tell more.

    Those of a pool are judged with how many of them are effective, among its checks.
    """
    verdict = weights.verdict(context.layout.n_dim)
    if verdict.helps or verdict is WeightVerdict.UNKNOWN:
        return []
    far = verdict is WeightVerdict.FAR
    is_own = context.traits.is_gaussian and not context.is_pool
    untold = is_own and weights.khat > _HEAVY and not (not_moved(moved) or _forgot(moved))
    serious = far or untold
    return [Finding(weights.sentence(context.layout.n_dim), context.shape_cure() if serious else "", serious)]


def _forgot(moved: Moved) -> bool:
    """Tell whether moved draws have forgotten where they began, in each coordinate."""
    if len(moved.end) < 2 or _stuck(moved):
        return False
    square = np.mean((moved.end - moved.start) ** 2, axis=0)
    independent = moved.end.var(axis=0) + moved.start.var(axis=0)
    return bool(np.all(square >= _FORGOTTEN * independent))


def _of_equal_modes(context: Context, equal: Sequence[EqualModes]) -> list[Finding]:
    """Say what is symmetric where q is not."""
    result = []
    for kind in ("labels", "sign"):
        of_kind = [e for e in equal if e.kind == kind]
        if not of_kind:
            continue
        what = ", or ".join(_changed(e) for e in of_kind[:_N_NAMED])
        if of_kind[0].covered == "all":
            text = f"log p stays the same when {what}: q covers all equal modes. {_AFFECTED[kind]}"
            result.append(Finding(text, _FIXED[kind], False))
            continue
        number = math.prod(e.number for e in of_kind)
        part = "some" if context.traits.has_components else of_kind[0].covered
        covered = f"{part} of {number:,} equal modes" if number <= _MOST_COUNTED else f"{part} of many equal modes"
        text = f"log p stays the same when {what}: q covers {covered}. {_UNAFFECTED[kind]}"
        result.append(Finding(text, f"{_FIXED[kind]} {context.several_modes_cure()}", True))
    return result


def _changed(equal: EqualModes) -> str:
    """Return what a symmetry does, as a clause."""
    *others, last = (f"`{name}`" for name in equal.names)
    names = f"{', '.join(others)} and {last}" if others else last
    if equal.kind == "labels":
        return f"the labels of {names} are exchanged"
    changes = "change sign together" if others else "changes sign"
    return f"{names} {changes}{' at one label' if equal.by_label else ''}"


def _of_places(context: Context, places: Sequence[OtherMode], q: Distribution) -> list[Finding]:
    modes = [p for p in places if p.share > _MUCH]
    if not modes:
        return []
    number = f"{len(modes)} modes" if len(modes) > 1 else "a mode"
    where = place_of(context.layout, np.asarray(modes[0].q.mean()), q.mean(), q.sd())
    text = (
        f"q misses {number} of the posterior; the largest has {100 * modes[0].share:.0f} % of the mass of both, at "
        f"{where}."
    )
    return [Finding(text, context.mode_cure(), True)]


def of_joint(context: Context, joint: JointDrift, moments: Drift) -> list[Finding]:
    """Say where log p drifts: of a minority of draws; or of all, or of most, where no coordinate tells as much."""
    cure, n = context.shape_cure(), len(joint.rises)
    if joint.has_minority:
        text = (
            f"A part of the draws is far from the posterior: as they are moved towards it, log p rises by more than "
            f"{joint.far:.0f} nats at {n:,} of {joint.n_draws:,} ({100 * n / joint.n_draws:.0f} %), by "
            f"{np.median(joint.rises):,.0f} in the median of these, and falls as far at {joint.n_falls:,}."
        )
        return [Finding(text, cure, True)]
    if moments.stands_out:
        return []
    if joint.is_much(joint.mean):
        drift = f"E[log p] drifts by {joint.mean} nats"
    elif joint.is_much(joint.location):
        drift = f"log p of most draws drifts by {joint.location} nats"
    else:
        return []
    text = (
        f"The joint density is off: {drift} as draws are moved, where its standard deviation is about "
        f"{np.sqrt(0.5 * joint.n_dim):.1f}, though no single coordinate stands out."
    )
    return [Finding(text, cure, True)]


_WEIGHTED_CURE = "approx.sample(importance='psis') draws with these weights."


def _in_words(drift: Drift, sizes: Mapping[str, float], certain: float, before: str = "") -> tuple[str, str]:
    """Return what is off by more than some sizes, empty for nothing, and what these are."""
    off, of = drift.off(sizes, certain), drift.functionals
    assert of is not None
    parts = [f"{before}the {_MEASURES[name][0]} of {_named(drift, None, name, at)}" for name, at in off.items()]
    names = {of.where(int(column))[0].name for columns in off.values() for column in columns}
    others = f"Deterministics and {PREDICTORS}" if PREDICTORS in names else "Deterministics"
    return ", and ".join(parts), PREDICTORS.capitalize() if names == {PREDICTORS} else others


def of_functionals(context: Context, drift: Drift, seen: str) -> list[Finding]:
    """Return what is off by much, or, where nothing is, by little; ``seen``: by what, as a clause."""
    words, kind = _in_words(drift, COMPUTED, 1.0, "in ")
    if words:
        return [Finding(f"{kind} are off: {seen} {words}.", context.shape_cure(), True)]
    words, kind = _in_words(drift, COMPUTED_SLIGHT, 0.0, "in ")
    return [Finding(f"{kind} are slightly off: {seen} {words}.", "", False)] if words else []


def of_weighted(shift: Drift) -> list[Finding]:
    """Return what importance weights change, where they can be used: limits by much, or anything by little."""
    words, kind = _in_words(shift, {"lower": COMPUTED["lower"], "upper": COMPUTED["upper"]}, 1.0)
    if words:
        text = f"{kind} are skewed as q is not: importance weights move {words}."
        return [Finding(text, _WEIGHTED_CURE, True)]
    words, _ = _in_words(shift, COMPUTED_SLIGHT | {"sd": COMPUTED["sd"]}, 0.0)
    return [Finding(f"Importance weights move {words}.", _WEIGHTED_CURE, False)] if words else []
