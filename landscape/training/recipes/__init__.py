"""Recipes, the settings of a run: their tables, and those that come with the package.

No torch is imported, for the commands that only name recipes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from landscape.core import options, registry
from landscape.core.errors import InputError, OperationError
from landscape.core.options import Count, Natural, NonNegative, Positive, Within, fit, near

# Number of independent estimates of g from a sample (our choice: a standard error is then within about 20%).
GROUPS = 16


def _in_groups(where: str, samples: int) -> None:
    if samples % GROUPS:
        raise InputError(where, samples, allowed=f"a multiple of {GROUPS}")


GroupedSamples = Annotated[Natural, _in_groups]


@dataclass(frozen=True)
class Schedule:
    """lr(t) = lr · scaling · warm-up · factor^(milestones passed) · anneal^(units since warm-up) · cosine.

    Every part is off by default: Figure 2's constant rate. Lengths are in ``unit``, steps or epochs (passes
    over the training set, t·nB/samples after step t), so that at step t, p(t) is t in that unit.
    DPSGD-2020's speech recipe is unit "epochs", base_batch 256, warmup 10, anneal 1/√2 = 0.7071 (as we read
    it).

    Attributes:
        unit: The unit of the lengths below. Source: ours.
        base_batch: b of the linear scaling rule: the rate is × nB/b, and ``lr`` is the rate for batch b. 0:
            no scaling. Unit: samples. Source: ours; the rule is DPSGD-2020's, section 4.
        warmup: W: the rate is × p/W until p = W. Unit: ``schedule.unit``. Source: ours; the linear ramp is
            DPSGD-2020's, section 4.2, from where it starts is ours.
        milestones: The rate is × ``factor`` for each milestone m with p > m. Unit: ``schedule.unit``. Source:
            ours; none.
        factor: The factor at a milestone. Source: DPSGD-2020, section 4.1.
        anneal: The rate is × ``anneal`` at the start of each unit after the warm-up, the first included.
            Source: ours; 1 changes nothing.
        cosine: C: the rate is × ½(1 + cos πx), x = (p(t) − p(1) − W)/C from 0 to 1, to zero C units after the
            warm-up; 0: no cosine. Its length is its own, not ``steps``, so that a run may be made longer.
            Unit: ``schedule.unit``. Source: ours.
    """

    unit: Literal["steps", "epochs"] = "steps"
    base_batch: Natural = 0
    warmup: NonNegative = 0.0
    milestones: list[NonNegative] = field(default_factory=list)
    factor: Positive = 0.1
    anneal: Positive = 1.0
    cosine: NonNegative = 0.0

    def peak_lr(self, lr: float, batch: int) -> float:
        """Return the rate after the warm-up: ``lr`` scaled to the total ``batch`` nB."""
        return lr * batch / self.base_batch if self.base_batch else lr

    def at(self, lr: float, step: int, batch: int, samples: int) -> float:
        """Return the rate of one step.

        Args:
            lr: α of the recipe.
            step: counted from 1.
            batch: the total batch nB.
            samples: those of the training set.
        """

        def position(t: int) -> float:
            return t * batch / samples if self.unit == "epochs" else t

        p = position(step)
        rate = self.peak_lr(lr, batch)
        if p < self.warmup:
            rate *= p / self.warmup
        rate *= self.factor ** sum(p > m for m in self.milestones)
        rate *= self.anneal ** math.ceil(max(0.0, p - self.warmup))
        if self.cosine:
            x = (p - position(1) - self.warmup) / self.cosine
            rate *= (1 + math.cos(math.pi * min(1.0, max(0.0, x)))) / 2
        return float(rate)


@dataclass(frozen=True)
class Decompose:
    """The decomposition of steps into effective learning rate and noise: its interval and its samples.

    Attributes:
        every: The interval of decomposed steps; 0: none. Unit: steps. Source: ours; every 10th step costs
            about as much as the training itself at Figure 2's size, and resolves its curves.
        samples: Number of training samples from which g is estimated; 0: all, so that g is exact. Unit:
            samples. Source: ours; 0 is the definition.
        split: Record the terms of Eq. 4, too. They take one more gradient where learners have weights of
            their own. Source: ours.
    """

    every: options.Natural = 10
    samples: GroupedSamples = 0
    split: bool = True


@dataclass(frozen=True)
class Evaluate:
    """The evaluation of w_a on the test set.

    Attributes:
        every: The interval of evaluations of loss and accuracy; 0: only at the end. Unit: steps. Source:
            ours.
        bn_samples: Training samples, always the same ones, on which BatchNorm's statistics are re-estimated
            at w_a before an evaluation. Unit: samples. Source: ours; a statistic over 5,000 samples has a
            standard error of 1.4%.
    """

    every: options.Natural = 100
    bn_samples: options.AtLeastTwo = 5000


@dataclass(frozen=True)
class Save:
    """The writing of checkpoints along the run; one is always written at the end.

    Attributes:
        every: The interval of the files step-NNNNNNN.h5; 0: only at the end. Unit: steps. Source:
            ours.
    """

    every: options.Natural = 500


def _is_registered(where: str, instrument: str) -> None:
    registry.instruments[instrument]  # refuses another name


@dataclass(frozen=True)
class Monitor:
    """The measurements along the run besides its steps, at w_a and at the learners' weights.

    Attributes:
        sharpness: The interval of measurements of λ_max of the loss at w_a; 0: none. Unit: steps. Source:
            ours; at Figure 2's settings every 50 steps cost about an eighth of the run.
        samples: Training samples for Hessians, always the same ones; 0: all. Unit: samples. Source: ours; at
            Figure 2's settings λ_max on 2,000 samples is within 10% of that on 10,000.
        k: Number of leading eigenvectors, for the share of the learners' spread that lies along them.
            Source: ours.
        instruments: Names of instruments that measure every ``every`` steps, such as "batch-sharpness".
            Source: ours.
        every: How often the instruments measure. Unit: steps. Source: ours.
        draws: Minibatches that an instrument draws each time. Source: ours; a standard error from 16 is right
            to 18%.
        rho: Radius of "worst-sharpness" and "average-sharpness", which need one. Source: ours.
        window: The number of latest measurements of w_a over which "average" takes the mean. Source: ours;
            each costs a gradient and a Hessian product each time.
    """

    sharpness: options.Natural = 0
    samples: options.Natural = 2000
    k: options.Count = 3
    instruments: list[Annotated[str, _is_registered]] = field(default_factory=list)
    every: options.Count = 50
    draws: options.AtLeastTwo = 16
    rho: options.NonNegative = 0.0
    window: Annotated[int, Within(2, 32)] = 4  # the most that landscape.average takes


@dataclass(frozen=True)
class Diverge:
    """The bounds beyond which a run counts as diverged.

    Attributes:
        loss: The mean has diverged if its loss is not finite or above this. Unit: nat. Source: ours; runs at
            Figure 2(a)'s rate peaked at 1,272 in a burst and came back.
        consensus: The learners have diverged if for ten steps in a row the consensus distance exceeds this
            many times the larger of ‖w_a‖² now and at the start, while the mean's loss is still below
            ``diverge.loss``. Source: ours; where one learner throws the mean along the ratio stays near n −
            1, and only disagreement that grows by itself stays far beyond.
    """

    loss: options.Positive = 1e4
    consensus: options.Positive = 100.0


@dataclass(frozen=True)
class Init:
    """The initial weights.

    Attributes:
        checkpoint: File whose w_a and BatchNorm statistics are the initial ones; "": new weights. A resumed
            run does not need the file. Source: ours; "" is training from scratch.
        sha256: SHA-256 of the file's bytes. If it is missing, the run sets it; otherwise the file must match.
            Source: ours.
    """

    checkpoint: str = ""
    sha256: str = ""


def table_of(kind: type[Any], values: dict[str, Any], prefix: str, **others: Any) -> Any:
    """Return a recipe's table: an instance of the dataclass ``kind``, made from ``values`` (key -> value).

    ``others`` are the values of fields of ``kind`` that are no keys of the table.

    Raises:
        InputError: for unknown or missing keys and wrong values; the message names ``prefix`` + key.

    Example:
        >>> table_of(Monitor, {"every": 10}, "monitor.").every
        10
    """
    hints = options.type_hints(kind, bounds=True)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name not in others}
    checked = {}
    for key, value in values.items():
        options.choose(f"recipe key {prefix}{key}", key, fields)  # refuses an unknown key
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise InputError(f"{prefix}{key}", value, allowed="a table")
            value = table_of(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        checked[key] = value
    for name, f in fields.items():
        has_no_default = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if name not in checked and has_no_default:
            raise InputError(f"recipe key {prefix}{name}: missing, and there is no default")
    table = kind(**checked, **others)
    options.check_fields(table, prefix)
    return table


# The recipes of DPSGD-2020's tables: one for every cell of its Tables 2, 3 and 5, and for Tables 4 and 6
# with open speech data.
#
# CIFAR-10, sections 4 and 4.1 of the paper: 320 epochs, ×0.1 after 160 and 240, momentum 0.9, weight decay
# 5e-4, crops and flips, normalized channels; 16 learners, DPSGD mixing with one random partner per step. The
# paper states neither the number of learners in Table 2's runs, nor how the noise differs between them.
#
# Speech, section 4.2: the paper's network, 10 epochs of warm-up and 10 of annealing by 1/√2. Switchboard
# has four million samples and a baseline batch of 256; the spoken digits have 3,856, so that all batches are
# a sixteenth of the paper's, and rates are those of batch 16. Our choices: these batches, the imbalance of 4
# between the digits, and plain SGD as the optimizer.
NETWORKS = (
    "efficientnet-b0", "senet-18", "vgg-19", "resnet-18", "densenet-121", "mobilenet", "mobilenet-v2",
    "shufflenet-v2", "googlenet", "resnext-29",
)  # fmt: skip


# The total batches of Table 3, and those that stand for Table 4's.
BATCHES, SPEECH_BATCHES = (1024, 2048, 4096, 8192), (128, 256, 512)


# The training samples of each task, which turn epochs into steps: images, and windows of 21 frames.
SAMPLES = {"cifar10": 50_000, "speech": 3_856}


EPOCHS = {"cifar10": 320.0, "speech": 20.0}


# σ of SSGD* at the largest batch, the best that the paper found (section 4.3).
SIGMA = {"efficientnet-b0": 0.04, "senet-18": 0.01, "lstm": 0.01}


ALGORITHMS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "ssgd"},  # of one learner
    "ssgd": {"name": "ssgd"},
    "dpsgd": {"name": "dpsgd", "mixing": "random-matching"},
    "ssgd-noise": {"name": "ssgd*"},
}


@dataclass(frozen=True)
class Series:
    """Cells of one table: all ``models`` × ``batches`` × ``algorithms`` × ``rates``.

    ``rates`` are for batch ``base`` and scaled linearly to others; ``base`` 0: not scaled.
    """

    where: str
    task: str
    models: tuple[str, ...]
    batches: tuple[int, ...]
    algorithms: tuple[str, ...]
    rates: tuple[float, ...] = (0.1,)
    base: int = 1024
    rate_in_name: bool = False

    @property
    def pattern(self) -> str:
        """The names, as a shell would write them: cifar10/NETWORK-b{1024,2048}-{ssgd,dpsgd}."""
        model = "NETWORK" if self.models == NETWORKS else _braces(self.models)
        rate = f"-lr{_braces(self.rates)}" if self.rate_in_name else ""
        return f"{self.task}/{model}-b{_braces(self.batches)}-{_braces(self.algorithms)}{rate}"


def _braces(words: Iterable[Any]) -> str:
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


_BOTH, _LSTM = ("ssgd", "dpsgd"), ("lstm",)


SERIES = (
    Series("Tables 2 and 3, baseline", "cifar10", NETWORKS, (128,), ("sgd",), base=0),
    # One learner up to batch 512 is ours; Table 2's 1024 is the first cell of Table 3.
    Series("Table 2", "cifar10", NETWORKS, (256, 512), ("sgd",), base=0),
    Series("Table 3", "cifar10", NETWORKS, BATCHES, _BOTH),
    Series("Table 2", "cifar10", NETWORKS, (2048, 4096, 8192), ("ssgd",), base=0, rate_in_name=True),
    Series("Table 5", "cifar10", NETWORKS, (8192,), _BOTH, (0.4, 0.2), 8192, rate_in_name=True),
    Series("Figure 1", "cifar10", ("efficientnet-b0", "senet-18"), (8192,), ("ssgd-noise",)),
    Series("as Table 4, batches / 16", "speech", _LSTM, SPEECH_BATCHES, _BOTH, base=16),
    Series(
        "as Table 6", "speech", _LSTM, (256, 512), _BOTH, (0.05, 0.025, 0.0125), 16, rate_in_name=True
    ),
    Series("as Figure 1", "speech", _LSTM, (512,), ("ssgd-noise",), base=16),
)  # fmt: skip


@functools.cache
def cells() -> dict[str, tuple[Series, str, int, str, float]]:
    """Return the paper's runs by recipe name: series, model, batch, algorithm, learning rate."""
    by_name = {}
    for s in SERIES:
        for model, batch, algorithm, rate in itertools.product(s.models, s.batches, s.algorithms, s.rates):
            suffix = f"-lr{rate:g}" if s.rate_in_name else ""
            name = f"{s.task}/{model}-b{batch}-{algorithm}{suffix}"
            assert name not in by_name
            by_name[name] = s, model, batch, algorithm, rate
    return by_name


