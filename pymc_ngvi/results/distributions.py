"""The distributions of fits, as reports read them."""

import functools

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import base_of, draws_of
from pymc_ngvi.core.linalg import logsumexp
from pymc_ngvi.core.sizes import check_cov_size
from pymc_ngvi.core.types import Array, GaussianState, Target, VariationalState
from pymc_ngvi.density import Layout, LogDensity, ModelDensity
from pymc_ngvi.families import DiagonalState, FullState, MixtureState, name_of
from pymc_ngvi.families.matrices.partition import Partition
from pymc_ngvi.families.pushforward import PushforwardState
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.marginal.pooled import PoolState
from pymc_ngvi.mixtures.finite.worth import effective_components, worth_between
from pymc_ngvi.reparam import Conditional, ReparametrisedDensity
from pymc_ngvi.results.convert import Labels, flat_dataset, free_names
from pymc_ngvi.results.costs import Costs, direct_costs, reparametrised_costs


def components_dataset(mixture: MixtureState, layout: Layout) -> xr.Dataset:
    """Return weights, means and standard deviations of components, unconstrained."""
    component, moment, weights = names_of(layout)
    leading: dict[str, Labels] = {component: np.arange(mixture.n_components), moment: ["mean", "sd"]}
    moments = np.stack([mixture.means, mixture.sds], axis=1)
    shares = xr.DataArray(mixture.weights, dims=component, coords={component: leading[component]})
    return flat_dataset(layout, moments, leading).assign({weights: shares})


def names_of(layout: Layout) -> list[str]:
    """Return the names of the dims of components and of moments, and of the weights, apart from those of the model."""
    return free_names(layout, "component", "moment", "weights")


def weights_by_component(mixture: MixtureState, layout: Layout) -> xr.DataArray:
    """Return the weights of the components."""
    dim = names_of(layout)[0]
    return xr.DataArray(mixture.weights, coords={dim: np.arange(mixture.n_components)}, dims=dim, name="weights")


def responsibilities(mixture: MixtureState, layout: Layout, theta: Array) -> xr.DataArray:
    """Return the probability that each draw belongs to each component, (n_draws, n_components)."""
    if theta.ndim != 2 or theta.shape[1] != mixture.n_dim:
        raise ValueError(
            f"draws should be unconstrained, of shape (n_draws, {mixture.n_dim}), such as draw_flat(n) returns; "
            f"got {theta.shape}."
        )
    coords = {"draw": np.arange(len(theta)), names_of(layout)[0]: np.arange(mixture.n_components)}
    return xr.DataArray(mixture.responsibilities(theta), coords=coords, dims=list(coords), name="responsibilities")


