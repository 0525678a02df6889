"""Seconds that several pages quote are those of one run of the benchmark."""

import csv
import re

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Where a figure stands, what it is of, and how it is rounded.
QUOTED = [
    ("docs/benchmarks.md", r"takes ([\d.]+) s on epilepsy", ("epilepsy", "ngvi_gaussian", "cold"), 1),
    ("docs/benchmarks.md", r"([\d.]+) s on German credit", ("german", "ngvi_gaussian", "cold"), 1),
    ("docs/benchmarks.md", r"([\d.]+) s on heart", ("heart", "ngvi_gaussian", "cold"), 1),
]


@pytest.fixture(scope="module")
def measured():
    with (ROOT / "tests" / "benchmarks" / "results" / "compare.csv").open() as file:
        return {(row["model"], row["method"], row["cache"]): row for row in csv.DictReader(file)}


@pytest.mark.parametrize(("page", "pattern", "cell", "digits"), QUOTED)
def test_a_figure_is_that_of_the_benchmark(measured, page, pattern, cell, digits):
    text = " ".join((ROOT / page).read_text().split())
    found = re.search(pattern, text)
    assert found, f"{page} does not say {pattern}"
    assert found[1] == f"{float(measured[cell]['seconds']):.{digits}f}"


def test_the_benchmark_is_one_run(measured):
    assert len({row["environment"] for row in measured.values()}) == 1
    assert len({row["run_id"] for row in measured.values()}) == 1
