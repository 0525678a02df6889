"""Kinds of posteriors that are no Gaussian, by the value of the option ``posterior`` that asks for one."""

from typing import Any

from pymc_ngvi.posteriors.kinds.kind import PosteriorKind
from pymc_ngvi.posteriors.kinds.latent_gaussian import LatentGaussianKind
from pymc_ngvi.posteriors.kinds.moved import MovedKind
from pymc_ngvi.posteriors.kinds.trees import TreeKind

#: In the order in which they are looked for: those that can be had without much looking first, the last resort last.
KINDS: dict[str, PosteriorKind[Any]] = {kind.name: kind for kind in (TreeKind(), LatentGaussianKind(), MovedKind())}
