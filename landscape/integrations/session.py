"""The common part of the callbacks: a recorder between a trainer's hooks, and the pictures at the end."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils import data as torch_data

from landscape.analysis.grids import contour
from landscape.analysis.planes import NORMS, random_plane
from landscape.analysis.spectrum import spectrum
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import hdf5
from landscape.core.errors import InputError, LandscapeError, warn_caller
from landscape.core.options import SPLIT, Natural, check_keywords, check_type, choose
from landscape.evaluation.grid import axes
from landscape.problem.problem import Loss, Problem
from landscape.problem.shards import is_sharded
from landscape.results.base import Provenance, Result
from landscape.results.spectrum import QUANTITIES
from landscape.training.own_loop.flat import rank_and_size
from landscape.training.own_loop.observer import undisturbed
from landscape.training.own_loop.recorder import Recorder, RecorderWarning
from landscape.training.run.setup import due

EVERY = inspect.signature(Recorder).parameters["every"].default


class Options(TypedDict, total=False):
    """Options of a callback that are those of :class:`landscape.Recorder`, with its defaults."""

    every: int
    samples: int
    sharpness: int
    monitor: Mapping[str, Any] | None
    save_every: int
    batch: int
    resume: bool | int
    scalars: str | Sequence[str] | None
    seed: int
    terms: Callable[[Any], Tensor] | None
    randomness: str | int


@dataclass(frozen=True)
class Contour:
    """The contour at the end, with the defaults of ``landscape contour``."""

    grid: int | tuple[int, int] = (50, 50)
    span: float | None = None
    norm: Literal["none", "filter", "layer"] = "none"
    seed: Natural = 0
    split: str = SPLIT

    def __post_init__(self) -> None:
        axes(self.grid, 1.0 if self.span is None else self.span)
        choose("contour.norm", self.norm, NORMS)

    def compute(self, problem: Problem, about: Provenance) -> Result:
        """The surface around the center of ``problem``, over a random plane."""
        plane = random_plane(problem, self.norm, self.seed)
        return contour(problem, plane, self.grid, self.span, **about)


@dataclass(frozen=True)
class Spectrum:
    """The spectrum at the end, as :func:`landscape.spectrum` has it; a trace alone has no picture."""

    k: Natural = 0
    quantities: list[str] | tuple[str, ...] = ()
    seed: Natural = 0
    split: str = SPLIT

    def __post_init__(self) -> None:
        for name in self.quantities:
            choose("spectrum.quantities", name, QUANTITIES)

    def compute(self, problem: Problem, about: Provenance) -> Result:
        """The parts that are asked for, of the Hessian at the center of ``problem``."""
        drawn = self.k or {"extremes", "density"} & {*self.quantities}
        quantities: Any = self.quantities if drawn else ("extremes", *self.quantities)
        return spectrum(problem, self.k, quantities=quantities, seed=self.seed, **about)


PICTURES: dict[str, type[Contour | Spectrum]] = {"contour": Contour, "spectrum": Spectrum}


class Session:
    """A recorder that a trainer's hooks open, step and close; between two of its runs there is none.

    Args:
        folder, loss, data, test, options: as :class:`landscape.Recorder` takes them. What the trainer knows
            takes the place of a loss, data, ``batch`` and ``resume`` that are not given.
        pictures: what is computed at the end, name -> False, True or the options of :class:`Contour` and
            :class:`Spectrum`.

    Raises InputError for an option that is not known or not allowed.
    """

    def __init__(
        self, folder: str | Path, loss: Loss | None, data: Any, test: Any, options: Mapping[str, Any],
        pictures: Mapping[str, bool | Mapping[str, Any]],
    ) -> None:  # fmt: skip
        for name in options:
            choose("LandscapeCallback", name, Options.__annotations__)
        for name in ("every", "samples"):
            check_type(name, options.get(name, 0), int)
        self.folder, self.loss, self.data, self.test = Path(folder), loss, data, test
        self.options = dict(options)
        self._pictures: dict[str, Contour | Spectrum] = {}
        for name, given in pictures.items():
            if not isinstance(given, (bool, Mapping)):
                raise InputError(f"{name}: {given!r} is not allowed, it must be a bool or a dict of options")
            if given is not False:
                kind = PICTURES[name]
                picture = kind(**check_keywords(name, {} if given is True else given, kind))
                choose(f"{name}.split", picture.split, ("train",) if test is None else ("train", "test"))
                self._pictures[name] = picture
        self.recorder: Recorder | None = None
        self.steps = 0
        self.within = False  # a step
        self._step = contextlib.ExitStack()
        self.hooks = contextlib.ExitStack()  # of the trainer's, until the recorder is closed

    def splits(self, loader: Any, even: Iterable[str] = ()) -> tuple[Any, Any]:
        """The training set and the test data, as :func:`given_or_own` has them; no test data: None."""
        how: dict[str, Any] = {"whole": self.options.get("samples", 0) > 0, "even": even}
        test = None if self.test is None else given_or_own("test", self.test, loader, **how)
        return given_or_own("data", self.data, loader, **how), test

    def begin(
        self, model: nn.Module, data: Any, test: Any, optimizer: Any, *, batch: int, resume: int,
        terms: Callable[[Any], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Open the recorder.

        Args:
            model: evaluated with the loss that was given, or its own; its weights are recorded.
            data, test: as the recorder takes them.
            batch: the trainer's, 0 where it is not known.
            resume: the step that the trainer goes on from; 0: none.
            terms: in place of the user's.
        """
        self.abort()
        for name in self._pictures if is_sharded(model) else ():
            raise InputError(f"{name}: not allowed with a sharded model; call landscape.{name} on all ranks")
        options = {"batch": batch, **self.options} | ({"terms": terms} if terms else {})
        if resume and isinstance(options.get("resume", False), bool):
            options["resume"] = resume
        self._made_of = model, {"train": data, "test": test}, options.get("terms")
        self.recorder = Recorder(
            self.folder, model, self.loss, data, test=test, optimizer=optimizer, **options
        )
        self.steps = self.recorder.steps

    def before(self) -> None:
        """Begin a step, right before the optimizer's."""
        self.after()  # of a step that was skipped, so that no hook came after it
        if self.recorder is not None:
            self._step.enter_context(self.recorder.step())
            self.within = True

    def after(self) -> None:
        """End the step, right after the optimizer's; without a step nothing happens."""
        self._step.close()
        self.within = False
        if self.recorder is not None:
            self.steps = self.recorder.steps

    def log(self, loss: Any) -> None:
        """Record the loss of the step that was made last, if that is one that is decomposed."""
        if self.recorder is not None and due(self.options.get("every", EVERY), self.steps):
            self.recorder.log(loss=loss)

    def abort(self) -> None:
        """Close the recorder as it is; of a step that has begun nothing is written."""
        recorder, self.recorder = self.recorder, None
        self._step.pop_all()
        self.within = False
        self.hooks.close()
        if recorder is not None:
            recorder.abort()

    def end(self) -> None:
        """Close the recorder, and draw what is to be drawn."""
        self.after()
        recorder = self.recorder
        if recorder is not None:
            recorder.close()
        self.abort()
        if recorder is not None and rank_and_size()[0] == 0:
            self._draw()

    def _about(self, label: str, split: str) -> Provenance:
        digest = hdf5.sha256(self.folder / "last.h5")
        return {"split": split, "label": label, "source": "last.h5", "source_sha256": digest}

    def _draw(self) -> None:
        """Write NAME.h5 and NAME.png into the folder for each picture; a warning for one that fails.

        They are of the weights in last.h5. An error would take the trained model from a script.
        """
        for name, picture in self._pictures.items():
            model, splits, terms = self._made_of
            run = Checkpoint.load(self.folder / "last.h5")
            try:
                with undisturbed(next(model.parameters()).device, *splits.values()):
                    problem = Problem(
                        model, self.loss, splits[picture.split], terms=terms,
                        weights=run.weights[0], dtype=run.weights.dtype,
                    )  # fmt: skip
                    result = picture.compute(problem, self._about(run.label, picture.split))
                    result.save(self.folder / f"{name}.h5")
                    result.plot(path=self.folder / f"{name}.png")
            except LandscapeError as error:
                warn_caller(f"{name}: not drawn: {error}", RecorderWarning)


