"""What reports read: an approximate posterior as one value, whatever its distribution is."""

import contextlib
import warnings

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pymc as pm

from pymc_ngvi.core.messages import OURS
from pymc_ngvi.core.types import Array
from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density import Layout, ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.info import DataSnapshot
from pymc_ngvi.fitting.record import FitRecord
from pymc_ngvi.results.distributions import Distribution
from pymc_ngvi.results.structure import ModelStructure

_NO_HISTORY: Array = np.empty(0)


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
