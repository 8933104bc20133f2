"""What every public function is about, a problem or a run, and weights, which have many forms.

Another kind is refused in one line that helps.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given as examples
from hypothesis import strategies as st
from torch import Tensor, nn

import landscape
from landscape import Checkpoint, InputError, LandscapeError, Problem
from landscape.checkpoint.weights import network_of
from landscape.core.analysis import memory_of
from landscape.training.recipes.recipe import read
from landscape.training.run.loop import Trainer

WORDS = {"problem": "a Problem", "run": "a Checkpoint", "checkpoint": "a Checkpoint"}
#: Arguments that functions cannot do without, for a model of 8 parameters.
GIVEN: dict[str, Any] = {
    "a": torch.zeros(8),
    "b": torch.ones(8),
    "direction": torch.ones(8),
    "before": torch.zeros(8),
    "after": torch.ones(8),
    "batch": 4,
    "local_batch": 4,
    "lr": 0.1,
    "plane": landscape.Plane(torch.zeros(8), torch.eye(2, 8), "random", "none", 0),
    "problem": None,
    "rho": 0.1,
    "weights": torch.randn(3, 8),
}


def parameters(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(getattr(landscape, name)).parameters.values())


def first(name: str) -> str:
    return parameters(name)[0].name


def needed(name: str) -> dict[str, Any]:
    """The arguments after the first that a public function cannot do without."""
    _, *others = parameters(name)
    return {p.name: GIVEN[p.name] for p in others if p.default is p.empty and p.kind is not p.VAR_KEYWORD}


#: Every public function about a problem or a run -> the arguments that it needs.
NEEDED = {
    name: needed(name)
    for name in landscape.__all__
    if (name == "HessianOperator" or inspect.isfunction(getattr(landscape, name))) and first(name) in WORDS
}


assert len(NEEDED) > 20


def linear() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.CrossEntropyLoss(), (torch.randn(20, 3), torch.randint(2, (20,)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("run") / "last.h5"
    Trainer(read("digits-ssgd", ["steps=2", "decompose.every=0", "batch=20"])).run().save(file)
    return file


@pytest.fixture(scope="module")
def given(path: Path) -> dict[str, Any]:
    """A first argument of each kind."""
    model, loss, data = linear()
    return {
        "Problem": Problem(model, loss, data), "Checkpoint": landscape.load(path), "Path": path, "Linear": model,
        "list": [Problem(model, loss, data)],
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["Problem", "Checkpoint", "Path", "Linear", "list"])
@pytest.mark.parametrize("name", NEEDED)
def test_another_kind_is_refused_with_what_would_do(name: str, kind: str, given: dict[str, Any]) -> None:
    wanted = WORDS[first(name)]
    if wanted == f"a {kind}" or (kind == "Checkpoint" and wanted == "a Problem"):
        return
    shown = type(given[kind]).__name__  # PosixPath
    with pytest.raises(InputError, match=f"^{first(name)}: a {shown} is not allowed, .*{wanted}") as refusal:
        getattr(landscape, name)(given[kind], **NEEDED[name])
    assert "\n" not in str(refusal.value)
    if kind == "Path" or (wanted == "a Problem" and kind == "Linear"):
        names = dict(zip(("model", "loss", "data"), linear(), strict=True))
        names |= {"run": given["Checkpoint"], "landscape": landscape}
        found = eval(refusal.value.remedy, names)
        assert isinstance(found, Problem if wanted == "a Problem" else Checkpoint)
    else:
        assert not refusal.value.remedy


OF_RUNS = [
    "contour", "line", "hessian_grid", "random_plane", "between", "eigen_plane", "noise", "noise_scale",
    "noise_alignment", "batch_sharpness", "sharpness", "disagreement", "smoothing", "average",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_run_stands_for_its_problem(name: str, path: Path) -> None:
    run, function = Checkpoint.load(path), getattr(landscape, name)
    problem = run.problem()
    every: dict[str, Any] = {
        "plane": landscape.random_plane(problem),
        "direction": run.mean,
        "weights": torch.stack((run.mean, 1.1 * run.mean)),
        "grid": (2, 1), "batch": 20, "local_batch": 10, "lr": 0.1, "rho": 0.05, "k": 2, "draws": 2, "min_draws": 2,
        "max_draws": 2,
    }  # fmt: skip
    if name == "line":  # which takes one of the two
        del every["weights"]
    every = {key: value for key, value in every.items() if key in inspect.signature(function).parameters}
    of_run, of_problem = function(run, **every), function(problem, **every)
    known = run.about()  # as the commands have it
    assert sorted(known) == ["label", "source", "source_sha256", "split"]
    for field in dataclasses.fields(of_run):
        if field.name in known:
            assert getattr(of_run, field.name) == known[field.name]  # type: ignore[literal-required]
            continue  # which the problem alone does not know
        np.testing.assert_array_equal(getattr(of_run, field.name), getattr(of_problem, field.name))
    if name != "between":
        assert memory_of(function, run, **every)[0] == memory_of(function, problem, **every)[0]


def test_a_run_has_a_problem_of_fewer_samples_of_each_class(path: Path) -> None:
    run = Checkpoint.load(path)
    whole, few = run.problem(), run.using(samples=50).problem()
    assert few.data.fingerprint() == run.problem(samples=50).data.fingerprint()
    labels = [problem.data.resident[1].bincount(minlength=10) / problem.samples for problem in (whole, few)]
    assert (labels[0] - labels[1]).abs().max() < 1 / 50  # of each class the same share, to a sample
    assert landscape.spectrum(run.using(samples=50), k=1).samples == 50
    with pytest.raises(
        landscape.InputError, match=f"samples: 99999 .* at most {whole.samples:,}, those of the split"
    ):
        run.problem(samples=99_999)


def test_a_run_brings_its_learners_and_its_settings(tmp_path: Path) -> None:
    settings = ["steps=3", "decompose.every=0", "learners=3", "batch=30", "algorithm.name=dpsgd"]
    Trainer(read("digits-ssgd", settings)).run().save(tmp_path / "last.h5")
    run = Checkpoint.load(tmp_path / "last.h5")
    found = landscape.noise(run, draws=2)
    own = landscape.noise(run.problem(), run.weights, run.lr, run.local_batch, draws=2)
    assert (found.label, found.split, found.lr, found.local_batch) == (run.label, "train", run.lr, 10)
    np.testing.assert_array_equal(found.direct, own.direct)
    assert landscape.smoothing(run, draws=2, k=1).lr == run.lr
    assert landscape.disagreement(run, k=1, label="mine").label == "mine"
    for name in ("noise", "smoothing", "disagreement", "average"):
        own_step = {"lr": 0.1, "local_batch": 10} if name == "noise" else {}
        with pytest.raises(InputError, match="weights: missing; a problem has no learners, give theirs"):
            getattr(landscape, name)(run.problem(), **own_step)
    with pytest.raises(InputError, match="lr, local_batch: missing"):
        landscape.noise(run.problem(), run.weights)


def test_compare_takes_several(path: Path) -> None:
    model, loss, data = linear()
    for one in (Problem(model, loss, data), str(path), model):
        with pytest.raises(InputError, match="1 given, at least 2"):
            landscape.compare(one)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a Linear is not allowed, it must be a Checkpoint .* or a Problem"):
        landscape.compare([model] * 2)  # type: ignore[list-item]
    found = landscape.compare([str(path), path, landscape.load(path)], quantities=["trace"])  # type: ignore[list-item]
    assert found.value[0, 0] == found.value[0, 1] == found.value[0, 2]


def network(seed: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), activation(), nn.Linear(8, 3))


def problem_of(model: nn.Module) -> Problem:
    torch.manual_seed(9)
    return Problem(model, nn.CrossEntropyLoss(), (torch.randn(30, 4), torch.randint(3, (30,))))


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One network as every form of weights."""
    folder, model = tmp_path_factory.mktemp("weights"), network(1)
    state = model.state_dict()
    torch.save(state, folder / "b.pt")
    wrapped = {f"module.{k}": t for k, t in state.items()}
    torch.save({"epoch": 3, "model_state_dict": wrapped}, folder / "b.ckpt")
    safetensors.torch.save_file(state, folder / "b.safetensors")
    run = landscape.import_state(folder / "b.pt", model)
    for name in ("b.h5", "run/last.h5"):
        (folder / name).parent.mkdir(exist_ok=True)
        run.save(folder / name)
    return {
        "vector": vector(model), "array": vector(model).numpy(), "parameter": nn.Parameter(vector(model)),
        "float64": vector(model).double(), "Problem": problem_of(model), "model": model,
        "DataParallel": nn.DataParallel(model), "average": torch.optim.swa_utils.AveragedModel(model),
        "state": state, "reversed": dict(reversed(state.items())),
        "wrapped": {"state_dict": {f"_orig_mod.{name}": t for name, t in state.items()}, "epoch": 3},
        "pt": folder / "b.pt", "text": str(folder / "b.pt"), "ckpt": folder / "b.ckpt",
        "safetensors": folder / "b.safetensors", "h5": folder / "b.h5", "folder": folder / "run", "run": run,
    }  # fmt: skip


