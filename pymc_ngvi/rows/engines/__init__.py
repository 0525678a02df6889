"""Engines: what evaluates rows. Each is one file, and one entry here."""

from collections.abc import Callable

from pymc_ngvi.reading.compiled import CompileAll
from pymc_ngvi.rows.engines.engine import Engine
from pymc_ngvi.rows.engines.on_numpy import NumPyEngine
from pymc_ngvi.rows.engines.on_pytensor import PyTensorEngine

#: Engines by name: from how PyTensor compiles graphs, where that is needed.
ENGINES: dict[str, Callable[[CompileAll], Engine]] = {"numpy": NumPyEngine, "pytensor": PyTensorEngine}
