"""Choices that the user left open and that depend on the model: minibatches, and missing second derivatives."""

import warnings

from collections.abc import Mapping
from typing import Any, NamedTuple

from pymc_ngvi.core import prices
from pymc_ngvi.core.linalg import fits_in_memory
from pymc_ngvi.core.messages import OURS
from pymc_ngvi.density import MissingDerivativeError, ModelDensity
from pymc_ngvi.families import DENSE, FAMILIES, INDEPENDENT, STRUCTURED, FullState, SparseFamily, traits_of
from pymc_ngvi.families.dissection import cheapest_with_fill, find_structure, step_seconds
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.matrices.sparse.structure import FilledStructure, SummedStructure
from pymc_ngvi.families.sparse import goes_with_fill, goes_with_sums
from pymc_ngvi.fitting.options import AUTO, OF_RULE, OPTIONS, FitOptions
from pymc_ngvi.fitting.registry import AXES, ON_FIXED_DRAWS, only_family, stochastic_step

# --- the family for a model, where the user names none: by what a step would cost, and whether it fits in memory ---

#: Dimensions below which a dense covariance costs nothing worth saving, and below which it costs less in any case.
_SMALL, _LESS = 40, 48


class FamilyChoice(NamedTuple):
    """A family and why it was taken."""

    #: Of a registered family.
    name: str
    #: For the closing line of the fit; empty where there was nothing to choose.
    reason: str = ""
    #: Taken because nothing better fits in memory.
    is_makeshift: bool = False


def choose_family(density: ModelDensity, *, may_fill: bool = False, may_sum: bool = False) -> FamilyChoice:
    """Return the family that suits a model."""
    n_dim = density.n_dim
    if n_dim < _SMALL:
        return FamilyChoice(DENSE)
    dense_fits = fits_in_memory(FullState.memory_bytes(n_dim))
    filled = cheapest_filled(density, sums=may_sum) if may_fill else None
    if filled is None and density.pattern is None:
        if dense_fits:
            return FamilyChoice(DENSE, "the Hessian is dense")
        return FamilyChoice(INDEPENDENT, "the Hessian is dense, and a dense covariance does not fit in memory", True)
    structure = filled or find_structure(density.pattern)
    sparse_fits = fits_in_memory(SparseFamily(structure).memory_bytes(n_dim))
    of_dense = prices.of_dense(n_dim) + prices.PER_COLUMN * n_dim if n_dim >= _LESS else 0.0
    if sparse_fits and (step_seconds(structure) + prices.PER_COLUMN * _columns(structure) < of_dense or not dense_fits):
        return FamilyChoice(STRUCTURED, in_short(structure))
    if dense_fits:
        return FamilyChoice(DENSE, "a sparse precision would take longer")
    return FamilyChoice(INDEPENDENT, "neither a dense covariance nor a sparse precision fits in memory", True)


def _columns(structure: ArrowStructure | FilledStructure) -> int:
    """Return the columns of a Hessian that are computed one by one, where blocks share theirs; with fill-in, few."""
    if isinstance(structure, FilledStructure):
        return 0
    return structure.n_border + int(max(structure.sizes, default=0))


def cheapest_filled(density: ModelDensity, *, sums: bool) -> FilledStructure | None:
    """Return the structure of a factor with fill-in that costs least; None where another form costs less."""
    return cheapest_with_fill(density.summed if sums else None, lambda: density.pattern)


def in_short(structure: ArrowStructure | FilledStructure) -> str:
    """Return how many coordinates are global and how many blocks there are, or how large a factor with fill-in is."""
    if isinstance(structure, FilledStructure):
        n, rows = structure.fronts.n_entries, structure.n_dim
        words = f"a precision whose Cholesky factor has {n:,} entries, {n / rows:,.0f} in a row"
        n_sums = structure.n_sums if isinstance(structure, SummedStructure) else 0
        return words + (f", beside {n_sums} sum{'s'[: n_sums != 1]} over many coordinates" if n_sums else "")
    n, sizes = structure.n_border, structure.sizes
    if not len(sizes):
        return f"all {n:,} coordinates are global"
    least, most = int(sizes[0]), int(sizes[-1])
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    blocks = f"{len(sizes):,} independent block{'s'[: len(sizes) != 1]} of size {size}"
    return f"{n:,} global coordinate{'s'[: n != 1]}, {blocks}"


