"""What people look at beside coordinates, for any model: Deterministics, parameters of its data, and contrasts."""

from collections.abc import Iterator

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from measure import Array, coordinate_names, unconstrain
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.op import RandomVariable
from xarray import DataTree

#: Elements of each quantity at most, evenly spaced; numbers that are held at once.
N_EACH, _HELD = 60, 2**22


class Looks:
    """Functionals and coordinates of draws.

    Functionals are: each Deterministic; each parameter of an observed variable, such as its means, with the total; and
    of free variables on the real line the total, and differences of neighbours. Of many elements, some.

    Parameters
    ----------
    model : pm.Model
        As it is fitted. Draws may be those of another one with the same posterior, which has all its free variables.
    """

    def __init__(self, model: pm.Model) -> None:
        self.model = model
        quantities = dict(_quantities(model))
        self._names = list(quantities)
        batched = {rv: rv.type.clone(shape=(None, *rv.type.shape))() for rv in model.free_RVs}
        outputs = vectorize_graph([pt.as_tensor(q) for q in quantities.values()], batched) if quantities else []
        options = {"mode": "FAST_COMPILE", "on_unused_input": "ignore"}
        self._function = pytensor.function(list(batched.values()), outputs, **options)

    def __call__(self, posterior: DataTree) -> tuple[Array, list[str], int]:
        """Return functionals and coordinates, (n, k), their names, and the number of functionals."""
        stacked = posterior.to_dataset().stack(sample=("chain", "draw"))
        draws = [stacked[rv.name].transpose("sample", ...).to_numpy() for rv in self.model.free_RVs]
        n = len(draws[0])
        sizes = [np.size(value[0]) for value in self._function(*(d[:1] for d in draws))]
        step = max(1, _HELD // max(sum(sizes), 1))
        parts, names = [], list[str]()
        for start in range(0, n, step):
            values = self._function(*(d[start : start + step] for d in draws))
            columns = [_columns(name, value) for name, value in zip(self._names, values, strict=True)]
            parts.append(np.concatenate([column for column, _ in columns], axis=1) if columns else np.empty((step, 0)))
            names = [name for _, of in columns for name in of]
        functionals = np.concatenate(parts)[:n]
        flat = np.concatenate([functionals, unconstrain(posterior, self.model)], axis=1)
        return flat, [*names, *coordinate_names(self.model)], len(names)


def _quantities(model: pm.Model) -> Iterator[tuple[str, pt.Variable]]:
    """Yield quantities with names."""
    free = set(model.free_RVs)
    for variable in model.deterministics:
        yield variable.name, variable
    for variable in model.observed_RVs:
        for i, parameter in enumerate(variable.owner.op.dist_params(variable.owner)):
            before = {*ancestors([parameter])}
            is_drawn = any(v.owner and isinstance(v.owner.op, RandomVariable) for v in before - free)  # of a mixture
            if parameter.type.ndim and free & before and parameter not in free and not is_drawn:
                yield f"{variable.name}, parameter {i + 1}", parameter
    for variable in model.free_RVs:
        if variable.type.ndim and model.rvs_to_transforms[variable] is None:
            yield f"steps of {variable.name}", variable


def _columns(name: str, values: Array) -> tuple[Array, list[str]]:
    """Return columns of a quantity, (n, k), with names: elements, or differences of neighbours; and the total."""
    flat = values.reshape(len(values), -1).astype(float)
    total = flat.sum(axis=1, keepdims=True)
    if name.startswith("steps of "):
        flat = np.diff(flat, axis=1)
    size = flat.shape[1]
    index = np.unique(np.linspace(0, size - 1, min(size, N_EACH)).round().astype(int)) if size else np.empty(0, int)
    names = [f"{name}[{i}]" for i in index]
    if values[0].size == 1:
        return flat, [name]
    return np.concatenate([flat[:, index], total], axis=1), [*names, f"total of {name.removeprefix('steps of ')}"]
