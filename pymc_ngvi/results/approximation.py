"""The result of a fit: a ``pymc.Approximation`` whose q is any `VariationalState`."""

import numpy as np

from pymc.variational.opvi import Approximation
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.variable import TensorVariable

from pymc_ngvi.core.seeds import Seed, generator_of
from pymc_ngvi.core.types import VariationalState
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.density.constrain import Constrainer
from pymc_ngvi.density.data import DataSnapshot
from pymc_ngvi.results.diagnosis.kept import Kept
from pymc_ngvi.results.fitted import NO_Q
from pymc_ngvi.results.group import NGVIGroup
from pymc_ngvi.results.methods import Methods

#: Number of the random stream behind draws that are given no seed.
_DRAWS_STREAM = 2_000_000


def _generator(random_seed: Seed) -> np.random.Generator:
    """Return a generator apart from the streams that a fit with the same seed draws from."""
    whole = isinstance(random_seed, int | np.integer)
    return generator_of([random_seed, _DRAWS_STREAM] if whole else random_seed)


class NGVIApproximation(Methods, Approximation):
    """Approximate posterior of a PyMC model; everything that works with the result of ``pm.fit`` works with it.

    Parameters
    ----------
    density : ModelDensity
        Log density of the model.
    q : VariationalState
        On the unconstrained scale, in the order of ``density.layout``.
    random_seed : int, list of int, SeedSequence, Generator, RandomState or None
        Seeds the draws of calls that are given no seed of their own.
    include_transformed : bool, default False
        Whether `sample` and `state` show the unconstrained variables (``sd_log__``) too.

    Attributes
    ----------
    record : FitRecord or None
        Outcome of the fit; None where there was none.
    hist : ndarray
        Loss, -ELBO, of each iteration.
    gap_hist : ndarray
        Estimated nats still to be gained after each iteration.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> from pymc_ngvi.results.approximation import NGVIApproximation
    >>> from pymc_ngvi.families import DiagonalState
    >>> from pymc_ngvi.density import LogDensity
    >>> with pm.Model() as model:
    ...     scale = pm.HalfNormal("scale")
    >>> q = DiagonalState.from_scale(np.array([-0.6]), np.array([0.8]))
    >>> approx = NGVIApproximation(LogDensity(model), q, random_seed=1)
    >>> dict(approx.sample(1000).posterior.sizes)
    {'chain': 1, 'draw': 1000}
    >>> approx.mean_flat, approx.sd_flat
    (array([-0.6]), array([0.8]))
    """

    groups: list[NGVIGroup]

    def __init__(
        self,
        density: ModelDensity,
        q: VariationalState,
        *,
        random_seed: Seed = None,
        include_transformed: bool = False,
    ) -> None:
        group = NGVIGroup(density.layout, q, model=density.model)
        super().__init__([group], model=density.model)
        self.record = self._session = self._gaussian = self._next_step = None
        self.hist = self.gap_hist = np.empty(0)
        self._reports = Kept()
        self.restart(density, q, random_seed=random_seed, include_transformed=include_transformed)

    def restart(
        self, density: ModelDensity, q: VariationalState, *, random_seed: Seed = None, include_transformed: bool = False
    ) -> None:
        """Begin anew from ``q``, with arguments as those of the class; nodes made before follow.

        Raises
        ------
        ValueError
            If the free variables of the model are not those that this approximation was made for.
        """
        made_for = self.groups[0].layout.variables
        if density.layout.variables != made_for:
            raise ValueError(
                "The free variables of the model, or their shapes, changed after the approximation was made: "
                f"{[v.name for v in made_for]} then, {[v.name for v in density.layout.variables]} now. Make a new one."
            )
        self.set_state(q)
        self.density = density
        self.include_transformed = include_transformed
        self._rng = _generator(random_seed)
        self._data = DataSnapshot(density.model)
        self._constrainer = Constrainer.of(density)

    def become(self, q: VariationalState) -> None:
        """Replace q by one that a fit has come to; where it is of another class, nodes made before keep the old one."""
        if type(q) is not self.groups[0].state_class:
            super().__init__([NGVIGroup(self.layout, q, model=self.model)], model=self.model)
        self.set_state(q)

    def __repr__(self) -> str:
        """Return the kind of q, the dimension and how the fit ended."""
        kind = f"{self._distribution.name} {self._distribution.detail}".rstrip()
        outcome = "not fitted" if self.record is None else f"{self.record.status}: ELBO {self.record.elbo}"
        return f"NGVIApproximation({kind}, n_dim={self.layout.n_dim}, {outcome})"

    __str__ = __repr__

    @property
    def params(self) -> dict[str, TensorSharedVariable]:
        """Shared variables that hold the parameters of q.

        Raises
        ------
        AttributeError
            Of an exact posterior, which has none.
        """
        if self._next_step is not None:
            raise AttributeError(NO_Q)
        return super().params

    @property
    def mean(self) -> TensorVariable:
        """Mean, (n_dim,), unconstrained: a PyTensor variable that follows the fit."""
        return self.groups[0].mean

    @property
    def std(self) -> TensorVariable:
        """Standard deviations, (n_dim,), unconstrained: a PyTensor variable that follows the fit."""
        return self.groups[0].std

    @property
    def cov(self) -> TensorVariable:
        """Covariance, (n_dim, n_dim), unconstrained: a PyTensor variable that follows the fit.

        Raises
        ------
        ValueError
            Above 5,000 dimensions: use `std`, `sd_flat` or `cov_of`.
        """
        return self.groups[0].cov
