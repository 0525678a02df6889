"""Run the notebooks: ``make notebooks``, or ``python examples/notebooks.py 01_epilepsy`` for some of them.

A notebook is a pair of files: ``NN_name.py``, a script with cells in the percent format of Jupytext, is what people
edit; ``NN_name.ipynb``, the same cells with their outputs, is what people read, and what this script writes.
"""

import argparse
import base64
import io
import re
import subprocess
import sys
import tempfile
import time

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
_HEADER = re.compile(r"\A# ---\n(#.*\n)*?# ---\n")
_MARK = re.compile(r"^# %%(?P<kind> \[markdown\])?$", re.MULTILINE)


def read_cells(path):
    """Return the cells of a script.

    Parameters
    ----------
    path : pathlib.Path

    Returns
    -------
    list of (str, str)
        "markdown" or "code", and the text.

    Raises
    ------
    ValueError
        Where a line of a Markdown cell is no comment, or code comes before the first cell.
    """
    text = _HEADER.sub("", path.read_text(encoding="utf-8"))
    before, *parts = _MARK.split(text)
    if before.strip():
        raise ValueError(f"{path.name} should begin with a cell, '# %%'; got {before.strip().splitlines()[0]!r}.")
    return [
        ("markdown", _uncommented(body, path.name)) if kind else ("code", body.strip("\n"))
        for kind, body in zip(parts[::2], parts[1::2], strict=True)
    ]


def _uncommented(body, name):
    lines = body.strip("\n").splitlines()
    code = [line for line in lines if not line.startswith("#")]
    if code:
        raise ValueError(f"A Markdown cell of {name} should hold comments alone; got {code[0]!r}.")
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def make_notebook(path):
    """Return the notebook of a script, without outputs."""
    import nbformat.v4 as v4

    cells = []
    for i, (kind, text) in enumerate(read_cells(path)):
        make = v4.new_markdown_cell if kind == "markdown" else v4.new_code_cell
        cells.append(make(text, id=f"cell-{i:02d}"))  # ids that do not change from one run to the next
    metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return v4.new_notebook(cells=cells, metadata=metadata)


def execute(path):
    """Run a script as a notebook, in a kernel of its own, and write the notebook beside it."""
    import nbclient
    import nbformat

    from jupyter_client.manager import AsyncKernelManager

    notebook = make_notebook(path)
    metadata = dict(notebook.metadata)
    place = {"metadata": {"path": HERE}}
    with tempfile.TemporaryDirectory() as folder:
        # Sockets are files: nothing else on the machine can listen, and no port has to be free.
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")
        client = nbclient.NotebookClient(notebook, km=kernel, timeout=900, record_timing=False, resources=place)
        client.extra_arguments = ["--InlineBackend.figure_formats={'retina'}"]  # figures for fine screens
        client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    notebook.metadata = nbformat.from_dict(metadata)  # the kernel adds the version of Python
    nbformat.write(notebook, path.with_suffix(".ipynb"))


def smaller(png):
    """Return a picture with 64 colours, which takes a third of the space; both as text, as notebooks hold them."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main():
    """Run what was asked for."""
    scripts = {path.stem: path for path in sorted(HERE.glob("[0-9][0-9]_*.py"))}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(scripts)}; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="run so many at a time; seconds that they print are longer")
    options = parser.parse_args()
    names = options.names or list(scripts)
    unknown = [name for name in names if name not in scripts]
    if unknown:
        parser.error(f"there is no notebook called {', '.join(unknown)}; there are {', '.join(scripts)}")
    if options.jobs > 1:
        with ThreadPoolExecutor(options.jobs) as pool:
            done = list(pool.map(lambda name: subprocess.run([sys.executable, __file__, name], check=False), names))
        sys.exit(any(one.returncode for one in done))
    for name in names:
        start = time.perf_counter()
        execute(scripts[name])
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
