"""What is fitted: a density, the family of its approximations, and how these become approximations of the model's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from numpy.typing import ArrayLike, NDArray

from pymc_ngvi.core.linalg import check_memory
from pymc_ngvi.core.messages import suggestion
from pymc_ngvi.core.types import Array, FittedState, GaussianState, Rule, Target, VariationalState
from pymc_ngvi.density import LogDensity, ModelDensity
from pymc_ngvi.density.by_rows import NO_ROWS
from pymc_ngvi.families import DENSE, FAMILIES, STRUCTURED, Family
from pymc_ngvi.families.dissection import find_structure
from pymc_ngvi.families.gaussian import Gaussian
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure
from pymc_ngvi.families.pushforward import PushforwardState
from pymc_ngvi.fitting import starting
from pymc_ngvi.fitting.defaults import cheapest_filled, choose_family
from pymc_ngvi.fitting.options import FitOptions
from pymc_ngvi.fitting.registry import BY_GRADIENTS
from pymc_ngvi.graphs.layout import Layout, Variable
from pymc_ngvi.reparam import Conditional, reparametrised
from pymc_ngvi.reparam.row_space import RowSpaceDensity

# --- from names of variables to the blocks of a block-diagonal covariance ---

_EXPECTED = "blocks should be a sequence of sequences of names, such as [['a', 'b'], ['c']]"


def block_labels(layout: Layout, blocks: Sequence[Sequence[str]] | None = None) -> NDArray[np.intp]:
    """Return which block each coordinate belongs to."""
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


# What is fitted: a density, the family of its approximations, and how these become approximations of the model's.


@dataclass(frozen=True)
class Problem:
    """A density to be approximated, in coordinates that may not be the model's own."""

    #: Of the model.
    density: ModelDensity
    #: What is fitted: ``density`` itself, or its reparametrisation.
    target: Target
    #: Makes states of location and scale.
    family: Family[FittedState]
    #: From the scale of states to the model's own unconstrained scale; None where they are on it.
    transform: Conditional | None = None

    @property
    def has_own_coordinates(self) -> bool:
        """Whether states are on the model's own unconstrained scale."""
        return self.target is self.density

    def on_model_scale(self, state: VariationalState) -> VariationalState:
        """Return the approximation of the model that a state stands for."""
        if isinstance(self.target, RowSpaceDensity):
            return self.target.gaussian(cast(GaussianState, state))
        if self.transform is None:
            return state
        assert isinstance(state, Gaussian)
        return PushforwardState(state, self.transform)

    def first_state(
        self, rule: Rule, point: Array, scales: Sequence[Array], start: Mapping[str, ArrayLike] | None
    ) -> VariationalState:
        """Return the best state to start from, about a mean and with one of some scales, as `start` returns them."""
        large = starting.large_scales(self.density, point, start) if self.has_own_coordinates else []
        return starting.choose_start(rule, self.family, point, scales, self.density, large)

    def start(
        self, start: Mapping[str, ArrayLike] | None, start_sigma: Mapping[str, ArrayLike] | float | None
    ) -> tuple[Array, list[Array]]:
        """Return the starting mean, and the standard deviations to choose among, (n_dim,) each."""
        point = starting.start_point(self.density, start)
        scales = starting.start_scales(self.density, start_sigma)
        if isinstance(self.target, RowSpaceDensity):
            space = self.target.space
            return space.of_theta(point), [space.sd_of(scale) for scale in scales]
        if self.transform is None:
            return point, scales
        # Relative to their conditional modes and scales, local coordinates begin where a Gaussian has them.
        transform = self.transform
        transform.recentre(point)
        is_border = np.zeros(len(point), dtype=bool)
        is_border[transform.structure.border] = True
        location = np.where(is_border, point, 0.0)
        if start is not None:
            phi = transform.inverse(point[None])[0][0]
            location = phi if np.isfinite(phi).all() else location
        return location, [np.where(is_border, scale, 1.0) for scale in scales]

    def labels(self, index: Sequence[int] | NDArray[np.intp]) -> tuple[str, ...]:
        """Return the names of coordinates, of those that are the model's own."""
        if isinstance(self.target, RowSpaceDensity):
            kept = self.target.space.kept
            index = [int(kept[i]) for i in index if i < len(kept)]
        return tuple(self.density.layout.label(int(i)) for i in index)

    def mean_and_sd(self, state: VariationalState) -> tuple[Array, Array]:
        """Return what another problem of the same model may begin from: on the model's own scale, if that is known."""
        known = state if self.transform is not None else self.on_model_scale(state)
        return known.mean(), known.sd()

    def state_about(self, mean: Array, sd: Array) -> VariationalState:
        """Return the state with this mean and these standard deviations, as `mean_and_sd` returns them."""
        if isinstance(self.target, RowSpaceDensity):
            mean, sd = self.target.space.of_theta(mean), self.target.space.sd_of(sd)
        return self.family.from_scale(mean, sd)


