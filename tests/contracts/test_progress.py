"""The progress line: what it shows, and that it can be switched off."""

import functools
import re
import sys

import pymc as pm
import pytest

from pymc_ngvi.fitting.progress import FitProgress, announced

from pymc_ngvi import NGVI, ConvergenceWarning, fit_ngvi
from pymc_ngvi.core.status import format_gap
from pymc_ngvi.fitting import progress

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


@pytest.fixture
def fields(monkeypatch):
    """Record what the line was told, in order."""
    told = []
    update = FitProgress.update

    def recorded(self, state, *, last=False):
        update(self, state, last=last)
        told.append(dict(self._progress.tasks[0].fields) | {"completed": self._progress.tasks[0].completed})

    monkeypatch.setattr(FitProgress, "update", recorded)
    return told


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


def _state(n_iterations, **shown):
    rule = type("Rule", (), {"elbo": -1.0, "gap": 0.1, "n_draws": 8, "step_size": 1.0, **shown})
    return type("State", (), {"n_iterations": n_iterations, "rule": rule})


@pytest.mark.parametrize("columns", ["80", "100"])
def test_nothing_is_cut(capsys, monkeypatch, columns):
    """Large numbers and all headers fit the usual terminals, and numbers stand below the end of their headers."""
    monkeypatch.setenv("COLUMNS", columns)
    with FitProgress() as line:
        large = {"elbo": -12_345_678.9, "gap": 123456.0, "n_draws": 16_384, "step_size": 0.00012345}
        line.update(_state(10_000, **large), last=True)
    headers, rule, numbers = [row for row in capsys.readouterr().out.splitlines() if row.strip()][-3:]
    assert all(header in headers for header in HEADERS)
    assert numbers.split()[:5] == ["10,000", "-12,345,678.90", "1.2e+05", "16,384", "0.00012"]
    assert set(rule.strip()) == {"─"}
    for header, number in zip(HEADERS, numbers.split(), strict=True):
        end = headers.index(header) + len(header)
        assert numbers[:end].rstrip().endswith(number), header


@pytest.mark.parametrize("end", ["error", "interrupt"])
def test_line_is_closed_when_the_fit_ends_early(end):
    """A line left running would keep its thread and swallow the terminal's cursor."""
    closed = []

    def callback(approx, losses, i):
        raise ZeroDivisionError if end == "error" else KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        leave = FitProgress.__exit__
        patch.setattr(FitProgress, "__exit__", lambda self, *a: (leave(self, *a), closed.append(self))[0])
        inference = NGVI(skewed_model(), random_seed=1)
        if end == "error":
            with pytest.raises(ZeroDivisionError):
                inference.fit(callbacks=[callback], backend="quick")
        else:
            assert inference.fit(callbacks=[callback], backend="quick").status.label == "interrupted"
    [line] = closed
    assert not line._progress.live.is_started


def test_refining_shows_a_line_of_its_own(capsys):
    with pytest.warns(ConvergenceWarning):
        approx = fit_ngvi(1, model=skewed_model(), random_seed=1, backend="quick", progressbar=False)
    approx.refine(1000, progressbar=True)
    out = capsys.readouterr().out
    assert all(header in out for header in HEADERS if header != "Draws")
    assert f" {approx.n_iterations} " in out


@pytest.fixture
def _bare_notebook(monkeypatch):
    """A notebook without ipywidgets, where Rich would warn at each line that changes."""
    console = progress.Console
    monkeypatch.setattr(progress, "Console", lambda **options: console(**{"force_jupyter": True} | options))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)


@pytest.mark.usefixtures("_bare_notebook")
def test_a_fit_in_a_notebook_without_widgets_is_shown_as_text(capsys):
    approx = fit_ngvi(model=skewed_model(), random_seed=1, backend="quick")
    out = capsys.readouterr().out
    assert all(header in out for header in HEADERS if header != "Draws")
    assert f" {approx.n_iterations} " in out


@pytest.mark.usefixtures("_bare_notebook")
def test_long_work_in_a_notebook_without_widgets_is_left_to_the_log(capsys, caplog):
    with caplog.at_level("INFO", "pymc.ngvi"), announced("Judging q", 20.0):
        pass
    assert capsys.readouterr().out == ""
    assert [record.message for record in caplog.records] == ["Judging q: about 20 s."]
