"""A measurement in a process of its own: it prints JSON objects as it goes, one a line, and whatever it had printed
when it ended, or was ended, counts.
"""

import json
import os
import signal
import subprocess
import sys
import time

from collections.abc import Sequence
from pathlib import Path

from compare import cache_environment


def run_process(command: Sequence[str], folder: Path, limit: float) -> dict[str, object]:
    """Run a command and return what it reported.

    Parameters
    ----------
    command : sequence of str
    folder : Path
        Holds everything that is compiled: empty for a cold run, that of the cold run for a warm one.
    limit : float
        Seconds, after which the process is killed.

    Returns
    -------
    dict
        The JSON objects that it printed, merged; ``process_seconds``; ``status`` says how it ended, if not by itself.
    """
    folder.mkdir(exist_ok=True)
    output, errors = folder / "output.txt", folder / "errors.txt"
    start = time.perf_counter()
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=cache_environment(folder), start_new_session=True
        )
        try:
            process.wait(limit)
            end = None if process.returncode == 0 else f"error: exit code {process.returncode}, {_last_line(errors)}"
        except subprocess.TimeoutExpired:
            end = f"more than {limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: dict[str, object] = {}
    for line in output.read_text().splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    if end is not None:
        ended = "note" if "seconds" in found else "status"  # what was measured stays measured
        found[ended] = end
    return {"process_seconds": time.perf_counter() - start, **found}


def script(file: str, *arguments: object) -> list[str]:
    """Return the command that runs a script with this Python."""
    return [sys.executable, file, *map(str, arguments)]


def report(**values: object) -> None:
    """Print values, as `run_process` reads them."""
    print(json.dumps(values), flush=True)


def peak_memory() -> float | None:
    """Return the largest resident memory of this process so far, in MiB; None where the system does not say."""
    file = Path("/proc/self/status")
    if not file.exists():
        return None
    lines = [line for line in file.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) / 1024


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _last_line(file: Path) -> str:
    return (file.read_text(errors="replace").strip().splitlines() or [""])[-1]