#: Function -> its two vectors of weights, of which the second was given.
TAKEN: dict[str, Callable[[Problem, nn.Module, Any], Any]] = {
    "line": lambda p, a, b: (
        landscape.line(p, a, b, points=3).start + landscape.line(p, a, b, points=3).direction
    ),
    "connect": lambda p, a, b: landscape.connect(p, a, b, points=3, steps=0).weights[1],
    "between": lambda p, a, b: landscape.between(p, [a, b]).weights[1],
    "pca_plane": lambda p, a, b: landscape.pca_plane(p, [a, b, network(2)]).weights[1],
    "learners_plane": lambda p, a, b: landscape.learners_plane(p, (a, b, network(2))).weights[1],
}


@pytest.mark.parametrize("form", ["vector", "array", "parameter", "float64", "Problem", "model", "DataParallel", "average",
    "state", "reversed", "wrapped", "pt", "text", "ckpt", "safetensors", "h5", "folder", "run"])  # fmt: skip
def test_weights_have_many_forms(form: str, second: dict[str, Any]) -> None:
    a, problem = network(0), problem_of(network(0))
    for call in TAKEN.values():
        np.testing.assert_allclose(call(problem, a, second[form]), second["array"], atol=1e-6)
    expected = landscape.average(problem, [vector(a), second["vector"]])
    np.testing.assert_array_equal(landscape.average(problem, [a, second[form]]).exact, expected.exact)
    step = landscape.loss_change(problem, a, second[form]).step_norm
    assert step == pytest.approx(float((second["vector"] - vector(a)).norm()))
    if second[form] is not second["vector"] and not isinstance(second[form], (np.ndarray, Tensor)):
        own = network_of(problem, second[form], "b").own_loss(problem)  # BatchNorm's statistics are its own
        assert own == pytest.approx(problem_of(second["model"]).loss())


