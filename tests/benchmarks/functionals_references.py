"""References of ``functionals.py``: moments and limits of functionals and coordinates, by NUTS, weights or exactly."""

import time

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import arviz as az
import functionals_models
import numpy as np
import pymc as pm

from functionals_series import level_data
from measure import Array, coordinate_names, unconstrain
from xarray import DataTree

FOLDER = Path(__file__).parent / "functionals_references"
#: The least effective sample size that is asked for.
WANTED = 4_000
N_CHAINS, N_TUNE, N_DRAWS, TARGET = 2, 1_000, 3_000, 0.95
#: Ends of central intervals of 89 %.
LIMITS = (0.055, 0.945)


class Summary(NamedTuple):
    """What is known of functionals, then coordinates (unconstrained), of a posterior: an array of each, (k,).

    Attributes
    ----------
    names : list of str
    is_functional : array
        False of coordinates.
    mean, sd, low, high, kurtosis : array
        The limits are those of central intervals of 89 %.
    size : array
        Effective sample size of the mean; infinite where it is exact.
    size_of_sd : array
        That of the squared deviations.
    """

    names: list[str]
    is_functional: Array
    mean: Array
    sd: Array
    low: Array
    high: Array
    kurtosis: Array
    size: Array
    size_of_sd: Array

    @classmethod
    def of_draws(cls, draws: Array, names: list[str], n_functionals: int, n_chains: int, size: float = 0.0) -> Self:
        """Summarise draws, (n, k), of chains one after the other; with a ``size``, that is their effective one."""
        mean, sd = draws.mean(axis=0), draws.std(axis=0)
        low, high = np.quantile(draws, LIMITS, axis=0)
        kurtosis = np.mean((draws - mean) ** 4, axis=0) / np.maximum(sd**4, np.finfo(float).tiny)
        if size:
            sizes = np.full((2, len(names)), size)
        else:
            by_chain = draws.reshape(n_chains, -1, len(names))
            sizes = np.array([effective_sizes(values) for values in (by_chain, (by_chain - mean) ** 2)])
        is_functional = np.arange(len(names)) < n_functionals
        return cls(names, is_functional, mean, sd, low, high, kurtosis, *sizes)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read what `write` wrote."""
        with np.load(file) as found:
            return cls(found["names"].tolist(), *(found[name] for name in cls._fields[1:]))

    def write(self, file: Path) -> None:
        """Write a file, small enough to be kept in the tree."""
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, **{name: _small(np.array(value)) for name, value in self._asdict().items()})

    @property
    def varies(self) -> Array:
        """Which are not constants, as the diagonal of a correlation matrix is, (k,)."""
        return self.sd > 1e-6 * (np.abs(self.mean) + np.finfo(np.float32).tiny)

    def least_size(self) -> float:
        """Return the least effective sample size of a mean, constants left out."""
        return float(self.size[self.varies].min())

    def chosen(self, model: pm.Model) -> Self:
        """Return those of another model, whose coordinates are functionals or coordinates here."""
        coordinates, where = coordinate_names(model), {name: i for i, name in enumerate(self.names)}
        own = functionals(model)
        names = [name for name in self.names if name.split("[")[0] in own]
        index = [where[name] for name in (*names, *coordinates)]
        is_functional = np.arange(len(index)) < len(names)
        return type(self)([*names, *coordinates], is_functional, *(value[index] for value in self[2:]))

    def only(self, index: Array) -> Self:
        """Return a part."""
        names = [name for name, kept in zip(self.names, index, strict=True) if kept]
        return type(self)(names, *(value[index] for value in self[1:]))


def effective_sizes(values: Array) -> Array:
    """Return the effective sample size of the mean of each column of (chains, draws, k)."""
    return np.array([float(az.ess(values[:, :, i], method="mean")) for i in range(values.shape[2])])


def file_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of the reference of a model."""
    return folder / f"{'_'.join(''.join(c if c.isalnum() else ' ' for c in name).split())}.npz"


def least_size(name: str, folder: Path = FOLDER) -> tuple[int, float] | None:
    """Return the number of functionals and coordinates of a reference, and its least size; None where there is none."""
    file = file_of(name, folder)
    if not file.exists():
        return None
    found = Summary.read(file)
    return int(found.varies.sum()), found.least_size()


def make(name: str, limit: float) -> Summary:
    """Make the reference of a model: exactly, by importance weights, or by NUTS."""
    if name in functionals_models.NOISE:
        from functionals_integral import local_level

        return local_level(level_data(functionals_models.NOISE[name]))
    from functionals_latent import LATENT

    twin = functionals_models.TWINS.get(name, name)
    if twin not in LATENT:
        return by_nuts(name, limit)
    from functionals_weights import weighted

    model = functionals_models.model_of(twin)
    found = weighted(model, LATENT[twin](model), WANTED)
    return found if twin == name else found.chosen(functionals_models.model_of(name))


def functionals(model: pm.Model) -> list[str]:
    """Return the names of a model's Deterministics."""
    return [variable.name for variable in model.deterministics]


def flattened(posterior: DataTree, model: pm.Model) -> tuple[Array, list[str], int]:
    """Return draws of functionals and coordinates, (n, k), their names, and the number of functionals."""
    parts, names = [], []
    for name in functionals(model):
        values = posterior[name].to_numpy()  # (chain, draw, ...)
        shape = values.shape[2:]
        parts.append(values.reshape(values.shape[0] * values.shape[1], -1))
        names += [f"{name}[{','.join(map(str, i))}]" if i else name for i in np.ndindex(shape)]
    parts.append(unconstrain(posterior, model))
    return np.concatenate(parts, axis=1), [*names, *coordinate_names(model)], len(names)


def by_nuts(name: str, limit: float) -> Summary:
    """Return the reference of a model: pairs of chains are added until the least effective size is `WANTED`.

    None is begun after ``limit`` seconds. The mass matrix knows which coordinates go together, as an intercept and
    effects do: with a diagonal one, their effective size is often a tenth.
    """
    model = functionals_models.model_of(name)
    adaptation = "diag" if name in functionals_models.DIAGONAL else "low_rank"
    written = functionals_models.for_nuts(name)
    return sampled(name, written, lambda posterior: flattened(posterior, model), limit, adaptation)


def sampled(
    name: str, model: pm.Model, flat: Callable[[DataTree], tuple[Array, list[str], int]], limit: float, adaptation: str
) -> Summary:
    """Return the reference of a model as `by_nuts` does; ``flat`` makes of draws what `flattened` does."""
    import nutpie

    start = time.perf_counter()
    compiled, parts, known = nutpie.compile_pymc_model(model), [], 0.0
    while True:
        tree = nutpie.sample(
            compiled, draws=N_DRAWS, tune=N_TUNE, chains=N_CHAINS, cores=1, seed=7 + len(parts),
            target_accept=TARGET, adaptation=adaptation, progress_bar=False,
        )  # fmt: skip
        draws, names, n_functionals = flat(tree["posterior"])
        parts.append(draws)
        known += Summary.of_draws(draws, names, n_functionals, N_CHAINS).least_size()
        seconds = time.perf_counter() - start
        print(f"{name}: {known:.0f} after {seconds:.0f} s", flush=True)
        is_late = seconds * (len(parts) + 1) / len(parts) > limit
        if known < WANTED and not is_late:
            continue
        found = Summary.of_draws(np.concatenate(parts), names, n_functionals, N_CHAINS * len(parts))
        if found.least_size() >= WANTED or is_late:
            return found
        known = found.least_size()


def _small(values: Array) -> Array:
    return values.astype(np.float32) if values.dtype == float else values
