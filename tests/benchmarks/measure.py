"""How far an approximation is from the reference posterior, and its evidence lower bound.

Everything here happens in the unconstrained space, on flat vectors that concatenate the raveled
value variables of the model in the order of ``model.value_vars``.
"""

import importlib.util

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol, Self

import numpy as np
import pymc as pm
import pytensor

from numpy.typing import NDArray
from pytensor.graph.replace import vectorize_graph
from xarray import DataTree

Array = NDArray[np.float64]


class MomentErrors(NamedTuple):
    """Errors of means and standard deviations, in units of the reference standard deviation.

    Attributes
    ----------
    em : float
        Root mean square over coordinates of the error of the mean.
    es : float
        Root mean square over coordinates of the relative error of the standard deviation.
    worst_name : str
        The coordinate with the largest error of the mean.
    worst_error : float
        That error, with its sign.
    """

    em: float
    es: float
    worst_name: str
    worst_error: float


class Estimate(NamedTuple):
    """A Monte Carlo estimate and its standard error."""

    value: float
    se: float

    @classmethod
    def of(cls, draws: Array) -> Self:
        """Return the mean of independent draws and its standard error."""
        return cls(float(draws.mean()), float(draws.std(ddof=1) / np.sqrt(len(draws))))


class Density(Protocol):
    """A distribution over flat unconstrained vectors that can be drawn from and evaluated."""

    def draw(self, n: int, seed: int) -> Array:
        """Return ``n`` draws, shape (n, d)."""

    def log_density(self, theta: Array) -> Array:
        """Return the normalised log density at each row of ``theta``, shape (n,)."""


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian with mean (d,) and covariance ``factor @ factor.T``, the factor lower triangular.

    A factor of shape (d,) stands for a diagonal matrix.
    """

    mean: Array
    factor: Array

    @classmethod
    def from_covariance(cls, mean: Array, covariance: Array) -> Self:
        """Factor a covariance; raises ``LinAlgError`` where it is not positive definite."""
        return cls(mean, np.linalg.cholesky(covariance))

    @property
    def sd(self) -> Array:
        """Marginal standard deviations, shape (d,)."""
        return np.linalg.norm(self.factor, axis=1) if self.factor.ndim == 2 else self.factor

    def draw(self, n: int, seed: int) -> Array:
        """Return ``n`` draws, shape (n, d)."""
        z = np.random.default_rng(seed).standard_normal((n, len(self.mean)))
        return self.mean + (z @ self.factor.T if self.factor.ndim == 2 else z * self.factor)

    def log_density(self, theta: Array) -> Array:
        """Return the log density at each row of ``theta``, shape (n,)."""
        centred = (theta - self.mean).T
        if self.factor.ndim == 2:
            z, scale = np.linalg.solve(self.factor, centred), np.diag(self.factor)
        else:
            z, scale = centred / self.factor[:, None], self.factor
        constant = np.log(scale).sum() + 0.5 * len(scale) * np.log(2 * np.pi)
        return -0.5 * (z**2).sum(axis=0) - constant


@dataclass(frozen=True)
class Reference:
    """Means and standard deviations of a long NUTS run, by coordinate name."""

    mean: dict[str, float]
    sd: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read ``uncon_names``, ``uncon_mean`` and ``uncon_sd`` from a ``.npz`` file."""
        with np.load(path) as file:
            names = file["uncon_names"].tolist()
            return cls(
                mean=dict(zip(names, file["uncon_mean"].tolist(), strict=True)),
                sd=dict(zip(names, file["uncon_sd"].tolist(), strict=True)),
            )

    def errors(self, names: Sequence[str], mean: Array, sd: Array) -> MomentErrors:
        """Compare moments, one per name, with the reference.

        Raises
        ------
        ValueError
            If the names are not those of the reference.
        """
        if set(names) != set(self.mean):
            unmatched = sorted(set(names) ^ set(self.mean))
            raise ValueError(f"coordinates without a partner: {', '.join(unmatched[:5])}")
        reference_sd = np.array([self.sd[name] for name in names])
        error = (mean - np.array([self.mean[name] for name in names])) / reference_sd
        worst = int(np.argmax(np.abs(error)))
        return MomentErrors(
            em=_rms(error),
            es=_rms(sd / reference_sd - 1),
            worst_name=names[worst],
            worst_error=float(error[worst]),
        )


def load_models(references: Path) -> ModuleType:
    """Import ``models.py`` of the reference folder, one function ``name(data_dir)`` per model."""
    spec = importlib.util.spec_from_file_location("reference_models", references / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_inputs(data: Path | None, references: Path | None, models: Sequence[str]) -> None:
    """Exit with a sentence that says what is missing, if anything is.

    Raises
    ------
    SystemExit
        If a folder is not given or not there, or a model has no reference.
    """
    wanted = {"--data": "the data sets", "--references": "models.py and the NUTS moments"}
    for option, folder in zip(wanted, (data, references), strict=True):
        if folder is None:
            raise SystemExit(f"Give {option}, the folder that holds {wanted[option]}.")
        if not folder.is_dir():
            raise SystemExit(f"{option} {folder} is not a folder.")
    for name in ("models.py", *(f"{model}.npz" for model in models)):
        if not (references / name).is_file():
            raise SystemExit(f"--references {references} holds no {name}.")


def coordinate_names(model: pm.Model) -> list[str]:
    """Name every unconstrained coordinate, as in ``beta[3]``, ``z[0,1]`` or ``sd_log__``."""
    point = model.initial_point()
    return [
        f"{value.name}[{','.join(map(str, index))}]" if index else value.name
        for value in model.value_vars
        for index in np.ndindex(point[value.name].shape)
    ]


def log_density_of(model: pm.Model) -> Callable[[Array], Array]:
    """Compile the log density of the model, Jacobian terms included, for flat draws (n, d)."""
    log_p = model.compile_logp(jacobian=True)
    point = model.initial_point()
    shapes = {value.name: point[value.name].shape for value in model.value_vars}
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])

    def as_point(theta: Array) -> dict[str, Array]:
        parts = np.split(theta, ends[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    return lambda draws: np.array([float(log_p(as_point(theta))) for theta in draws])


def elbo(density: Density, log_p: Callable[[Array], Array], n: int, seed: int) -> Estimate:
    """Estimate the evidence lower bound of ``density`` on ``n`` fresh draws."""
    theta = density.draw(n, seed)
    return Estimate.of(log_p(theta) - density.log_density(theta))


def unconstrain(posterior: DataTree, model: pm.Model) -> Array:
    """Map posterior draws on the constrained scale to flat unconstrained ones, shape (n, d)."""
    stacked = posterior.to_dataset().stack(sample=("chain", "draw"))
    draws = {rv: stacked[rv.name].transpose("sample", ...).to_numpy() for rv in model.free_RVs}
    batched = {rv: rv.type.clone(shape=(None, *rv.type.shape))() for rv in model.free_RVs}
    values = vectorize_graph([_forward(model, rv) for rv in model.free_RVs], batched)
    function = pytensor.function(list(batched.values()), values, mode="FAST_COMPILE")
    by_name = dict(
        zip(
            (model.rvs_to_values[rv].name for rv in model.free_RVs),
            function(*draws.values()),
            strict=True,
        )
    )
    parts = [by_name[value.name] for value in model.value_vars]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _forward(model: pm.Model, rv: pytensor.graph.Variable) -> pytensor.graph.Variable:
    transform = model.rvs_to_transforms[rv]
    return rv if transform is None else transform.forward(rv, *rv.owner.inputs)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))
