"""One cell of the comparison: one method on one data set, in this process and nowhere else.

Started by ``compare.py``, which watches the report file to see what stage the cell is at and how
long it may take.
"""

import argparse
import json
import time

from pathlib import Path

START = time.perf_counter()

import measure  # noqa: E402  (the imports are timed)
import rivals  # noqa: E402

ELBO_DRAWS = 20_000
MOMENT_SEED = 20_240


class Report:
    """What is known about the cell so far, as a JSON file that is always complete.

    Parameters
    ----------
    path : Path
        The file, replaced at every change of stage.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, object] = {}

    def enter(self, stage: str, **values: object) -> None:
        """Note values and the stage that begins now."""
        self.values.update(values, stage=stage)
        partial_file = self.path.with_suffix(".partial")
        partial_file.write_text(json.dumps(self.values))
        partial_file.replace(self.path)


def main() -> None:
    """Fit, draw, report the time; then measure the quality if asked to."""
    options = _parse_options()
    report = Report(options.report)
    report.enter("preparing")
    rivals.import_method(options.method)
    imported = time.perf_counter()
    model = getattr(measure.load_models(options.references), options.model)(options.data)
    built = time.perf_counter()
    report.enter("fitting", import_seconds=imported - START, model_seconds=built - imported)
    try:
        outcome = rivals.RUNNERS[options.method](model, options.seed)
    except Exception as error:
        report.enter("done", status=f"error: {_first_line(error)}")
        return
    report.enter(
        "measuring",
        seconds=time.perf_counter() - built,
        wall_seconds=time.time() - options.launched,
        status="ok",
        **outcome.facts,
    )
    if options.measure:
        try:
            report.enter("measuring", **_measure(outcome, model, options))
        except Exception as error:
            report.enter("measuring", note=f"not measured: {_first_line(error)}")
    report.enter("done")


def _measure(outcome: rivals.Outcome, model, options: argparse.Namespace) -> dict[str, object]:
    """Compare with the reference and estimate the ELBO, as columns of the results."""
    found = outcome.describe()
    reference = measure.Reference.read(options.references / f"{options.model}.npz")
    errors = reference.errors(found.names, found.mean, found.sd)
    columns = {**errors._asdict(), "how": found.how}
    if found.density is not None:
        log_p = measure.log_density_of(model)
        estimate = measure.elbo(found.density, log_p, ELBO_DRAWS, MOMENT_SEED)
        columns |= {"elbo": estimate.value, "elbo_se": estimate.se}
    return columns


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", required=True, choices=rivals.RUNNERS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--references", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--launched", type=float, required=True, help="time of the launch, epoch")
    parser.add_argument("--measure", action="store_true", help="measure the quality of the result")
    return parser.parse_args()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


if __name__ == "__main__":
    main()
