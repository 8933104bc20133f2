"""Recipes and data files: what is read, and what is said of what cannot be."""

from __future__ import annotations

import contextlib
import copy
import gzip
import inspect
import re
import tomllib
import typing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

import landscape
from landscape import InputError, OperationError
from landscape.core import registry
from landscape.core.options import positive, toml_value
from landscape.data import images
from landscape.data.images import decode
from landscape.training import optimizer
from landscape.training.recipes import built_in, recipe
from landscape.training.recipes.settings import with_changes, without_effect
from landscape.training.run import launch
from landscape.training.run.loop import Trainer
from tests.conftest import Command
from tests.harm.samples import idx

BUILT_IN = {
    "digits-ssgd",
    "digits-dpsgd",
    "digits-muloco",
    "saddle-dpsgd",
    *(f"mnist-fig2{part}-{a}" for part in "ab" for a in ("ssgd", "ssgd-noise", "dpsgd")),
    *(f"mnist-{a}" for a in ("local-sgd", "slowmo", "async", "minimum")),
}


@pytest.mark.parametrize("samples", [0, 1797])
def test_digits_refuses_a_split_without_samples(samples: int) -> None:
    with pytest.raises(InputError, match=rf"data.test_samples: {samples} is not allowed.*≥ 1 and ≤ 1,796"):
        landscape.data.load("digits", test_samples=samples)


def test_the_built_in_recipes_are_there_and_read_back_equal() -> None:
    assert set(built_in()) == BUILT_IN
    for name in BUILT_IN:
        assert recipe.read(name).name == name
        filled = recipe.from_values(tomllib.loads(recipe.read(name).to_toml()))
        assert filled == recipe.from_values(tomllib.loads(filled.to_toml()))


def test_a_recipe_shows_itself_as_what_differs_from_the_defaults() -> None:
    settings = {"seed": 3, "monitor.sharpness": 20, "optimizer.momentum": 0.9, "init.checkpoint": "a.h5"}
    for made in (*map(recipe.read, BUILT_IN), recipe.read("digits-dpsgd", settings)):
        shown = repr(made)
        assert len(shown.splitlines()) <= 12
        assert max(map(len, shown.splitlines())) < 150
        assert recipe.from_values(eval(shown, {"Recipe": dict})) == made
    assert "\n       monitor={'sharpness': 20}," in shown
    assert "dtype" not in shown


def test_a_whole_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(InputError, match="lr: a whole number of 16610 bits is not allowed.*finite"):
        positive("lr", 10**5000, least=0)


