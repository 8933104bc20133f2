"""Common parts of all analysis commands: checkpoints, opened as problems, and the result files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from landscape.checkpoint import run_folder, user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.foreign_weights import SUFFIXES, import_state
from landscape.cli import common, options
from landscape.cli.parameters import described, options_of
from landscape.cli.source import OF_SOURCE, SOURCE, Source
from landscape.core import hdf5
from landscape.core.errors import InputError
from landscape.core.memory import pick_device
from landscape.core.options import SPLIT
from landscape.core.progress import Progress
from landscape.problem.problem import Problem
from landscape.results import base

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound=base.Result)

# Defaults of options that the name of a result does not mention.
DEFAULTS = ("random", "none", "hessian", SPLIT)


@dataclass(frozen=True)
class Analysis:
    """The checkpoints of an analysis command, and the options that all of these commands have.

    ``seed`` is the seed of whatever the command draws; ``dtype`` and ``device`` are where it computes.
    ``settings`` are the options that are parameters of the function that the command calls.
    """

    checkpoints: tuple[str, ...]
    split: str
    seed: int
    dtype: str
    output: options.Output
    device: str
    source: Source
    quiet: bool
    settings: Mapping[str, Any]

    def open(self) -> list[Checkpoint]:
        """All checkpoints, read and checked before any work starts.

        The folder of a run stands for its last one; a file of weights trained elsewhere becomes one.
        """
        return [self._open(run_folder.checkpoint_in(Path(path))) for path in self.checkpoints]

    def _open(self, path: Path) -> Checkpoint:
        if path.suffix not in SUFFIXES:
            return Checkpoint.load(path)
        model = self.source.model
        if model is None:
            raise InputError(f"--model: missing; {path} has only weights, give the model that they belong to")
        run = import_state(
            path, self.source.build_model(), name=model.name, options=model.options, message=self.message
        )
        run.path = path
        return run

    @property
    def torch_dtype(self) -> torch.dtype:
        """The precision of --dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def problem(self, run: Checkpoint) -> Problem:
        """The problem of ``run`` at w_a, on the split, in the precision and on the device of the options."""
        self.source.check_model(run)
        other = self.source.other_data(run)
        problem = open_problem(run, self.split, self.source, self.device, self.torch_dtype)
        if other:
            known = user_code.command_text(run.data["name"], run.data["options"])
            self.message(f"--data: {other} is not the data of {run.path}, {known}")
        return problem

    def about(self, run: Checkpoint) -> base.Provenance:
        """Where a result of ``run`` comes from; its label names data that is not the checkpoint's."""
        return about(run, self.split, self.source.other_data(run))

    def target(self, run: Checkpoint, kind: str, *variant: str, resumes: bool = False) -> Path:
        """The path of the result. The path is checked and its folder is made before the work starts.

        By default next to the checkpoint, under a name with those values of ``variant`` and of --split that
        are no defaults, such as last-contour-pca.h5. ``resumes``: the command itself checks what the file
        holds.
        """
        assert run.path is not None
        words = [kind, *(word for word in (*variant, self.split) if word not in DEFAULTS)]
        name = f"{run.path.stem}-{'-'.join(words)}.h5"
        path = Path(self.output.path) if self.output.path else run.path.with_name(name)
        common.check_targets(path, self.output.picture, self.output.force or resumes)
        return path

    def compute(
        self,
        kind: str,
        jobs: Iterable[Checkpoint | tuple[Any, ...]],
        function: Callable[..., R],
        *variant: str,
    ) -> list[R]:
        """The results of ``jobs``: a checkpoint, or a tuple that begins with one. Printed and written.

        ``function`` takes a job, the options of the command, the progress, and where the result comes from,
        by keyword. ``kind`` and ``variant`` name the file.
        """
        whole = [job if isinstance(job, tuple) else (job,) for job in jobs]
        path, results = self.target(whole[0][0], kind, *variant), []
        for job, progress in self.each(kind, whole):
            about = self.about(job[0])
            results.append(function(*job, **self.settings, seed=self.seed, progress=progress, **about))
            common.describe(results[-1])
        self.write(results, path)
        return results

    def each(self, title: str, runs: Sequence[Any]) -> Iterator[tuple[Any, Progress]]:
        """``runs`` with one progress bar: each with the function that takes the share of it that is done."""
        with common.progress_bar(title, self.quiet) as bar:
            for i, run in enumerate(runs):
                yield run, functools.partial(_share, bar, i, len(runs))

    def message(self, text: str) -> None:
        """A line for the user, on stderr; none with -q."""
        common.message(text, self.quiet)

    def values(self, text: str) -> None:
        """Print the numbers of a result on stdout, also with -q; --json shows those of the result itself."""
        common.values(text)

    def write(self, results: Sequence[base.Result], path: Path) -> None:
        """Save ``results``, draw them if --plot is given, and print the names of the files on stdout.

        Their numbers are what --json prints.
        """
        common.write(results, path, self.output.picture)


