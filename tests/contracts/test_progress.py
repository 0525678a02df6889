"""The display of calls: what it shows in terminals, notebooks and files, and that it can be switched off."""

import contextlib
import functools
import re
import time

import IPython.display
import pymc as pm
import pytest

from rich.console import Console

from pymc_ngvi import ConvergenceWarning, fit_ngvi
from pymc_ngvi.core import progress
from pymc_ngvi.core.progress import show_numbers, task
from pymc_ngvi.core.status import Status, format_gap
from pymc_ngvi.fitting.loop import History, LoopState

pytestmark = pytest.mark.usefixtures("_compiled_once")

HEADERS = ("Iteration", "ELBO (nats)", "Nats to gain", "Draws", "Step size", "Elapsed")


@functools.cache
def skewed_model():
    with pm.Model() as model:
        pm.Gamma("rate", 2.0, 3.0)
        pm.Normal("loc", shape=2)
    return model


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """Rich reads the width when a console is made; too narrow a one would cut the columns."""
    monkeypatch.setenv("COLUMNS", "160")


def test_off_prints_nothing(capfd):
    fit_ngvi(model=skewed_model(), random_seed=1, backend="quick", progressbar=False)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize("through", ["pm.fit", "fit_ngvi"])
def test_on_shows_where_the_fit_ended(capsys, through):
    model, options = skewed_model(), {"random_seed": 1, "backend": "quick"}
    approx = pm.fit(method="ngvi", model=model, **options) if through == "pm.fit" else fit_ngvi(model=model, **options)
    out = capsys.readouterr().out
    assert all(header in out for header in HEADERS if header != "Draws"), out
    assert "Draws" not in out, "exact expectations take none"
    last = [line for line in out.splitlines() if line.strip()][-1]
    assert re.search(r"\b\d:\d\d:\d\d\b", last), "elapsed time"
    shown = re.sub(r"\d:\d\d:\d\d", "", last).split()
    assert f"{approx.n_iterations}" in shown
    # ELBO on the last draws, with its sign: the history holds the loss.
    assert f"{-approx.hist[-1]:,.2f}" in shown
    assert f"{approx.gap_hist[-1]:.3f}" in shown


@pytest.mark.parametrize(
    ("gap", "shown"),
    [(0.0, "0.000"), (1.23456, "1.235"), (99.9, "99.900"), (123456.0, "1.2e+05"), (float("inf"), "inf")],
)
def test_large_gaps_are_short(gap, shown):
    assert format_gap(gap) == shown
    assert format_gap(gap, " nats") == f"{shown} nats"


@pytest.mark.parametrize("unit", ["", " nats"])
def test_a_gap_that_nothing_tells_of_is_unknown_and_has_no_unit(unit):
    assert format_gap(float("nan"), unit) == "unknown"


@pytest.mark.parametrize("columns", ["80", "100"])
def test_nothing_is_cut(capsys, monkeypatch, columns):
    """Large numbers and all headers fit the usual terminals, and numbers stand below the end of their headers."""
    monkeypatch.setenv("COLUMNS", columns)
    large = {"elbo": -12_345_678.9, "gap": 123456.0, "n_draws": 16_384, "step_size": 0.00012345}
    state = LoopState(type("Rule", (), large), Status.RUNNING, History(10_000))
    with task("Gaussian fit", has_numbers=True):
        show_numbers(state.numbers)
    headers, rule, numbers = capsys.readouterr().out.splitlines()
    assert all(header in headers for header in HEADERS)
    assert numbers.split()[:5] == ["10,000", "-12,345,678.90", "1.2e+05", "16,384", "0.00012"]
    assert set(rule.strip()) == {"─"}
    for header, number in zip(HEADERS, numbers.split(), strict=True):
        end = headers.index(header) + len(header)
        assert numbers[:end].rstrip().endswith(number), header


@pytest.fixture
def _at_once(monkeypatch):
    monkeypatch.setattr(progress, "_UNSEEN", 0.0)


@pytest.fixture
def _terminal(monkeypatch, _at_once):
    monkeypatch.setattr(progress, "Console", functools.partial(Console, force_terminal=True))


@pytest.mark.usefixtures("_terminal")
def test_a_terminal_shows_what_is_done_on_one_line(capsys):
    with task("Choosing the posterior"), task("Nested posterior", seconds=7.4):
        time.sleep(0.3)
    with task("Fits", 4) as fits, task("Compiling"):
        fits.completed = 1
        time.sleep(0.3)
    out = capsys.readouterr().out
    assert "Nested posterior, about 7 s  0:00:00" in out
    assert "Fits: 1 of 4  0:00:00, 0:00:00 left" in out


@pytest.mark.usefixtures("_terminal")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_terminal_has_its_cursor_back_when_a_fit_ends_early(capsys, error):
    """So has it the stream that the log goes to."""

    def callback(approx, losses, i):
        raise error

    with pytest.raises(ZeroDivisionError) if error is ZeroDivisionError else contextlib.nullcontext():
        fit_ngvi(model=skewed_model(), random_seed=1, backend="quick", callbacks=[callback])
    hidden, shown = (f"\x1b[?25{letter}" for letter in "lh")
    out = capsys.readouterr().out
    assert hidden in out
    assert out.rindex(shown) > out.rindex(hidden)
    with task("Another"):
        assert len(progress._DISPLAY.get().tasks) == 1


def test_refining_shows_a_line_of_its_own(capsys):
    with pytest.warns(ConvergenceWarning):
        approx = fit_ngvi(1, model=skewed_model(), random_seed=1, backend="quick", progressbar=False)
    approx.refine(1000, progressbar=True)
    out = capsys.readouterr().out
    assert all(header in out for header in HEADERS if header != "Draws")
    assert f" {approx.n_iterations} " in out


@pytest.mark.usefixtures("_at_once")
def test_a_notebook_has_one_output_that_changes(monkeypatch):
    """It needs no widgets, which saved notebooks do not show."""
    outputs = []

    class Output:
        def update(self, content, *, raw):
            outputs[-1] = content

    def display(content, *, raw, display_id):
        outputs.append(content)
        return Output()

    monkeypatch.setattr(progress, "Console", lambda **options: Console(**{"force_jupyter": True} | options))
    monkeypatch.setattr(IPython.display, "display", display)
    fit_ngvi(model=skewed_model(), random_seed=1, backend="quick")
    [output] = outputs
    assert all(header in output["text/plain"] for header in HEADERS if header != "Draws")
    assert output["text/html"].startswith("<pre")


@pytest.mark.parametrize(("seconds", "said"), [(3.0, []), (45.0, ["Exact posterior, about 45 s."])])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_log_of_a_script_has_what_takes_long(capsys, caplog, seconds, said, enabled):
    with caplog.at_level("INFO", "pymc.ngvi"), task("Fit", enabled=enabled), task("Exact posterior", seconds=seconds):
        assert caplog.messages == (said if enabled else [])
    assert capsys.readouterr().out == ""
