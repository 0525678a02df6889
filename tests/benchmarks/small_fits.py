"""What default fits of small models take, cold and warm, by one version of the package or by several side by side.

Each fit is made in a process of its own: once cold, with nothing compiled yet, after imports and with the model built,
and then again several times. Versions take turns; the least of the repetitions counts, as others on the machine only
ever make them longer. From a checkout that is not installed, set ``PYTHONPATH`` to its root.

Examples
--------
::

    python small_fits.py
    python small_fits.py --versions before=/tmp/before now=. --models "groups: radon" epilepsy --repeats 1
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import argparse
import json
import logging
import subprocess
import sys
import time
import warnings

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from users_models import MODELS

TESTS = Path(__file__).parents[1]
#: Of the battery of `users.py`, but for the first.
CASES = (
    "epilepsy", "groups: eight schools noncentred", "groups: radon", "groups: bambi bernoulli",
    "groups: bambi poisson crossed", "regression: poisson two parameters", "regression: logistic",
    "regression: ordered logit", "regression: robust", "counts and survival: negative binomial",
    "series and fields: seasonal", "structured: dims groups", "structured: custom density",
)  # fmt: skip
N_WARM = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each model."""
    options = _parse_options(arguments)
    if options.worker:
        print(json.dumps(measured(options.models[0])))
        return
    versions = dict(version.split("=", 1) for version in options.versions)
    least: dict[str, dict[str, list[float]]] = {}
    for name in options.models:
        least[name] = {version: [np.inf] * 3 for version in versions}
        for _ in range(options.repeats):
            for version, root in versions.items():
                found = _in_process(name, root)
                least[name][version] = [min(pair) for pair in zip(least[name][version], found, strict=True)]
        print(name, *(f"{v}: {_in_words(s)}" for v, s in least[name].items()), sep="; ", flush=True)
    total = {v: np.sum([least[name][v] for name in least], axis=0) for v in versions}
    print("all", *(f"{v}: {_in_words(s)}" for v, s in total.items()), sep="; ")
    first, *others = versions
    for version in others:
        ratio = np.array([np.divide(least[name][version], least[name][first]) for name in least])
        print(f"{version} / {first}: all {total[version] / total[first]}, median {np.median(ratio, axis=0)}")


def _in_words(seconds: Sequence[float]) -> str:
    return f"cold {seconds[0]:.2f}, compiling {seconds[1]:.2f}, warm {seconds[2]:.2f}"


def _in_process(name: str, root: str) -> list[float]:
    command = [sys.executable, __file__, "--worker", "--models", name]
    environment = {**os.environ, "PYTHONPATH": str(Path(root).resolve())}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds: list[float] = json.loads(result.stdout.splitlines()[-1])
    return seconds


def measured(name: str) -> list[float]:
    """Return the processor seconds of a cold fit, those that it says are of compiling, and of a warm fit."""
    import pymc_ngvi

    warnings.simplefilter("ignore")  # of how fits end
    logging.getLogger("pymc").setLevel(logging.ERROR)
    if name == "epilepsy":
        sys.path.append(str(TESTS))
        from real_models import epilepsy as build
    else:
        build = MODELS[name][1]
    inference, seconds, compiling = pymc_ngvi.NGVI(build(), random_seed=1), [], []
    for _ in range(1 + N_WARM):
        before = _processor()
        approx = inference.fit(progressbar=False)
        seconds.append(_processor() - before)
        compiling.append(float(approx.compile_seconds))
    return [seconds[0], compiling[0], min(seconds[1:])]


def _processor() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", default=list(CASES), metavar="MODEL")
    parser.add_argument("--versions", nargs="+", default=[f"now={TESTS.parent}"], metavar="NAME=ROOT")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