class Recorded:
    """The common base of callbacks: their arguments, and the session that is made of them."""

    def __init__(
        self,
        folder: str | Path,
        loss: Loss | None = None,
        data: Any = None,
        *,
        test: Any = None,
        contour: bool | Mapping[str, Any] = False,
        spectrum: bool | Mapping[str, Any] = False,
        **options: Unpack[Options],
    ) -> None:
        pictures = {"contour": contour, "spectrum": spectrum}
        self._session = Session(folder, loss, data, test, options, pictures)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Another module with the same parameters, buffers and parts, and attributes of its own.

    Methods that were put into the module, such as a ``forward`` of another trainer, are its own. So are its
    lists, as they are now, without what steps gathered there: tensors with a graph, which cannot be copied.
    """
    own = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:
            vars(own)[name] = MethodType(value.__func__, own)
        elif type(value) is list:
            vars(own)[name] = [each for each in value if not isinstance(each, Tensor) or each.is_leaf]
    return own


# Under these, and no others that are known, each sample is as likely as any other.
EVEN = (torch_data.SequentialSampler, torch_data.RandomSampler, torch_data.DistributedSampler)


def given_or_own(name: str, given: Any, loader: Any, *, whole: bool, even: Iterable[str] = ()) -> Any:
    """Data as :class:`landscape.Problem` takes it: ``given``, or, where that is None, those of ``loader``.

    A loader of the trainer's is shuffled, cut into shares of processes, and busy with its own epoch: its data
    set is read by another one, in order. So is a DataLoader among what was given, and a Dataset with the
    trainer's collate function and batches.

    Args:
        name: "data" or "test", for messages.
        whole: as one batch, from which samples can be drawn, and not in batches.
        even: names of classes of samplers that give each sample as often as any other.

    Raises:
        InputError: for what is no DataLoader, or one whose data set has no length, or whose sampler may weigh
            samples.
    """
    own = loader if given is None else given
    if isinstance(given, torch_data.Dataset) or type(given).__module__.partition(".")[0] == "datasets":
        collate = getattr(loader, "collate_fn", None)
        own, even = torch_data.DataLoader(given, batch_size=batch_size(loader) or 1, collate_fn=collate), ()
    if isinstance(own, torch_data.DataLoader):
        return in_order(name, own, whole=whole, even=even)
    if given is None:
        kind = type(loader).__name__
        raise InputError(f"{name}: the trainer's {kind} is not one DataLoader; give {name}=…")
    return given


def batch_size(loader: Any) -> int:
    """Samples in a batch of a process; 0 where that is not known."""
    if not isinstance(loader, torch_data.DataLoader) or loader.batch_sampler is None:
        return 0
    return int(getattr(_batch_sampler(loader), "batch_size", None) or 0)


def in_order(name: str, loader: torch_data.DataLoader[Any], *, whole: bool, even: Iterable[str] = ()) -> Any:
    """The data of ``loader`` in order: batches of its size, or, if ``whole``, one batch of all of it."""
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, torch_data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"{name}: a {type(dataset).__name__} has no length; give {name}=…, such as a list of batches"
        )
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", batches)
    if not isinstance(sampler, EVEN) and type(sampler).__name__ not in even:
        raise InputError(
            f"{name}: a {type(sampler).__name__} may weigh samples or leave some out; give {name}=…"
        )
    size = batch_size(loader) or None
    if whole and size is None:
        raise InputError(f"{name}: its data set gives batches, from which no samples can be drawn; samples=0")
    if whole:
        return collate([dataset[i] for i in range(len(dataset))])
    return torch_data.DataLoader(
        dataset,
        size,
        collate_fn=collate,
        num_workers=loader.num_workers,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # or the seeds of its workers would be drawn from the loop's
    )


def _batch_sampler(loader: torch_data.DataLoader[Any]) -> Any:
    """The innermost batch sampler of a loader, or its sampler where there is none."""
    part: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while hasattr(part, "batch_sampler"):  # accelerate's, a process's share of another
        part = part.batch_sampler
    return part
