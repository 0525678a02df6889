"""Look into wheel and source distribution, install each into a new environment outside the checkout, and try it.

``make wheel`` runs it: ``python tests/packaging/check.py dist``, on a wheel that was built of the checkout.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile

from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
#: Files that the build adds to the source distribution.
MADE = {"PKG-INFO"}


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


def tracked() -> set[str]:
    """Return the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name}


def content(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_wheel(wheel: Path, expected: set[str]) -> bytes:
    """Compare with the package in the checkout; its licence should be there, too. Return its metadata."""
    files = content(wheel)
    packed = {name for name in files if ".dist-info/" not in name}
    if packed != expected:
        raise SystemExit(f"{wheel.name} lacks {sorted(expected - packed)} and has {sorted(packed - expected)} besides.")
    if not any(name.endswith("/LICENSE") for name in files):
        raise SystemExit(f"{wheel.name} has no licence.")
    return next(text for name, text in files.items() if name.endswith(".dist-info/METADATA"))


def check_sdist(sdist: Path) -> bytes:
    """All that is tracked should be there, and nothing that was made from it. Return its metadata."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2]: name for name in archive.getnames()}
        info = archive.extractfile(names["PKG-INFO"])
        assert info is not None
        metadata = info.read()
    missing, extra = sorted(tracked() - set(names)), sorted(set(names) - tracked() - MADE)
    if missing or extra:
        raise SystemExit(f"{sdist.name} lacks {missing} and has {extra} besides.")
    return metadata


def check_description(metadata: bytes) -> None:
    """It should be the README, with an address in the place of each relative link."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = f"{project['urls']['Repository']}/(?:raw|blob)/{project['version']}/"
    shown = Metadata.from_email(metadata).description or ""  # raises where a field is not valid
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if re.sub(rf"\]\({base}", "](", shown) != readme or re.search(r"\]\((?!https:|#)", shown):
        raise SystemExit("The description is not README.md with addresses in the place of its relative links.")


def run(*command: str | Path, where: str) -> None:
    """Run a command in a folder."""
    subprocess.run([*map(str, command)], check=True, cwd=where)


def try_both(wheel: Path, sdist: Path) -> None:
    """Install the wheel, then the source distribution, and run `smoke.py` where the checkout can't be imported.

    What is built from the source distribution should be the wheel, to the byte.
    """
    with tempfile.TemporaryDirectory(prefix="pymc_ngvi_release_") as folder:
        builder = venv.EnvBuilder(with_pip=True)
        builder.create(folder)
        python = builder.ensure_directories(folder).env_exe
        pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(*pip, "install", wheel, where=folder)
        run(*pip, "check", where=folder)
        run(python, "-I", SMOKE, where=folder)
        run(*pip, "wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", "built", sdist, where=folder)
        built = only(Path(folder) / "built", "*.whl")
        if content(built) != content(wheel):
            raise SystemExit(f"{sdist.name} builds another wheel than {wheel.name}.")
        run(*pip, "uninstall", "--yes", "pymc-ngvi", where=folder)
        run(*pip, "install", "--no-deps", "--no-cache-dir", sdist, where=folder)
        run(*pip, "check", where=folder)
        run(python, "-I", SMOKE, where=folder)


def main() -> None:
    """Check what a folder has."""
    folder = Path(sys.argv[1]).resolve()
    expected = sources(ROOT / "pymc_ngvi")
    wheel, sdist = only(folder, "*.whl"), only(folder, "*.tar.gz")
    metadata = check_wheel(wheel, expected)
    if check_sdist(sdist) != metadata:
        raise SystemExit("Wheel and source distribution have different metadata.")
    check_description(metadata)
    try_both(wheel, sdist)


if __name__ == "__main__":
    main()
