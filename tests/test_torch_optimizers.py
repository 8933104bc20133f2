"""Classes of torch.optim as optimizers: against torch itself, resumed, in processes, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import landscape
from landscape import FailedError, InputError
from landscape.core import registry
from landscape.problem.layout import average
from landscape.testing import check_optimizer
from landscape.train import optimizer
from landscape.train.optimizer import torch_optim
from landscape.train.recipes import recipe
from landscape.train.run.loop import Trainer
from tests.conftest import slow_but

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "weight_decay": 0.05, "betas": [0.8, 0.95]},
    "sgd": {"name": "torch:SGD", "momentum": 0.8, "weight_decay": 0.001},
    "adagrad": {"name": "torch:Adagrad", "initial_accumulator_value": 0.1},
    "adafactor": {"name": "torch:Adafactor"},
    "nadam": {"name": "torch:NAdam"},
    "rprop": {"name": "torch:Rprop", "step_sizes": [1e-6, 1.0]},
}


def chosen(tiny: Path, **changes: Any) -> recipe.Recipe:
    values = recipe.parse(tiny.read_text(), "tiny") | {"name": "tiny", "dtype": "float64", "lr": 0.02}
    return recipe.from_values(values | changes)


def textbook(trainer: Trainer, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Tensor:
    """(n, P): each learner a module under an optimizer of torch's own; then w_j ← Σ_k M_jk w_k + (step_j)."""
    r = trainer.recipe
    modules = [landscape.models.build("mlp", widths=[6, 8, 3], activation="tanh").double() for _ in range(4)]
    for module in modules:
        torch.nn.utils.vector_to_parameters(trainer.train.theta.clone(), module.parameters())
    optimizers = [kind(m.parameters(), lr=r.lr, **options) for m in modules]  # type: ignore[call-arg]

    def vectors() -> Tensor:
        return torch.stack([torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in modules])

    for t in range(1, r.steps + 1):
        x, y = trainer._minibatches(t)
        before = vectors()
        for j, (module, each) in enumerate(zip(modules, optimizers, strict=True)):
            for group in each.param_groups:
                group["lr"] = r.rate(t, trainer.train.samples)
            each.zero_grad()
            torch.nn.functional.cross_entropy(module(x[j]), y[j]).backward()
            each.step()
        mixed = trainer.rule.mixing.apply(before, t)  # type: ignore[attr-defined]
        for module, row in zip(modules, mixed + vectors() - before, strict=True):
            torch.nn.utils.vector_to_parameters(row, module.parameters())
    return vectors()