# --- choices that the user left open and that depend on the model: minibatches, and missing second derivatives ---

#: Weights of a network beyond which momentum and limited steps lead further in a few passes than averages do.
_MANY_WEIGHTS = 5_000
#: Directions in which functions of rows may vary, beyond which draws of all coordinates are the quicker.
_FEW_DIRECTIONS = 5
#: Families whose form is known before the data are read, and that take exact expectations.
_OF_BATCHES = tuple(
    name
    for name, family in FAMILIES.items()
    if not family.traits.from_structure
    and any("quadrature" in product.estimators for product in family.traits.goes_with)
)
#: Options by name, as users give them.
type Given = Mapping[str, Any]


def options_for(given: Given, density: ModelDensity | None = None) -> FitOptions:
    """Check what was given, and fill in what was not."""
    given = {name: given.get(name, default) for name, default in OPTIONS.items()}
    filled = dict(given)
    if given["posterior"] == AUTO and names_a_method(given):
        filled["posterior"] = "gaussian"
    if density is not None and density.is_streamed:
        filled |= _for_batches(given)
    if density is not None and given["family"] in (None, AUTO):
        filled |= _family_for(given, density)
    if density is not None and traits_of(given["family"] or "").has_components and given["components"] is None:
        filled |= _components_for(given, density)
    if density is not None and density.has_minibatch and given["step"] is None:
        filled["step"] = stochastic_step(**{axis: filled[axis] for axis in AXES})
    if density is not None and given["estimator"] == "gauss_newton" and density.n_dim > _MANY_WEIGHTS:
        filled |= {"step": "ivon"} if given["step"] is None and _go_together({**filled, "step": "ivon"}) else {}
    if density is not None and _goes_by_rows(given, filled, density):
        filled["estimator"] = "quadrature"
    options = FitOptions(**filled)
    if density is None:
        return options
    if density.has_minibatch and options.choice.step in ON_FIXED_DRAWS:
        raise ValueError(
            f"{options.rule} compares ELBOs on the same data, and the model reads pm.Minibatch data, "
            "which differ from one evaluation to the next: leave it out, or take step='decay' or 'constant' with a "
            "Gaussian family, or the full data."
        )
    error = density.hessian_error() if options.choice.estimator == "price" else None
    return options if error is None else _without_hessians(given, filled, error)


def _for_batches(given: Given) -> Mapping[str, str]:
    """Return what goes with data in batches: expectations by quadrature, and a Gaussian."""
    wanted = {"update": "natural", "estimator": "quadrature", "step": "linesearch", "reparam": None}
    for name, value in wanted.items():
        if given[name] not in (None, value):
            raise ValueError(
                f"batches= takes natural steps with expectations by quadrature: leave {name}={given[name]!r} out. "
                "pm.Minibatch goes with stochastic step rules."
            )
    if given["posterior"] not in (AUTO, "gaussian"):
        raise ValueError(
            f"posterior={given['posterior']!r} takes draws of log p on all data, which are not in memory: with "
            "batches, leave it out."
        )
    if given["family"] not in (None, AUTO, *_OF_BATCHES):
        raise ValueError(f"batches= goes with family={' or '.join(map(repr, _OF_BATCHES))}; got {given['family']!r}.")
    return {"estimator": "quadrature", "posterior": "gaussian"}


def names_a_method(given: Given) -> bool:
    """Tell whether a method was named, whose result nothing is to be done to."""
    named = [given[name] for name in (*AXES, "reparam") if name != "family"]
    return given["family"] not in (None, AUTO) or any(value is not None for value in named)


