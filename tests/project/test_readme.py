"""What README.md claims: its figures are those that were measured, its rows those of the page that it is taken from."""

import csv
import importlib
import re

from texts import DOCS, ROOT, read

README = read(ROOT / "README.md")


def test_figures_are_those_of_the_benchmark(monkeypatch):
    """`python tests/benchmarks/readme.py --tables` prints the lines anew."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    benchmark = importlib.import_module("readme")
    with (benchmark.RESULTS / "readme.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert "\n".join(benchmark.by_kind(rows)) in README
    assert benchmark.after_installation(rows) in " ".join(README.split())
    assert all(len(models) >= 5 for models in benchmark.KINDS.values())
    assert {(row["kind"], row["model"]) for row in rows} == {(k, m) for k, ms in benchmark.KINDS.items() for m in ms}


def test_my_model_is_a_part_of_the_table_on_the_front_page():
    rows = re.findall(r"^\| \[.+\]\(docs/.+$", README, flags=re.MULTILINE)
    assert 5 <= len(rows) <= 7
    assert [row for row in rows if row.replace("](docs/", "](") not in read(DOCS / "my_model.md")] == []


def test_it_is_read_in_a_minute():
    assert len(README.splitlines()) <= 110