#: Dimensions up to which matched draws have the exact first two moments of their normals.
_MOST_MATCHED = 1_000
#: Largest dimension for which components are pooled to one dense covariance.
_MOST_POOLED = 1_000
#: Weights of a mixture that are shown, at most.
_MAX_SHOWN = 6


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
    user's own class. A density is not required: `log_density` may not be known.
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

    @property
    def detail(self) -> str:
        """What there is to add in a line: ``with weights 0.70, 0.30``; often empty."""
        return ""

    @property
    def family(self) -> str:
        """The name of its family, for results that no fit made: ``full``."""
        return name_of(self.q)

    @property
    def arrow(self) -> Partition | None:
        """Its blocks that are independent given a border; None where it has none."""
        structure = getattr(self.gaussian, "structure", None)
        return structure if isinstance(structure, Partition) else getattr(structure, "partition", None)

    # --- draws ---

    def base(self, n: int, rng: np.random.Generator) -> Array:
        """Return what ``n`` draws are made of, a row each: base draws, or the draws themselves."""
        return base_of(self.q, n, rng)

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return independent draws of equal weight, (n, n_dim); rows may be NaN."""
        return draws_of(self.q, n, rng)

    def draw_matched(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws whose mean and covariance are those of the distribution, as far as that can be had."""
        base = self.base(n, rng)
        if self.n_dim <= _MOST_MATCHED:
            z = base[:, : self.n_dim]
            z -= z.mean(axis=0)
            factor = np.linalg.cholesky(z.T @ z / len(z))
            z[:] = linalg.solve_lower(factor, np.ascontiguousarray(z.T)).T
        return np.asarray(self.q.draws(base))

    def effective(self, n: int) -> float:
        """Return how many independent draws ``n`` of its draws are worth, for means."""
        return float(n)

    def effective_globals(self, n: int) -> float:
        """Return the same for means of global parameters alone, where these repeat more often than draws do."""
        return self.effective(n)

    def joint(self, n: int, rng: np.random.Generator) -> JointDraws:
        """Return draws with the weights that it keeps of them, worth ``n`` as far as that can be had."""
        return JointDraws.of_equal_weight(self.draw(n, rng))

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

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates; raise ValueError where that would take too much memory."""
        block = getattr(self.q, "cov_block", None)
        check_cov_size(self.n_dim if block is None else len(index))
        if block is not None:
            return np.asarray(block(index))
        return self.cov()[np.ix_(index, index)]

    @property
    def gaussian(self) -> GaussianState:
        """A Gaussian of about its spread, that whitens: its own, q, or a diagonal one of the moments of q."""
        own = getattr(self.q, "gaussian", self.q)
        return cast(GaussianState, own if hasattr(own, "whiten") else DiagonalState(self.mean(), self.sd()))

    # --- densities, and weights ---

    def log_density(self, theta: Array) -> Array | None:
        """Return log q, (n_draws,), at the rows of ``theta``; None where it is not known."""
        return np.asarray(self.q.log_density(np.asarray(theta, dtype=np.float64)))

    def rough_log_density(self, theta: Array) -> Array | None:
        """Return log q, or that of a Gaussian near to it, to tell what is far from q; None where there is neither."""
        return self.log_density(theta)

    def in_modes(self) -> "Sequence[Distribution]":
        """Return what it is at each of its modes; empty where it does not tell them apart."""
        return ()

    @property
    def is_checked(self) -> bool:
        """Whether it has checks of its own, which were made with it, and all of these speak for it."""
        return False

    def kept_log_weights(self) -> Array | None:
        """Return the log weights of draws that it keeps; None where draws are made, and weighed, on call."""
        return None

    def sd_errors(self) -> Array | None:
        """Return the relative standard errors of standard deviations that rest on kept weights, NaN of others."""
        return None

    def proposed(self, n: int, rng: np.random.Generator) -> Array:
        """Return the draws that importance weights are of, (n, n_dim): those of `draw`, or of what it is made of."""
        return self.draw(n, rng)

    def log_weights(self, theta: Array, density: ModelDensity) -> Array:
        """Return the logarithms of their weights, (n_draws,), whose mean is the ELBO: log p - log q."""
        with np.errstate(invalid="ignore"):
            weights: Array = density.logp(theta) - self.q.log_density(theta)
        return weights

    def draws_with_ratio(self, n: int) -> tuple[Array, Array] | None:
        """Return draws at some values of hyperparameters, (n, m, n_dim), with log p - log q given these, (n, m).

        None where there are no such draws, or where they are weighted by these already.
        """
        return None

    # --- for single reports ---

    def stats(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[np.generic]]:
        """Return what ``sample_stats`` have of draws, (n_draws,) each; log q where it is asked for and known."""
        found = self.log_density(theta) if log_q else None
        return {} if found is None else {"log_q": found}

    def attrs(self, theta: Array) -> dict[str, float]:
        """Return what attributes of trees say of draws."""
        return {}

    def groups(self, layout: Layout) -> dict[str, xr.Dataset]:
        """Return groups that describe the distribution beside its draws."""
        return {}

    def remark(self, density: ModelDensity, record: FitRecord | None, n: int, rng: np.random.Generator) -> str:
        """Return a sentence for summaries from ``n`` draws; often empty."""
        return ""

    def plan(self, density: ModelDensity) -> MovePlan:
        """Return how its draws are moved towards the posterior."""
        whitens = self.gaussian
        return MovePlan(density, whitens, self.q.draws, coupled=whitens is self.q)

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return what evaluations cost."""
        return direct_costs(density, record, self.n_dim, _n_numbers(self.q))


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
    def detail(self) -> str:
        """The weights, the largest first."""
        largest = [f"{w:.2f}" for w in np.sort(self.q.weights)[::-1][:_MAX_SHOWN]]
        return f"with weights {', '.join(largest)}{', ...'[: 5 * (self.q.n_components > _MAX_SHOWN)]}"

    @property
    def arrow(self) -> Partition | None:
        """None: what components have in common is the pattern of the model."""
        return None

    @functools.cached_property
    def gaussian(self) -> GaussianState:
        """A Gaussian with the mean covariance within components."""
        return _pooled(self.q)

    def stats(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[np.generic]]:
        """Add the component of each draw, drawn with its responsibilities: draw and component have their joint law."""
        terms, log_density = self.q.log_densities(theta)
        ends = np.cumsum(np.exp(terms - log_density[:, None]), axis=1)
        # u < 1 times the last end: at least one end, the last, is above it.
        component = np.sum(ends <= rng.random((len(theta), 1)) * ends[:, -1:], axis=1)
        return {"component": component, "log_q": log_density} if log_q else {"component": component}

    def groups(self, layout: Layout) -> dict[str, xr.Dataset]:
        """Return weights, means and standard deviations of the components."""
        return {"components": components_dataset(self.q, layout)}

    def remark(self, density: ModelDensity, record: FitRecord | None, n: int, rng: np.random.Generator) -> str:
        """Say what the mixture gains over the single Gaussian that it began from."""
        if record is None or record.gaussian is None:
            number = f"{self.q.n_components} components, {effective_components(self.q.weights):.1f} effective"
            return f"Mixture of {number}."
        return worth_between(self.q, record.gaussian, density, n, rng).sentence()