@examples(st.permutations(range(9)), st.sampled_from(["", "module.", "model.", "net.", "module._orig_mod."]),
          st.sampled_from(["", "state_dict", "model", "model_state_dict"]))  # fmt: skip
def test_parameters_are_matched_by_name(order: list[int], prefix: str, key: str) -> None:
    problem, state = problem_of(network(0)), network(1).state_dict()
    names = list(state)
    moved = {f"{prefix}{names[k]}": state[names[k]] for k in order}
    found = network_of(problem, {key: moved, "epoch": 1} if key else moved, "b")
    assert torch.equal(found.theta, vector(network(1)))


def test_a_path_leads_from_the_center_where_one_network_is_given() -> None:
    p, q = problem_of(network(0)), problem_of(network(1))
    both = landscape.line(p, p, q, points=3)
    np.testing.assert_array_equal(landscape.line(p, q, points=3).loss, both.loss)
    np.testing.assert_array_equal(landscape.line(p, network(1), points=3).loss, both.loss)
    assert landscape.line(p, q.weights, points=3).kind == "direction"
    one, two = (landscape.connect(*ends, points=3, steps=0) for ends in ((p, q), (p, p, q)))
    np.testing.assert_array_equal(one.loss, two.loss)


class Frozen(nn.Module):
    """A frozen parameter, a table, and a count that no output depends on."""

    def __init__(self, scale: float, table: float, count: int) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor([scale]), requires_grad=False)
        self.register_buffer("table", torch.tensor([table, 1.0]))
        self.register_buffer("count", torch.tensor(count))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.table[0]


