"""Engines: what evaluates rows. Each is one file, and one entry here."""

import functools

from collections.abc import Callable

from pymc_ngvi.reading.affine import CompileAll
from pymc_ngvi.rows.engines.on_jax import OnJax
from pymc_ngvi.rows.engines.on_programs import ProgramEngine
from pymc_ngvi.rows.engines.on_pytensor import Engine, PyTensorEngine
from pymc_ngvi.rows.programs.on_numpy import OnNumPy

#: Engines by the ``backend`` that takes them: from how PyTensor compiles graphs, where that is needed. All that is no
#: row is PyTensor's: compiled for that backend or, where it knows none of this name, run as with "quick".
ENGINES: dict[str, Callable[[CompileAll], Engine]] = {
    "quick": functools.partial(ProgramEngine, OnNumPy),
    "numba": PyTensorEngine,
    "c": PyTensorEngine,
    "jax": functools.partial(ProgramEngine, OnJax),
}


def engine_for(backend: str, compile_: CompileAll) -> Engine:
    """Return the engine that a backend takes; with a mode of PyTensor, PyTensor.

    Parameters
    ----------
    backend : str
    compile_ : callable
        How PyTensor compiles what is no program.

    Returns
    -------
    Engine

    Examples
    --------
    >>> from pymc_ngvi.reading.affine import quickly
    >>> from pymc_ngvi.rows.engines import engine_for
    >>> type(engine_for("quick", quickly)).__name__
    'ProgramEngine'
    """
    return ENGINES.get(backend, PyTensorEngine)(compile_)