@runs(max_examples=10)
@given(
    st.integers(2, 9), st.integers(1, 50), st.floats(1e-8, 1e8), st.text(max_size=20),
    st.lists(st.integers(1, 100), max_size=3),
)  # fmt: skip
def test_toml_is_read_back(learners: int, local: int, lr: float, name: str, milestones: list[int]) -> None:
    values = tomllib.loads(recipe.read("digits-ssgd").to_toml())
    values |= {"name": name, "learners": learners, "batch": learners * local, "lr": lr}
    r = recipe.from_values(values | {"schedule": {"milestones": milestones}})
    assert recipe.from_values(tomllib.loads(r.to_toml())) == r


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learnrs=4", "recipe key learnrs: 'learnrs' is not known; did you mean 'learners'?"),
        ("algorithm.mixng='full'", "'mixng' is not known"),
        ("learners=0", "learners: 0"),
        ("learners=true", "learners: True is not allowed, it must be a whole number"),
        ("batch=501", "batch: 501 is not allowed, it must be divisible by 5 learners, as 500 is"),
        ("lr=-1", "lr: -1 is not allowed, it must be a finite number > 0"),
        ("lr=nan", "lr: nan is not allowed"),
        ("lr='big'", "lr: 'big' is not allowed, it must be a finite number"),
        ("steps=-1", "steps: -1 is not allowed"),
        ("dtype=half", "dtype: 'half' is not known .allowed: float32, float64"),
        ("model.widths=['a']", "model.widths: 'a' is not allowed"),
        ("decompose=3", "decompose: 3 is not allowed, it must be a table"),
        ("algorithm={}", "algorithm.name: missing"),
        ("lr.x=3", "'lr' is not a table"),
        ("lr", "settings: 'lr' is not allowed, it must be KEY=VALUE"),
        ("~algorithm.mixing", "'~algorithm.mixing' is not allowed, the recipe has no such key .it has: name"),
        ("~monitors.every", "'~monitors.every' is not allowed, .*no such table"),
        ("~learners", "recipe key learners: missing, and there is no default"),
        ("optimizer.name=adamm", "optimizer.name: 'adamm' is not known; did you mean 'adam'"),
        ("optimizer={name='lamb', momentum=0.9}", "optimizer: 'momentum' is not known"),
        (
            "optimizer.momentum=1",
            "optimizer.momentum: 1 is not allowed, it must be a finite number ≥ 0 and < 1",
        ),
        ("optimizer={name='lamb', beta2=1.0}", "optimizer.beta2: 1.0 is not allowed"),
        ("optimizer={name='lars', trust=0}", "optimizer.trust: 0 is not allowed"),
        ("accumulate=3", "accumulate: 3 is not allowed, it must be a divisor of B, 100"),
        ("autocast=fp16", "autocast: 'fp16' is not known; did you mean 'bfloat16'"),
        ("data.split=shards", "data.split: 'shards' is not allowed .allowed: iid, dirichlet"),
        ("schedule.unit=hours", "schedule.unit: 'hours' is not known"),
        ("schedule.anneal=0", "schedule.anneal: 0 is not allowed"),
        ("schedule.cosine=inf", "schedule.cosine: inf is not allowed"),
        ("schedule.milestones=[1, nan]", "schedule.milestones: .* must be a finite number"),
    ],
)
def test_bad_settings_name_the_key_and_what_is_allowed(setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        recipe.read("digits-ssgd", [setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "left_out", "table", "kept"),
    [
        (["algorithm.name=ssgd"], "algorithm.mixing: left out, dpsgd has it and ssgd does not", "algorithm", {}),
        (["algorithm.name=dsgd-ac"], "", "algorithm", {"mixing": "ring(1)"}),
        (["algorithm.name=ssgd*", "algorithm.sigma=0.1"], "algorithm.mixing", "algorithm", {"sigma": 0.1}),
        (["optimizer.name=adam"], "optimizer.momentum: left out, sgd has it", "optimizer", {}),
        (["optimizer.name=lars"], "", "optimizer", {"momentum": 0.5}),
        (["~optimizer.momentum"], "", "optimizer", {}),
        (["model.name=nets:mine"], "", "model", {"widths": [64, 10]}),
        (["data.name=synthetic"], "", "data", {"split": "labels(3)"}),
    ],
)  # fmt: skip
def test_another_name_leaves_out_the_keys_that_only_the_old_one_has(
    tmp_path: Path, settings: list[str], left_out: str, table: str, kept: dict[str, Any]
) -> None:
    file = tmp_path / "r.toml"
    file.write_text(
        "learners = 4\nbatch = 80\nlr = 0.2\nsteps = 60\n"
        "data = {name = 'digits', split = 'labels(3)'}\n"
        "algorithm = {name = 'dpsgd', mixing = 'ring(1)'}\nmodel = {name = 'mlp', widths = [64, 10]}\n"
        "optimizer = {momentum = 0.5}\n"
    )
    with pytest.warns(UserWarning, match=left_out) if left_out else contextlib.nullcontext():
        found = getattr(recipe.read(str(file), settings), table)
    assert {key: value for key, value in found.items() if key != "name"} == kept


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("digits-sgd", None, InputError, "did you mean 'digits-ssgd'"),
        ("none.toml", None, OperationError, "none.toml: cannot be read"),
        ("bad.toml", b"lr = = 3", InputError, "bad.toml: not valid TOML"),
        ("short.toml", b"lr = 1.0", InputError, "recipe key learners: missing"),
        ("bytes.toml", b"\xff\xfe\x00", OperationError, "cannot be read as a recipe"),
    ],
)
def test_recipe_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes | None, kind: type[Exception], message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(kind, match=message):
        recipe.read(str(tmp_path / name) if "." in name else name)


