"""Which backend serves a fit best: whether compiling takes longer than it saves."""

from collections.abc import Mapping

from pymc_ngvi.density.by_rows import ByRows
from pymc_ngvi.density.flat import FlatGraphs
from pymc_ngvi.density.hessians import Hessians
from pymc_ngvi.graphs.backends import BACKENDS
from pymc_ngvi.graphs.jaxed import check_installed
from pymc_ngvi.rows.engines import ENGINES

#: Evaluations that `backend="auto"` expects of a fit: gradients, and draws at which a dense Hessian is needed.
_EXPECTED_GRADIENTS, _EXPECTED_HESSIANS = 1_600, 1_200
#: Gradients that it expects of a fit without Hessians: some thousand iterations, with 8 draws in each.
_EXPECTED_ALONE = 16_000
#: Dimensions up to which it looks at the sparsity of the Hessian.
_MOST_COLOURED = 100_000
#: Times that a gradient takes of log p alone, at most.
_MOST_TIMES = 10


def check_backend(backend: str, compile_kwargs: Mapping[str, object] | None) -> None:
    """Raise ValueError for an unknown backend, and for one beside a mode; ImportError for one that is not installed."""
    known = dict.fromkeys((*BACKENDS, *ENGINES))
    if backend not in known:
        raise ValueError(f"backend should be one of {', '.join(map(repr, known))}; got {backend!r}.")
    if backend != "auto" and compile_kwargs and "mode" in compile_kwargs:
        raise ValueError(
            f"backend={backend!r} and compile_kwargs['mode']={compile_kwargs['mode']!r} both choose how to compile; "
            "give one of them."
        )
    if backend == "jax":
        check_installed()


def fastest_backend(
    graphs: FlatGraphs, by_rows: ByRows, hessians: Hessians, n_dim: int, *, needs_hessians: bool = True
) -> str:
    """Return the backend with which a fit should be over first: "quick" or "numba"."""
    if graphs.is_large or graphs.has_equations or graphs.has_tails:
        return "quick"  # compilers take longer still for thousands of nodes, and do not compile integrations
    if not needs_hessians:
        return "numba" if graphs.forward is None and graphs.cost.prefers_numba(_EXPECTED_ALONE) else "quick"
    if graphs.forward is not None and _forward_seconds(graphs, n_dim) < graphs.cost.numba_compile_seconds:
        return "quick"
    # Where compiling would not pay anyway, no gradient is made. Sparsity and rows only ever make for less work.
    if not _may_prefer_numba(graphs, n_dim):
        return "quick"
    n_products = n_dim
    if by_rows.gives_hessians:
        n_products = hessians.n_products
    elif n_dim <= _MOST_COLOURED and graphs.cost.prefers_numba(_work(n_dim)):
        n_products = hessians.second.sparse.n_colours_by_graph()
    numba = _may_prefer_numba(graphs, n_products) and graphs.cost.prefers_numba(_work(n_products))
    return "numba" if numba else "quick"


def _forward_seconds(graphs: FlatGraphs, n_dim: int) -> float:
    """Return the time expected of a fit with derivatives that are carried along."""
    return graphs.cost.quick_seconds * (_EXPECTED_GRADIENTS + (1 + n_dim / 2) * _EXPECTED_HESSIANS)


def _may_prefer_numba(graphs: FlatGraphs, n_products: int) -> bool:
    """Tell whether compiling may pay, from the graph of log p alone."""
    return graphs.cost_of_logp.prefers_numba(_MOST_TIMES * _work(n_products))


def _work(n_directions: int) -> int:
    """Return the evaluations expected of a fit, in gradients."""
    # A product along one of many directions costs about .4 of a gradient: the rest is shared among them.
    return _EXPECTED_GRADIENTS + int(0.4 * n_directions * _EXPECTED_HESSIANS)
