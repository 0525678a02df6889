"""What a summary shows, and in which order: parameters of the population, then those of each group, then effects."""

import math

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr

from pymc_ngvi.reading.roles import Grouping, Roles

#: Heading of what belongs to no group.
POPULATION = "Population-level parameters"
#: Axes of draws.
_SAMPLE = ("chain", "draw")


class ShownVariables(NamedTuple):
    """Which variables a summary shows.

    Parameters
    ----------
    sections : dict
        Names by heading, in the order in which they are shown; one heading, "", where there are no groups.
    notes : tuple of str
        Sentences below the table: numbers of observations and of levels, what was left out.
    """

    sections: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All names that are shown."""
        return [name for names in self.sections.values() for name in names]


def plan_sections(roles: Roles, sizes: Mapping[str, int], *, group_effects: bool) -> ShownVariables:
    """Return what a summary shows of a model.

    Parameters
    ----------
    roles : Roles
    sizes : mapping of str to int
        Numbers of elements by name, in the order of the draws.
    group_effects : bool
        Whether to show the effects of groups, too.
    """
    groups = roles.groups
    apart = {*roles.rows, *roles.raw}
    apart.update(name for g in groups for name in (*g.scales, *g.packed, *g.effects, *g.offsets))
    sections = {POPULATION: [name for name in sizes if name not in apart]}
    for g in groups:
        sections[f"{_what(g)}: {_levels(g)}"] = g.scales
    if group_effects:
        for g in groups:
            sections[f"Effects: {_levels(g)}"] = g.effects or g.offsets
    shown = {heading: tuple(names) for heading, names in sections.items() if names} or {"": tuple(sizes)}
    if not groups:
        shown = {"": tuple(name for names in shown.values() for name in names)}
    return ShownVariables(shown, (*_counts(roles), *_left_out(roles, sizes, group_effects=group_effects)))


def _what(group: Grouping) -> str:
    correlated = group.packed or any("corr" in name for name in group.scales)
    return "Standard deviations and correlations" if correlated else "Standard deviations"


def _levels(group: Grouping) -> str:
    return f"{group.name} ({group.n_levels:,} levels)"


def _counts(roles: Roles) -> list[str]:
    """Return the sentences with the numbers of observations and of levels, as mixed-model programs print them."""
    of = list(roles.observations.items())
    observed = f"{of[0][1]:,}" if len(of) == 1 else ", ".join(f"{name} {n:,}" for name, n in of)
    sentences = [f"Number of observations: {observed}."] if of else []
    if roles.groups:
        sentences.append("Number of levels: " + ", ".join(f"{g.name} {g.n_levels:,}" for g in roles.groups) + ".")
    return [" ".join(sentences)] if sentences else []


def _left_out(roles: Roles, sizes: Mapping[str, int], *, group_effects: bool) -> list[str]:
    """Return sentences that say what the summary leaves out, and how to see it."""
    sentences = []
    effects = [] if group_effects else [name for g in roles.groups for name in g.effects or g.offsets]
    if effects:
        n = sum(sizes[name] for name in effects)
        sentences.append(f"Not shown: {n:,} group effects ({', '.join(effects)}); see summary(group_effects=True).")
    offsets = [name for g in roles.groups if g.effects for name in g.offsets]
    others = {
        "standardised effects": [*offsets, *roles.raw],
        "packed Cholesky factors": [name for g in roles.groups for name in g.packed],
        "values for each observation": list(roles.rows),
    }
    parts = [f"{kind} ({', '.join(names)})" for kind, names in others.items() if names]
    if parts:
        last = [name for names in others.values() for name in names][-1]
        start = "Nor are shown" if effects else "Not shown:"
        sentences.append(f'{start} {", ".join(parts)}; see, by name, summary(var_names=["{last}"]).')
    return sentences


def arranged(
    posterior: xr.Dataset, plan: ShownVariables, scales: set[str], terms: Mapping[str, Sequence[str]]
) -> tuple[xr.Dataset, dict[str, slice]]:
    """Return the draws that a summary shows, and where the rows of each section will be.

    Of matrices of correlations among ``scales``, only the entries below the diagonal are kept, each once.

    Parameters
    ----------
    posterior : xarray.Dataset
    plan : ShownVariables
    scales : set of str
    terms : mapping of str to sequence of str
        Labels for the axes of scales that have none, as `names_of_terms` finds them.

    Returns
    -------
    dataset : xarray.Dataset
        Variables in the order of the sections.
    where : dict
        Slice of rows by heading.
    """
    kept: dict[str, xr.DataArray] = {}
    where: dict[str, slice] = {}
    start = 0
    for heading, names in plan.sections.items():
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


def names_of_terms(few: xr.Dataset, groups: Sequence[Grouping]) -> dict[str, list[str]]:
    """Return the names of the terms that standard deviations and correlations belong to, by name of these.

    They are those of the axis of the effects that is not the axis of levels; a Cholesky factor has plain axes.

    Parameters
    ----------
    few : xarray.Dataset
        Draws of all variables, two or more.
    groups : sequence of Grouping
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
    if values.ndim != 4 or values.shape[2] != values.shape[3]:
        return False
    unit = np.allclose(np.diagonal(values, axis1=2, axis2=3), 1.0)
    return bool(unit and np.allclose(values, values.swapaxes(2, 3), equal_nan=True))


def _below_diagonal(draws: xr.DataArray) -> xr.DataArray:
    draws = draws.transpose(*_SAMPLE, ...)
    later, earlier = np.tril_indices(draws.shape[2], -1)
    rows, cols = (
        np.asarray(draws[dim].values if dim in draws.coords else range(draws.sizes[dim])) for dim in draws.dims[2:]
    )
    pairs = [f"{cols[j]}, {rows[i]}" for i, j in zip(later, earlier, strict=True)]
    dim = f"{draws.name}_pair"
    values = draws.to_numpy()[:, :, later, earlier]
    coords = {d: draws.coords[d] for d in _SAMPLE if d in draws.coords}
    return xr.DataArray(values, dims=(*_SAMPLE, dim), coords={**coords, dim: pairs}, name=draws.name)
