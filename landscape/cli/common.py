"""Functions and options that commands share: checkpoints as problems, files, messages and pictures."""

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
from landscape.cli.options import OMIT, group
from landscape.cli.output import add_results as add_results
from landscape.cli.output import add_values as add_values
from landscape.cli.output import message as message
from landscape.cli.output import print_files as print_files
from landscape.cli.output import print_values as print_values
from landscape.cli.output import progress_bar as progress_bar
from landscape.cli.output import table_text as table_text
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
    print_values(text_of(result))


@dataclass(frozen=True)
class Target:
    """The file of the results, and their picture, if any.

    Args:
        output: Result file. [default: next to the checkpoint]
        replace: Replace another result in the file.
        picture: Also draw a picture: .png, .pdf or .svg.
    """

    output: str | None
    replace: bool
    picture: str | None

    @contextlib.contextmanager
    def opened(self, default: Path, *, writes: bool = True) -> Iterator[storage.ResultFile]:
        """Open the result file, checked before the work starts; print a message if nothing was computed.

        Args:
            default: The path if ``-o`` is not given.
            writes: Whether this process is the one that writes the file.
        """
        path = Path(self.output) if self.output else default
        check_targets(path, self.picture)
        with storage.ResultFile(path, "a", replace=self.replace, writes=writes) as file:
            yield file
        if not file.written:
            message(f"{path}: complete already, nothing is computed")

    def write(
        self, default: Path, sources: Iterable[str], compute: Callable[[], Iterable[base.Result]],
        describe: Callable[[Any], None],
    ) -> None:  # fmt: skip
        """Compute, print and draw the results of the current command.

        If the file has the results of the same command already, they are read and not computed, except with
        ``replace``.

        Args:
            default: The path of the file if ``-o`` is not given.
            sources: A text for each file on which the results depend: its name, and 16 digits of its SHA-256.
            compute: Yields the results.
            describe: Prints a result.
        """

        def computed_and_printed() -> Iterator[base.Result]:
            for result in compute():
                describe(result)
                yield result

        context = click.get_current_context()
        # Parameter -> the longest flag of its option: --output, not -o.
        flags = {str(parameter.name): max(parameter.opts, key=len) for parameter in context.command.params}
        settings = {flags[name]: value for name, value in context.params.items() if name not in _NOT_SETTINGS}
        call = {"command": context.command.name, "source": [*sources], **settings}
        with self.opened(default) as file:
            results_of_call = file.once(call, computed_and_printed)
        if not file.written:  # the results were read, and are not printed yet
            for result in results_of_call:
                describe(result)
        show(results_of_call, file.path, self.picture)


TARGET = group(Target)
#: Parameters of commands on which the numbers of a result do not depend, and files, which have a SHA-256.
_NOT_SETTINGS = ("checkpoints", "files", "output", "replace", "picture", "device", "data_dir")


def check_targets(path: Path | None, picture: str | None) -> None:
    """Make the folders of a result and a picture; refuse wrong formats, and a checkpoint as the result."""
    if path:
        ends_in("-o", path, [".h5"])
        if path.exists() and hdf5.schema_of(path) == SCHEMA:
            raise OperationError(f"-o: {path} is a checkpoint, it is not overwritten; give another name")
    if picture:
        from landscape import plots  # here, because it imports matplotlib, which only drawing needs

        plots.check_format(picture)
    for target in (path, picture):
        if target:
            make_folder(Path(target).parent)


def show(items: Sequence[base.Result], path: Path | None, picture: str | None) -> None:
    """Draw the results if ``picture`` is given, and print the names of the files on stdout."""
    add_results(items)
    print_files(*([path] if path else []))
    if picture:
        from landscape import plots

        with progress_bar("picture"):
            plots.draw(items, picture)
        print_files(picture)


R = TypeVar("R", bound=base.Result)

# Defaults of options, which the name of a result's file leaves out.
DEFAULTS = ("random", "none", "hessian", "worst", SPLIT)
# A command that is expected to take more seconds prints its forecast first (our choice).
LONG = 5.0