def paper_recipe_values(name: str, changes: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values, by key, of the recipe ``name`` of DPSGD-2020's tables; None for any other name.

    ``changes`` are the user's settings. Three of them determine the number of steps: ``epochs``, ``batch``
    and ``data.subset``. Only these recipes have the setting ``epochs``; it also scales the schedule. Raises
    InputError for an unknown name that begins with "cifar10/" or "speech/".
    """
    if name not in cells():
        if name.partition("/")[0] in SAMPLES and not name.endswith(".toml"):
            similar = near(name, cells())  # words that suggest similar names, or ""
            raise InputError(f"recipe: '{name}' is not known{similar}; landscape recipes lists all")
        return None
    series, model, batch, algorithm, lr = cells()[name]
    # fit() checks the type and the range of a value.
    epochs = fit("epochs", changes.get("epochs", EPOCHS[series.task]), Positive)
    batch = fit("batch", changes.get("batch", batch), Count)
    samples = SAMPLES[series.task]
    data = changes.get("data")
    if isinstance(data, dict) and isinstance(data.get("subset"), int) and data["subset"] > 0:
        samples = data["subset"]  # any other value raises an error later, when all keys are checked
    steps = max(1, round(epochs * samples / batch))
    task_tables = _task_tables(series.task, share=epochs / EPOCHS[series.task])
    noise = {"sigma": SIGMA[model]} if algorithm == "ssgd-noise" else {}
    return {
        "name": name,
        "learners": 1 if algorithm == "sgd" else 16,
        "batch": batch,
        "lr": lr,
        "steps": steps,
        "decompose": {"every": 0},
        # Intervals for 32 evaluations and four checkpoints (our choice).
        "evaluate": {"every": math.ceil(steps / 32)},
        "checkpoint": {"every": math.ceil(steps / 4)},
        **task_tables,  # two of these, "model" and "schedule", are completed below
        "algorithm": ALGORITHMS[algorithm] | noise,
        "model": {"name": model, **task_tables["model"]},
        "schedule": {"unit": "epochs", "base_batch": series.base, **task_tables["schedule"]},
    }


def _task_tables(task: str, share: float) -> dict[str, Any]:
    """Return the tables that a task decides, with the schedule for ``share`` of the task's epochs."""
    if task == "speech":
        return {
            "model": {"classes": 100},
            "data": {"name": "spoken-digits", "imbalance": 4.0},
            "schedule": {"warmup": 10 * share, "anneal": round(0.5 ** (0.5 / share), 6)},
        }
    return {
        "model": {},
        "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 5e-4},
        "data": {"name": "cifar10", "augment": True},
        "schedule": {"milestones": [160 * share, 240 * share], "factor": 0.1},
    }


BUILT_IN = Path(__file__).parent


def built_in() -> list[str]:
    """Return the names of the recipes that come with the package as files."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))


def names() -> list[str]:
    """Return the names of all built-in recipes: those in files, then those of DPSGD-2020's tables."""
    return [*built_in(), *cells()]


def facts(name: str) -> dict[str, Any]:
    """Return the main values of a built-in recipe by name; lr is the peak of the schedule."""
    values = paper_recipe_values(name, {}) or file_values(name)
    schedule = table_of(Schedule, values.get("schedule", {}), "schedule.")
    numbers = {key: values[key] for key in ("learners", "batch", "lr", "steps")}
    numbers["lr"] = schedule.peak_lr(values["lr"], values["batch"])
    return {"name": name, **{table: values[table]["name"] for table in ("algorithm", "data")}, **numbers}


@options.checked()
def recipes(pattern: str | None = None) -> dict[str, str]:
    """List the built-in recipes: each name with a line on its settings.

    Args:
        pattern: a pattern of names, such as "cifar10/resnet-18-*". Default: all but the recipes of
            DPSGD-2020's tables, which are hundreds.

    Returns:
        Name -> algorithm, data, number of learners n, total batch nB, peak learning rate and steps.

    Example:
        >>> recipes("digits-dpsgd")
        {'digits-dpsgd': 'dpsgd     digits  n = 5, nB = 500, lr 0.5, 500 steps'}
    """
    chosen = [name for name in names() if fnmatchcase(name, pattern)] if pattern else built_in()
    line = "{algorithm:9} {data:7} n = {learners}, nB = {batch}, lr {lr:g}, {steps} steps"
    return {name: line.format(**facts(name)) for name in chosen}


def file_values(recipe: str) -> dict[str, Any]:
    """Return the values of the recipe in a file, whose name is the default for the recipe's name."""
    path = BUILT_IN / f"{recipe}.toml"
    if recipe not in built_in():
        path = Path(recipe)
        if path.suffix != ".toml":
            options.choose("recipe", recipe, built_in())
    try:
        values = options.parse_toml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise OperationError(f"{path}: cannot be read as a recipe ({error})") from error
    return {"name": path.stem} | values
