"""What reports read: an approximate posterior as one value, whatever its distribution is."""

import contextlib
import warnings

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pymc as pm
import xarray as xr

from numpy.typing import NDArray

from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.types import Array, GaussianState, Target
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import DataSnapshot
from pymc_ngvi.families.matrices.arrow import ArrowStructure
from pymc_ngvi.families.pushforward import Transform
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.marginal.joint import JointDraws
from pymc_ngvi.results.costs import Costs
from pymc_ngvi.results.structure import ModelStructure

_NO_HISTORY: Array = np.empty(0)


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
    transform: Transform | None = None

    def on_model_scale(self, points: Array) -> Array:
        """Return points in the model's coordinates."""
        return points if self.transform is None else np.asarray(self.transform.forward(points)[0])


class Distribution(Protocol):
    """An approximate posterior on the unconstrained scale, as far as reports go.

    All points are flat, (n_dim,) each, in the order of the layout. Those of this package inherit what most have in
    common. A density is not required: `log_density` may not be known.
    """

    @property
    def n_dim(self) -> int:
        """Number of coordinates."""

    @property
    def name(self) -> str:
        """Its name, for titles and errors: ``FullState``."""

    @property
    def detail(self) -> str:
        """What there is to add in a line: ``with weights 0.70, 0.30``; often empty."""
        return ""

    @property
    def family(self) -> str:
        """The name of its family, for results that no fit made: ``full``."""

    @property
    def arrow(self) -> ArrowStructure | None:
        """Its blocks that are independent given a border; None where it has none."""
        structure = getattr(self.gaussian, "structure", None)
        return structure if isinstance(structure, ArrowStructure) else None

    # --- draws ---

    def base(self, n: int, rng: np.random.Generator) -> Array:
        """Return what ``n`` draws are made of, a row each: base draws, or the draws themselves."""

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return independent draws of equal weight, (n, n_dim); rows may be NaN."""

    def draw_matched(self, n: int, rng: np.random.Generator) -> Array:
        """Return draws whose mean and covariance are those of the distribution, as far as that can be had."""
        return self.draw(n, rng)

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

    def sd(self) -> Array:
        """Return the standard deviations, (n_dim,)."""

    def cov(self) -> Array:
        """Return the covariance, (n_dim, n_dim)."""

    def cov_block(self, index: NDArray[np.intp]) -> Array:
        """Return the covariance of some coordinates; raise ValueError where that would take too much memory."""

    @property
    def gaussian(self) -> GaussianState:
        """A Gaussian of about its spread: a `GaussianState` that whitens."""

    # --- densities, and weights ---

    def log_density(self, theta: Array) -> Array | None:
        """Return log q, (n_draws,), at the rows of ``theta``; None where it is not known."""
        return None

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

    def draws_with_ratio(self, n: int) -> tuple[Array, Array] | None:
        """Return draws at some values of hyperparameters, (n, m, n_dim), with log p - log q given these, (n, m).

        None where there are no such draws, or where they are weighted by these already.
        """
        return None

    # --- for single reports ---

    def stats(self, theta: Array, rng: np.random.Generator, log_q: bool) -> dict[str, NDArray[np.generic]]:
        """Return what ``sample_stats`` have of draws, (n_draws,) each; log q where it is asked for and known."""
        return {}

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

    def costs(self, density: ModelDensity, record: FitRecord | None) -> Costs:
        """Return what evaluations cost."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """An approximate posterior of a model: a distribution, the model, and how the distribution was fitted."""

    distribution: Distribution
    #: log p of the model, and its layout.
    density: ModelDensity
    #: From the unconstrained scale to all variables.
    constrain: Constrainer
    #: None where no fit has made it.
    record: FitRecord | None = None
    #: Loss and gap of each iteration; shape (n_iterations,).
    hist: Array = field(default_factory=lambda: _NO_HISTORY)
    gap_hist: Array = field(default_factory=lambda: _NO_HISTORY)
    #: Of the model, when it was fitted.
    data: DataSnapshot | None = None
    #: Whether draws have the unconstrained variables, too.
    include_transformed: bool = False

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

    @property
    def dims(self) -> dict[str, list[str]]:
        """Dims of discrete variables, and of Deterministics that depend on them, which the model has not."""
        return {} if self.density.summed_out is None else self.density.summed_out.dims

    def values(self, theta: Array, random_seed: int | None) -> dict[str, AnyArray]:
        """Return all variables at unconstrained draws, discrete ones that were summed out included."""
        values = self.constrain(theta, random_seed=random_seed)
        return values | self.density.discrete_given(values, random_seed)

    @property
    def structure(self) -> ModelStructure:
        """Which coordinates are independent of each other given which others."""
        summed = self.density.summed
        if summed is None:
            return ModelStructure(self.layout, self.density.structural_pattern, self.distribution.arrow)
        sums = tuple(np.flatnonzero(weights) for weights in summed.weights)
        return ModelStructure(self.layout, summed.among, self.distribution.arrow, sums=sums)

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return unconstrained draws, (n, n_dim); warn where some are NaN."""
        theta = self.distribution.draw(n, rng)
        if lost := int(np.isnan(theta).any(axis=1).sum()):
            warnings.warn(
                f"{lost:,} of {n:,} draws are NaN: given their global parameters, no conditional mode of the group "
                "effects was found. Fit without reparam, or leave these draws out.",
                UserWarning,
                skip_file_prefixes=OURS,
            )
        return theta

    def log_q(self, theta: Array) -> Array:
        """Return log q, (n_draws,); raise ValueError where it is not known."""
        found = self.distribution.log_density(np.asarray(theta, dtype=np.float64))
        if found is None:
            raise ValueError(
                f"The density of this approximation, {self.kind}, is not known: there are draws and "
                "moments of it, but no log_q, nor importance weights of its draws."
                + self._of_exact("approx.gaussian, the Gaussian fit that it began from, has log_q.")
            )
        return found

    def check_correctable(self, what: str) -> None:
        """Raise ValueError where draws are weighted already, and nothing is left to correct."""
        if self.distribution.kept_log_weights() is not None:
            raise ValueError(
                f"There is nothing for {what} to correct: this posterior is a pool of draws with weights of its own."
                + self._of_exact("The Gaussian fit that it began from is approx.gaussian.")
            )

    def _of_exact(self, sentence: str) -> str:
        return f" {sentence}" if self.record is not None and self.record.is_pool else ""

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
            warnings.warn(
                f"{said}: draws of free variables are those given the data of the fit, but Deterministics, "
                "observed_data and constant_data are of the data as they are now. Draw before pm.set_data, or fit "
                "again.",
                UserWarning,
                skip_file_prefixes=OURS,
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