def write_idx(path: Path, array: np.ndarray) -> None:
    path.write_bytes(gzip.compress(idx(array)) if path.suffix == ".gz" else idx(array))


def write_mnist(folder: Path, suffix: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 255 if "images" in name else 10, shape, dtype=np.uint8)
        for name, shape in zip(images.FILES, [(30, 4, 4), (30,), (10, 4, 4), (10,)], strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        write_idx(folder / (name + suffix), array)
    return arrays


@pytest.mark.parametrize(
    ("name", "suffix", "inside"),
    [("mnist", "", True), ("fashion-mnist", ".gz", True), ("mnist", ".gz", False)],
)
def test_idx_files_are_found_and_read(tmp_path: Path, name: str, suffix: str, inside: bool) -> None:
    arrays = write_mnist(tmp_path / name if inside else tmp_path, suffix)
    data = landscape.data.load(name, data_dir=tmp_path)
    assert data.train[0].shape == (30, 16)
    np.testing.assert_allclose(data.test[0].numpy(), arrays[images.FILES[2]].reshape(10, 16) / 255, rtol=1e-6)
    assert torch.equal(data.train[1], torch.from_numpy(arrays[images.FILES[1]].astype(np.int64)))
    assert re.fullmatch("[0-9a-f]{64}", data.fingerprint)


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    monkeypatch.setenv("LANDSCAPE_DATA", str(tmp_path))
    assert len(landscape.data.load("mnist").train[1]) == 30


def test_missing_and_damaged_data_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        OperationError, match=r"train-images-idx3-ubyte\[.gz\] is not in .* download the four IDX files"
    ):
        landscape.data.load("mnist", data_dir=tmp_path)
    write_mnist(tmp_path / "mnist", ".gz")
    path = tmp_path / "mnist" / f"{images.FILES[0]}.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(OperationError, match="cannot be read .* download it again"):
        landscape.data.load("mnist", data_dir=tmp_path)
    write_idx(path, np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(OperationError, match=r"shape \(3, 4, 4\) and its labels \(30,\)"):
        landscape.data.load("mnist", data_dir=tmp_path)
    with pytest.raises(InputError, match="data: 'color' is not known"):
        landscape.data.load("digits", color=True)


def test_digits_and_synthetic() -> None:
    digits = landscape.data.load("digits")
    assert digits.train[0].shape == (1437, 64)
    assert digits.test[0].shape == (360, 64)
    assert (float(digits.train[0].min()), float(digits.train[0].max())) == (0.0, 1.0)
    assert digits.fingerprint == landscape.data.load("digits").fingerprint
    assert digits.fingerprint != landscape.data.load("digits", test_samples=300).fingerprint
    mixture = landscape.data.load("synthetic", samples=6000, classes=3, imbalance=9.0)
    counts = torch.bincount(mixture.train[1]).double()
    assert float(counts[0] / counts[2]) == pytest.approx(9, rel=0.15)
    assert float(counts[0] / counts[1]) == pytest.approx(3, rel=0.15)
    with pytest.raises(InputError, match="data.imbalance: 0.5"):
        landscape.data.load("synthetic", imbalance=0.5)


def test_the_quadratic_has_exactly_its_hessian_and_moments() -> None:
    data = landscape.data.load("quadratic", dimension=3, curvature_std=0.2, gradient_std=0.5)
    x = data.train[0].numpy()
    np.testing.assert_allclose(x.mean(0), [1, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(x.std(0), [0.2, 0.5, 0.5, 0.5], rtol=1e-12)
    model = landscape.models.build("quadratic", eigenvalues=[1.0, -2.0, 5.0], center=0.5)
    values = np.linalg.eigvalsh(model.get_buffer("hessian").numpy())
    np.testing.assert_allclose(values, [-2, 1, 5], atol=1e-12)


def test_a_recipe_file_names_code_only_where_allowed(tiny: Path, tmp_path: Path, command: Command) -> None:
    bad = tiny.read_text().replace(
        'data = { name = "synthetic", samples = 200, dimension = 6, classes = 3 }',
        f'data = {{ name = "subprocess:getoutput", cmd = "touch {tmp_path}/ran" }}',
    )
    path = tmp_path / "bad.toml"
    path.write_text(bad)
    for words in (
        ("train", path, "-o", tmp_path / "r"),
        ("sweep", path, "--seeds", "0", "-o", tmp_path / "s"),
        ("train", path, "--set", "model.name=tests.nets:norm_net", "--nproc", "2", "-o", tmp_path / "r"),
    ):
        code, _, err = command(*words)
        assert code == 2
        assert "data.name" in err
        assert "subprocess:getoutput" in err
        assert "--allow-code" in err
        assert len(err.splitlines()) == 1
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "recipe.toml").write_text(bad)
    assert command("train", "-o", tmp_path / "r", "--resume")[0] == 1
    launch.launch(recipe.read(str(tiny), ["steps=1"]), tmp_path / "c")
    run = landscape.load(tmp_path / "c" / "last.h5")
    run.recipe = f'name = "bad"\n{bad}'.replace("steps = 30", "steps = 40")
    run.save(tmp_path / "c" / "last.h5")
    assert command("train", "-o", tmp_path / "c", "--resume")[0] == 1
    assert command("smoothing", tmp_path / "c" / "last.h5")[0] == 1
    assert not (tmp_path / "ran").exists()


def test_code_is_run_where_it_is_typed_or_allowed(tiny: Path, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "own.toml"
    old = 'model = { name = "mlp", widths = [6, 8, 3], activation = "tanh" }'
    path.write_text(tiny.read_text().replace(old, 'model = { name = "tests.nets:norm_net" }'))
    typed = ("--set", "model.name=tests.nets:norm_net", "--set", "steps=1")
    assert command("train", path, *typed, "-o", tmp_path / "a", "-q")[0] == 0
    assert command("train", path, "--allow-code", "--set", "steps=1", "-o", tmp_path / "b", "-q")[0] == 0
    assert command("train", "-o", tmp_path / "b", "--resume", "-q")[0] == 1
    assert command("train", "-o", tmp_path / "b", "--resume", "--allow-code", "-q")[0] == 0


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("lr = " + "[" * 1000 + "]" * 1000, "within each other"),
        ("lr = " + "{a = " * 1000 + "1" + "}" * 1000, "within each other"),
        (".".join("a" * 50000) + " = 1", "dots"),
        (".".join("a" * 900) + " = 1", "within each other"),
        ("lr = 1e39", "lr: 1e+39 is not allowed"),
        ("lr = 1" + "0" * 400, "lr: a number of"),
        ("lr = 1" + "0" * 5000, "4300 digits"),
        ("seed = 99999999999999999999", "seed: 99999999999999999999 is not allowed"),
        ("data.samples = 0x" + "f" * 5000, "data.samples: a number of"),
    ],
)
def test_huge_and_deep_recipes_are_refused_in_one_line(toml: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f"{toml}\n")
    with pytest.raises(InputError) as caught:
        recipe.read(str(path), ["learners=1", "batch=1"] if "lr = 1e" not in toml else digits_dpsgd())
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
    key, _, value = toml.partition(" = ")
    with pytest.raises(InputError):
        recipe.read("digits-dpsgd", [f"{key}={value}"])


def digits_dpsgd() -> list[str]:
    """All that a recipe needs but lr and a name."""
    found = recipe.read("digits-dpsgd").values()
    return [
        f"{k}={toml_value(found[k])}" for k in ("learners", "batch", "steps", "algorithm", "model", "data")
    ]


def test_an_image_that_is_another_kind_of_file_starts_nothing(tmp_path: Path) -> None:
    """A .png that is EPS, which PIL would give to Ghostscript."""
    eps = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a.png").write_text(eps)
    with pytest.raises(OperationError, match=r"a.png: cannot be decoded as an image \(cannot identify"):
        decode(tmp_path / "a.png", 8, 0.0)


TINY: dict[str, Any] = {
    "name": "tiny", "learners": 4, "batch": 40, "lr": 0.2, "steps": 9, "dtype": "float64",
    "algorithm": {"name": "ssgd"}, "model": {"name": "mlp", "widths": [6, 4, 3], "activation": "tanh"},
    "data": {"name": "synthetic", "samples": 80, "dimension": 6, "classes": 3},
    "decompose": {"every": 3}, "evaluate": {"every": 0}, "checkpoint": {"every": 0},
}  # fmt: skip
# Values of options that a type does not give, and those of options without a default.
VALUES: dict[str, Any] = {
    "mixing": "lazy(0.5, ring(1))", "node_period": 2, "share": 0.5, "momentum": 0.6, "graph": "random", "start": 2, "chunk": 2, "nodes": 2, "quorum": 2, "k": 1, "groups": None,
    "betas": [0.5, 0.9], "etas": [0.4, 1.3], "step_sizes": [1e-5, 0.1], "ns_coefficients": None, "initial_accumulator_value": 0.5,
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "ssgd*": {"sigma": 0.1}, "async-sgd": {"delay": 2}, "single-merge": {"at": 5}, "steepest": {"norm": "max"},
    **{name: {"period": 4} for name in ("local-sgd", "slowmo", "diloco", "noloco", "snoo")},
    "sparseloco": {"period": 4, "share": 0.3}, "demo": {"k": 1, "chunk": 4},
    **{name: {"period": 4, "fragments": 2} for name in ("streaming-diloco", "decoupled-diloco")},
}  # fmt: skip
# What brings the options of a rule or an optimizer to effect that are refused otherwise.
ENABLED: dict[str, dict[str, Any]] = {
    "algorithm.buffers": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "algorithm.node_period": {"algorithm.nodes": 2}, "algorithm.order": {"algorithm.mixing": "ring(1)"},
    "algorithm.power": {"schedule": {"warmup": 5.0}}, "algorithm.start": {"schedule": {"warmup": 5.0}},
    "algorithm.quorum": {"algorithm.availability": 0.3}, "schedule.factor": {"schedule": {"milestones": [4.0]}},
    "monitor.samples": {"monitor.sharpness": 3}, "monitor.k": {"monitor.sharpness": 3},
    "monitor.every": {"monitor.instruments": ["path"]},
    "monitor.draws": {"monitor.instruments": ["batch-sharpness"], "monitor.every": 3},
    "monitor.window": {"monitor.instruments": ["average"], "monitor.every": 2},
    "schedule.unit": {"schedule": {"warmup": 3.0}}, "optimizer.nesterov": {"optimizer.momentum": 0.5},
    "optimizer.dampening": {"optimizer.momentum": 0.5},
    "optimizer.decoupled_weight_decay": {"optimizer.weight_decay": 0.1},
}  # fmt: skip


def another(key: str, default: Any, annotation: Any) -> Any:
    """A value of an option that is not its default; None where there is none to be tried."""
    kind = typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
    if key in VALUES:
        return VALUES[key]
    if typing.get_origin(kind) is Literal:
        return next(value for value in typing.get_args(kind) if value != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    return 0.6 * default or 0.3 if isinstance(default, float) else None


def of_entry(table: str, name: str) -> list[tuple[str, Any]]:
    """(key, another value) of the options of a rule or an optimizer that have a default."""
    kind = registry.algorithms[name] if table == "algorithm" else optimizer.make(name, NEEDED.get(name, {}))
    kind = getattr(kind, "kind", kind)
    made = kind if isinstance(kind, type) else type(kind)
    own = inspect.signature(made).parameters.items()
    hints = typing.get_type_hints(made.__init__, include_extras=True)
    speed = ("foreach", "fused", "capturable", "differentiable", "lr")  # they change no number
    pairs = [
        (key, another(key, p.default, hints.get(key)))
        for key, p in own
        if p.default is not p.empty and key not in speed
    ]
    return [(key, value) for key, value in pairs if value is not None]


def outcome(values: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Weights, optimizer and history of a run, without the clock's columns, and rounds of one learner alone."""
    end = Trainer(recipe.from_values(values)).run()
    apart = {"wall_s", "samples_per_s", "wait_s", *(["comm_rounds"] if values["learners"] == 1 else [])}
    return end.weights, {k: v for k, v in end.history.items() if k not in apart} | {
        f"optimizer {k}": v.numpy() for k, v in end.optimizer.items()
    }


def differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    (weights, columns), (others, more) = outcome(a), outcome(b)
    near = {"rtol": 1e-9, "atol": 1e-13, "equal_nan": True}
    if columns.keys() != more.keys() or weights.shape != others.shape:
        return True
    if not torch.allclose(weights, others, rtol=1e-12, atol=1e-13):
        return True
    return any(not np.allclose(columns[k], more[k], **near) for k in columns)


def with_key(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return with_changes(copy.deepcopy(values), changes)


OPTIMIZERS = (
    "sgd", "lars", "lamb", "steepest", "adam", "adamw", "rmsprop", "nadam", "radam", "adagrad", "torch:SGD",
)  # fmt: skip
TABLES = {
    "schedule": [("unit", "epochs"), ("base_batch", 20), ("warmup", 3.0), ("milestones", [4.0]), ("factor", 0.5), ("anneal", 0.9), ("cosine", 9.0)],
    "decompose": [("every", 2), ("samples", 16), ("split", False)],
    "monitor": [("sharpness", 3), ("samples", 10), ("k", 1), ("instruments", ["path"]), ("every", 2), ("draws", 2), ("rho", 0.1), ("window", 2)],
    "evaluate": [("every", 3)],
    "": [("seed", 1), ("dtype", "float32"), ("autocast", "bfloat16"), ("batch", 20), ("learners", 2), ("lr", 0.1)],
    "data": [("split", "dirichlet(0.5)"), ("split", "sizes(0.25, 0.25, 0.2, 0.3)"), ("split", "labels(2)")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "name"),
    [
        *(("algorithm", name) for name in registry.algorithms.names()),
        *(("optimizer", name) for name in OPTIMIZERS),
        *((table, "") for table in TABLES),
    ],
)
def test_every_setting_changes_the_run_or_is_refused(table: str, name: str) -> None:
    """Each key of each table alone, and again with what it needs where it is refused alone."""
    base = TINY | ({table: {"name": name, **NEEDED.get(name, {})}} if name else {})
    base |= {"lr": 0.01} if table == "optimizer" else {}
    base |= {"dtype": "float32"} if table == "" else {}
    cases = [(base, case) for case in (of_entry(table, name) if name else TABLES[table])]
    if table == "algorithm":
        alone = {**base, "learners": 1, "optimizer": {"name": "sgd", "momentum": 0.9}}
        cases += [(alone, case) for case in of_entry(table, name)]
        cases += [(alone, ("mixing", "one-peer-exponential")), (alone, ("buffers", "average"))]
    for base, (key, value) in cases:
        dotted = f"{table}.{key}".lstrip(".")
        now = with_key(base, {dotted: value})
        if now == base:
            continue
        try:
            refused = dotted in without_effect(recipe.from_values(now))
        except InputError:  # refused wherever it stands
            continue
        assert refused != differ(base, now), (dotted, value, base["learners"])
        if refused and dotted in ENABLED and base["learners"] > 1:
            more = with_key(base, ENABLED[dotted])
            now = with_key(more, {dotted: value})
            assert dotted not in without_effect(recipe.from_values(now))
            assert differ(more, now), (dotted, value)


LOCAL = {"algorithm.name": "local-sgd", "algorithm.period": 4, "learners": 4, "steps": 9}
MOMENTUM = {"optimizer.name": "sgd", "optimizer.momentum": 0.9}
BIAS = {"optimizer.name": "sgd", "optimizer.groups.bias": {"lr_factor": 1.0}}


@pytest.mark.parametrize(
    ("settings", "more", "refused", "need"),
    [
        ({**LOCAL, "algorithm.period": 1, "algorithm.start": 3}, MOMENTUM, "algorithm.start", "period > 1"),
        ({**LOCAL, "algorithm.period": 1, "algorithm.mixing": "full"}, {"algorithm.period": 2}, "algorithm.mixing", "period > 1"),
        ({**LOCAL, "algorithm.start": 9, "algorithm.mixing": "full"}, {"steps": 10}, "algorithm.mixing", "start < steps"),
        ({**LOCAL, **MOMENTUM, "algorithm.period": 10, "algorithm.buffers": "reset"}, {"steps": 10}, "algorithm.buffers", "start + period <= steps"),
        ({**LOCAL, **MOMENTUM, "learners": 1, "algorithm.buffers": "average"}, {"algorithm.buffers": "reset"}, "algorithm.buffers", "learners > 1"),
        ({**LOCAL, "learners": 1, "algorithm.start": 3}, {"learners": 2}, "algorithm.start", "learners > 1"),
        ({"schedule.milestones": [4.0], "schedule.factor": 1.0}, {"schedule.factor": 0.5}, "schedule.milestones", "factor != 1"),
        ({"optimizer.name": "sgd", "optimizer.nesterov": True}, {"optimizer.momentum": 0.9}, "optimizer.nesterov", "momentum > 0"),
        (BIAS, {"optimizer.groups.bias": {"lr_factor": 0.5}}, "optimizer.groups.bias", "a setting of its own"),
        (BIAS, {"optimizer.groups.weight": {"lr_factor": 0.5}}, "optimizer.groups.bias", "a setting of its own"),
    ],
)  # fmt: skip
def test_what_a_setting_needs_is_said_and_brings_it_to_effect(
    settings: dict[str, Any], more: dict[str, Any], refused: str, need: str
) -> None:
    message = rf"^{re.escape(refused)}: .* is not allowed, it changes nothing without .*{re.escape(need)}"
    with pytest.raises(InputError, match=message) as caught:
        landscape.Recipe.read("digits-ssgd", **settings)
    assert str(caught.value).endswith("; leave it out")
    landscape.Recipe.read("digits-ssgd", **{**settings, **more})


@pytest.mark.parametrize("name", ["local-sgd", "slowmo"])
def test_one_node_has_no_period_of_its_own(name: str) -> None:
    of_rule = {"algorithm.name": name, "algorithm.period": 4, "learners": 4}
    for period in (1, 2, 4):
        with pytest.raises(InputError, match=rf"algorithm.node_period: {period} is not allowed.*nodes > 1"):
            landscape.Recipe.read(
                "digits-ssgd", **of_rule, **{"algorithm.node_period": period, "algorithm.nodes": 1}
            )
    two = {"algorithm.nodes": 2, "algorithm.node_period": 2}
    assert landscape.Recipe.read("digits-ssgd", **of_rule, **two).rule().node_period == 2


def test_a_run_with_settings_without_effect_goes_on_by_itself_and_none_begins(tmp_path: Path) -> None:
    old = with_key(
        TINY,
        {"algorithm": {"name": "local-sgd", "period": 4, "nodes": 1, "node_period": 1}, "monitor.draws": 4},
    )
    launch.launch(recipe.from_values(old), tmp_path / "run", device="cpu")
    assert landscape.train(None, tmp_path / "run", resume=True, device="cpu").step == 9
    for again in (old, {**old, "steps": 14}):
        with pytest.raises(InputError, match=r"monitor.draws: 4 is not allowed.*; leave it out"):
            landscape.train(recipe.from_values(again), tmp_path / "run", resume=True, device="cpu")
    with pytest.raises(InputError, match=r"monitor.draws"):
        landscape.train(recipe.from_values(old), tmp_path / "new", resume=True, device="cpu")
    assert not (tmp_path / "new").exists()


def test_statistics_of_batchnorm_need_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluate.bn_samples: 64 is not allowed.*BatchNorm"):
        landscape.train("digits-ssgd", tmp_path / "run", steps=1, **{"evaluate.bn_samples": 64})
    assert not (tmp_path / "run").exists()