class PushforwardDistribution(Distribution):
    """The image of a Gaussian: its draws are moved in the coordinates of that."""

    def plan(self, density: ModelDensity) -> MovePlan:
        """Move draws of the Gaussian, in its coordinates."""
        transform = cast(Conditional, self.q.transform)
        assert isinstance(density, LogDensity)  # others are not reparametrised
        target = ReparametrisedDensity(density, transform)
        return MovePlan(target, self.gaussian, self.gaussian.draws, coupled=True, transform=transform)

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return the costs of evaluations with their searches for conditional modes."""
        search = record is None or record.reparam != "noncentred"
        return reparametrised_costs(density, record, self.n_dim, _n_numbers(self.q), search=search)


distribution_of.register(MixtureState, MixtureDistribution)


distribution_of.register(PushforwardState, PushforwardDistribution)


def _n_numbers(q: VariationalState) -> int:
    return sum(np.size(value) for value in q.params().values())


def _pooled(q: MixtureState) -> GaussianState:
    """Return a Gaussian with the mean covariance within components; in high dimension that of the heaviest one."""
    heaviest: GaussianState = q.components[int(np.argmax(q.log_weights))]
    if q.n_components == 1 or q.n_dim > _MOST_POOLED:
        return heaviest
    within = np.sum([w * c.cov() for w, c in zip(q.weights, q.components, strict=True)], axis=0)
    factor = linalg.cholesky(linalg.symmetrise(within))
    return heaviest if factor is None else cast(GaussianState, FullState(q.mean(), factor))


@dataclass(frozen=True, eq=False)
class PoolDistribution(Distribution):
    """An exact or nested posterior: draws and moments, and weights of its pool; no density."""

    @property
    def name(self) -> str:
        """Its name, for titles and errors."""
        return f"{self.q.kind} posterior"

    @property
    def detail(self) -> str:
        """The effective size of its draws."""
        return f"with an effective sample size of {self.q.effective_size:,.0f}"

    @property
    def family(self) -> str:
        """The name of its family: ``exact`` or ``nested``."""
        return self.q.kind

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of equal weight."""
        return self.q.draw(n, rng)

    base = draw_matched = draw

    def log_density(self, theta: Array) -> None:
        """Return None: it is not known."""

    def joint(self, n: int, rng: np.random.Generator) -> JointDraws:
        """Return the pool, with the other coordinates at each, and its weights."""
        return self.q.joint(n, rng)

    def effective(self, n: int) -> float:
        """Return the effective size of the pool that they are taken from, where that can't be made as large."""
        return self.q.effective_for(n)

    def effective_globals(self, n: int) -> float:
        """Return the same for means of the global parameters alone."""
        return min(self.effective(n), self.q.effective_size_for_globals(n))

    def cov(self) -> Array:
        """Return the covariance."""
        check_cov_size(self.n_dim)
        return self.q.cov()

    def rough_log_density(self, theta: Array) -> Array | None:
        """Return that of the Gaussian fit, or of the Gaussians at all modes."""
        theta = np.asarray(theta, dtype=np.float64)
        fits = [mode.gaussian for mode in self.q.in_modes] or [self.q.gaussian, *self.q.others]
        return logsumexp([fit.log_density(theta) for fit in fits], axis=0) - np.log(len(fits))

    def in_modes(self) -> "Sequence[Distribution]":
        """Return what it is at each of its modes; empty where it does not tell them apart."""
        return [PoolDistribution(mode) for mode in self.q.in_modes]

    @property
    def is_checked(self) -> bool:
        """Whether nothing stands against calling it exact."""
        return self.q.checks.is_exact

    def kept_log_weights(self) -> Array | None:
        """Return the log weights of the pool."""
        return self.q.pool.log_ratio

    def sd_errors(self) -> Array:
        """Return the relative errors of the standard deviations of the globals; NaN for the others."""
        errors = np.full(self.n_dim, np.nan)
        errors[self.q.globals_] = self.q.sd_errors
        return errors

    def log_weights(self, theta: Array, density: ModelDensity) -> Array:
        """Raise: weights are kept."""
        raise NotImplementedError(f"The {self.name} keeps the weights of its draws.")

    def draws_with_ratio(self, n: int) -> tuple[Array, Array] | None:
        """Return draws of an approximate nested posterior; None of any other."""
        return self.q.rest.draws_with_ratio(self.q, n)

    def stats(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[np.generic]]:
        """Return a number for each draw that is the same where the global parameters are, and log weights of pairs."""
        log_weight = self.q.rest.weight_of(self.q, theta)
        of_pairs = {} if log_weight is None else {"log_weight": log_weight}
        return {"global_draw": self._distinct(theta)[1], **of_pairs}

    def attrs(self, theta: Array) -> dict[str, float]:
        """Return effective sizes of the pool and of its globals, and how many draws have different globals."""
        return {
            "effective_sample_size": self.q.effective_size_for(len(theta)),
            "effective_global_draws": self.q.effective_size_for_globals(len(theta)),
            "distinct_global_draws": len(self._distinct(theta)[0]),
        }

    def _distinct(self, theta: Array) -> tuple[Array, NDArray[np.intp]]:
        """Return the different values of the globals, and which of them each draw has."""
        g = np.ascontiguousarray(theta[:, self.q.globals_])
        rows = g.view(np.dtype((np.void, g.itemsize * g.shape[1])))[:, 0]
        _, first, number = np.unique(rows, return_index=True, return_inverse=True)
        return g[first], number

    def plan(self, density: ModelDensity) -> MovePlan:
        """Move draws in coordinates whitened by the Gaussian fit."""
        return MovePlan(density, self.gaussian, lambda draws: draws)

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return the costs of evaluating log p."""
        return direct_costs(density, record, self.n_dim, 0)


distribution_of.register(PoolState, PoolDistribution)
