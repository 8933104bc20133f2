"""The values of a recipe: settings that change them, those of DPSGD-2020's tables, those without effect."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from landscape.core import registry
from landscape.core.errors import DataWarning, InputError, warn_caller
from landscape.core.options import MAX_DEPTH, Count, Positive, fit, near
from landscape.training import optimizer

#: A setting that begins so takes the key out, as in Hydra.
UNSET = "~"
#: The tables whose keys depend on their name, and where it is looked up.
NAMED: dict[str, Any] = {
    "algorithm": registry.algorithms,
    "optimizer": optimizer,
    "model": registry.models,
    "data": registry.data_sets,
}


def changed(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Change ``values`` by ``settings``, values by dotted key, and return it.

    "~KEY" takes a key out. Where a table's name becomes another one, keys that only the old name has go, and
    a warning says which.
    """
    before = {table: table_name(values, table) for table in NAMED}
    for key, value in settings.items():
        *tables, last = key.split(".")
        if len(tables) > MAX_DEPTH:
            raise InputError(f"settings: a key has {len(tables) + 1} parts, at most {MAX_DEPTH} are allowed")
        if key.startswith(UNSET):
            _take_out(values, key)
            continue
        inner = values
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise InputError(f"settings: '{key}' is not allowed, '{table}' is not a table")
        inner[last] = plain_value(key, value)
    for table, old in before.items():
        if f"{table}.name" in settings and old not in (None, table_name(values, table)):
            _drop_keys_of(old, table, values[table], settings)
    return values


def table_name(values: Mapping[str, Any], table: str) -> Any:
    """The name in a table of a recipe; None for a table without a name."""
    part = values.get(table)
    default = "sgd" if table == "optimizer" else None
    return part.get("name", default) if isinstance(part, dict) else None


def _take_out(values: dict[str, Any], key: str) -> None:
    """Remove what "~KEY" names."""
    *tables, last = key.removeprefix(UNSET).split(".")
    inner: Any = values
    for table in tables:
        inner = inner.get(table) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        keys = ", ".join(inner) if isinstance(inner, dict) and inner else "no such table"
        raise InputError(f"settings: '{key}' is not allowed, the recipe has no such key (it has: {keys})")
    del inner[last]


