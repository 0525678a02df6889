"""What has been computed of an approximation, for as long as it is of the same q."""

from dataclasses import dataclass

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.results.diagnosis.diagnosis import Diagnosis
from pymc_ngvi.results.posterior import Distribution, Posterior


@dataclass
class Kept:
    """Results that are kept between calls, and what they are of."""

    q: Distribution | None = None
    density: ModelDensity | None = None
    #: Importance weights of draws that belong to the fit; shape (n_draws,), optional.
    log_ratio: Array | None = None
    diagnosis: Diagnosis | None = None
    #: The budget that the diagnosis was given.
    share: tuple[float, float] = (0.0, 0.0)
    #: Evaluates the variables that were named last.
    narrow: Constrainer | None = None

    def follow(self, posterior: Posterior) -> "Kept":
        """Forget what is of another q, or of another density; return this object."""
        if self.density is not posterior.density:
            self.narrow = None
        elif self.q is posterior.distribution:
            return self
        self.q, self.density, self.log_ratio, self.diagnosis = posterior.distribution, posterior.density, None, None
        return self

    @property
    def verdict(self) -> str | None:
        """That of the diagnosis; None where none was made."""
        return None if self.diagnosis is None else self.diagnosis.verdict
