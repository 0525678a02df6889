"""Look into wheel and source distribution, install the wheel into a new environment outside the checkout, and try it.

``make wheel`` runs it: ``python tests/packaging/check.py dist``.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
#: Some of what the source distribution should have, and parts of paths that it should not.
IN_SDIST = ("pyproject.toml", "Makefile", "docs/conf.py", "docs/index.md", "examples/epilepsy.py", "tests/conftest.py")
NOT_IN_SDIST = ("docs/_build/", "docs/examples/", "examples/output/", "__pycache__", ".venv")


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} should have one {pattern}; it has {[path.name for path in found]}.")
    return found[0]


def sources(package: Path) -> set[str]:
    """Return the files of a package, relative to its parent."""
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package.parent).as_posix() for path in files}


def check_wheel(wheel: Path, expected: set[str]) -> None:
    """Compare with the package in the checkout; its licence should be there, too."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    if packed != expected:
        raise SystemExit(f"{wheel.name} lacks {sorted(expected - packed)} and has {sorted(packed - expected)} besides.")
    if not any(name.endswith("/LICENSE") for name in names):
        raise SystemExit(f"{wheel.name} has no licence.")


def check_sdist(sdist: Path, expected: set[str]) -> None:
    """Tests, pages and examples should be there, and nothing that was made from them."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = sorted((expected | set(IN_SDIST)) - names)
    extra = sorted(name for name in names if any(part in name for part in NOT_IN_SDIST))
    if missing or extra:
        raise SystemExit(f"{sdist.name} lacks {missing} and has {extra} besides.")


def try_wheel(wheel: Path) -> None:
    """Install the wheel and run `smoke.py` where nothing of the checkout can be imported."""
    with tempfile.TemporaryDirectory(prefix="pymc_ngvi_wheel_") as folder:
        builder = venv.EnvBuilder(with_pip=True)
        builder.create(folder)
        python = builder.ensure_directories(folder).env_exe
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
        subprocess.run(install, check=True, cwd=folder)
        subprocess.run([python, "-I", str(SMOKE)], check=True, cwd=folder)


def main() -> None:
    """Check what a folder has."""
    folder = Path(sys.argv[1]).resolve()
    expected = sources(ROOT / "pymc_ngvi")
    wheel, sdist = only(folder, "*.whl"), only(folder, "*.tar.gz")
    check_wheel(wheel, expected)
    check_sdist(sdist, expected)
    try_wheel(wheel)


if __name__ == "__main__":
    main()
