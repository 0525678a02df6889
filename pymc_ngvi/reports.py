"""All that an approximation reports, beside its PyTensor nodes: each part is a mixin of its own."""

from pymc_ngvi.components import ComponentReport


class Report(ComponentReport):
    """What `NGVIApproximation` inherits beside ``pymc.Approximation``."""
