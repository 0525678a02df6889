"""Distributions, and what reports read of them; from arrays to what PyMC users expect: traces, trees, Datasets."""

import contextlib
import functools
import math
import warnings

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray
from pymc.backends.arviz import find_observations
from pymc.backends.base import MultiTrace
from pymc.backends.ndarray import NDArray as NDArrayTrace

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import base_of, draws_of
from pymc_ngvi.core.importance import MIN_KHAT_DRAWS
from pymc_ngvi.core.messages import warn
from pymc_ngvi.core.pattern import Pattern
from pymc_ngvi.core.sizes import FIXED_SEED, check_cov_size, check_draws
from pymc_ngvi.core.types import AnyArray, Array, GaussianState, Indices, Target, VariationalState
from pymc_ngvi.core.version import __version__
from pymc_ngvi.density import Layout, LogDensity, ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import DataSnapshot
from pymc_ngvi.density.shards import ShardedDensity
from pymc_ngvi.families import DiagonalState, MixtureState
from pymc_ngvi.families.gaussian import Partition
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.graphs.layout import Variable
from pymc_ngvi.marginal.pooled import Draws, PoolState
from pymc_ngvi.methods.mixtures import effective_components, worth_between
from pymc_ngvi.methods.reparam import Conditional, PushforwardState, ReparametrisedDensity
from pymc_ngvi.reading.roles import Extent, Roles, find_roles
from pymc_ngvi.results.structure import ModelStructure

#: Effective draws for each dimension from which on their covariance is near enough to that of the posterior: where 400
#: dimensions had 5, products of gradients came out 19 % short, and a path of exact draws drifted by 36 nats; where 157
#: had 35, 5 %, so that exact posteriors of crossed effects with 20,000 rows were called unreliable.
_PER_DIM = 100.0


def to_multitrace(
    model: pm.Model, values: dict[str, NDArray[np.generic]], stats: dict[str, NDArray[np.generic]], chains: int = 1
) -> MultiTrace:
    """Return draws as a PyMC trace."""
    of_values, of_stats = ({name: np.split(of, chains) for name, of in some.items()} for some in (values, stats))
    traces, n_draws = [], len(next(iter(values.values()))) // chains
    for chain in range(chains):
        trace = NDArrayTrace(
            model=model,
            vars=[SimpleNamespace(name=name) for name in values],
            fn=lambda *_: None,  # no draw is recorded
            var_shapes={name: value.shape[1:] for name, value in values.items()},
            var_dtypes={name: value.dtype for name, value in values.items()},
        )
        trace.setup(draws=n_draws, chain=chain, sampler_vars=[{name: s.dtype for name, s in stats.items()}])
        trace.samples = {name: of[chain] for name, of in of_values.items()}
        trace._stats = [{name: of[chain] for name, of in of_stats.items()}]
        trace.draw_idx = n_draws
        trace.close()
        traces.append(trace)
    return MultiTrace(traces)


