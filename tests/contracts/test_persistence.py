"""An approximation in a file, and back: the same bits, what is refused, and what goes on as if it had not stopped."""

import builtins
import functools
import json
import os
import pickle
import warnings

from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import fields

import cloudpickle
import h5py
import numpy as np
import pymc as pm
import pytest
import xarray as xr

from numpy.testing import assert_allclose, assert_array_equal
from texts import DOCS, run

import pymc_ngvi

from pymc_ngvi import ConvergenceWarning, LogDensity, NGVIApproximation, load
from pymc_ngvi.families import BlockState, BlockStructure, DiagonalState
from pymc_ngvi.fitting.options import ALLOWED, AXES, Choice
from pymc_ngvi.results.persistence import sealed

pytestmark = pytest.mark.usefixtures("_compiled_once")

_RNG = np.random.default_rng(5)
X = _RNG.standard_normal((30, 2))
Y = _RNG.poisson(np.exp(0.4 * X[:, 0] + 0.5))
GROUP = np.repeat(np.arange(6), 5)


def regression(*, y=Y, x=X, sd=1.0, labels=("a", "b"), names=("level", "slope"), shape=None, scale=pm.HalfNormal):
    """Return a model of three coordinates of which much can be changed."""
    with pm.Model(coords={"k": list(labels)}) as model:
        data = pm.Data("x", x)
        variables = {
            "level": lambda: pm.Normal(names[0], 0.0, sd, shape=shape),
            "slope": lambda: pm.Normal(names[1], 0.0, 0.7, dims="k"),
        }
        made = {name: variables[name]() for name in ("level", "slope")}
        spread = scale("spread", 1.0)
        pm.Poisson("y", pm.math.exp(made["level"].sum() + spread * (data @ made["slope"])), observed=y)
    return model


def hierarchical():
    """Return a model with group effects."""
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0)
        sd = pm.HalfNormal("sd", 1.0)
        effect = pm.Normal("effect", 0.0, sd, shape=6)
        pm.Poisson("y", pm.math.exp(mu + effect[GROUP]), observed=Y)
    return model


def many_groups():
    """Return a model whose Hessian has a structure of its own."""
    counts = np.random.default_rng(2).poisson(2.0, size=(30, 2))
    with pm.Model() as model:
        mu = pm.Normal("mu", 0.0, 1.0)
        effect = pm.Normal("effect", mu, 0.5, shape=30)
        pm.Poisson("y", pm.math.exp(effect[:, None]), observed=counts)
    return model


def two_modes():
    with pm.Model() as model:
        x = pm.Normal("x", 0.0, 2.0)
        z = pm.Normal("z", 0.0, 1.0)
        pm.Normal("y", abs(x) ** 1.5 + 0.3 * z, 0.5, observed=3.0)
    return model


def heavy_tails():
    with pm.Model() as model:
        pm.StudentT("x", nu=4.0, mu=1.0, sigma=2.0, shape=2)
    return model


def four_directions():
    """Return a model whose rows have too many predictors for expectations without draws, but could have them."""
    with pm.Model() as model:
        b = pm.Normal("b", 0.0, 1.0, shape=4)
        pm.Poisson("y", pm.math.exp(b[0] + b[1] * X[:, 0]) + pm.math.exp(b[2] * X[:, 1] + b[3]), observed=Y)
        pm.Potential("sum", pm.math.sin(b[0]) * pm.math.sin(b[1]) * pm.math.sin(b[2]) * pm.math.sin(b[3]))
    return model


def left_support():
    """Return a model with rates that a Gaussian makes negative."""
    with pm.Model() as model:
        level, slope = pm.Normal("level", 3.0, 1.0), pm.Normal("slope", 0.0, 1.0)
        pm.Poisson("y", level + slope * X[:12, 0], observed=np.arange(12) % 4)
    return model


def minibatches():
    x, y = pm.Minibatch(X[:, 0], X[:, 1], batch_size=10)
    with pm.Model() as model:
        slope = pm.Normal("slope", 0.0, 1.0)
        pm.Normal("y", slope * x, 1.0, observed=y, total_size=len(X))
    return model


@functools.cache
def made(make):
    """Return a model for the tests that change nothing of it, and compile it once."""
    return make()


