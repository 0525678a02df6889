"""The notebooks run, warn of nothing and need no network; what is committed is what the scripts say."""

import importlib.util
import json
import os
import re
import subprocess
import sys

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))
NAMES = [path.stem for path in SCRIPTS]
#: What a script needs beside the dependency group example.
NEEDS = {"03_bambi": "bambi", "09_three_million_flights": "distributed"}
#: Bytes of a notebook with its figures.
MAX_SIZE = 300_000
#: Seconds for one script: each takes less than one minute on two cores that have nothing else to do.
MAX_SECONDS = 600

#: Runs a script where it can't reach another machine, and as a kernel does: other processes do not import it.
OFFLINE = """
import sys

HERE = "localhost", "127.0.0.1"

def hook(event, args):
    if event in ("socket.getaddrinfo", "socket.connect") and not any(name in str(args) for name in HERE):
        raise OSError(f"a notebook should not need the network: {event} {args}")

sys.addaudithook(hook)
with open(sys.argv[1], encoding="utf-8") as script:
    exec(compile(script.read(), sys.argv[1], "exec"))
"""


def module():
    """Return ``examples/notebooks.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("notebooks", EXAMPLES / "notebooks.py")
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


def notebook(name):
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))


def run(script, *flags, folder=EXAMPLES):
    """Run a script in a process of its own, from the folder that its data are relative to."""
    return subprocess.run(
        [sys.executable, *flags, "-c", OFFLINE, str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=MAX_SECONDS,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(EXAMPLES.parent)},
    )


# --- pairs ---


def test_each_script_has_a_notebook_and_the_other_way_round():
    assert NAMES
    assert [path.stem for path in sorted(EXAMPLES.glob("*.ipynb"))] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_script_and_notebook_hold_the_same_cells(name):
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook(name)["cells"]]
    assert cells == module().read_cells(EXAMPLES / f"{name}.py"), f"run: make notebooks (or notebooks.py {name})"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_run_from_the_first_cell_to_the_last(name):
    cells = [cell for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure"
    # Errors, warnings and logs: nothing that a reader should not see, but for the closing lines of fits.
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    said = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stderr")
    assert re.sub(r"(?m)^(.* in [\d.]+ s[;:].*|Sampling: \[.*|)\n", "", said) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_small_and_says_nothing_of_the_machine(name):
    text = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < MAX_SIZE
    assert str(Path.home()) not in text
    assert str(EXAMPLES.parent) not in text
    assert json.loads(text)["metadata"]["language_info"] == {"name": "python"}


# --- runs ---


def test_a_run_fails_where_an_assertion_does_and_where_the_network_is_asked_for(tmp_path):
    for text, message in [
        ("assert 1 > 2", "AssertionError"),
        ("import socket\nsocket.create_connection(('203.0.113.1', 80), timeout=1)", "should not need the network"),
    ]:
        script = tmp_path / "script.py"
        script.write_text(text)
        done = run(script, folder=tmp_path)
        assert done.returncode
        assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs(name):
    """Its assertions hold; warnings that point at it or at our package are errors."""
    for package in ("arviz", "matplotlib", NEEDS.get(name, "arviz")):
        pytest.importorskip(package, reason=f"{package} is in no dependency group that is installed")
    # ``-W`` takes module names literally, so each of our modules is named.
    paths = (path.relative_to(EXAMPLES.parent) for path in EXAMPLES.parent.glob("pymc_ngvi/**/*.py"))
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    done = run(EXAMPLES / f"{name}.py", *(f for m in ("__main__", *modules) for f in ("-W", f"error:::{m}")))
    assert done.returncode == 0, done.stderr
