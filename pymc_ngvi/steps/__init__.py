"""Step rules: how far to go, and when to stop. One file and one row each."""

from pymc_ngvi.steps.adaptive import Adaptive

STEPS: dict[str, type] = {"adaptive": Adaptive}

__all__ = ["STEPS", "Adaptive"]
