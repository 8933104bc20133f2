"""Recipes: the settings of a run, checked."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from landscape.checkpoint.checkpoint import IMPORTED, Checkpoint
from landscape.checkpoint.user_code import Spec, is_user_defined
from landscape.core import options, registry
from landscape.core.errors import InputError, OperationError
from landscape.core.hdf5 import Array
from landscape.core.options import Count, Natural, Positive, Seed
from landscape.data import base
from landscape.training import optimizer
from landscape.training import recipes as built_in
from landscape.training.algorithms import Rule
from landscape.training.recipes import Decompose, Diverge, Evaluate, Init, Monitor, Save, Schedule, table_of
from landscape.training.recipes import settings as keys
from landscape.training.recipes.settings import NAMED, UNSET, parsed, refuse_without_effect, with_changes
from landscape.training.topology import is_file, stored_matrices

MATRIX = "matrix"  # the name in a checkpoint of the mixing matrix that the run read from a file

# The tables whose name may be MODULE:NAME.
CODE_TABLES = ("model", "data")


@dataclass(frozen=True)
class Recipe:
    """All settings of a run: ``read`` and ``replace`` make them, ``landscape.train`` takes them.

    The reference of recipe keys is made from this docstring and its tables'.

    Attributes:
        name: A name for messages and plots. Source: the name of the recipe's file.
        learners: Number of learners n.
        batch: Total batch nB of a step. It must be divisible by n. Unit: samples.
        lr: Learning rate α; with ``schedule.base_batch`` the rate for that batch.
        steps: Length of the run. Unit: steps.
        seed: Seed of the initial weights, the minibatches and all other random numbers. Source: ours.
        dtype: Precision of weights, optimizer state and passes over whole data sets. Source: PyTorch's.
        autocast: "bfloat16" runs the network on minibatches under autocast, on CPU as well as CUDA; "": in
            ``dtype``. Source: ours; "" changes no number.
        accumulate: Number of microbatches in which each local minibatch is computed. Source: ours; 1 is the
            whole minibatch at once.
        sampling: "replacement" draws minibatches with replacement. "all" takes the whole training set in each
            step, an equal share for each learner in order, so that gradients have no sampling noise; the
            training set must then have ``batch`` samples. Source: ours; the paper does not say how it draws.
        scalars: Tracker that gets the rows of the history, too; "": none. Source: ours; "" needs no package.
        algorithm, model, data, optimizer: Tables with a ``name`` and the options of that part. ``data`` has
            the key ``split``, too: "iid": all learners draw from the whole training set. Otherwise each draws
            from a part of its own, of B samples or more: "dirichlet(0.1)": each label in shares drawn from
            Dirichlet(α, …, α); "labels(2)": that number of labels a learner; "sizes(0.5, 0.5)": shares of all
            samples at random; "by(COLUMN)": the values of a column of the data, each to one learner.
        schedule, decompose, evaluate, checkpoint, monitor, diverge, init: Tables of further keys.
        matrices: Mixing matrices by the names of their files, each read once; no key.

    Example:
        >>> Recipe.read("digits-dpsgd", steps=100).steps
        100
    """

    name: str
    learners: Count
    batch: Count
    lr: Positive
    steps: Natural
    algorithm: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    seed: Seed = 0
    dtype: Literal["float32", "float64"] = "float32"
    autocast: Literal["", "bfloat16"] = ""
    accumulate: Count = 1
    sampling: Literal["replacement", "all"] = "replacement"
    scalars: Literal["", "tensorboard", "wandb", "trackio"] = ""
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "sgd"} | optimizer.options("sgd", {}))
    schedule: Schedule = field(default_factory=Schedule)
    decompose: Decompose = field(default_factory=Decompose)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Save = field(default_factory=Save)
    monitor: Monitor = field(default_factory=Monitor)
    diverge: Diverge = field(default_factory=Diverge)
    init: Init = field(default_factory=Init)
    #: Mixing matrices by the names of their files, each read once: stored in checkpoints, no key of a recipe.
    matrices: dict[str, Array] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        options.check_fields(self)
        if self.batch % self.learners:
            n, example = self.learners, max(1, self.local_batch) * self.learners
            raise InputError("batch", self.batch, allowed=f"divisible by {n} learners, as {example} is")
        if self.local_batch % self.accumulate:
            raise InputError("accumulate", self.accumulate, allowed=f"a divisor of B, {self.local_batch}")
        if self.autocast and self.dtype == "float64":
            raise InputError("autocast: 'bfloat16' is not allowed with dtype 'float64', only with 'float32'")
        maximum = torch.finfo(getattr(torch, self.dtype)).max
        if self.schedule.peak_lr(self.lr, self.batch) > maximum:
            raise InputError(f"lr: {self.lr} is not allowed, {self.dtype} has numbers up to {maximum:.4g}")
        if self.init.sha256 and not self.init.checkpoint:
            raise InputError("init.sha256: not allowed without init.checkpoint")
        # The options of the parts are checked here, before any data is read.
        self.rule()
        optimizer.make(*self.part("optimizer"))
        self.spec("model")
        self.spec("data")
        self.split  # noqa: B018 - refuses a split that is not allowed

    def __repr__(self) -> str:
        """Return the arguments that differ from the defaults, in a line for the run and for each table."""
        run, tables = list[str](), list[str]()
        for key in dataclasses.fields(self):
            value = getattr(self, key.name)
            default = key.default if key.default_factory is dataclasses.MISSING else key.default_factory()
            if dataclasses.is_dataclass(value):
                value = {name: v for name, v in vars(value).items() if v != getattr(default, name)}
                default = {}
            if key.repr and value != default:
                (tables if isinstance(value, dict) else run).append(f"{key.name}={value!r}")
        return "Recipe(" + ",\n       ".join([", ".join(run), *tables]) + ")"

    def part(self, table: str) -> tuple[str, dict[str, Any]]:
        """Name and options of a part of the run, as they are given.

        Args:
            table: "algorithm", "model", "data" or "optimizer".

        Returns:
            (name, options); the optimizer is SGD by default.

        Raises:
            InputError: for a table without a name.

        Example:
            >>> Recipe.read("digits-dpsgd").part("algorithm")
            ('dpsgd', {'mixing': 'full'})
        """
        values = ({"name": "sgd"} if table == "optimizer" else {}) | getattr(self, table)
        if table == "data":
            values.pop("split", None)
        if "name" not in values:
            raise InputError(f"{table}.name: missing, and there is no default")
        name = str(values.pop("name"))
        return (optimizer.full_name(name) if table == "optimizer" else name), values

    def spec(self, table: str) -> Spec:
        """Name and options of a part of the run, checked, with their defaults; MODULE:NAME is not imported.

        Args:
            table: "algorithm", "model", "data" or "optimizer".

        Returns:
            An object with ``name`` and ``options``.

        Example:
            >>> Recipe.read("digits-dpsgd").spec("algorithm").options["order"]
            'awc'
        """
        name, values = self.part(table)
        if not (table in CODE_TABLES and is_user_defined(name)):
            values = NAMED[table].options(name, values)
        return Spec(name, values, called=True)

    @property
    def split(self) -> base.Division:
        """The way in which the learners share the training set, ``data.split``."""
        text = options.fit("data.split", self.data.get("split", base.IID), str)
        return base.parse(text, self.learners)

    @property
    def names_code(self) -> bool:
        """Return whether its model or data is MODULE:NAME."""
        return any(is_user_defined(self.spec(table).name) for table in CODE_TABLES)

    def rule(self) -> Rule:
        """Make the update rule that the table "algorithm" describes.

        Returns:
            A new rule, without state.

        Example:
            >>> Recipe.read("digits-dpsgd").rule().label
            'DPSGD'
        """
        with stored_matrices(self.matrices):
            name, values = self.part("algorithm")
            rule: Rule = registry.algorithms.make(name, values, learners=self.learners, seed=self.seed)
        rule.peak_lr = self.schedule.peak_lr(self.lr, self.batch)
        return rule

    def stability_limit(self) -> float | None:
        """The largest ηλ at which the rule with its optimizer is stable on a quadratic loss.

        Returns:
            The limit, without unit; None: unknown.

        Example:
            >>> Recipe.read("digits-dpsgd").stability_limit()
            1.0
        """
        momentum = optimizer.make(*self.part("optimizer")).heavy_ball
        return self.rule().stability_limit(*momentum) if momentum else None

    def describe(self) -> str:
        """Return the rule's line for the user, with its mixing matrix and its stability limit.

        Returns:
            The line; "" for a rule that has none.

        Example:
            >>> "spectral gap" in Recipe.read("digits-dpsgd").describe()
            True
        """
        return self.rule().describe(*(optimizer.make(*self.part("optimizer")).heavy_ball or (None,)))

    @property
    def local_batch(self) -> int:
        """The local minibatch B of a learner, in samples."""
        return self.batch // self.learners

    def rate(self, step: int, samples: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: counted from 1.
            samples: those of the training set.

        Returns:
            α, with what the schedule makes of it.

        Example:
            >>> Recipe.read("digits-dpsgd", lr=0.5).rate(1, samples=1500)
            0.5
        """
        return self.schedule.at(self.lr, step, self.batch, samples)

    def values(self) -> dict[str, Any]:
        """Return the values of all keys, nested as the tables are.

        Returns:
            A copy, which may be changed.

        Example:
            >>> Recipe.read("digits-dpsgd").values()["decompose"]["every"]
            10
        """
        values = dataclasses.asdict(self)
        del values["matrices"]
        return values

    def to_toml(self) -> str:
        """Write the whole recipe, defaults included, as TOML, which :meth:`read` takes from a file.

        Returns:
            The text.

        Example:
            >>> Recipe.read("digits-dpsgd").to_toml().splitlines()[0]
            'name = "digits-dpsgd"'
        """
        specs = {table: self.spec(table) for table in NAMED}
        named = {table: {"name": spec.name, **spec.options} for table, spec in specs.items()}
        named["data"]["split"] = self.split.text
        return options.toml_text(self.values() | named)

    @classmethod
    def read(cls, recipe: str | Path, /, *, allow_code: bool = False, **settings: Any) -> Recipe:
        """Read the recipe of a built-in name or a TOML file, and change some of its settings.

        Args:
            recipe: a name (:func:`landscape.recipes` lists them) or the path of a TOML file.
            allow_code: a file may name code, MODULE:NAME, that is to be run; without it only settings may.
            settings: values by key; a key within a table is dotted, ``**{"algorithm.mixing": "ring(1)"}``.

        Returns:
            The checked recipe.

        Raises:
            InputError: for a name, key or value that is not allowed, or a setting that changes nothing.
            OperationError: for a file that cannot be read.

        Example:
            >>> Recipe.read("digits-dpsgd", lr=0.5, **{"algorithm.mixing": "ring(1)"}).algorithm
            {'name': 'dpsgd', 'mixing': 'ring(1)'}
        """
        return refuse_without_effect(read(recipe, settings, allow_code=allow_code))

    def replace(self, **settings: Any) -> Recipe:
        """Make a recipe with some other settings; this one stays as it is.

        Args:
            settings: values by key, as of :meth:`read`.

        Returns:
            The checked recipe.

        Raises:
            InputError: for a key or value that is not allowed, or a setting that changes nothing.

        Example:
            >>> Recipe.read("digits-dpsgd").replace(steps=10, **{"decompose.every": 0}).steps
            10
        """
        values = with_changes(self.values(), settings)
        has_same_algorithm = values["algorithm"] == self.algorithm
        matrix = next(iter(self.matrices.values()), None) if has_same_algorithm else None
        return refuse_without_effect(from_values(values, matrix))