def _share(bar: Progress, done: int, total: int, share: float) -> None:
    bar((done + share) / total)


def analysis_options(
    function: Callable[..., Any],
    *names: str,
    split: bool = True,
    problem: bool = True,
    metavar: str = "CKPT…",
    required: bool = True,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[F], F]:
    """The options of an analysis command, which it gets as one Analysis, ``analysis``.

    Args:
        function: what the command calls; its parameters ``names`` and ``own`` become options, as
            :func:`.options_of` makes them, and the help of --seed is its.
        split: whether there is --split; without, the analysis is of the training set.
        problem: whether the command opens problems, with --dtype, --max-memory, --model, --data, …
        metavar: the name of the checkpoints in the help.
        required: whether there must be a checkpoint.
        own: what click is told of a parameter.
    """
    chosen = (*names, *(own or {}))

    def make(**values: Any) -> Analysis:
        output = options.Output(*(values.pop(name) for name in ("output", "force", "picture")))
        source = Source.of_options(**{name: values.pop(name) for name in OF_SOURCE if name in values})
        settings = {name: values.pop(name) for name in dict.fromkeys(chosen)}
        unset = {"split": SPLIT, "dtype": "float32"}
        return Analysis(output=output, source=source, settings=settings, **{**unset, **values})

    seed = described(function).get("seed", "Draws the directions.")
    return options.grouped(
        "analysis",
        make,
        click.argument(
            "checkpoints",
            metavar=metavar,
            nargs=-1,
            required=required,
            shell_complete=options.paths("file"),
        ),
        *options_of(function, *names, **own or {}),
        *([options.split] if split else []),
        click.option("--seed", default=0, show_default=True, help=seed),
        *([options.dtype, options.max_memory] if problem else []),
        *options.OUTPUT,
        options.device,
        *(SOURCE if problem else [options.data_dir]),
        options.quiet,
    )


def open_problem(
    run: Checkpoint, split: str, source: Source, device: str, dtype: torch.dtype = torch.float32
) -> Problem:
    """The problem of ``run`` at w_a, with model, data and loss from ``source``."""
    return run.problem(
        split,
        model=source.build_model if source.model else None,
        data=source.user_data,
        loss=source.user_loss,
        data_dir=source.data_dir,
        device=pick_device(device),
        dtype=dtype,
        randomness=source.randomness,
    )


def about(run: Checkpoint, split: str, other_data: str = "") -> base.Provenance:
    """Where a result of ``run`` comes from, as the result keeps it.

    ``other_data``: what the data is called where it is not the checkpoint's.
    """
    assert run.path is not None
    return {
        "split": split,
        "label": f"{run.label}, on {other_data}" if other_data else run.label,
        "source": run.path.name,
        "source_sha256": hdf5.sha256(run.path),
    }
