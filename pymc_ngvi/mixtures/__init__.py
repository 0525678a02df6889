"""Mixtures, finite (of Gaussians) and continuous (the Student-t), each with a step rule of its own."""

from pymc_ngvi.core.types import Rule
from pymc_ngvi.mixtures.finite.trust_region import ComponentTarget, TrustRegion
from pymc_ngvi.mixtures.student_t.scale_mixture import ScaleMixture

#: Step rules of families that are mixtures.
MIXTURE_STEPS: dict[str, type[Rule]] = {"trust_region": TrustRegion, "scale_mixture": ScaleMixture}

__all__ = ["MIXTURE_STEPS", "ComponentTarget", "ScaleMixture", "TrustRegion"]
