"""Describe the machine and the versions that a result was measured with."""

import datetime
import os
import platform

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "scipy", "pymc", "pytensor", "numba", "jax", "pymc-extras", "nutpie", "pymc-ngvi")


def describe_machine() -> str:
    """Return the CPU model, the number of usable cores and the memory, in one line."""
    return f"{_cpu_model()}, {len(_usable_cores())} cores, {_memory()}"


def describe_versions() -> str:
    """Return the versions of Python and of each installed package that matters, in one line."""
    versions = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} (not installed)")
    return ", ".join(versions)


def describe_environment() -> str:
    """Return machine and versions as one line, the form that is stored with every result."""
    return f"{describe_machine()}; {describe_versions()}"


def today_and_here() -> dict[str, str]:
    """Return the date and the environment, as columns of a result."""
    return {"date": datetime.date.today().isoformat(), "environment": describe_environment()}


def _cpu_model() -> str:
    return _proc_field("/proc/cpuinfo", "model name") or platform.processor() or "unknown CPU"


def _usable_cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _memory() -> str:
    total = _proc_field("/proc/meminfo", "MemTotal")
    return f"{int(total.split()[0]) / 2**20:.1f} GiB" if total else "unknown memory"


def _proc_field(path: str, field: str) -> str | None:
    """Read the first ``field : value`` line of a file below /proc; None where there is none."""
    file = Path(path)
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None