class GridType(click.ParamType):  # type: ignore[type-arg]  # no generic class in click 8.1
    """The points of a grid. A type, not a callback: it also converts defaults if a command calls another."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert "50" or "51x25" to (nx, ny); a default is a pair already."""
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", value)
        nx, ny = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if min(nx, ny) < 1:
            raise InputError(f"--grid: '{value}' is not allowed, it must be K or KXxKY ≥ 1, such as 51x25")
        return nx, ny


#: Parameter of an analysis -> settings of click that its signature and Args do not contain. A command may add
#: settings, or replace them.
OPTION_SETTINGS: Mapping[str, options.Settings] = {
    "grid": {"type": GridType(), "help": "Points: K, or KXxKY such as 51x25."},
    "interpolation_tol": {"metavar": "SIZE"},
    "delays": {"flag": "--delay", "metavar": "τ,…"},
}


@dataclass
class Source:
    """The model, data and loss of an analysis; None: those of the checkpoint, or of the data.

    Args:
        model: MODULE:NAME, which is called with the options in brackets, or a built-in name. [default: the
            checkpoint's, if it is a built-in one]
        data: MODULE:NAME, which is called with the options in brackets, or a built-in name: (x, y), batches,
            or splits of them. [default: the checkpoint's]
        loss: MODULE:NAME of loss(outputs, targets), which returns a mean (a class, or a name with brackets,
            is called first); or output, if the model returns its loss. [default: the loss of the data, else
            cross-entropy, or output if batches are single dicts]
        randomness: For a model or loss that draws random numbers in eval mode: seed fixes the numbers; N, a
            number, averages the loss over N draws.
    """

    model: str | None = None
    data: str | None = None
    loss: str | None = None
    data_dir: str | None = None
    randomness: str = "refuse"

    def __post_init__(self) -> None:
        """Parse the names of the model and the data."""
        self.model_spec = user_code.known_spec("model", self.model, registry.models) if self.model else None
        self.data_spec = user_code.known_spec("data", self.data, registry.data_sets) if self.data else None

    @functools.cached_property
    def user_data(self) -> user_code.UserData | Dataset | None:
        """The user's data, loaded once."""
        return user_code.load_data("data", self.data_spec, self.data_dir) if self.data_spec else None

    def other_data(self, run: Checkpoint) -> str:
        """Return the name of the user's data if it is certainly not the checkpoint's data; "" otherwise.

        Raises:
            OperationError: for data with the name of the checkpoint's data but another fingerprint.
        """
        trained_on, spec = run.data, self.data_spec
        if spec is None or not trained_on["name"]:
            return ""
        assert self.user_data is not None
        fingerprint = self.user_data.fingerprint
        if fingerprint and fingerprint == trained_on["fingerprint"]:
            return ""
        typed_options = user_code.parse("data", str(self.data)).options  # without defaults
        lacks_options = _lacks_options(spec, typed_options, trained_on)
        if not lacks_options and (spec.name, spec.options) != (trained_on["name"], trained_on["options"]):
            return user_code.command_text(spec.name, typed_options)
        if lacks_options or (fingerprint and trained_on["fingerprint"]):
            full_name = user_code.command_text(trained_on["name"], trained_on["options"])
            cause = (
                f"options are missing, give --data {full_name}" if lacks_options else "random without a seed?"
            )
            words = f"{spec.name} is not that of {run.path} by its fingerprint ({cause})"
            raise OperationError(f"--data: {words}")
        return ""

    def of(
        self, run: Checkpoint, device: str, split: str = SPLIT, dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> Checkpoint:  # fmt: skip
        """Return ``run`` with the model, data and loss of the options.

        Raises:
            OperationError: for the name of its model without the model's options.
        """
        spec = self.model_spec
        typed_options = user_code.parse("model", self.model).options if self.model else {}
        if spec and _lacks_options(spec, typed_options, run.model):
            name = user_code.command_text(run.model["name"], run.model["options"])
            raise OperationError(f"--model: not that of {run.path} without its options; give --model {name}")
        return run.using(
            split=split, model=self.model, data=self.user_data, loss=self.user_loss, data_dir=self.data_dir,
            device=pick_device(device), dtype=dtype, randomness=self.randomness, **more,
        )  # fmt: skip

    @functools.cached_property
    def user_loss(self) -> Loss | Literal["data"] | None:
        """The user's loss, or "data": values of ``Checkpoint.problem``'s argument ``loss``."""
        return user_code.load_loss("loss", self.loss) if self.loss else "data"


def _lacks_options(spec: user_code.Spec, typed_options: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """Return whether ``spec`` would be the checkpoint's if the user had typed all of its options."""
    typed_are_equal = all(recorded["options"].get(key) == value for key, value in typed_options.items())
    return spec.name == recorded["name"] and spec.options != recorded["options"] and typed_are_equal


_NAME = {"metavar": "NAME"}
SOURCE = group(Source, model=_NAME, data=_NAME, loss=_NAME, randomness={"metavar": "refuse|seed|N"})


@dataclass(frozen=True, kw_only=True)
class AnalysisCommand:
    """The checkpoints of an analysis command, and the options that all analysis commands have.

    ``settings`` has the values of the function's own parameters, by name.

    Args:
        seed: Seed of all that the command draws.
        samples: Use at most N samples of the data, the same in each call, for a quick look. [default: all]
        metrics: Also compute a metric: accuracy, error, top5, mse, mae, nll, margin, perplexity, f1 or
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
        """Load and check all checkpoints; only then make their models and load their data.

        The folder of a run stands for its last checkpoint; a file of weights alone becomes a checkpoint.
        """
        dtype = getattr(torch, self.dtype)
        loaded = [_load(Path(path)) for path in self.checkpoints]
        runs = [imported([item], self.source) if isinstance(item, Path) else item for item in loaded]
        metrics = user_code.load_metrics("--metric", self.metrics)
        options = {"metrics": metrics, "samples": self.samples}
        return [self.source.of(run, self.device, self.split, dtype, **options) for run in runs]

    def say_if_other_data(self, runs: Iterable[Any]) -> None:
        """Print a message for each checkpoint that was certainly trained on other data."""
        for run in runs:
            if isinstance(run, Checkpoint) and (data_name := self.source.other_data(run)):
                run_data = user_code.command_text(run.data["name"], run.data["options"])
                message(f"--data: {data_name} is not the data of {run.path}, {run_data}")

    def about(self, *runs: Checkpoint) -> base.Provenance:
        """Return the origin of a result of a run, or of several; the label names other data."""
        data_name = self.source.other_data(runs[0])
        origins = [about(run, self.split, self.source.other_data(run)) for run in runs]
        if len(runs) == 1:
            return origins[0]
        return {
            "split": self.split,
            "label": f"{len(runs)} checkpoints{f', on {data_name}' if data_name else ''}",
            "source": ", ".join(str(run.path) for run in runs),
            "source_sha256": ", ".join(origin["source_sha256"] for origin in origins),
        }

    def path(self, run: Checkpoint, kind: str, *variant: str) -> Path:
        """Return the default path of a result, next to the checkpoint, such as last-contour-pca.h5.

        The name has the values of ``variant``, --split and --samples, except for defaults.
        """
        assert run.path is not None
        words = [kind, *(word for word in (*variant, self.split) if word not in DEFAULTS)]
        if self.samples:
            words.append(f"{self.samples}-samples")
        return run.path.with_name(f"{run.path.stem}-{'-'.join(words)}.h5")

    def compute(
        self, kind: str, jobs: Iterable[Checkpoint | tuple[Any, ...]], function: Callable[..., R],
        *, variant: Sequence[str] = (), describe: Callable[[R], None] = describe,
    ) -> None:  # fmt: skip
        """Call ``function`` for each job; print the results, and write them to one file.

        Args:
            kind: Kind of the results, for the name of the file.
            jobs: The positional arguments of each call: a checkpoint, or a tuple that begins with one or more
                checkpoints.
            function: Receives the arguments of a job and, by keyword, the settings of the command, ``seed``,
                ``progress`` and the origin of the result (:class:`.Provenance`).
            variant: Values of options for the file's name. :meth:`path` leaves out those in ``DEFAULTS``.
            describe: Prints a result.
        """
        calls = [job if isinstance(job, tuple) else (job,) for job in jobs]
        runs_of_calls = [[item for item in call if isinstance(item, Checkpoint)] for call in calls]

        def results_of_calls() -> Iterator[R]:
            for (call, call_progress), runs in zip(with_progress(kind, calls), runs_of_calls, strict=True):
                keywords = {
                    **self.settings,
                    **self.about(*runs),
                    "seed": self.seed,
                    "progress": call_progress,
                }
                result = function(*call, **keywords)
                # The message comes only now, because ``function`` may refuse the data.
                self.say_if_other_data(runs)
                yield result

        unique_runs = {id(run): run for run in itertools.chain.from_iterable(runs_of_calls)}
        origins = [run.about(self.split) for run in unique_runs.values()]
        sources = [f"{origin['label']} ({origin['source_sha256'][:16]})" for origin in origins]
        user_data = self.source.user_data
        if isinstance(user_data, user_code.UserData):  # the user's code may return other data at each call
            sources.append(f"data {user_data.fingerprint[:16]}")
        self.target.write(self.path(calls[0][0], kind, *variant), sources, results_of_calls, describe)


def _load(path: Path) -> Checkpoint | Path:
    """Load the checkpoint of a file or folder; for weights alone, check the files and return ``path``."""
    if not names_state(path):
        return Checkpoint.load(storage.checkpoint_in(path))
    files_of(path)
    return path


def imported(states: Sequence[Path], source: Source) -> Checkpoint:
    """Return a checkpoint of weights from other programs; its learners are the files ``states``.

    Its path is beside the first file. ``source`` names the model of all of them.
    """
    spec = source.model_spec
    if spec is None:
        raise InputError(f"--model: missing; {states[0]} has only weights; give MODULE:NAME or a name")
    model = user_code.build_model("model", spec)
    run = import_state(states, model, name=spec.name, options=spec.options, message=message)
    run.path = name_beside(states[0])
    return run


def with_progress(title: str, jobs: Sequence[Any]) -> Iterator[tuple[Any, Progress]]:
    """Yield each job with a function that sets the finished share of it, in one progress bar for all."""

    with progress_bar(title) as bar:
        for count, job in enumerate(jobs):
            yield job, portion(bar, count / len(jobs), (count + 1) / len(jobs))


# Parameters of analyses that every analysis command has, and so are no settings.
_COMMON_PARAMETERS = ("seed", "max_memory", "device", "data_dir")


def analysis_options(
    function: Callable[..., Any], *, split: bool = True, seed: bool = True, metrics: bool = False,
    metavar: str = "CKPT…", required: bool = True, **by_parameter: options.Settings | None,
) -> options.Group:  # fmt: skip
    """Return the options of an analysis command, which receives their values as one :class:`AnalysisCommand`.

    Args:
        function: The analysis. Its parameters become options (:func:`.options_of`): each number, text or flag
            with a default, and those in ``by_parameter``. If the function analyzes a problem, and not a run,
            the command also has --dtype, --max-memory, --model, --data and so on.
        split: Whether there is --split; otherwise the training set is analyzed.
        seed: Whether there is --seed.
        metrics: Whether there is --metric.
        metavar: Name of the checkpoints in the help.
        required: Whether there must be a checkpoint.
        by_parameter: Parameter -> settings of its option in click, or OMIT; in place of the settings in
            ``ANALYSES``.
    """
    parameters, hints = inspect.signature(function).parameters, type_hints(function, bounds=True)
    by_parameter = {**ANALYSES[function].options, **by_parameter}
    takes_problem = "run" not in parameters
    omits_split = by_parameter.pop("split", {}) is OMIT  # the option --split is made below
    has_split = split and takes_problem and not omits_split
    seed_help = options.help_texts(function).get("seed", "Draws the directions.")
    names = []
    for name, parameter in parameters.items():
        has_default = parameter.default is not parameter.empty
        if has_default and name not in _COMMON_PARAMETERS and options.is_plain(hints[name]):
            names.append(name)
    click_settings = {}
    for name in (*names, *by_parameter):
        own_settings = by_parameter.get(name, {})
        if own_settings is not OMIT:
            click_settings[name] = {**OPTION_SETTINGS.get(name, {}), **own_settings}
    # --max-memory needs no field of a class, because its callback sets the limit. It is among the options of
    # the target only for its position in the help.
    max_memory = [options.option("max_memory")] if takes_problem else []
    return options.group(
        AnalysisCommand,
        checkpoints=options.SHARED["files"] | {"metavar": metavar, "required": required},
        settings=options.Group(dict, options.options_of(function, **click_settings)),
        split={} if has_split else OMIT,  # {}: the usual settings
        seed={"help": seed_help} if seed else OMIT,
        dtype={} if takes_problem else OMIT,
        metrics={"flag": "--metric", "metavar": "NAME"} if metrics else OMIT,
        samples={"metavar": "N"} if takes_problem else OMIT,
        target=options.Group(TARGET.make, [*max_memory, *TARGET.options]),
        source=SOURCE if takes_problem else options.Group(Source, [options.option("data_dir")]),
    )


def about(run: Checkpoint, split: str, other_data: str = "") -> base.Provenance:
    """Return the origin of a result of ``run``, whose label names ``other_data`` than the checkpoint's."""
    origin = run.about(split)
    if other_data:
        origin["label"] = f"{run.label}, on {other_data}"
    return origin


@functools.cache
def command_of(function: Callable[..., Any]) -> click.Command:
    """Make the command of an analysis from its declaration, its signature and its docstring.

    A parameter with ``each`` in the declaration accepts several values; the analysis runs for each of them.
    """
    declaration, name = ANALYSES[function], function.__name__.replace("_", "-")
    list_options = [option for option, entry in declaration.options.items() if entry and "each" in entry]
    parameters = inspect.signature(function).parameters
    not_accepted = {"seed", "progress"} - {*parameters}

    def compute(*job: Any, **keywords: Any) -> Any:
        return function(*job, **{key: value for key, value in keywords.items() if key not in not_accepted})

    def run(analysis: AnalysisCommand) -> None:
        settings = dict(analysis.settings)
        lists = [dict.fromkeys(settings.pop(option)) for option in list_options]  # each value once
        analysis = dataclasses.replace(analysis, settings=settings)
        # The value of the option ``declaration.variant``, if there is one, becomes part of the file's name.
        variant = [settings[declaration.variant]] if declaration.variant else []
        # A job is a checkpoint with one value of each list; all combinations are computed.
        jobs = [*itertools.product(analysis.open(), *lists)]
        analysis.compute(name, jobs, compute, variant=variant)

    sections = re.split(r"^(?:Args|Returns|Raises|Example):\n", inspect.getdoc(function) or "", flags=re.M)
    values = "".join(f" --{option} 0.1" for option in list_options)
    example = f"landscape {name} runs/ss runs/dp{values} --plot {name}.png"
    run.__name__ = function.__name__
    run.__doc__ = f"{options.plain(sections[0])}\n\nExample:\n    {example}"
    return options.command(name, analysis=analysis_options(function, seed="seed" in parameters))(run)


def say_cost(function: Callable[..., Any], problem: Problem, options: Mapping[str, Any]) -> None:
    """Print the forecast of a call's time and memory, if the call is long."""
    expected = forecast(function, problem, **options)
    if expected.seconds > LONG:
        message(repr(expected))