def to_datatree(
    trace: MultiTrace, model: pm.Model, more: Mapping[str, xr.Dataset] | None = None, **options: Any
) -> xr.DataTree:
    """Convert a trace of approximate draws as PyMC does, add groups to it, and sign it."""
    dims = _dims_that_do_not_fit(trace, model) | dict(options.pop("dims", None) or {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found chain dimension to be longer")  # as of few draws it is
        tree: xr.DataTree = pm.to_inference_data(trace, model=model, dims=dims, **options)
    for group, dataset in (more or {}).items():
        tree[group] = xr.DataTree(dataset)
    for group in ("posterior", "sample_stats", *(more or ())):
        if group in tree.children:
            attrs = tree[group].attrs
            attrs |= {"inference_library": "pymc_ngvi", "inference_library_version": __version__}
    if "sample_stats" in tree.children:
        stats = tree["sample_stats"].to_dataset()
        tree["sample_stats"] = xr.DataTree(stats[sorted(stats.data_vars, key=str)])  # PyMC keeps their names in a set
    return tree


def flat_dataset(
    layout: Layout, vectors: Array, leading: Mapping[str, Sequence[str] | NDArray[np.generic]] | None = None
) -> xr.Dataset:
    """Return unconstrained vectors as a Dataset by value name, dims and coords where they are named."""
    leading, data = leading or {}, {}
    for v in layout.variables:
        part = vectors[..., v.where].reshape(vectors.shape[:-1] + v.shape)
        coords = {**leading, **{d: layout.coords[d] for d in v.dims or ()}}
        data[v.value_name] = xr.DataArray(part, dims=(*leading, *dims_of(v)), coords=coords)
    return xr.Dataset(data)


def free_names(layout: Layout, *names: str) -> list[str]:
    """Return names, with ``q_`` before those that the variables or dims of a model have taken."""
    taken = {v.value_name for v in layout.variables}.union(*(dims_of(v) for v in layout.variables))
    return [f"q_{name}" if name in taken else name for name in names]


def dims_of(variable: Variable) -> tuple[str, ...]:
    """Return the names of the axes of an unconstrained variable."""
    return variable.dims or _plain_dims(variable.value_name, variable.shape)


def constrained_dataset(
    model: pm.Model, values: Mapping[str, NDArray[np.generic]], leading: tuple[str, ...] = ()
) -> xr.Dataset:
    """Return values by variable, (*leading, ...), with the dims and labels of the model; numbers where it has none."""
    data = {}
    for name, value in values.items():
        shape = np.shape(value)[len(leading) :]
        dims, coords = axes_of(model, name, shape)
        numbers = {dim: np.arange(n) for dim, n in zip(dims, shape, strict=True)}
        data[name] = xr.DataArray(value, dims=(*leading, *dims), coords=numbers | coords)
    return xr.Dataset(data)


def axes_of(model: pm.Model, name: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], dict[str, AnyArray]]:
    """Return the dims and coords of a variable of a model, or of the first of its axes."""
    dims = (model.named_vars_to_dims.get(name) or ())[: len(shape)]
    if None in dims or len(dims) != len(shape):
        dims = _plain_dims(name, shape)
    coords = {}
    for dim, length in zip(dims, shape, strict=True):
        labels = model.coords.get(dim)
        if labels is not None and len(labels) == length:
            coords[dim] = np.asarray(labels)
    return tuple(dims), coords


def _dims_that_do_not_fit(trace: MultiTrace, model: pm.Model) -> dict[str, list[str]]:
    """Return plain dims for the variables that are not of the length of their coords.

    Observations keep their length when ``pm.set_data`` brings predictors, and coords, of another. Bambi's models of an
    intercept alone have a Deterministic of length 1 along all observations.
    """
    shapes = {name: np.shape(values) for name, values in find_observations(model).items()}
    shapes |= {name: trace.get_values(name, burn=len(trace) - 1).shape[1:] for name in trace.varnames}
    plain = {}
    for name, lengths in shapes.items():
        labels = [model.coords.get(dim) for dim in model.named_vars_to_dims.get(name) or ()]
        if any(ls is not None and len(ls) != length for ls, length in zip(labels, lengths, strict=False)):
            plain[name] = list(_plain_dims(name, lengths))
    return plain


def _plain_dims(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"{name}_dim_{i}" for i in range(len(shape)))


def indices_of(layout: Layout, names: str | Sequence[str]) -> Indices:
    """Return the flat coordinates of the named variables, in the order of the names."""
    found = {name: layout.coordinates(name) for name in ([names] if isinstance(names, str) else names)}
    if unknown := [name for name, at in found.items() if at is None]:
        known = ", ".join(repr(v.name) for v in layout.variables)
        raise ValueError(f"No free variable is called {', '.join(map(repr, unknown))}; there are {known}.")
    return np.concatenate([np.arange(0), *(at for at in found.values() if at is not None)])


def element_names(variable: xr.DataArray, leading: int) -> list[str]:
    """Return the names of elements in C order, the first dims left out: ``beta[age]``, or ``beta`` of a scalar."""
    dims = variable.dims[leading:]
    values = [variable[dim].values if dim in variable.coords else np.arange(variable.sizes[dim]) for dim in dims]
    labels = [
        ", ".join(str(v[i]) for v, i in zip(values, at, strict=True)) for at in np.ndindex(*variable.shape[leading:])
    ]
    return [f"{variable.name}[{label}]" if dims else str(variable.name) for label in labels]


def in_numbers(dataset: xr.Dataset) -> xr.Dataset:
    """Return variables with 0 and 1 in the place of truth values, which can't be subtracted."""
    return dataset.map(lambda of: of.astype(np.int64) if of.dtype == np.bool_ else of, keep_attrs=True)


def one_chain(columns: Mapping[str, Array]) -> xr.Dataset:
    """Return numbers by name, (n_draws,) each, as draws of one chain."""
    n = len(next(iter(columns.values())))
    data = {name: (("chain", "draw"), values[None]) for name, values in columns.items()}
    return xr.Dataset(data, coords={"chain": [0], "draw": np.arange(n)})


# --- distributions ---


def components_dataset(mixture: MixtureState, layout: Layout) -> xr.Dataset:
    """Return weights, means and standard deviations of components, unconstrained."""
    component, moment, weights = free_names(layout, "component", "moment", "weights")
    leading = {component: np.arange(mixture.n_components), moment: np.array(["mean", "sd"])}
    moments = np.stack([mixture.means, mixture.sds], axis=1)
    shares = xr.DataArray(mixture.weights, dims=component, coords={component: leading[component]})
    return flat_dataset(layout, moments, leading).assign({weights: shares})


#: Dimensions up to which matched draws have the exact first two moments of their normals.
_MOST_MATCHED = 1_000


#: Of draws: statistics, (n_draws,) each, and attributes.
type Notes = tuple[dict[str, NDArray[np.generic]], dict[str, float]]


@dataclass(frozen=True)
class MovePlan:
    """In what coordinates draws move."""

    #: log p in those coordinates.
    target: Target
    #: Whitens; velocities are drawn from it.
    gaussian: GaussianState
    #: Makes draws of q, in those coordinates, of the rows of its base draws.
    draw: Callable[[Array], Array]
    #: Whether q is the Gaussian that whitens, so that a control can move with each draw.
    coupled: bool = False
    #: From those coordinates to the model's.
    transform: Any = None

    def on_model_scale(self, points: Array) -> Array:
        """Return points in the model's coordinates."""
        return points if self.transform is None else np.asarray(self.transform.forward(points)[0])


@dataclass(frozen=True, eq=False)
class Distribution:
    """An approximate posterior on the unconstrained scale, as far as reports go.

    All points are flat, (n_dim,) each, in the order of the layout. As it stands it is that of a Gaussian, or of a
    user's own class.
    """

    #: A `VariationalState`, or what keeps draws in the place of one.
    q: Any

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.q.n_dim

    @property
    def name(self) -> str:
        """Its name, for titles and errors: ``FullState``."""
        return type(self.q).__name__

    # --- draws ---

    def base(self, n: int, rng: np.random.Generator) -> Array:
        """Return what ``n`` draws are made of, a row each: base draws, or the draws themselves."""
        return base_of(self.q, n, rng)

    def draw(self, n: int, rng: np.random.Generator, read: Indices | None = None) -> Array:
        """Return independent draws of equal weight, (n, n_dim); rows may be NaN, and others than coordinates read."""
        return draws_of(self.q, n, rng)

    def draw_matched(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws whose mean and covariance are those of the distribution, as far as that can be had."""
        base = self.base(n, rng)
        if self.n_dim <= _MOST_MATCHED:
            z = base[:, : self.n_dim]
            z -= z.mean(axis=0)
            z[:] = linalg.solve_lower(np.linalg.cholesky(z.T @ z / len(z)), np.ascontiguousarray(z.T)).T
        return np.asarray(self.q.draws(base))

    def effective(self, n: int, *, of_globals: bool = False) -> float:
        """Return how many independent draws ``n`` of its draws are worth for means, of global parameters or of all."""
        return float(n)

    def joint(self, n: int, rng: np.random.Generator) -> Draws:
        """Return draws with the weights that it keeps of them, worth ``n`` as far as that can be had."""
        return Draws.of_equal_weight(self.draw(n, rng))

    def sources(self, theta: Array) -> Indices:
        """Return numbers, (n,), that are equal for draws that are not independent."""
        return np.arange(len(theta))

    # --- moments ---

    def mean(self) -> Array:
        """Return the mean, (n_dim,)."""
        return np.asarray(self.q.mean())

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""
        return np.asarray(self.q.sd())

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""
        return np.asarray(self.q.cov())

    def cov_block(self, index: Indices) -> Array:
        """Return the covariance of some coordinates; raise ValueError where that would take too much memory."""
        block = getattr(self.q, "cov_block", None)
        check_cov_size(self.n_dim if block is None else len(index))
        return self.cov()[np.ix_(index, index)] if block is None else np.asarray(block(index))

    @property
    def gaussian(self) -> GaussianState:
        """A Gaussian of about its spread, that whitens: its own, q, or a diagonal one of the moments of q."""
        own = getattr(self.q, "gaussian", self.q)
        return cast(GaussianState, own if hasattr(own, "whiten") else DiagonalState(self.mean(), self.sd()))

    # --- densities, and weights ---

    def log_density(self, theta: Array) -> Array:
        """Return log q, (n_draws,), or that of a Gaussian near to it, to tell what is far from q."""
        return np.asarray(self.q.log_density(np.asarray(theta, dtype=np.float64)))

    def kept_log_weights(self) -> Array | None:
        """Return the log weights of draws that it keeps in the place of a density; None where draws are weighed."""
        return None

    def log_weights(self, theta: Array, density: ModelDensity) -> Array:
        """Return the log importance weights of draws, (n_draws,), whose mean is the ELBO: log p - log q."""
        with np.errstate(invalid="ignore"):
            weights: Array = density.logp(theta) - self.q.log_density(theta)
        return weights

    # --- for single reports ---

    def notes(self, theta: Array, rng: np.random.Generator, log_q: bool) -> Notes:
        """Return what ``sample_stats`` have of draws, log q where it is asked for and known, and attributes."""
        return {"log_q": self.log_density(theta)} if log_q else {}, {}

    def groups(self, layout: Layout) -> dict[str, xr.Dataset]:
        """Return groups that describe the distribution beside its draws."""
        return {}

    def remark(self, density: ModelDensity, record: FitRecord | None, n: int, rng: np.random.Generator) -> str:
        """Return a sentence for summaries from ``n`` draws; often empty."""
        return ""

    def plan(self, density: ModelDensity) -> MovePlan:
        """Return how its draws are moved towards the posterior."""
        whitens = self.gaussian
        if isinstance(self.q, PushforwardState):  # draws are moved in the coordinates of the Gaussian
            transform = cast(Conditional, self.q.transform)
            target = ReparametrisedDensity(cast(LogDensity, density), transform)  # others are not reparametrised
            return MovePlan(target, whitens, whitens.draws, coupled=True, transform=transform)
        return MovePlan(density, whitens, self.q.draws, coupled=whitens is self.q)


@functools.singledispatch
def distribution_of(q: VariationalState) -> Distribution:
    """Return a q as reports read it.

    Parameters
    ----------
    q : VariationalState
        ``distribution_of.register`` adds a class whose reports differ from those of a Gaussian.
    """
    return Distribution(q)


class MixtureDistribution(Distribution):
    """A mixture: its components are shown."""

    @property
    def gaussian(self) -> GaussianState:
        """The component that is the heaviest: of these, it whitens the most draws."""
        return self.q.components[int(np.argmax(self.q.log_weights))]

    def notes(self, theta: Array, rng: np.random.Generator, log_q: bool) -> Notes:
        """Add the component of each draw, drawn with its responsibilities: draw and component have their joint law."""
        terms, log_density = self.q.log_densities(theta)
        ends = np.cumsum(np.exp(terms - log_density[:, None]), axis=1)
        # u < 1 times the last end: at least one end, the last, is above it.
        component = np.sum(ends <= rng.random((len(theta), 1)) * ends[:, -1:], axis=1)
        return {"component": component, "log_q": log_density} if log_q else {"component": component}, {}

    def groups(self, layout: Layout) -> dict[str, xr.Dataset]:
        """Return weights, means and standard deviations of the components."""
        return {"components": components_dataset(self.q, layout)}

    def remark(self, density: ModelDensity, record: FitRecord | None, n: int, rng: np.random.Generator) -> str:
        """Say what the mixture gains over the single Gaussian that it began from."""
        if record is None or record.gaussian is None:
            n, effective = self.q.n_components, effective_components(self.q.weights)
            return f"Mixture of {n} components, {effective:.1f} effective."
        return worth_between(self.q, record.gaussian, density, n, rng).sentence()


distribution_of.register(MixtureState, MixtureDistribution)


@dataclass(frozen=True, eq=False)
class PoolDistribution(Distribution):
    """An exact or nested posterior: draws and moments, and weights of its pool; no density."""

    @property
    def name(self) -> str:
        """Its name, for titles and errors."""
        return f"{self.q.kind} posterior"

    def draw(self, n: int, rng: np.random.Generator, read: Indices | None = None) -> Array:
        """Return draws of equal weight."""
        return self.q.draw(n, rng, read=read)

    def draw_matched(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of the pool as it is."""
        return self.q.draw(n, rng, in_chains=False)

    def base(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of what there is: not more than these are worth, where more would be repetitions."""
        if not self.q.n_parts * len(self.q.locals_):
            n = min(n, math.ceil(self.q.size_of_all(self.q.effective_size)))
        return self.q.draw(n, rng, in_chains=False)

    def sources(self, theta: Array) -> Indices:
        """Return numbers, (n,), that are equal where globals are."""
        g = np.ascontiguousarray(theta[:, self.q.globals_])
        return np.unique(g.view(np.dtype((np.void, g.itemsize * g.shape[1])))[:, 0], return_inverse=True)[1]

    def joint(self, n: int, rng: np.random.Generator) -> Draws:
        """Return the pool, with the other coordinates at each, and its weights."""
        return self.q.joint(n, rng)

    def effective(self, n: int, *, of_globals: bool = False) -> float:
        """Return the effective size of what they are taken from, where that can't be made as large."""
        effective = self.q.effective_for(n)
        return min(effective, self.q.effective_size_for_globals(n)) if of_globals else effective

    def log_density(self, theta: Array) -> Array:
        """Return that of the Gaussian fit, or of the Gaussians at all modes."""
        theta = np.asarray(theta, dtype=np.float64)
        fits = [mode.gaussian for mode in self.q.in_modes] or [self.q.gaussian, *self.q.others]
        return linalg.logsumexp([fit.log_density(theta) for fit in fits], axis=0) - np.log(len(fits))

    def kept_log_weights(self) -> Array | None:
        """Return the log weights of the pool."""
        return self.q.pool.log_ratio

    def notes(self, theta: Array, rng: np.random.Generator, log_q: bool) -> Notes:
        """Say which draws have the same globals, how many have different ones, and how many independent ones there are.

        The last are effective sizes of the pool, and of its globals.
        """
        number = self.sources(theta)
        return {"global_draw": number}, {
            "effective_sample_size": self.q.effective_size_for(len(theta)),
            "effective_global_draws": self.q.effective_size_for_globals(len(theta)),
            "distinct_global_draws": int(number.max()) + 1,
        }

    def plan(self, density: ModelDensity) -> MovePlan:
        """Move draws in coordinates whitened by the Gaussian fit, or by scales alone where these draws have made it.

        Draws are nearer to their own covariance than to the posterior's, unless there are many more than dimensions: in
        coordinates that it whitens, they would drift although they are the posterior's.
        """
        q, whitens = self.q, self.gaussian
        is_own = q.is_nested and np.array_equal(whitens.mean(), q.mean())
        if is_own and q.size_of_all(q.effective_size) < _PER_DIM * q.n_dim:
            whitens = DiagonalState.from_scale(q.mean(), q.sd())
        return MovePlan(density, whitens, lambda draws: draws)


distribution_of.register(PoolState, PoolDistribution)


class LogMarginalLikelihood(NamedTuple):
    """The logarithm of p(y), the density of the data with all parameters integrated out.

    Parameters
    ----------
    value : float
        In nats.
    se : float
        Monte Carlo standard error, from independent sequences of draws; of a nested posterior, with the error of the
        log density of its hyperparameters; of a moved one, that of bridge sampling.
    """

    value: float
    se: float

    def __str__(self) -> str:
        """Return ``-684.54 +- 0.01 (of the mode that was found)``."""
        return f"{self.value:,.2f} +- {self.se:.2g} (of the mode that was found)"


# --- what reports read: an approximate posterior as one value, whatever its distribution is ---


@dataclass(eq=False)
class Posterior:
    """An approximate posterior of a model: a distribution, the model, how it was fitted, and what reports have made."""

    distribution: Distribution
    #: log p of the model, and its layout.
    density: ModelDensity
    #: From the unconstrained scale to all variables.
    constrain: Constrainer
    #: None where no fit has made it.
    record: FitRecord | None = None
    #: Of the model, when it was fitted.
    data: DataSnapshot | None = None
    #: Whether draws have the unconstrained variables, too.
    include_transformed: bool = False
    #: Importance weights of draws that belong to the fit; shape (n_draws,), optional.
    log_ratio: Array | None = None
    #: The last `Diagnosis`, if any.
    diagnosis: Any = None

    @property
    def kind(self) -> str:
        """What the distribution is, with an article: ``a FullState``."""
        name = self.distribution.name
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

    @property
    def layout(self) -> Layout:
        """Where each variable is in the flat vector."""
        return self.density.layout

    @property
    def model(self) -> pm.Model:
        """The PyMC model."""
        return self.density.model

    def values(self, theta: Array, random_seed: int | None) -> dict[str, AnyArray]:
        """Return all variables at unconstrained draws, discrete ones that were summed out included."""
        values = self.constrain(theta, random_seed=random_seed)
        return values | self.density.discrete_given(values, random_seed)

    @property
    def structure(self) -> ModelStructure:
        """Which coordinates are independent of each other given which others."""
        sums = () if self.density.summed is None else tuple(map(np.flatnonzero, self.density.summed.weights))
        q = self.distribution  # what the components of a mixture have in common is the pattern of the model
        own = None if isinstance(q.q, MixtureState) else getattr(q.gaussian, "structure", None)
        arrow = own if isinstance(own, Partition) else None
        return ModelStructure(self.layout, self.pattern, arrow, sums=sums)

    @property
    def pattern(self) -> Pattern | None:
        """Entries of the Hessian of log p that can differ from 0, sums over many coordinates aside."""
        return self.density.structural_pattern if self.density.summed is None else self.density.summed.among

    def draw(self, n: int, rng: np.random.Generator, read: Indices | None = None) -> Array:
        """Return unconstrained draws, (n, n_dim), right where coordinates are ``read``; warn where some are NaN."""
        theta = self.distribution.draw(n, rng, read)
        if lost := int(np.isnan(theta).any(axis=1).sum()):
            warn(
                f"{lost:,} of {n:,} draws are NaN: given their global parameters, no conditional mode of the group "
                "effects was found. Fit without reparam, or leave these draws out."
            )
        return theta

    def log_q(self, theta: Array) -> Array:
        """Return log q, (n_draws,); raise ValueError where it is not known."""
        if self.distribution.kept_log_weights() is not None:
            raise ValueError(
                f"The density of this approximation, {self.kind}, is not known: there are draws and "
                "moments of it, but no log_q, nor importance weights of its draws."
                + self.of_exact("approx.gaussian, the Gaussian fit that it began from, has log_q.")
            )
        return self.distribution.log_density(theta)

    def check_weighable(self, draws: int, what: str = "Weights take") -> None:
        """Raise where the fit has diverged, or draws are too few to judge weights of these."""
        if self.record is not None:
            self.record.refuse_diverged()
        if check_draws(draws) < MIN_KHAT_DRAWS:
            raise ValueError(f"{what} at least {MIN_KHAT_DRAWS} draws; got {draws}.")

    def of_exact(self, sentence: str) -> str:
        """Return a sentence where the posterior is a weighted pool that a fit came before."""
        return f" {sentence}" if self.record is not None and self.record.is_pool else ""

    @property
    def why_not_judged(self) -> str:
        """Why log p tells nothing of the fit, a clause; empty where it does."""
        return self.density.why_in_part or ("the data were changed" if self.changed_data() else "")

    def changed_data(self) -> list[str]:
        """Return the names of the data that were changed since the fit."""
        return [] if self.data is None else self.data.changed()

    def refuse_changed_data(self, why: str) -> None:
        """Raise ValueError if ``pm.set_data`` changed the data since the fit."""
        if said := self.of_changed_data():
            raise ValueError(f"{said}. {why}: set the data back with pm.set_data, or fit again.")

    def of_changed_data(self) -> str:
        """Return which data were changed since the fit, in a clause; empty where none were."""
        changed = self.changed_data()
        return f"The data {', '.join(map(repr, changed))} were changed after the fit" if changed else ""

    def warn_of_changed_data(self) -> None:
        """Warn where draws of two kinds of variables are about different data."""
        if said := self.of_changed_data():
            warn(
                f"{said}: draws of free variables are those given the data of the fit, but Deterministics, "
                "observed_data and constant_data are of the data as they are now. Draw before pm.set_data, or fit "
                "again."
            )

    @contextlib.contextmanager
    def with_data_of_fit(self) -> Iterator[None]:
        """Give the model the data of the fit, where they are known, for as long as the context lasts."""
        with contextlib.ExitStack() as stack:
            if self.changed_data() and self.data is not None:
                with contextlib.suppress(ValueError):  # of a file, they may never have been seen
                    stack.enter_context(self.data.restored())
            yield

    def check_weights(self) -> None:
        """Raise ValueError where log p is not that of the posterior that was fitted."""
        if self.density.has_minibatch:
            raise ValueError(
                "The model reads pm.Minibatch data: importance weights would compare q with the posterior given one "
                "batch only. Build the model on all of the data to compare them there."
            )
        self.refuse_changed_data("The model's posterior is another one now than q approximates")


# --- what single evaluations cost, estimated from the graph, the sizes of the data and the dimension: no clock ---

#: log p alone, as a part of a gradient.
_LOG_P = 0.75
#: Seconds that a draw and its log density take for each coordinate and each parameter of q.
_PER_COORDINATE, _PER_PARAMETER = 1e-7, 1e-9
#: Gradients that one of the density that was fitted takes, that the way of a draw to the model's scale takes, and the
#: seconds on top of both: plain; reparametrised with a search for conditional modes; and without one.
_PLAIN, _SEARCH, _NO_SEARCH = (1.0, 0.0, 0.0), (8.0, 4.0, 6e-4), (2.5, 0.5, 2e-5)


def costs_of(posterior: "Posterior") -> tuple[float, float]:
    """Estimate seconds of a gradient of the fitted density and of a draw with its importance weight.

    They follow from the graph of log p, the sizes of its data, the dimension, and the numbers that define q.
    """
    q, record, one = posterior.distribution.q, posterior.record, posterior.density.gradient_seconds
    params = {} if isinstance(q, PoolState) else q.params()
    own = _PER_COORDINATE * q.n_dim + _PER_PARAMETER * sum(np.size(value) for value in params.values())
    gradients, way, more = _PLAIN
    if isinstance(q, PushforwardState):
        gradients, way, more = _SEARCH if record is None or record.reparam != "noncentred" else _NO_SEARCH
    gradient = gradients * one + more + 0.5 * own
    weight = _LOG_P * one + 2.0 * (way * one + more) + own
    return gradient, weight


def two_points(posterior: Posterior) -> xr.Dataset:
    """Return all variables at one point, twice, as if these were draws: enough to tell sizes, and so roles.

    A draw of q takes a search for modes where effects are relative to these.
    """
    values = posterior.values(np.tile(posterior.density.initial_point(), (2, 1)), FIXED_SEED)
    trace, transformed = to_multitrace(posterior.model, values, {}), posterior.include_transformed
    tree = to_datatree(trace, posterior.model, dims=posterior.density.summed_out.dims, include_transformed=transformed)
    return tree["posterior"].to_dataset()


def roles_of(posterior: Posterior, few: xr.Dataset) -> Roles:
    """Return the roles of the variables, whose axes are taken from any draws."""
    extents = {}
    for name, draws in few.data_vars.items():
        dims = [d for d in draws.dims if d not in ("chain", "draw")]
        named = [None if str(d).startswith(f"{name}_dim_") else str(d) for d in dims]
        extents[str(name)] = Extent(tuple(named), tuple(draws.sizes[d] for d in dims))
    density = posterior.density
    roles = find_roles(posterior.model, posterior.layout, posterior.pattern, extents)
    of_rows = [
        name
        for name in density.summed_out.shown
        if math.prod(extents[name].shape) > 1 and math.prod(extents[name].shape) in roles.observations.values()
    ]
    roles = replace(roles, rows=(*roles.rows, *of_rows))
    return replace(roles, observations=density.observations) if isinstance(density, ShardedDensity) else roles