def test_what_cannot_stand_for_weights_is_refused(tmp_path: Path) -> None:
    problem, a, state = problem_of(network(0)), network(0), network(1).state_dict()
    landscape.line(problem, problem.weights, points=2).save(tmp_path / "line.h5")
    one = "a vector .P,., a Problem, a model, a state dict, a run, or the name of a file"
    wrong = [
        (len, f"a builtin_function_or_method is not allowed, it must be {one}"), (nn.Linear, f"the class Linear .* {one}"),
        (3.0, f"3.0 .* {one}"), ([1, 2], f"1, 2. .* {one}"), (torch.ones(3), r"shape \(3,\), it must be \(83,\)"),
        (vector(a).long(), "a torch.int64 vector is not allowed"), (vector(a) * torch.nan, "NaN or infinite"),
        (nn.Linear(4, 3), "lacks layers"), (network(1, nn.Tanh), r"lacks layers \(ReLU\)"),
        (problem_of(network(1, nn.Tanh)), r"lacks layers \(ReLU\)"),
        ({k: t for k, t in state.items() if k != "0.bias"}, "lacks '0.bias'"), (state | {"z": state["0.bias"]}, "'z'"),
        (state | {"0.bias": torch.ones(5)}, r"'0.bias' has shape \(5,\)"), ({}, "no tensors by name"), ("no.pt", "no such file"),
        ("no.h5", "no such file"), (tmp_path, str(tmp_path)), ("b.npz", r"'b.npz' is not allowed, its name must end in .h5, .pt"),
        (tmp_path / "line.h5", f"line.h5: a Line is not allowed, it must be {one}"),
    ]  # fmt: skip
    for b, words in wrong:
        for name, call in TAKEN.items():
            with pytest.raises(LandscapeError, match=words) as refusal:
                call(problem, a, b)
            assert str(refusal.value).startswith("b: " if name in ("line", "connect") else "weights[1]: ")
            assert "\n" not in str(refusal.value)
    for several in (state, a, problem, "b.pt", 3, None):
        for function in (landscape.between, landscape.pca_plane, landscape.learners_plane):
            with pytest.raises(InputError, match=f"weights: .* is not allowed, it must be a list, .* {one}"):
                function(problem, several)  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "words"), [
    ({"scale": 2.0}, "b: its frozen parameter 'scale' is not the problem's; give a vector of θ"),
    ({"table": 2.0}, "b: its buffer 'table' is not the problem's"), ({"count": 7}, ""),
])  # fmt: skip
def test_what_is_no_part_of_the_weights_must_be_the_problems(changes: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"scale": 1.0, "table": 1.0, "count": 0}
    a, b = Frozen(**usual), Frozen(**usual | changes)
    problem = problem_of(a)
    for form in (b, b.state_dict(), problem_of(b)):
        if words:
            with pytest.raises(InputError, match=words):
                landscape.line(problem, a, form)
        else:
            landscape.line(problem, a, form, points=2)
    landscape.line(problem, a, vector(b.layer), points=2)  # a vector is θ alone


@pytest.mark.parametrize(
    "function", ["loss", "gradient", "loss_and_gradient", "evaluate", "at", "hessian", "top"]
)
def test_theta_is_a_vector_of_any_kind(function: str) -> None:
    problem, model = problem_of(network(0)), network(0)
    call = getattr(problem, function, lambda theta: landscape.top_eigenvalues(problem, 1, weights=theta))
    for theta in (vector(model).numpy(), vector(model).double()):
        if function == "loss":
            assert problem.loss(theta) == problem.loss()
        call(theta)
    theta = vector(model)
    for wrong in (theta.tolist(), 1.0, model, model.state_dict(), problem, "a.pt", theta.long()):
        with pytest.raises(
            InputError, match=r"weights: .* it must be a vector \(P,\).*layout.flatten"
        ) as one:
            call(wrong)
        assert "\n" not in str(one.value)
    with pytest.raises(InputError, match=r"weights: shape \(1, 83\), it must be \(83,\)"):
        call(vector(model)[None])
    assert torch.equal(problem.layout.flatten(model.state_dict()), problem.weights)  # the remedy
    for value in (torch.nan, torch.inf):
        with pytest.raises(InputError, match="weights: they are NaN or infinite"):
            problem.loss(vector(model) * value)
