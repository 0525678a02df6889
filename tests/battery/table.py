"""Print what comes of cases by name: right, told or wrong, the kind, and seconds of the processor.

Run it as ``python tests/battery/table.py two_sensors rare_counts --seeds 1 2 3`` with ``tests`` on the path of modules.
"""

import argparse
import logging
import time
import warnings

import numpy as np

from battery import test_cases, test_kinds

_FIT = test_cases.fit


def functions():
    """Return cases by name."""
    kinds = {
        name[5:]: value for name, value in vars(test_kinds).items() if name.startswith("test_") and callable(value)
    }
    return kinds | {case.values[0].__name__: case.values[0] for case in test_cases.CASES}


def row(function, seed):
    """Return what came of a case."""
    fits, seconds = [], []

    def fit(model, seed, **options):
        start = time.process_time()
        fits.append(_FIT(model, seed, **options))
        seconds.append(time.process_time() - start)
        return fits[-1]

    test_cases.fit = test_kinds.fit = fit
    try:
        function(seed)
    except AssertionError as error:
        outcome = f"wrong: {str(error).splitlines()[1:2] or error}"
    except Exception as error:  # a crash is an outcome
        outcome = f"{type(error).__name__}: {error}"
    else:
        outcome = "right" if fits and fits[0].diagnose(random_seed=1).reliable else "told"
    plan = fits[0].plan if fits else None
    kind = "" if plan is None or plan.taken is None else plan.taken.kind
    return kind, bool(fits and fits[0].record.is_exact), outcome, np.round(seconds, 1).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=list(functions()))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    options = parser.parse_args()
    logging.getLogger("pymc.ngvi").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for name in options.names:
        for seed in options.seeds:
            kind, is_exact, outcome, seconds = row(functions()[name], seed)
            print(f"{name:28} {seed:3} {kind:9} {'exact' if is_exact else '':6} {seconds} {outcome}", flush=True)


if __name__ == "__main__":
    main()
