"""The scripts of the page on shards run as they are written, each in a process of its own."""

import re
import subprocess
import sys

import pytest

from texts import DOCS, blocks, run

TEXT = (DOCS / "shards.md").read_text(encoding="utf-8")
FIRST = blocks(TEXT)[0]
OTHERS = re.findall(r"^```py\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SCRIPTS = [block for block in OTHERS if block.startswith("if __name__")]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=["processes", "dask"])
def test_a_script_of_the_page_runs(script, tmp_path):
    before, *_ = FIRST.partition("\n\nshards = ")
    (tmp_path / "shops.py").write_text(f"{before}\n\n{script}")
    done = subprocess.run([sys.executable, "shops.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Exact up to Monte Carlo error" in done.stdout


@pytest.mark.slow
def test_the_same_by_bambi():
    (by_formula,) = (block for block in OTHERS if block.startswith("import bambi"))
    run(f"```python\n{FIRST}```\n\n```python\n{by_formula}```")
