"""Common parts of the commands: checkpoints as problems, options, files, messages and pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import torch

from landscape.analysis.forecast import forecast
from landscape.checkpoint import storage, user_code
from landscape.checkpoint.checkpoint import SCHEMA, Checkpoint
from landscape.checkpoint.states import files_of, name_beside, names_state
from landscape.checkpoint.weights import import_state
from landscape.cli import options
from landscape.cli.options import group
from landscape.cli.output import columns as columns
from landscape.cli.output import files as files
from landscape.cli.output import message as message
from landscape.cli.output import progress_bar as progress_bar
from landscape.cli.output import results as results
from landscape.cli.output import values as values
from landscape.core import hdf5, registry
from landscape.core.analysis import ANALYSES
from landscape.core.devices import pick_device
from landscape.core.errors import InputError, OperationError
from landscape.core.files import make_folder as make_folder
from landscape.core.options import SPLIT, Count, Seed, ends_in, type_hints
from landscape.core.progress import Progress, portion
from landscape.data.base import Dataset
from landscape.problem.problem import Loss, Problem
from landscape.results import base
from landscape.results.shown import text_of


def describe(result: base.Result) -> None:
    """Print the numbers of a result on stdout, also with -q; --json shows them with its fields."""
    values(text_of(result))


@dataclass(frozen=True)
class Target:
    """The file of the results, and the picture of them, if any.

    Args:
        output: Result file. [default: next to the checkpoint]
        replace: Replace another result that the file holds.
        picture: Draw it, too: .png, .pdf or .svg.
    """

    output: str | None
    replace: bool
    picture: str | None

    @contextlib.contextmanager
    def opened(self, default: Path, *, writes: bool = True) -> Iterator[storage.ResultFile]:
        """The file, checked before the work starts; at the end it is said whether anything was computed.

        ``writes``: whether this process is the one that writes it.
        """
        path = Path(self.output) if self.output else default
        check_targets(path, self.picture)
        with storage.ResultFile(path, "a", replace=self.replace, writes=writes) as file:
            yield file
        if not file.written:
            message(f"{path}: complete already, nothing is computed")

    def write(
        self,
        default: Path,
        sources: Iterable[str],
        compute: Callable[[], Iterable[base.Result]],
        describe: Callable[[Any], None],
    ) -> None:
        """Compute the results of the command that runs, unless the file has them; print and draw them.

        ``sources``: the names of the files that they come from, each with its SHA-256.
        """

        def described() -> Iterator[base.Result]:
            for result in compute():
                describe(result)
                yield result

        context = click.get_current_context()
        flags = {str(parameter.name): max(parameter.opts, key=len) for parameter in context.command.params}
        settings = {flags[name]: value for name, value in context.params.items() if name not in _ELSEWHERE}
        with self.opened(default) as file:
            items = file.once({"command": context.command.name, "source": [*sources], **settings}, described)
        for result in [] if file.written else items:
            describe(result)
        show(items, file.path, self.picture)


TARGET = group(Target)
#: Parameters of commands on which the numbers of a result do not depend.
_ELSEWHERE = ("checkpoints", "files", "output", "replace", "picture", "device", "data_dir")


def check_targets(path: Path | None, picture: str | None) -> None:
    """Check that a result and a picture can be written there, and make the folders.

    A checkpoint is never overwritten.
    """
    if path:
        ends_in("-o", path, [".h5"])
    if path and path.exists():
        schema = hdf5.schema_of(path)
        if schema == SCHEMA:
            raise OperationError(f"-o: {path} is a checkpoint, it is not overwritten; give another name")
    if picture:
        from landscape import plots  # and matplotlib: only where something is drawn

        plots.check_format(picture)
    for target in filter(None, (path, Path(picture) if picture else None)):
        make_folder(target.parent)


def show(items: Sequence[base.Result], path: Path | None, picture: str | None) -> None:
    """Draw the results if ``picture`` is given, and print the names of the files on stdout."""
    results(items)
    files(*([path] if path else []))
    if picture:
        from landscape import plots

        with progress_bar("picture"):
            plots.draw(items, picture)
        files(picture)


R = TypeVar("R", bound=base.Result)

# Defaults of options that the name of a result does not mention.
DEFAULTS = ("random", "none", "hessian", "worst", SPLIT)
# Seconds above which a command says before it starts what it will take (ours: a user then wonders).
LONG = 5.0


class GridType(click.ParamType):  # type: ignore[type-arg]  # no generic class in click 8.1
    """The points of a grid; a type and no callback, so that a default is read where commands call others."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """(nx, ny) from "50" or "51x25"; a default is a pair already."""
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", value)
        nx, ny = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if min(nx, ny) < 1:
            raise InputError(f"--grid: '{value}' is not allowed, it must be K or KXxKY ≥ 1, such as 51x25")
        return nx, ny


#: What a signature and its Args do not say of a parameter of an analysis, by its name: what click is told, as
#: of the options that commands share. A command adds to it, or replaces it.
TABLE: Mapping[str, options.Settings] = {
    "grid": {"type": GridType(), "help": "Points: K, or KXxKY such as 51x25."},
    "interpolation_tol": {"metavar": "SIZE"},
    "delays": {"flag": "--delay", "metavar": "τ,…"},
}


@dataclass
class Source:
    """The model, data and loss of an analysis; None: those of the checkpoint, or of the data.

    Args:
        model: MODULE:NAME, called to make it, or a built-in name; options follow in brackets. [default: the
            checkpoint's, if it is a built-in one]
        data: MODULE:NAME, called to make it, or a built-in name; options follow in brackets: (x, y), batches,
            or splits of them. [default: the checkpoint's]
        loss: MODULE:NAME of loss(outputs, targets), a mean (a class, or a name with brackets, is called to
            make it); or output: the model returns its loss. [default: the data's, else cross-entropy, or
            output where batches are single dicts]
        randomness: A model or loss that draws random numbers in eval mode: seed holds them fixed, a number is
            that of the draws over which the loss is averaged.
    """

    model: str | None = None
    data: str | None = None
    loss: str | None = None
    data_dir: str | None = None
    randomness: str = "refuse"

    def __post_init__(self) -> None:
        """Read what was named."""
        self.model_spec = user_code.known_spec("model", self.model, registry.models) if self.model else None
        self.data_spec = user_code.known_spec("data", self.data, registry.data_sets) if self.data else None

    @functools.cached_property
    def user_data(self) -> user_code.UserData | Dataset | None:
        """The user's data, made once."""
        return user_code.load_data("data", self.data_spec, self.data_dir) if self.data_spec else None

    def other_data(self, run: Checkpoint) -> str:
        """The name of the data if it is certainly not the checkpoint's data; "" otherwise.

        OperationError for data with the name of the checkpoint's data but another fingerprint.
        """
        trained_on, spec = run.data, self.data_spec
        if spec is None or not trained_on["name"]:
            return ""
        assert self.user_data is not None
        fingerprint = self.user_data.fingerprint
        if fingerprint and fingerprint == trained_on["fingerprint"]:
            return ""
        typed = user_code.parse("data", str(self.data)).options  # without a built-in one's defaults
        left_out = _left_out(spec, typed, trained_on)
        if not left_out and (spec.name, spec.options) != (trained_on["name"], trained_on["options"]):
            return user_code.command_text(spec.name, typed)
        if left_out or (fingerprint and trained_on["fingerprint"]):
            whole = user_code.command_text(trained_on["name"], trained_on["options"])
            cause = f"options are missing, give --data {whole}" if left_out else "random without a seed?"
            raise OperationError(
                f"--data: {spec.name} is not that of {run.path} by its fingerprint ({cause})"
            )
        return ""

    def of(
        self,
        run: Checkpoint,
        device: str,
        split: str = SPLIT,
        dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> Checkpoint:
        """``run`` with the problem that the options say.

        OperationError for the name of its model without the model's options.
        """
        spec = self.model_spec
        typed = user_code.parse("model", self.model).options if self.model else {}
        if spec and _left_out(spec, typed, run.model):
            whole = user_code.command_text(run.model["name"], run.model["options"])
            raise OperationError(f"--model: not that of {run.path} without its options; give --model {whole}")
        return run.using(
            split=split, model=self.model, data=self.user_data, loss=self.user_loss, data_dir=self.data_dir,
            device=pick_device(device), dtype=dtype, randomness=self.randomness, **more,
        )  # fmt: skip

    @functools.cached_property
    def user_loss(self) -> Loss | Literal["data"] | None:
        """The user's loss, or "data", as Checkpoint.problem takes it."""
        return user_code.load_loss("loss", self.loss) if self.loss else "data"


def _left_out(spec: user_code.Spec, typed: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """Return whether ``spec`` is the checkpoint's, except for options that were not ``typed``."""
    same = all(recorded["options"].get(key) == value for key, value in typed.items())
    return spec.name == recorded["name"] and spec.options != recorded["options"] and same


_NAME = {"metavar": "NAME"}
SOURCE = group(Source, model=_NAME, data=_NAME, loss=_NAME, randomness={"metavar": "refuse|seed|N"})


@dataclass(frozen=True, kw_only=True)
class AnalysisCommand:
    """The checkpoints of an analysis command, and the options that all of these commands have.

    ``settings`` are the options that are parameters of the function that the command calls.

    Args:
        seed: Of whatever the command draws.
        samples: Use at most N samples of the data, the same in each call, for a quick look. [default: all]
        metrics: A metric besides the loss: accuracy, error, top5, mse, mae, nll, margin, perplexity, f1 or
            calibration; or NAME=MODULE:FUNCTION of (outputs, targets). Can be repeated.
    """

    checkpoints: tuple[str, ...]
    settings: Mapping[str, Any]
    split: str = SPLIT
    seed: Seed = 0
    dtype: str = "float32"
    target: Target
    device: str
    source: Source
    metrics: tuple[str, ...] = ()
    samples: Count | None = None

    def open(self) -> list[Checkpoint]:
        """All checkpoints, read and checked before a model or data is made.

        The folder of a run stands for its last one; weights trained elsewhere become one.
        """
        dtype = getattr(torch, self.dtype)
        read = [_checked(Path(path)) for path in self.checkpoints]
        runs = [imported([item], self.source) if isinstance(item, Path) else item for item in read]
        metrics = user_code.load_metrics("--metric", self.metrics)
        more = {"metrics": metrics, "samples": self.samples}
        return [self.source.of(run, self.device, self.split, dtype, **more) for run in runs]

    def say_other_data(self, runs: Iterable[Any]) -> None:
        """A message for each of ``runs`` whose data is certainly another one."""
        for run in runs:
            if isinstance(run, Checkpoint) and (data_name := self.source.other_data(run)):
                run_data = user_code.command_text(run.data["name"], run.data["options"])
                message(f"--data: {data_name} is not the data of {run.path}, {run_data}")

    def about(self, *runs: Checkpoint) -> base.Provenance:
        """The origin of a result of a run, or between several.

        The label names data that is not the checkpoint's.
        """
        origins = [about(run, self.split, self.source.other_data(run)) for run in runs]
        if len(runs) == 1:
            return origins[0]
        data_name = self.source.other_data(runs[0])
        return {
            "split": self.split,
            "label": f"{len(runs)} checkpoints{f', on {data_name}' if data_name else ''}",
            "source": ", ".join(str(run.path) for run in runs),
            "source_sha256": ", ".join(of["source_sha256"] for of in origins),
        }

    def path(self, run: Checkpoint, kind: str, *variant: str) -> Path:
        """The default path of the result.

        It is next to the checkpoint, under a name with those values of ``variant``, --split and --samples
        that are no defaults, such as last-contour-pca.h5.
        """
        assert run.path is not None
        words = [kind, *(word for word in (*variant, self.split) if word not in DEFAULTS)]
        words += [f"{self.samples}-samples"] if self.samples else []
        return run.path.with_name(f"{run.path.stem}-{'-'.join(words)}.h5")

    def compute(
        self,
        kind: str,
        jobs: Iterable[Checkpoint | tuple[Any, ...]],
        function: Callable[..., R],
        *variant: str,
        describe: Callable[[R], None] = describe,
    ) -> None:
        """Print and write the results of ``jobs``: a checkpoint, or a tuple that begins with one or more.

        ``function`` takes a job, the options of the command, the progress, and where the result comes from,
        by keyword. ``kind`` and ``variant`` name the file.
        """
        whole = [job if isinstance(job, tuple) else (job,) for job in jobs]
        runs = [[part for part in job if isinstance(part, Checkpoint)] for job in whole]

        def compute() -> Iterator[R]:
            for (job, share), of in zip(with_progress(kind, whole), runs, strict=True):
                keywords = {**self.settings, **self.about(*of), "seed": self.seed, "progress": share}
                result = function(*job, **keywords)
                self.say_other_data(job)  # when the problem has turned out to be one
                yield result

        origins = [run.about(self.split) for run in {id(run): run for of in runs for run in of}.values()]
        sources = [f"{of['label']} ({of['source_sha256'][:16]})" for of in origins]
        if isinstance(data := self.source.user_data, user_code.UserData):  # whose code may give other numbers
            sources.append(f"data {data.fingerprint[:16]}")
        self.target.write(self.path(whole[0][0], kind, *variant), sources, compute, describe)


def _checked(path: Path) -> Checkpoint | Path:
    """The run in a file or folder, or ``path`` itself, whose files are there, if it has weights alone."""
    if not names_state(path):
        return Checkpoint.load(storage.checkpoint_in(path))
    files_of(path)
    return path


def imported(states: Sequence[Path], source: Source) -> Checkpoint:
    """The weights in files of other programs, all of the model that ``source`` names, beside the first."""
    if (spec := source.model_spec) is None:
        raise InputError(f"--model: missing; {states[0]} has only weights; give MODULE:NAME or a name")
    model = user_code.build_model("model", spec)
    run = import_state(states, model, name=spec.name, options=spec.options, message=message)
    run.path = name_beside(states[0])
    return run


def with_progress(title: str, jobs: Sequence[Any]) -> Iterator[tuple[Any, Progress]]:
    """``jobs`` with one progress bar: each with the function that takes the share of it that is done."""

    with progress_bar(title) as bar:
        for count, job in enumerate(jobs):
            yield job, portion(bar, count / len(jobs), (count + 1) / len(jobs))


# Parameters of analyses that are no settings of theirs, or that every analysis command has.
_GIVEN = ("seed", "max_memory", "device", "data_dir")


def analysis_options(
    function: Callable[..., Any],
    *,
    split: bool = True,
    seed: bool = True,
    metrics: bool = False,
    metavar: str = "CKPT…",
    required: bool = True,
    **own: options.Settings | None,
) -> options.Group:
    """The options of an analysis command, which it gets as one Analysis.

    Args:
        function: what the command calls. Its parameters that have a default and are numbers, texts or flags
            become options, as :func:`.options_of` makes them, and the help of --seed is its. One of a
            problem has --dtype, --max-memory, --model, --data, … besides.
        split: whether there is --split; without, the analysis is of the training set.
        seed: whether there is --seed.
        metrics: whether there is --metric.
        metavar: the name of the checkpoints in the help.
        required: whether there must be a checkpoint.
        own: what click is told of a parameter, which becomes an option; None for one that does not. It comes
            before what the function's declaration says.
    """
    parameters, hints = inspect.signature(function).parameters, type_hints(function, bounds=True)
    own = {**ANALYSES[function].options, **own}
    problem, split = "run" not in parameters, split and own.pop("split", {}) is not None
    names = dict.fromkeys(
        parameter.name
        for parameter in parameters.values()
        if parameter.name not in _GIVEN
        and parameter.default is not parameter.empty
        and options.is_plain(hints[parameter.name])
    )
    listed = [name for name in {**names, **own} if own.get(name, {}) is not None]
    settings = {name: {**TABLE.get(name, {}), **(own.get(name) or {})} for name in listed}
    limit = [options.option("max_memory")] if problem else []
    return options.group(
        AnalysisCommand,
        checkpoints=options.SHARED["files"] | {"metavar": metavar, "required": required},
        settings=options.Group(dict, options.options_of(function, **settings)),
        split={} if split and problem else None,
        seed={"help": options.sentences(function).get("seed", "Draws the directions.")} if seed else None,
        dtype={} if problem else None,
        metrics={"flag": "--metric", "metavar": "NAME"} if metrics else None,
        samples={"metavar": "N"} if problem else None,
        target=options.Group(TARGET.make, [*limit, *TARGET.options]),
        source=SOURCE if problem else options.Group(Source, [options.option("data_dir")]),
    )


def about(run: Checkpoint, split: str, other_data: str = "") -> base.Provenance:
    """The origin of a result of ``run``, as the result keeps it.

    ``other_data``: what the data is called where it is not the checkpoint's.
    """
    label: Any = {"label": f"{run.label}, on {other_data}"} if other_data else {}
    return run.about(split) | label


@functools.cache
def command_of(function: Callable[..., Any]) -> click.Command:
    """The command of an analysis, made from its declaration, its signature and its docstring.

    A parameter of which the declaration has ``each`` may be given several values: it is computed for each.
    """
    declared, title = ANALYSES[function], function.__name__.replace("_", "-")
    several = [name for name, own in declared.options.items() if own and "each" in own]
    parameters = inspect.signature(function).parameters
    left_out = {"seed", "progress"} - {*parameters}

    def compute(*job: Any, **keywords: Any) -> Any:
        return function(*job, **{key: value for key, value in keywords.items() if key not in left_out})

    def run(analysis: AnalysisCommand) -> None:
        settings = dict(analysis.settings)
        values = [dict.fromkeys(settings.pop(key)) for key in several]
        analysis = dataclasses.replace(analysis, settings=settings)
        variant = [settings[declared.variant]] if declared.variant else []
        analysis.compute(title, [*itertools.product(analysis.open(), *values)], compute, *variant)

    texts = re.split(r"^(?:Args|Returns|Raises|Example):\n", inspect.getdoc(function) or "", flags=re.M)
    words = "".join(f" --{key} 0.1" for key in several)
    example = f"landscape {title} runs/ss runs/dp{words} --plot {title}.png"
    run.__name__, run.__doc__ = function.__name__, f"{options.plain(texts[0])}\n\nExample:\n    {example}"
    return options.command(title, analysis=analysis_options(function, seed="seed" in parameters))(run)


def say_cost(function: Callable[..., Any], problem: Problem, options: Mapping[str, Any]) -> None:
    """Print what a call will take, if that is long."""
    expected = forecast(function, problem, **options)
    if expected.seconds > LONG:
        message(repr(expected))