def _drop_keys_of(old: str, table: str, values: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Take out those keys of a table that its new name does not have and ``settings`` do not give."""
    name = str(values["name"])
    if table == "optimizer":
        allowed = {optimizer.GROUPS, *optimizer.options(optimizer.full_name(name), {})}
    elif name in NAMED[table]:
        allowed = {"split", *inspect.signature(NAMED[table][name]).parameters}
    else:
        return  # code of the user, whose options are known when it is run; another name is refused later
    removed = [key for key in values if key not in {"name", *allowed} and f"{table}.{key}" not in settings]
    for key in removed:
        del values[key]
    if removed:
        keys = ", ".join(f"{table}.{key}" for key in removed)
        warn_caller(f"{keys}: left out, {old} has it and {name} does not", DataWarning)


def plain_value(key: str, value: Any) -> Any:
    """``value`` of a key as TOML has it; of NumPy's numbers and arrays, paths, tuples and ranges."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain_value(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain_value(key, item) for item in value]
    if not isinstance(value, (bool, int, float, str, Path)):
        raise InputError(key, value, allowed="text, a number, a list or a table")
    return str(value) if isinstance(value, Path) else value


def parsed(settings: Iterable[str]) -> dict[str, Any]:
    """Values by dotted key of "KEY=VALUE" settings; of several for a key the last one counts.

    "~KEY", which takes a key out, is a key without a value.

    Example:
        >>> parsed(["lr=0.5", "algorithm.name=dpsgd", "~epochs"])
        {'lr': 0.5, 'algorithm.name': 'dpsgd', '~epochs': None}
    """
    values: dict[str, Any] = {}
    for setting in settings:
        if setting.startswith(UNSET) and "=" not in setting:
            values[setting.strip()] = None
            continue
        key, value = key_and_value(setting)
        values.pop(key, None)  # the last one comes last
        values[key] = parse_value(value)
    return values


def key_and_value(setting: str) -> tuple[str, str]:
    """("lr", "0.5") of "lr=0.5"; InputError where it is not of that form.

    Example:
        >>> key_and_value("lr=0.5")
        ('lr', '0.5')
    """
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise InputError(f"settings: '{setting}' is not allowed, it must be KEY=VALUE, such as lr=0.5")
    return key.strip(), text


def parse_value(written: str) -> Any:
    """A TOML value; other text is a string without quotes, as in algorithm.name=dpsgd.

    Example:
        >>> parse_value("0.5"), parse_value("[1, 2]"), parse_value("dpsgd")
        (0.5, [1, 2], 'dpsgd')
    """
    try:
        return tomllib.loads(f"v = {written}")["v"]
    except tomllib.TOMLDecodeError:
        return written
    except (RecursionError, ValueError) as error:
        start = f"{written[:20]}…" if len(written) > 20 else written
        raise InputError(f"settings: '{start}' is not allowed ({' '.join(str(error).split())})") from error


# The recipes of DPSGD-2020's tables: one for every cell of its Tables 2, 3 and 5, and for Tables 4 and 6
# with open speech data.
#
# CIFAR-10, sections 4 and 4.1 of the paper: 320 epochs, ×0.1 after 160 and 240, momentum 0.9, weight decay
# 5e-4, crops and flips, normalized channels; 16 learners, DPSGD mixing with one random partner a step. The
# paper gives neither how many learners Table 2's runs have, nor how noise is spread over them.
#
# Speech, section 4.2: the paper's network, 10 epochs of warm-up and 10 of annealing by 1/√2. Switchboard
# has four million samples and a baseline batch of 256; the spoken digits have 3,856, so that all batches
# are a sixteenth of the paper's and rates are those of batch 16. That, the imbalance of 4 between the
# digits and the optimizer, which is plain SGD, are ours.
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
    """The series, model, batch, algorithm and rate of each recipe, by its name, table by table."""
    by_name = {}
    for s in SERIES:
        for model, batch, algorithm, rate in itertools.product(s.models, s.batches, s.algorithms, s.rates):
            suffix = f"-lr{rate:g}" if s.rate_in_name else ""
            name = f"{s.task}/{model}-b{batch}-{algorithm}{suffix}"
            assert name not in by_name
            by_name[name] = s, model, batch, algorithm, rate
    return by_name


def table_values(name: str, changes: dict[str, Any]) -> dict[str, Any] | None:
    """The values of the recipe ``name``, for the epochs and batch of ``changes``; None for another name.

    The key ``epochs``, which only these recipes have, shortens the run with its schedule; ``batch`` keeps the
    epochs. Raises InputError for a name that is like one of theirs.
    """
    if name not in cells():
        if name.partition("/")[0] in SAMPLES and not name.endswith(".toml"):
            similar = near(name, cells())
            raise InputError(f"recipe: '{name}' is not known{similar}; landscape recipes lists all")
        return None
    series, model, batch, algorithm, rate = cells()[name]
    epochs = fit("epochs", changes.get("epochs", EPOCHS[series.task]), Positive)
    batch = fit("batch", changes.get("batch", batch), Count)
    data = changes.get("data", {})
    samples = data.get("subset") if isinstance(data, dict) else 0
    samples = samples if isinstance(samples, int) and samples > 0 else SAMPLES[series.task]
    steps = max(1, round(epochs * samples / batch))
    of_task = _of_task(series.task, epochs / EPOCHS[series.task])
    return {
        "name": name,
        "learners": 1 if algorithm == "sgd" else 16,
        "batch": batch,
        "lr": rate,
        "steps": steps,
        "decompose": {"every": 0},
        "evaluate": {"every": -(-steps // 32)},  # this and the four checkpoints are ours
        "checkpoint": {"every": -(-steps // 4)},
        **of_task,
        "algorithm": ALGORITHMS[algorithm] | ({"sigma": SIGMA[model]} if algorithm == "ssgd-noise" else {}),
        "model": {"name": model, **of_task["model"]},
        "schedule": {"unit": "epochs", "base_batch": series.base, **of_task["schedule"]},
    }


def _of_task(task: str, share: float) -> dict[str, Any]:
    """The tables that a task decides; the schedule is that of a run of ``share`` of its epochs."""
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


# Settings without effect, which a new recipe may not have.

# What ``needs`` of tables, rules and optimizers may name besides options: facts about the run.
CHANGES, SPLITS = "a rate that changes", "steps along the mean gradient"


STATE, READ = "an optimizer with a state", "an instrument that reads it"


OTHER = "an optimizer other than plain SGD"


#: Of the tables that have no name.
NEEDS: dict[str, dict[str, str]] = {
    "schedule": {"unit": CHANGES, "factor": "milestones", "milestones": "factor != 1"},
    "decompose": {"samples": "every > 0", "split": f"every > 0 and {SPLITS}"},
    "monitor": {"every": "instruments", **dict.fromkeys(("samples", "k", "draws", "rho", "window"), READ)},
}


COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, "!=": operator.ne}


def _tables(recipe: Any) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]]:
    """The tables of a recipe: where, ``needs``, the values, and the defaults of what has needs."""
    for table, needs in NEEDS.items():
        values = getattr(recipe, table)
        yield table, needs, vars(values), vars(type(values)())

    def named(where: str, kinds: Any, needs: Mapping[str, str], name: str, options: dict[str, Any]) -> Any:
        plain = {key: value for key, value in options.items() if key not in needs}
        return where, needs, kinds.options(name, options), kinds.options(name, plain)

    yield named("algorithm", registry.algorithms, recipe.rule().needs, *recipe.part("algorithm"))
    spec = recipe.spec("optimizer")
    groups = spec.options.pop(optimizer.GROUPS, {}).items()
    tables = {f"optimizer.groups.{key}": group for key, group in groups}
    for where, group in {"optimizer": {"name": spec.name, **spec.options}, **tables}.items():
        given = {key: value for key, value in group.items() if key not in ("name", "lr_factor", "frozen")}
        if "name" in group:  # else it is frozen
            yield named(where, optimizer, optimizer.make(group["name"], given).needs, group["name"], given)


def _is_true(term: str, facts: Mapping[str, Any]) -> Any:
    """Return whether a fact, or "KEY < VALUE", or "KEY + KEY <= VALUE", is true."""
    if term in facts:
        return facts[term]
    keys, sign, bound = term.rsplit(" ", 2)
    value = functools.reduce(operator.add, (facts[key] for key in keys.split(" + ")))
    return COMPARE[sign](value, facts[bound] if bound in facts else type(value)(bound))


def idle(recipe: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a :class:`.Recipe` that are no defaults and change nothing: key -> value, its needs."""
    s, m, rule = recipe.schedule, recipe.monitor, recipe.rule()
    method = optimizer.make(*recipe.part("optimizer"))
    instruments = [*m.instruments, *(["lambda-max"] if m.sharpness else [])]
    read = {key for name in instruments for key in registry.instruments[name].reads}
    facts = {
        "learners": recipe.learners,
        "steps": recipe.steps,
        CHANGES: s.warmup or s.milestones or s.anneal != 1 or s.cosine,
        SPLITS: method.direction_is_gradient and any(map(rule.follows_mean_direction, range(1, 100))),
        STATE: method.names,
        OTHER: method.names or not method.linear,
    }
    keys = {}
    for where, needs, values, defaults in _tables(recipe):
        for key, condition in needs.items():
            if values.get(key) == defaults.get(key):
                continue
            terms = {**facts, **values, READ: key in read}
            ways = [way.split(" and ") for way in condition.split(" or ")]
            unmet = [" and ".join(term for term in way if not _is_true(term, terms)) for way in ways]
            if all(unmet):
                keys[f"{where}.{key}"] = values[key], " or ".join(dict.fromkeys(unmet))
    spec = recipe.spec("optimizer")
    groups = spec.options.pop(optimizer.GROUPS, {})
    if all(group == {"name": spec.name, "lr_factor": 1.0, **spec.options} for group in groups.values()):
        for key in groups:
            keys[f"optimizer.groups.{key}"] = recipe.optimizer[optimizer.GROUPS][key], "a setting of its own"
    return keys


def refuse_idle(recipe: Any) -> Any:
    """``recipe``; InputError for a setting without effect."""
    for key, (value, needs) in idle(recipe).items():
        raise InputError(f"{key}: {value!r} is not allowed, it changes nothing without {needs}; leave it out")
    return recipe