def _may_go_by_rows(given: Given, filled: Given) -> bool:
    """Tell whether exact expectations of rows go with what was given, and nothing that was asks for draws."""
    if any(given[name] is not None for name in (*OF_RULE, "estimator", "step", "reparam")) or not given["stl"]:
        return False
    return _go_together({**filled, "estimator": "quadrature"})


def _go_together(given: Given) -> bool:
    """Tell whether there are such options."""
    try:
        FitOptions(**given)
    except ValueError:
        return False
    return True


def _goes_by_rows(given: Given, filled: Given, density: ModelDensity) -> bool:
    """Tell whether a fit takes exact expectations of rows."""
    if filled["estimator"] == "quadrature":
        return True
    if not _may_go_by_rows(given, filled):
        return False
    n_directions = density.n_directions
    return n_directions is not None and n_directions <= _FEW_DIRECTIONS


def _family_for(given: Given, density: ModelDensity) -> Mapping[str, str | None]:
    """Return the family that suits the model, and why, where it goes with what was given."""
    if given["estimator"] == "gauss_newton" or only_family(**{axis: given[axis] for axis in AXES if axis != "family"}):
        return {"family": None}  # as the registry has it, whatever the model
    # Where group effects are told from global parameters, a sparse precision is there for the asking.
    chosen = FamilyChoice(STRUCTURED) if given["reparam"] else _chosen(given, density)
    filled = {"family": chosen.name, "family_reason": chosen.reason}
    if not _go_together({**given, **filled}):
        return {"family": None}  # let the other choices decide
    _warn_of_makeshift(
        chosen, "q gets a diagonal covariance, which ignores correlations: {}. Name a family for another."
    )
    return filled


def _chosen(given: Given, density: ModelDensity) -> FamilyChoice:
    """Return the family that suits a model, in the space of its rows where that has far fewer dimensions."""
    steps = [given[name] for name in ("update", "estimator", "step")]
    may_fill = not density.has_minibatch and goes_with_fill(*steps)
    may_sum = may_fill and goes_with_sums(*steps) and _goes_by_rows(given, {**given, "family": STRUCTURED}, density)
    chosen = choose_family(density, may_fill=may_fill, may_sum=may_sum)
    if (chosen.name == DENSE or chosen.is_makeshift) and _may_go_by_rows(given, {**given, "family": DENSE}):
        seen = density.seen_from_rows
        if seen is not None:
            return FamilyChoice(
                DENSE,
                f"the data see {len(seen.space.normal):,} coefficients in {seen.space.basis.shape[1]:,} dimensions",
            )
    return chosen


def _components_for(given: Given, density: ModelDensity) -> Mapping[str, str | None]:
    """Return what components of a mixture suit the model, where that goes with what was given."""
    chosen = choose_family(density)
    if not _go_together({**given, "components": chosen.name}):
        return {}
    _warn_of_makeshift(
        chosen, "Components get diagonal covariances, which ignore correlations: {}. Name components for others."
    )
    return {"components": chosen.name}


def _warn_of_makeshift(chosen: FamilyChoice, message: str) -> None:
    if chosen.is_makeshift:
        warnings.warn(message.format(chosen.reason), UserWarning, skip_file_prefixes=OURS)


def _without_hessians(given: dict[str, Any], filled: dict[str, Any], error: MissingDerivativeError) -> FitOptions:
    """Take an estimator from gradients alone, if that was left open."""
    if given["estimator"] is not None or given["step"] in ON_FIXED_DRAWS:
        raise error
    chosen = {name: filled.get(name) for name in ("family", "family_reason") if filled.get(name)}
    by_gradients = given | chosen | {"estimator": "stein"}
    if not _go_together(by_gradients):  # what was asked for needs Hessians
        raise error
    options = FitOptions(**by_gradients)
    warnings.warn(
        f"{error} The fit goes on with gradients alone (estimator='stein', update={options.choice.update!r}, "
        f"step={options.choice.step!r}), which takes many more iterations.",
        UserWarning,
        skip_file_prefixes=OURS,
    )
    return options
