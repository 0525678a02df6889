"""Options and fixtures that the whole suite shares."""

import gc
import importlib.util
import logging
import os
import random
import signal
import zlib

from pathlib import Path

# As in `make test`, before anything imports NumPy: threads of BLAS that wait for each other take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytensor
import pytest

from threadpoolctl import threadpool_limits

# An exception in one of several posteriors ends a fit here; tests of what users get in its place unset it.
os.environ.setdefault("PYMC_NGVI_RAISE", "1")
# No window may open; set before anything imports matplotlib.
os.environ.setdefault("MPLBACKEND", "Agg")

# The same examples in every run, and no deadline: a busy machine is no failure.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    """Add the folders that hold what the repository does not."""
    group = parser.getgroup("pymc_ngvi")
    group.addoption("--data", type=Path, default=None, help="folder of the larger data sets (csv)")
    group.addoption("--references", type=Path, default=None, help="folder of the NUTS reference moments (npz)")


def pytest_collection_finish():
    """Spare what is imported and collected, which stays till the end, each garbage collection: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Have the same numbers in every run where no seed is given: NumPy takes them from the name of the test."""
    np.random.bit_generator.randbits = random.Random(zlib.crc32(item.nodeid.encode())).getrandbits


def _folder(request, option):
    path = request.config.getoption(option)
    if path is None:
        pytest.skip(f"needs {option}=FOLDER")
    if not path.is_dir():
        raise pytest.UsageError(f"{option}={path} is not a folder")
    return path


@pytest.fixture
def data_dir(request):
    """Folder of the larger data sets; skips without ``--data``."""
    return _folder(request, "--data")


@pytest.fixture
def references_dir(request):
    """Folder of the NUTS reference moments; skips without ``--references``."""
    return _folder(request, "--references")


@pytest.fixture
def rng(request):
    """Generator seeded by the name of the test with its parameters: the same in every run and in any order."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def _log_levels():
    """Leave the levels of the log as they were: other tests read what is logged."""
    before = {logger: logger.level for logger in map(logging.getLogger, ("pymc", "pymc.ngvi"))}
    yield
    for logger, level in before.items():
        logger.setLevel(level)


@pytest.fixture
def _no_last_resort(monkeypatch):
    """Leave draws as they are where no other posterior can be relied on."""
    from pymc_ngvi.results import choice  # after what has to be set before PyTensor is imported

    monkeypatch.setattr(choice, "KINDS", {name: kind for name, kind in choice.KINDS.items() if not kind.is_last})


@pytest.fixture
def _nested_first(monkeypatch):
    """Have nested posteriors come before any Gaussian fit, as if they took no time, and trees were not sure."""
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.TreeKind.chance", lambda self, found: 0.9)
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.nested_seconds", lambda given: 0.01)
    monkeypatch.setattr("pymc_ngvi.posteriors.kinds.LatentGaussianKind.least", 0.01)


@pytest.fixture
def python_mode():
    """PyMC's own functions without compilation: they are not what is tested."""
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        yield


@pytest.fixture
def _sigint():
    """Let SIGINT raise KeyboardInterrupt: a shell that runs the suite in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def _one_blas_thread():
    """Keep BLAS to one thread, as a fit of a small model does; tests that run the loop themselves need it."""
    with threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(scope="module")
def cluster():
    """Two processes of Dask."""
    import dask

    from distributed import Client, LocalCluster

    # Processes start slowly on a busy machine.
    patient = {"distributed.comm.timeouts.connect": "180s", "distributed.comm.timeouts.tcp": "180s"}
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "localhost:0", "silence_logs": 50}
    with dask.config.set(patient), LocalCluster(**options) as cluster, Client(cluster, timeout=180) as client:
        yield client


@pytest.fixture(scope="module")
def _compiled_once():
    """Compile a model object once for all fits of a module, which then have to make it once, too.

    Compiling is nearly all the time that a fit of a small model takes. Only where no test changes the model.
    """
    modules = [importlib.import_module(f"pymc_ngvi.{name}") for name in ("inference", "results.approximation")]
    make, made = modules[0].LogDensity, {}

    class Once(type):
        """Of what stands for `LogDensity`: makes one, and knows one."""

        def __call__(cls, model, backend="auto", compile_kwargs=None, *, factors=None):
            if factors is not None:
                return make(model, backend, compile_kwargs, factors=factors)
            last = None if compile_kwargs else made.get((model, backend))
            share = last is not None and not last.has_minibatch
            density = last.again(backend) if share else make(model, backend, compile_kwargs)
            if not compile_kwargs:
                made[model, backend] = density
            return density

        def __instancecheck__(cls, instance):
            return isinstance(instance, make)

    class CompiledOnce(metaclass=Once):
        """In the place of `LogDensity`."""

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "LogDensity", CompiledOnce)
        yield


@pytest.fixture(autouse=True, scope="session")
def once():
    """Simplify and compile equal graphs once."""
    from once import Once, rewriters_once  # after what has to be set before PyTensor and Matplotlib are imported

    with pytest.MonkeyPatch.context() as patch:
        made = Once()
        made.install(patch)
        rewriters_once(patch)
        yield made


@pytest.fixture
def _anew(once):
    """Simplify and compile every graph; for tests of that."""
    once.is_active = False
    yield
    once.is_active = True


@pytest.fixture(autouse=True, scope="session")
def _rewrite_errors_raise():
    """Make a failing PyTensor rewrite an error instead of a line in the log; do not record where nodes are made."""
    with pytensor.config.change_flags(on_opt_error="raise", traceback__limit=0):
        yield