@pytest.mark.parametrize("name", KINDS)
def test_learners_follow_torchs_own_optimizers(tiny: Path, name: str) -> None:
    """DPSGD in AWC order on a ring, 12 steps in float64, with a schedule."""
    trainer = Trainer(chosen(tiny, optimizer=KINDS[name], steps=12, schedule={"cosine": 40.0}))
    options = {k: v for k, v in KINDS[name].items() if k != "name"}
    kind = getattr(torch.optim, trainer.recipe.part("optimizer")[0].removeprefix("torch:"))
    expected = textbook(trainer, kind, options)
    torch.testing.assert_close(trainer.run().weights, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_under_ssgd_it_is_one_optimizer_on_the_mean_gradient(tiny: Path, name: str) -> None:
    rule = {"name": "ssgd"}
    end = Trainer(chosen(tiny, optimizer=KINDS[name], algorithm=rule)).run()
    big = Trainer(chosen(tiny, optimizer=KINDS[name], algorithm=rule, learners=1)).run()
    torch.testing.assert_close(end.mean, big.mean, rtol=1e-9, atol=1e-10)
    assert np.isnan(end.history["delta_s"]).all()  # Eq. 4 splits plain steps only
    assert np.isfinite(end.history["alpha_e"]).any()


@pytest.mark.parametrize("name", slow_but(["adamw", "sgd", "adafactor", "rprop"], KINDS))
def test_it_passes_the_checks_of_optimizers(name: str) -> None:
    options = {key: value for key, value in KINDS[name].items() if key != "name"}
    check_optimizer(KINDS[name]["name"], options, only="restored")


def test_a_checkpoint_without_its_state_is_refused(tiny: Path) -> None:
    r = chosen(tiny, optimizer=KINDS["adamw"], steps=2)
    stored = Trainer(r).run()
    stored.optimizer = {}
    with pytest.raises(FailedError, match="holds nothing, its run needs"):
        Trainer(r, checkpoint=stored)


@pytest.mark.parametrize("buffers", ["keep", "reset", "average"])
def test_states_are_kept_reset_or_averaged_where_learners_are(tiny: Path, buffers: str) -> None:
    rule = {"name": "local-sgd", "period": 5, "buffers": buffers}
    end = Trainer(chosen(tiny, optimizer=KINDS["adamw"], algorithm=rule, steps=10)).run()
    moment = end.optimizer["exp_avg"]
    assert (end.optimizer["step"] == (0 if buffers == "reset" else 10)).all()
    assert bool((moment == moment[0]).all()) == (buffers != "keep")
    assert bool(moment.any()) == (buffers != "reset")
    again = Trainer(chosen(tiny, optimizer=KINDS["adamw"], algorithm=rule, steps=12), checkpoint=end).run()
    assert (again.optimizer["updates"] == (2 if buffers == "reset" else 12)).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "torch:AdamV"}, r"optimizer\.name: 'torch:AdamV'.*torch:AdamW"),
        ({"name": "torch:AdamW", "lr": 0.1}, r"optimizer\.lr"),
        ({"name": "torch:AdamW", "weight_decy": 0.1}, r"optimizer: 'weight_decy'.*'weight_decay'"),
        ({"name": "torch:AdamW", "weight_decay": "x"}, r"optimizer\.weight_decay: 'x'"),
        ({"name": "torch:AdamW", "eps": -1.0}, r"optimizer: 'torch:AdamW'.*epsilon"),
        ({"name": "torch:LBFGS"}, r"'torch:LBFGS'.*closure"),
        ({"name": "torch:SparseAdam"}, r"'torch:SparseAdam'.*dense gradients"),
        ({"name": "torch:Optimizer"}, r"'torch:Optimizer'"),
        ({"name": "torch:load"}, r"'torch:load'"),
        ({"name": "lbfgs"}, r"'torch:LBFGS'.*closure"),
        ({"name": "sparseadam"}, r"'torch:SparseAdam'.*dense gradients"),
        ({"name": "adamv"}, r"optimizer\.name: 'adamv' is not known; did you mean 'adam"),
        ({"name": "lamp"}, r"optimizer\.name: 'lamp' is not known; did you mean 'lamb'\?"),
        ({"name": "adam", "weight_decy": 0.1}, r"optimizer: 'weight_decy'.*'weight_decay'"),
        ({"name": "optimizer"}, r"optimizer\.name: 'optimizer' is not known"),
    ],
)
def test_what_cannot_be_is_refused_before_data_is_read(
    tiny: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        chosen(tiny, optimizer=options)


@pytest.mark.parametrize("name", ["torch:Muon", "muon"])
def test_a_class_for_other_models_is_refused_with_torchs_reason(tiny: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"'torch:Muon'.*2D") as refusal:  # biases are not
        Trainer(chosen(tiny, optimizer={"name": name}))
    assert "\n" not in str(refusal.value)


COMMON = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")


def test_short_names_are_torchs_classes(tiny: Path) -> None:
    """By --set and in a file, in whatever case: the same recipe as the full name gives."""
    for kind in COMMON:
        full = f"torch:{kind}"
        eps = ["optimizer.eps=1e-7"] if "eps" in torch_optim.options(full, {}) else []
        names = (full, kind, kind.lower())
        long, *short = (recipe.read(str(tiny), [f"optimizer.name={each}", *eps]).to_toml() for each in names)
        assert short == [long, long]
        assert recipe.from_values(recipe.parse(long, "recipe")).to_toml() == long


def test_sgd_and_a_plugins_name_stay_theirs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(optimizer.make("sgd", {}), optimizer.SGD)
    assert {"adam", "adamw", "lamb", "sgd"} <= set(optimizer.names())

    class Mine(optimizer.SGD):
        pass

    monkeypatch.setattr(registry.optimizers, "_entries", dict(registry.optimizers._entries))
    registry.optimizers.add("adam")(Mine)
    assert isinstance(optimizer.make("adam", {}), Mine)


def test_a_state_that_is_no_tensor_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["note"] = "text"

    monkeypatch.setattr(torch_optim, "_classes", lambda: {"torch:Odd": Odd})
    with pytest.raises(InputError, match=r"'torch:Odd'.*'note'.*str"):
        chosen(tiny, optimizer={"name": "torch:Odd"})


def test_all_that_is_left_of_it_reads_back(tiny: Path) -> None:
    r = chosen(tiny, optimizer={"name": "torch:AdamW", "weight_decay": 0, "betas": [0.8, 0.9]})
    back = recipe.from_values(recipe.parse(r.to_toml(), "recipe"))
    assert back.to_toml() == r.to_toml()
    assert "[0.8, 0.9]" in r.to_toml()
    sgd = optimizer.make("torch:SGD", {"momentum": 0.9, "nesterov": True})
    assert sgd.heavy_ball == (0.9, "nesterov")
    assert sgd.linear
    assert optimizer.make("torch:AdamW", {}).heavy_ball is None


def test_rules_of_a_mean_that_is_of_torch_directions(tiny: Path) -> None:
    """SSGD over an optimizer that is linear takes each learner's own gradient: the mean is the same."""
    rule = {"name": "ssgd"}
    ours = {"name": "sgd", "momentum": 0.8, "weight_decay": 0.001}
    a = Trainer(chosen(tiny, optimizer=KINDS["sgd"], algorithm=rule)).run()
    b = Trainer(chosen(tiny, optimizer=ours, algorithm=rule)).run()
    torch.testing.assert_close(average(a.weights), average(b.weights), rtol=1e-9, atol=1e-10)