def read(
    recipe: str | Path, settings: Iterable[str] | Mapping[str, Any] = (), *, allow_code: bool = False
) -> Recipe:
    """Return the recipe of a built-in name or of a TOML file, changed by ``settings``.

    The arguments are as for :meth:`Recipe.read`, except ``settings``: dotted key -> value, or texts
    "KEY=VALUE" as for the commands; the text "~KEY" removes a key.

    Example:
        >>> recipe = read("digits-dpsgd", ["lr=0.5", "algorithm.mixing=ring(1)"])
        >>> recipe.lr, recipe.learners, recipe.rule().mixing.spec
        (0.5, 5, 'ring(1)')
    """
    recipe = str(recipe)
    changes = dict(settings) if isinstance(settings, Mapping) else parsed(settings)
    new_values = {key: value for key, value in changes.items() if not key.startswith(UNSET)}
    new_tables = with_changes({}, new_values)  # the settings alone, as nested tables
    values = built_in.paper_recipe_values(recipe, new_tables)
    if values is None:  # a bundled file's name, or a file
        values = built_in.file_values(recipe)
    else:
        # The user may set ``epochs``, which is no key of a recipe. paper_recipe_values() has computed the
        # ``steps`` in ``values`` from ``epochs``.
        changes.pop("epochs", None)
    values = with_changes(values, changes)
    tables_to_check = () if allow_code else CODE_TABLES
    for table in tables_to_check:
        name = keys.table_name(values, table)
        # A setting may name code; the file may not.
        if isinstance(name, str) and is_user_defined(name) and name != keys.table_name(new_tables, table):
            text = f"{recipe}: {table}.name = {options.toml_value(name)} is code, which a file may not name"
            # The message ends with "; give allow_code=True or the setting … yourself".
            alternative = f"the setting {table}.name={name} yourself"
            raise InputError(text, give={"allow_code": True}, otherwise=alternative)
    return from_values(values)


