"""Which kernels of OpenBLAS `make test-kernels` takes."""

import kernels
import pytest


def processor(own, runs):
    """Return what each kernel leads to on a processor that has some: its own for a name that is not known."""
    return lambda kernel=None: [own, own] if kernel is None else [kernel, kernel] if kernel in runs else [own, own]


@pytest.mark.parametrize(
    ("own", "runs", "expected"),
    [
        ("SkylakeX", ["SkylakeX", "Haswell", "Sandybridge"], "Haswell"),
        ("Haswell", ["SkylakeX", "Haswell", "Sandybridge"], "SkylakeX"),
        ("Haswell", ["Haswell", "Sandybridge"], "Sandybridge"),
        ("Zen", ["Zen", "Haswell", "Sandybridge"], "Sandybridge"),
        ("neoversen1", ["ARMV8"], "ARMV8"),
        ("neoversen1", [], None),
        ("Haswell", ["Haswell"], None),
    ],
)
def test_the_first_of_the_others_that_runs(own, runs, expected):
    assert kernels.other_kernel([own], taken=processor(own, runs)) == expected


def test_both_libraries_have_to_take_it():
    assert kernels.other_kernel(["Haswell", "Haswell"], taken=lambda kernel: [kernel, "Haswell"]) is None


@pytest.mark.parametrize(("own", "said"), [([], "is not OpenBLAS"), (["Zen"], "takes Zen whatever OPENBLAS_CORETYPE")])
def test_where_there_is_nothing_to_try_it_says_so_and_passes(own, said, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "taken", lambda kernel=None: own)
    monkeypatch.setattr(kernels, "other_kernel", lambda own: None)
    assert kernels.main(["tests/contracts/test_linalg.py"]) == 0
    assert said in capsys.readouterr().out
