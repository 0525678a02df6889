"""The suite passes the benchmarks by; ``pytest tests/benchmarks`` runs their own tests."""

import sys

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing unless this folder was named, and never a script: what it compares with may not be installed."""
    named = (Path(arg.split("::")[0]).resolve() for arg in config.args)
    if not any(HERE in (path, *path.parents) for path in named):
        return True
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))  # the scripts import each other by bare names
    return True if collection_path.is_file() and not collection_path.name.startswith("test_") else None