def from_values(values: dict[str, Any], matrix: Array | None = None) -> Recipe:
    """Return a checked recipe from nested values; unknown keys and wrong types raise InputErrors.

    ``matrix`` replaces the file that the table "algorithm" names, if it names one.
    """
    rule = options.bounded_toml(values, "recipe").get("algorithm", {})
    files = [v for v in rule.values() if is_file(v)] if isinstance(rule, dict) else []
    matrices = {} if matrix is None else {str(Path(name)): matrix for name in files}
    return typing.cast(Recipe, table_of(Recipe, values, "", matrices=matrices))


def recipe_of(checkpoint: Checkpoint) -> Recipe:
    """Return the recipe that a checkpoint's run followed, with the mixing matrix that it began with.

    Raises OperationError for one that ``landscape train`` did not make.
    """
    if not checkpoint.has_recipe:
        how = "imported" if checkpoint.algorithm == IMPORTED else "recorded in a loop of the user's own"
        raise OperationError(f"{checkpoint.path or 'run'}: it was {how}; give a run of landscape train")
    matrix = checkpoint.shared.get(MATRIX)
    return from_values(checkpoint.settings, None if matrix is None else matrix.cpu().numpy())


def continued(run: Checkpoint, /, **changes: Any) -> Recipe:
    """Return the recipe of a run that continues ``run``, without the measurements along the way.

    Raises OperationError for a run without a recipe, and for a recipe that names code, which a file may not.
    """
    recipe = recipe_of(run)
    if recipe.names_code:
        raise OperationError(f"{run.path}: not allowed, its recipe names code, which a file may not do")
    quiet: dict[str, Any] = {"decompose": Decompose(every=0), "monitor": Monitor()}
    evaluate = dataclasses.replace(recipe.evaluate, every=0)
    return dataclasses.replace(recipe, evaluate=evaluate, **quiet, **changes)
