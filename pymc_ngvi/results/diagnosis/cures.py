"""What may help where q is not near enough to the posterior, by what is known of the model and the fit."""

import functools

from collections.abc import Callable
from dataclasses import dataclass

from pymc_ngvi.core.prices import in_words
from pymc_ngvi.density import Layout
from pymc_ngvi.families import DENSE, SEVERAL_MODES, STRUCTURED, Traits, traits_of
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.posteriors.kinds import KINDS
from pymc_ngvi.posteriors.kinds.kind import if_available
from pymc_ngvi.posteriors.kinds.trees import MANY_GLOBALS
from pymc_ngvi.posteriors.plan import Decision
from pymc_ngvi.results.posterior import Posterior
from pymc_ngvi.results.structure import ModelStructure

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
    return Context(
        layout=layout,
        record=record,
        family=posterior.distribution.family if record is None or record.is_pool else record.family,
        has_groups=_has_groups(structure),
        has_hessian=posterior.density.has_hessian,
        of_bambi=any("|" in v.name and v.name.endswith("_offset") for v in layout.variables),
        other_posterior=functools.cache(lambda: _other_posterior(posterior)),
        last_resort=functools.cache(lambda: _last_resort(posterior)),
        can_be_relative=not posterior.density.is_streamed and _can_be_relative(structure),
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


def _has_groups(structure: ModelStructure) -> bool:
    """Tell whether there are several blocks given global parameters: not a chain that is cut, nor a field."""
    local = sum(len(part.sizes) for part in structure.parts if part.kind == "blocks")
    return local >= _FEWEST_GROUPS and any(part.kind == "global" for part in structure.parts)


def _can_be_relative(structure: ModelStructure) -> bool:
    """Tell whether there are few global parameters, and blocks are effects of groups.

    Of crossed effects, those of one factor are global: each costs two gradients of every draw. Their scale is a block,
    which has no mode where all of them are 0, as at a start.
    """
    blocks = [part for part in structure.parts if part.kind == "blocks"]
    return structure.n_global <= MANY_GLOBALS and all(len(part.sizes) >= _FEWEST_GROUPS for part in blocks)