def fit(model, n, seed=1, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return pymc_ngvi.fit_ngvi(n, model=model, random_seed=seed, progressbar=False, **options)


def refined(approx, n, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return approx.refine(n, progressbar=False, **options)


def outcome(record):
    """Return what a record says, but for times, and as what compares."""
    return {f.name: getattr(record, f.name) for f in fields(record) if "seconds" not in f.name and f.name != "gaussian"}


def assert_same_q(left, right):
    assert type(left) is type(right)
    one, other = left.params(), right.params()
    assert one.keys() == other.keys()
    for name in one:
        assert_array_equal(one[name], other[name], err_msg=name)
        assert one[name].dtype == other[name].dtype


def assert_same(left, right):
    """Assert that two approximations have the same bits."""
    assert_same_q(left.q, right.q)
    assert_array_equal(left.hist, right.hist)
    assert_array_equal(left.gap_hist, right.gap_hist)
    one, other = outcome(left.record), outcome(right.record)
    assert repr(one) == repr(other)  # NaN is the same as NaN
    theta = left.draw_flat(4, random_seed=3)
    assert_array_equal(theta, right.draw_flat(4, random_seed=3))
    assert_array_equal(left.log_q(theta), right.log_q(theta))
    assert_array_equal(left.draw_flat(2), right.draw_flat(2))  # of the generators, which go on


@pytest.fixture(scope="module")
def fitted():
    """A fit that was cut short; not to be changed."""
    return fit(made(regression), 5)


@pytest.fixture
def file(fitted, tmp_path):
    path = tmp_path / "approx.nc"
    fitted.save(path)
    return path


# --- round trips ------------------------------------------------------------------------------------------------------

#: A model for each family, and options that make other states.
MODELS = {"sparse": many_groups, "mixture": two_modes, "student_t": heavy_tails}
FIRST = {}
for row in ALLOWED:
    FIRST.setdefault((row[0], row[3]), Choice(*row).given())
KINDS = {
    **{step: next(v for k, v in FIRST.items() if k[1] == step) for step in AXES["step"]},
    **{family: next(v for k, v in FIRST.items() if k[0] == family) for family in AXES["family"]},
    "t from gradients": {"family": "student_t", "estimator": "stein"},
    "gauss-newton": {"estimator": "gauss_newton", "step": "proximal"},
    "factor of the precision": {"update": "euclidean", "step": "adam", "estimator": "pathwise"},
    "antithetic": {"base_draws": "antithetic", "n_draws": 8, "stl": False},
    "named blocks": {"family": "block", "blocks": [["level", "spread"], ["slope"]]},
    "sparse adam": {"family": "sparse", "step": "adam"},
    "mixture of sparse": {"family": "mixture", "components": "sparse", "model": many_groups, "n_components": 2},
    "four directions": {"model": four_directions},
    "rvb1": {"reparam": "rvb1", "model": hierarchical},
    "rvb2": {"reparam": "rvb2", "model": hierarchical},
    "noncentred": {"reparam": "noncentred", "model": hierarchical, "family": "block"},
    "minibatches": {"model": minibatches, "step": "decay"},
}


# Without two: "full" is "adaptive" again, and "rvb1" has its round trip with new names.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("full", "rvb1")])
def test_goes_on_as_if_it_had_not_stopped(kind, tmp_path):
    options = dict(KINDS[kind])
    model = made(options.pop("model", None) or MODELS.get(options.get("family"), regression))
    approx = fit(model, 4, **options)
    path = tmp_path / "approx.nc"
    approx.save(path)
    again = load(path, model)
    assert_same(approx, again)
    assert again.density.backend == approx.density.backend
    assert_same(refined(approx, 9), refined(again, 9))
    assert again.record.n_iterations > 4


def test_a_fit_that_went_on_with_draws():
    model = made(left_support)
    approx = fit(model, 20)
    assert approx.record.estimator == "price"
    again = load(approx.to_datatree(), model)
    assert_same(refined(approx, 3), refined(again, 3))


@pytest.mark.parametrize(
    ("make", "family", "stages"),
    [(two_modes, "mixture", {"gaussian", "solve", "grow", "average"}), (heavy_tails, "student_t", set())],
)
def test_goes_on_from_every_stage(make, family, stages):
    """Kept in a callback, as a checkpoint: the fit that goes on ends where the one that was not stopped does."""
    trees, seen = {}, set()

    def keep(approx, losses, i):
        state = approx._session._state.rule
        stage = getattr(state, "stage", type(state).__name__)
        if stage not in seen:
            seen.add(stage)
            trees[i] = approx.to_datatree()

    options = {"family": family, "n_components": 2} if family == "mixture" else {"family": family}
    whole = fit(made(make), 500, callbacks=[keep], **options)
    assert seen >= stages
    assert len(trees) > 1
    for tree in trees.values():
        part = refined(load(tree, made(make)), 500)
        assert_same_q(whole.q, part.q)
        assert repr(outcome(whole.record)) == repr(outcome(part.record))


def test_without_the_fit(fitted, tmp_path):
    fitted.save(tmp_path / "small.nc", resumable=False)
    again = load(tmp_path / "small.nc", made(regression))
    assert_same_q(fitted.q, again.q)
    with pytest.raises(RuntimeError, match="no fit to continue"):
        again.refine(1)


def test_the_verdict_is_kept(tmp_path):
    """Also one that a longer look has found; q that has moved since then is not judged."""
    model = made(regression)
    approx = fit(model, 200)
    unjudged = load(approx.to_datatree(), model)
    assert not unjudged.record.verdict.is_tested
    assert unjudged.checks == approx.checks  # from the seed of the fit
    said = str(approx.diagnose(thorough=True, random_seed=1).checks)
    approx.save(tmp_path / "approx.nc")
    again = load(tmp_path / "approx.nc", model)
    before = again.density.n_gradients
    assert again.sample(5).posterior.attrs["verdict"] == approx.diagnose().verdict
    assert again.checks == approx.checks
    assert again.density.n_gradients == before
    assert str(again.diagnose().checks) == said
    assert again.summary(draws=50).lines == approx.summary(draws=50).lines
    refined(again, 50, tol=1e-4)
    assert not again.record.verdict.is_tested


def test_made_by_hand(tmp_path):
    model = regression()
    approx = NGVIApproximation(LogDensity(model), DiagonalState(np.array([0.1, 0.2, 0.3, -0.4]), np.ones(4)))
    approx.save(tmp_path / "approx.h5")
    again = load(tmp_path / "approx.h5", model)
    assert again.record is None
    assert_same_q(approx.q, again.q)


def test_a_state_that_no_file_can_hold():
    class OwnState(DiagonalState):
        """Of a family of one's own."""

    with pytest.raises(TypeError, match="OwnState"):
        NGVIApproximation(LogDensity(regression()), OwnState(np.zeros(4), np.ones(4))).to_datatree()


def test_the_model_of_the_context(file):
    with regression():
        assert load(file).record.n_iterations == 5


def test_unknown_options(file, fitted):
    with pytest.raises(TypeError, match="unexpected keyword argument 'progressbar'"):
        load(file, made(regression), progressbar=False)
    with pytest.raises(TypeError, match="log_p are of posterior draws"):
        fitted.to_datatree(log_p=False)


# --- draws, and other readers -----------------------------------------------------------------------------------------


def test_draws_are_those_of_sample(fitted, tmp_path):
    fitted.save(tmp_path / "approx.nc", draws=20, random_seed=4)
    expected = fitted.sample(20, random_seed=4)
    with xr.open_datatree(tmp_path / "approx.nc", engine="h5netcdf") as tree:
        xr.testing.assert_equal(tree["posterior"].to_dataset().load(), expected["posterior"].to_dataset())
        assert_array_equal(tree["observed_data/y"], Y)
        assert_array_equal(tree["unconstrained/slope"].sel(moment="mean", k="b"), fitted.mean_flat[2])
        assert_array_equal(tree["unconstrained/slope"].sel(moment="sd", k="a"), fitted.sd_flat[1])
        assert tree["approximation"].attrs["status"] == "iteration limit"
        assert_array_equal(tree["approximation/q.content.factor"], fitted.q.factor)
    assert_same_q(load(tmp_path / "approx.nc", made(regression)).q, fitted.q)


def test_no_dense_matrix_of_a_sparse_precision(tmp_path):
    """In 100,000 dimensions a dense matrix would take 80 GB."""
    n = 100_000
    with pm.Model() as model:
        pm.Normal("x", 0.0, 1.0, shape=n)
    q = BlockState(np.zeros(n), np.ones(n), BlockStructure(np.arange(n)))
    NGVIApproximation(LogDensity(model), q).save(tmp_path / "large.nc", draws=0)
    assert os.path.getsize(tmp_path / "large.nc") < 100 * n
    assert_same_q(load(tmp_path / "large.nc", model).q, q)


def test_base_draws_are_left_out():
    """They follow from the seed, and take more than the rest."""
    arrays = fit(made(regression), 2, n_draws=64).to_datatree()["fit"]
    assert "snapshot.state.rule.evaluation.grad" in arrays
    assert not any("base" in name or "theta" in name for name in arrays)


# --- models -----------------------------------------------------------------------------------------------------------

OTHERS = {
    "'level' is not in the model; 'height' is not in the file": {"names": ("height", "slope")},
    "'slope' has other labels along 'k': a, b in the file, a, c in the model": {"labels": ("a", "c")},
    r"'slope' has shape \(2,\) in the file, \(3,\) in the model": {"labels": "abc", "x": np.ones((30, 3))},
    r"'level' has shape \(\) in the file, \(1,\) in the model": {"shape": 1},
    "'spread' has unconstrained value 'spread_log__' in the file, 'spread_interval__' in the model; 'spread' has "
    "transform 'LogTransform' in the file, 'Interval' in the model": {
        "scale": lambda name, upper: pm.Uniform(name, 0.0, upper)
    },
    "'spread' has unconstrained value 'spread_log__' in the file, 'spread' in the model; 'spread' has transform "
    "'LogTransform' in the file, none in the model": {"scale": lambda name, sd: pm.Normal(name, 0.0, sd)},
}


@pytest.mark.parametrize("message", OTHERS)
def test_another_model_is_refused_with_what_differs(file, message):
    with pytest.raises(ValueError, match=f"does not fit the model: {message}"):
        load(file, regression(**OTHERS[message]))


def test_another_order_is_refused(file):
    with pm.Model(coords={"k": ["a", "b"]}) as model:
        pm.Data("x", X)
        pm.Normal("slope", 0.0, 0.7, dims="k")
        pm.Normal("level", 0.0, 1.0)
        pm.HalfNormal("spread", 1.0)
    with pytest.raises(ValueError, match="the order is level, slope, spread in the file, slope, level, spread in the"):
        load(file, model)


@pytest.mark.parametrize(("change", "name"), [({"y": Y + 1}, "'y'"), ({"x": X + 1.0}, "'x'")])
def test_other_data(file, change, name):
    with pytest.warns(UserWarning, match=f"fitted to other data: {name} differ"):
        approx = load(file, regression(**change))
    with pytest.warns(UserWarning, match=f"The data {name} were changed after the fit"):
        assert "log_p" not in approx.sample(5, random_seed=1)["sample_stats"]
    for call in (lambda: approx.refine(5), lambda: approx.khat(100)):
        with pytest.raises(ValueError, match=f"The data {name} were changed"):
            call()
    # Saved again, it stays that of the first data.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(approx.to_datatree(), regression())


def test_without_a_model_it_is_said_that_it_is_needed(file):
    with pytest.raises(TypeError, match=r"build it again, and call load\(file, model\)"):
        load(file)


def test_data_can_be_set_back(file):
    model = regression(x=X + 1.0)
    with pytest.warns(UserWarning, match="other data"):
        approx = load(file, model)
    with model:
        pm.set_data({"x": X.copy()})
    assert refined(approx, 3).record.n_iterations == 8
    with model:
        pm.set_data({"x": X + 2.0})
    with pytest.raises(ValueError, match="'x' were changed"):
        approx.refine(5)


def test_types_of_numbers_make_no_other_data(file):
    load(file, regression(y=Y.astype(np.int8), x=X.astype(np.float64)))  # no warning


def test_other_priors_are_refused_where_the_fit_goes_on(file):
    approx = load(file, regression(sd=1.5))
    with pytest.raises(ValueError, match="can't go on: at the mean of q, log p of this model is"):
        approx.refine(5)


def test_changed_data_are_not_saved():
    model = regression()
    approx = fit(model, 2)
    with model:
        pm.set_data({"x": X + 1.0})
    with pytest.raises(ValueError, match="with data that it was not fitted to"):
        approx.to_datatree()


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_existing_file_is_replaced_only_when_the_new_one_is_complete(fitted, file, monkeypatch):
    before = file.read_bytes()

    def fails(number):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="no space left"):
            fitted.save(file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]
    file.chmod(0o600)
    fitted.save(file, draws=0, resumable=False)
    assert file.stat().st_size < len(before)
    assert file.stat().st_mode & 0o777 == 0o600  # as that of the file before
    assert os.listdir(file.parent) == [file.name]


def test_paths_that_are_refused(fitted, tmp_path):
    with pytest.raises(ValueError, match=r"The suffix says in which format to save: \.nc, .*got .*approx\.pkl"):
        fitted.save(tmp_path / "approx.pkl")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        fitted.save(tmp_path / "no" / "approx.nc")
    (tmp_path / "folder.nc").mkdir()
    with pytest.raises(FileExistsError, match="is there already, and is no file"):
        fitted.save(tmp_path / "folder.nc")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        load(tmp_path / "none.nc", made(regression))


def test_a_name_may_be_as_long_as_the_system_has_them(fitted, tmp_path):
    fitted.save(tmp_path / f"{'a' * 252}.nc")
    assert os.listdir(tmp_path) == [f"{'a' * 252}.nc"]


def test_a_link_is_followed(fitted, tmp_path):
    (tmp_path / "link.nc").symlink_to(tmp_path / "file.nc")
    fitted.save(tmp_path / "link.nc")
    assert (tmp_path / "link.nc").is_symlink()
    assert load(tmp_path / "file.nc", made(regression)).record.n_iterations == 5


# --- files that are none ----------------------------------------------------------------------------------------------


def test_truncated_and_foreign_files(file, fitted):
    content = file.read_bytes()
    for n in (0, 4, 100, len(content) // 3, len(content) - 100):
        file.write_bytes(content[:n])
        with pytest.raises(ValueError, match=r"is damaged, or was not written to its end|is no netCDF-4 file"):
            load(file, made(regression))
    file.write_bytes(b"GIF89a" + content)
    with pytest.raises(ValueError, match="is no netCDF-4 file"):
        load(file, made(regression))
    fitted.sample(3).to_netcdf(file, engine="h5netcdf")
    with pytest.raises(ValueError, match="holds no approximation"):
        load(file, made(regression))


def test_a_single_bit_that_flipped(file):
    with h5py.File(file, "r+") as opened:
        mean = opened["approximation/q.content.location"]
        values = mean[:]
        values.view(np.uint8)[0] ^= 1
        mean[:] = values
    with pytest.raises(ValueError, match="is damaged: its numbers are not those that were written"):
        load(file, made(regression))


def outside(file, kind):
    """Put something into a file that is read from another one."""
    other = file.with_name("other.bin")
    other.write_bytes(np.arange(8.0).tobytes())
    with h5py.File(file, "r+") as opened:
        group = opened["approximation"]
        if kind == "external link":
            group["hist2"] = h5py.ExternalLink(str(other), "/x")
        elif kind == "soft link":
            group["hist2"] = h5py.SoftLink("/fit")
        elif kind == "external dataset":
            group.create_dataset("hist2", shape=(8,), dtype="f8", external=[(str(other), 0, 64)])
        else:
            layout = h5py.VirtualLayout(shape=(8,), dtype="f8")
            layout[:] = h5py.VirtualSource(str(other), "x", shape=(8,))
            group.create_virtual_dataset("hist2", layout)


@pytest.mark.parametrize("kind", ["external link", "soft link", "external dataset", "virtual dataset"])
def test_other_files_are_not_read(file, kind):
    outside(file, kind)
    with pytest.raises(ValueError, match=r"is damaged.*hist2' is a link to what is elsewhere"):
        load(file, made(regression))


@pytest.mark.parametrize("version", [0, 2, 3])
def test_another_format(fitted, version):
    tree = fitted.to_datatree()
    assert tree.attrs["format_version"] == 1
    tree.attrs |= {"format_version": version, "pymc_ngvi_version": "9.1"}
    message = rf"was written by pymc_ngvi 9\.1 in format {version}, and this version reads format 1 only: load it with"
    with pytest.raises(ValueError, match=message):
        load(tree, made(regression))


def edited(tree, group, edit):
    """Return a tree with the JSON of a group edited."""
    dataset = tree[group].to_dataset()
    content = json.loads(dataset["json"].values.tobytes())
    edit(content)
    new = xr.DataArray(np.frombuffer(json.dumps(content).encode(), dtype=np.uint8), dims="n")
    tree[group] = xr.DataTree(sealed(dataset.drop_vars("json").assign(json=new)))
    return tree


EVIL = {
    "newer version of pymc_ngvi: it holds a '.*', which": [
        {"class": "os.system", "of": {"command": "touch owned"}},
        {"class": "builtins.eval", "of": {}},
        {"class": "subprocess.Popen", "of": {"args": "x"}},
        {"class": "approximation.NGVIApproximation", "of": {}},
        {"class": "values.PathMoments", "of": {}},
        {"enum": "os.environ", "of": "HOME"},
    ],
    "damaged: .*name of a class": [{"class": ["fit.record"], "of": {}}],
    "which does not exist": [{"enum": "fit.status", "of": "mro"}],
    "of fields": [{"class": "fit.status", "of": {"value": 1}}],
    "an array of type": [{"dtype": "O", "array": "q.content.location"}, {"dtype": ["f8"], "values": [], "shape": [0]}],
    "no array": [{"dtype": "float64", "array": "nowhere"}],
    "unknown kind": [{"pickle": "gASVCQAAAAAAAACMBWhlbGxvlC4="}],
    "unexpected keyword": [{"class": "fit.elbo", "of": {"value": 1.0, "se": 1.0, "__class__": "x"}}],
    "something else": [{"class": "fit.choice", "of": dict.fromkeys(("family", "update", "estimator", "step"), "x")}],
}


@pytest.mark.parametrize(("message", "form"), [(m, form) for m, forms in EVIL.items() for form in forms])
def test_what_a_file_may_not_hold(fitted, message, form, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("code of a file was run")

    monkeypatch.setattr(os, "system", refuse)
    monkeypatch.setattr(builtins, "eval", refuse)
    tree = edited(fitted.to_datatree(), "approximation", lambda content: content.update(record=form))
    with pytest.raises(ValueError, match=rf"The tree .*{message}"):
        load(tree, made(regression))


BROKEN = {
    "no q": ("approximation", lambda c: c.pop("q")),
    "no class of q": ("approximation", lambda c: c.update(q={"dict": []})),
    "generator": ("approximation", lambda c: c.update(generator={"dict": [["bit_generator", "default_rng"]]})),
    "variables": ("approximation", lambda c: c.update(variables=[1])),
    "data": ("approximation", lambda c: c.update(data=[])),
    "snapshot": ("fit", lambda c: c.update(snapshot=None)),
    "tol": ("fit", lambda c: c["snapshot"]["of"]["options"]["of"].update(tol=-1.0)),
    "family": ("fit", lambda c: c["snapshot"]["of"]["options"]["of"].update(family="none")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_content_of_another_form(fitted, what):
    group, edit = BROKEN[what]
    with pytest.raises(ValueError, match="The tree is damaged: "):
        load(edited(fitted.to_datatree(), group, edit), made(regression))


def test_an_unknown_class_of_q_is_of_a_newer_version(fitted):
    tree = edited(
        fitted.to_datatree(), "approximation", lambda c: c.update(q={"dict": [["class", "gaussian.toeplitz"]]})
    )
    with pytest.raises(ValueError, match=r"newer version of pymc_ngvi: it holds a 'gaussian\.toeplitz'.*Install"):
        load(tree, made(regression))


def test_arrays_that_do_not_go_together(fitted):
    tree = fitted.to_datatree()
    tree["approximation"]["q.content.location"] = ("n_7", np.zeros(7))
    with pytest.raises(ValueError, match="The tree is damaged: "):
        load(tree, made(regression))


def test_nothing_is_unpickled(file, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    model = regression()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    approx = load(file, model)
    monkeypatch.undo()
    assert refined(approx, 2).record.n_iterations == 7


# --- cloudpickle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "library"),
    [
        ("adaptive", pickle),
        ("adaptive", cloudpickle),
        ("sparse", pickle),
        ("mixture", cloudpickle),
        ("rvb2", pickle),
    ],
)
def test_a_pickled_fit_goes_on_as_if_it_had_not_stopped(library, kind):
    options = dict(KINDS[kind])
    make = options.pop("model", None) or MODELS.get(options.get("family"), regression)
    approx = fit(made(make), 3, **options)
    copy = pickle.loads(library.dumps(approx))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        copy.refine(2, progressbar=False)
        approx.refine(2, progressbar=False)
    assert copy.n_iterations == approx.n_iterations
    # Functions are compiled again, and may round in another way.
    assert_allclose(copy.hist, approx.hist, rtol=1e-9)
    assert_allclose(copy.mean_flat, approx.mean_flat, rtol=1e-6, atol=1e-8)


def test_copies():
    """A shallow one is of the same model and leaves the fit alone, a deep one is of a model of its own."""
    approx = fit(regression(), 1)
    shallow, deep = shallow_copy(approx), deepcopy(approx)
    assert shallow.model is approx.model is not deep.model
    for copied in (shallow, deep):
        assert_array_equal(copied.draw_flat(3, random_seed=1), approx.draw_flat(3, random_seed=1))
    with pytest.raises(RuntimeError, match="no fit to continue"):
        shallow.refine()
    assert_same_q(deep.q, approx.q)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_examples_of_the_page_run():
    run((DOCS / "saving.md").read_text(encoding="utf-8"))
