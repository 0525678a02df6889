"""The distributions of fits, as reports read them: of each class of q, one."""

import functools

from dataclasses import dataclass
from typing import cast

import numpy as np
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core import linalg
from pymc_ngvi.core.draws import base_of, draws_of
from pymc_ngvi.core.sizes import check_cov_size
from pymc_ngvi.core.types import Array, GaussianState, VariationalState
from pymc_ngvi.density import Layout, LogDensity, ModelDensity
from pymc_ngvi.families import DiagonalState, FullState, MixtureState, StudentTState, name_of
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.pushforward import PushforwardState
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.mixtures.finite.worth import effective_components, worth_between
from pymc_ngvi.reparam import Conditional, ReparametrisedDensity
from pymc_ngvi.results.components import components_dataset
from pymc_ngvi.results.costs import Costs, direct_costs, reparametrised_costs
from pymc_ngvi.results.posterior import Distribution, MovePlan

#: Dimensions up to which matched draws have the exact first two moments of their normals.
_MOST_MATCHED = 1_000
#: Largest dimension for which components are pooled to one dense covariance.
_MOST_POOLED = 1_000
#: Weights of a mixture that are shown, at most.
_MAX_SHOWN = 6


@functools.singledispatch
def distribution_of(q: VariationalState) -> Distribution:
    """Return a q as reports read it.

    Parameters
    ----------
    q : VariationalState
        ``distribution_of.register`` adds a class whose reports differ from those of a Gaussian.
    """
    return StateDistribution(q)


@dataclass(frozen=True, eq=False)
class StateDistribution[Q: VariationalState](Distribution):
    """A q that has a density: a Gaussian, or one of a user's own class."""

    q: Q

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""
        return self.q.n_dim

    @property
    def name(self) -> str:
        """The name of the class of q: ``FullState``."""
        return type(self.q).__name__

    @property
    def family(self) -> str:
        """The name of the family of q."""
        return name_of(self.q)

    def base(self, n: int, rng: np.random.Generator) -> Array:
        """Return base draws: standard normals and, behind them, uniforms."""
        return base_of(self.q, n, rng)

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws of q."""
        return draws_of(self.q, n, rng)

    def draw_matched(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws whose normals have mean 0 and covariance 1 exactly, where there are few enough of them."""
        base = self.base(n, rng)
        if self.n_dim <= _MOST_MATCHED:
            z = base[:, : self.n_dim]
            z -= z.mean(axis=0)
            factor = np.linalg.cholesky(z.T @ z / len(z))
            z[:] = linalg.solve_lower(factor, np.ascontiguousarray(z.T)).T
        return np.asarray(self.q.draws(base))

    def mean(self) -> Array:
        """Return the mean."""
        return np.asarray(self.q.mean())

    def sd(self) -> Array:
        """Return the standard deviations."""
        return np.asarray(self.q.sd())

    def cov(self) -> Array:
        """Return the covariance."""
        return np.asarray(self.q.cov())

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates, without forming the whole where the family can."""
        block = getattr(self.q, "cov_block", None)
        check_cov_size(self.n_dim if block is None else len(index))
        if block is not None:
            return np.asarray(block(index))
        return self.cov()[np.ix_(index, index)]

    @property
    def gaussian(self) -> GaussianState:
        """What whitens: q, or a diagonal Gaussian of its moments where it can't."""
        whitens = self.q if hasattr(self.q, "whiten") else DiagonalState(self.mean(), self.sd())
        return cast(GaussianState, whitens)

    def log_density(self, theta: Array) -> Array | None:
        """Return log q."""
        return np.asarray(self.q.log_density(np.asarray(theta, dtype=np.float64)))

    def log_weights(self, theta: Array, density: ModelDensity) -> Array:
        """Return log p - log q."""
        with np.errstate(invalid="ignore"):
            weights: Array = density.logp(theta) - self.q.log_density(theta)
        return weights

    def stats(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[np.generic]]:
        """Return log q where it is asked for."""
        return {"log_q": np.asarray(self.q.log_density(theta))} if log_q else {}

    def plan(self, density: ModelDensity) -> MovePlan:
        """Move draws in coordinates whitened by q."""
        whitens = self.gaussian
        return MovePlan(density, whitens, self.q.draws, coupled=whitens is self.q)

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return the costs of evaluating log p and log q."""
        return direct_costs(density, record, self.n_dim, _n_numbers(self.q))


class StudentTDistribution(StateDistribution[StudentTState]):
    """A multivariate t: its Gaussian whitens."""

    @property
    def gaussian(self) -> GaussianState:
        """The Gaussian that is scaled."""
        return self.q.gaussian


class MixtureDistribution(StateDistribution[MixtureState]):
    """A mixture: its components are shown."""

    @property
    def detail(self) -> str:
        """The weights, the largest first."""
        largest = [f"{w:.2f}" for w in np.sort(self.q.weights)[::-1][:_MAX_SHOWN]]
        return f"with weights {', '.join(largest)}{', ...'[: 5 * (self.q.n_components > _MAX_SHOWN)]}"

    @property
    def arrow(self) -> ArrowStructure | None:
        """None: what components have in common is the pattern of the model."""
        return None

    @functools.cached_property
    def _pooled(self) -> GaussianState:
        return _pooled(self.q)

    @property
    def gaussian(self) -> GaussianState:
        """A Gaussian with the mean covariance within components."""
        return self._pooled

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


class PushforwardDistribution(StateDistribution[PushforwardState]):
    """The image of a Gaussian: its draws are moved in the coordinates of that."""

    @property
    def gaussian(self) -> GaussianState:
        """The Gaussian, in coordinates of its own."""
        return self.q.gaussian

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


@distribution_of.register
def _(q: StudentTState) -> Distribution:
    return StudentTDistribution(q)


@distribution_of.register
def _(q: MixtureState) -> Distribution:
    return MixtureDistribution(q)


@distribution_of.register
def _(q: PushforwardState) -> Distribution:
    return PushforwardDistribution(q)


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