def problem_of(density: ModelDensity, options: FitOptions) -> Problem:
    """Return what the options make of a model."""
    if options.choice.estimator == "quadrature" and density.n_directions is None:
        raise ValueError(NO_ROWS)
    if options.choice.estimator == "gauss_newton" and density.is_sharded:
        raise ValueError("estimator='gauss_newton' does not go with shards: leave it out.")
    density.functions.needs_hessians = options.choice.estimator not in BY_GRADIENTS
    if options.reparam is None:
        family = make_family(options, density)
        target = _target(density, options)
        _check(family, options, target.n_dim)
        return Problem(density, target, family)
    if not isinstance(density, LogDensity):
        raise ValueError(f"reparam={options.reparam!r} reads the data of groups, which are in shards: leave it out.")
    density.widen(density.initial_point()[None])  # what the graph does not tell, if anything
    pattern = density.structural_pattern
    if pattern is None:
        raise ValueError(
            f"reparam={options.reparam!r} standardises effects of groups, and the Hessian of this model shows none: it "
            "couples everything. Leave reparam out."
        )
    structure = find_structure(pattern)
    target = reparametrised(density, structure, options.reparam)
    family = make_family(options, density, structure)
    _check(family, options, density.n_dim)
    return Problem(density, target, family, target.transform)


def problem_by_draws(density: ModelDensity, options: FitOptions) -> tuple[Problem, FitOptions]:
    """Return what the options make of a model with draws in place of exact expectations, and the options.

    What was chosen to be sparse beside sums over many coordinates is not so by draws: another family takes its place.
    """
    options = options.with_draws()
    if options.family_reason and options.choice.family == STRUCTURED and density.pattern is None:
        chosen = choose_family(density)
        family = {"family": chosen.name, "family_reason": chosen.reason, "factor": None}
        options = replace(options, **cast(dict[str, Any], family))
    return problem_of(density, options), options


def _target(density: ModelDensity, options: FitOptions) -> Target:
    """Return a density in the space of its rows, where that has far fewer dimensions; or as it is."""
    dense = options.choice.family == DENSE and options.factor != "precision"
    seen = density.seen_from_rows if dense and options.choice.estimator == "quadrature" else None
    return density if seen is None or not isinstance(density, LogDensity) else RowSpaceDensity(density, seen)


@dataclass(frozen=True)
class _Form:
    """What families see of a model."""

    density: ModelDensity
    #: Of a reparametrised model.
    known: ArrowStructure | None = None

    @property
    def n_dim(self) -> int:
        """Number of unconstrained coordinates."""
        return self.density.n_dim

    def labels(self, blocks: Sequence[Sequence[str]] | None) -> NDArray[np.intp]:
        """Return the block of each coordinate: of those named, of a group, or of a variable."""
        if self.known is not None and blocks is None:
            return self.known.labels
        return block_labels(self.density.layout, blocks)

    def structure(self) -> ArrowStructure | None:
        """Return the structure of the Hessian; None where that counts as dense."""
        if self.known is not None or self.density.pattern is None:
            return self.known
        return find_structure(self.density.pattern)

    def filled(self, *, sums: bool) -> FilledStructure | None:
        """Return the structure of the factor of the Hessian as it is, where it saves much; None elsewhere."""
        return None if self.known is not None else cheapest_filled(self.density, sums=sums)


def make_family(
    options: FitOptions, density: ModelDensity, structure: ArrowStructure | None = None
) -> Family[FittedState]:
    """Return what makes a state of location and scale."""
    return FAMILIES[options.choice.family].of(_Form(density, structure), options)


def _check(family: Family[FittedState], options: FitOptions, n_dim: int) -> None:
    check_memory(family.memory_bytes(n_dim), options.choice.family, n_dim, list(FAMILIES))
