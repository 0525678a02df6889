"""What a file keeps of an exact posterior, and the posterior again, on a model."""

from typing import Any, Self

from pymc_ngvi.core.types import Array
from pymc_ngvi.density import ModelDensity
from pymc_ngvi.marginal.forest import Forest
from pymc_ngvi.marginal.log_marginal import LogMarginal
from pymc_ngvi.marginal.on_model import FittedDensity
from pymc_ngvi.marginal.sampling import Plain, Sampled, Sequences
from pymc_ngvi.marginal.verdict import Checks


class InFiles:
    """The part of an exact posterior that goes to files."""

    forest: Forest
    sampled: Sampled
    sequences: Sequences
    quadrature: LogMarginal | None
    gaussian: Any
    others: tuple[Any, ...]
    density: FittedDensity
    checks: Any
    _moments: Any

    def __init__(self, *parts: Any) -> None:
        raise NotImplementedError

    def content(self) -> dict[str, Any]:
        """Return what a file keeps; also moments and checks, which take evaluations of the model."""
        return {
            "forest": self.forest,
            "sampled": self.sampled,
            "seed": self.sequences.seed,
            "quadrature": None if self.quadrature is None else self.quadrature.content(),
            "gaussian": self.gaussian,
            "others": self.others,
            "log_p": self.density.log_p_at_point(),
            "moments": self._moments,
            "checks": self.checks,
        }

    @classmethod
    def of_content(cls, content: dict[str, Any], density: ModelDensity) -> Self:
        """Return the posterior on a model: the inverse of `content`.

        Raises
        ------
        ValueError
            If the parts do not go together.
        """
        forest, sampled, checks = (_of_kind(content, *named) for named in _KINDS)
        gaussian = content["gaussian"]
        moments: tuple[Array, Array] = tuple(content["moments"])
        if {density.n_dim, gaussian.n_dim, *(len(m) for m in moments)} != {forest.n_dim}:
            raise ValueError("the exact posterior is of another dimension")
        sampled.pool.check(forest.n_globals)
        fitted = FittedDensity(density, forest, gaussian.mean(), content["log_p"])
        quadrature = None
        if forest.n_local:
            quadrature = LogMarginal.of_content(content["quadrature"], fitted, forest, sampled.bend.forward)
        sequences = Sequences(quadrature or Plain(fitted.logp), content["seed"])
        state = cls(sampled, sequences, gaussian, forest, quadrature, fitted)
        vars(state).update(_moments=moments, checks=checks, others=tuple(content.get("others", ())))
        return state


_KINDS = (("forest", Forest), ("sampled", Sampled), ("checks", Checks))


def _of_kind(content: dict[str, Any], name: str, kind: type) -> Any:
    value = content[name]
    if not isinstance(value, kind):
        raise ValueError(f"what the exact posterior has as {name!r} is something else")
    return value
