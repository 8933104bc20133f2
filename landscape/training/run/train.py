"""A run by one call: :func:`train`, in this process or in several."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core import files
from landscape.core.errors import InputError, OperationError
from landscape.core.options import positive
from landscape.core.progress import ProgressOption, shows_progress, taken
from landscape.training.processes import children
from landscape.training.processes.children import TIMEOUT
from landscape.training.processes.process_group import started_by_launcher
from landscape.training.recipes.recipe import Recipe, read
from landscape.training.run.launch import check_folder, launch
from landscape.training.run.loop import Hooks


@shows_progress()
def train(
    recipe: Recipe | str | Path | None,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    nproc: int = 1,
    max_restarts: int = 0,
    timeout: float = TIMEOUT,
    device: str = "auto",
    data_dir: str | Path | None = None,
    allow_code: bool = False,
    message: Callable[[str], None] | None = None,
    progress: ProgressOption = None,
    **settings: Any,
) -> Checkpoint:
    """Train n learners by a recipe in a folder, as ``landscape train`` does, to the bit.

    Args:
        recipe: a name (:func:`landscape.recipes` lists them), the path of a TOML file, or a
            :class:`landscape.Recipe`. None with ``resume``: that of the folder's run.
        folder: gets last.h5, step-NNNNNNN.h5 and recipe.toml. Default: runs/NAME-seedN.
        resume: go on from last.h5, or start if there is none yet; the result is bit-identical to an
            uninterrupted run. The recipe must equal the run's, except for ``steps``, which may be larger.
        force: first delete the run in the folder.
        nproc: processes on this machine that share the learners; each writes logs/rank-R.log, and neither
            ``message`` nor ``progress`` is called.
        max_restarts: how often all processes are restarted from last.h5 after one is lost.
        timeout: seconds that a process may be silent, or that an exchange between them may take.
        device: "auto" (the accelerator, where there is one with float64), "cpu", "cuda", "xpu" or "mps".
        data_dir: the folder of data sets that are not bundled. Default: $LANDSCAPE_DATA or data.
        allow_code: run code that a file names as MODULE:NAME; what the settings name always runs.
        message: takes lines for the user.
        progress: takes the share that is done, or whether to show it; default: it is shown after two seconds.
        settings: other values of the recipe's keys, as of :meth:`landscape.Recipe.read`.

    Returns:
        The end of the run, as last.h5 has it; ``diverged`` says whether and how it diverged.

    Raises:
        InputError: for a recipe, setting or option that is not allowed.
        OperationError: for a folder that holds another run, that another process uses, or that cannot be
            written or resumed; for data that are missing; for a process that was lost.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = train("digits-dpsgd", folder, steps=5, **{"algorithm.mixing": "ring(1)"})
        >>> run.step, run.algorithm, run.path.name
        (5, 'dpsgd', 'last.h5')
    """
    chosen = chosen_recipe(recipe, settings, allow_code)
    if folder is None:
        if chosen is None:
            raise InputError("recipe: missing; give one, or the folder of a run with resume=True")
        folder = default_folder(chosen)
    about: dict[str, Any] = {"resume": resume, "force": force, "device": device, "data_dir": data_dir}
    about["allow_code"] = allow_code
    if nproc != 1 or max_restarts:
        return in_processes(chosen, Path(folder), nproc, max_restarts, timeout, **about)
    hooks = Hooks(message=message or (lambda line: None))
    report = taken(progress)
    hooks.step = lambda done, total: report(done / total)
    end = launch(chosen, folder, hooks=hooks, **about)
    end.path = Path(folder) / "last.h5"
    return end


def default_folder(recipe: Recipe) -> str:
    """The folder of a run that is given none."""
    return f"runs/{recipe.name.replace('/', '-')}-seed{recipe.seed}"


def chosen_recipe(
    recipe: Recipe | str | Path | None, settings: Mapping[str, Any], allow_code: bool
) -> Recipe | None:
    """The recipe of what a user gave, changed by ``settings``; None for None."""
    if isinstance(recipe, Recipe):
        return recipe.replace(**settings) if settings else recipe
    if recipe is None and settings:
        raise InputError("settings: not allowed without the recipe that they change; give its name or file")
    return None if recipe is None else read(recipe, settings, allow_code=allow_code)


def in_processes(
    recipe: Recipe | None,
    folder: Path,
    nproc: int,
    max_restarts: int,
    timeout: float,
    *,
    resume: bool,
    force: bool,
    device: str,
    data_dir: str | Path | None,
    allow_code: bool,
    shown: Sequence[str] | None = None,
) -> Checkpoint:
    """Train in ``nproc`` processes, each of which runs the command ``landscape train``; as :func:`train`.

    ``shown``: flags of the output of the first one; None: it shows nothing.
    """
    positive("nproc", nproc, least=1)
    positive("max_restarts", max_restarts, least=0)
    positive("timeout", timeout)
    if started_by_launcher():
        raise InputError("nproc, max_restarts: not allowed under torchrun, which has its own")
    if force and max_restarts:
        raise InputError("force, max_restarts: only one of the two is allowed")
    check_folder(folder, resume=resume, force=force)
    last = folder / "last.h5"
    with tempfile.TemporaryDirectory(prefix="landscape-recipe-") as place:
        words = ["train"]
        if recipe is not None:
            words.append(str(Path(place, "recipe.toml")))
            files.write_text(Path(words[1]), recipe.to_toml())
        words += ["-o", str(folder), "--device", device, "--timeout", str(timeout)]
        words += ["--data-dir", str(data_dir)] if data_dir else []
        # A restart has to resume; where there is no run yet, --resume starts it.
        flags = {"--resume": resume or max_restarts, "--force": force, "--quiet": shown is None}
        # Code that a recipe names was allowed when it was read.
        flags["--allow-code"] = allow_code or (recipe is not None and recipe.names_code)
        code = children.start(
            [*words, *(flag for flag, is_set in flags.items() if is_set), *(shown or ())],
            nproc,
            timeout=timeout,
            threads=None if "OMP_NUM_THREADS" in os.environ else os.cpu_count(),
            restarts=max_restarts,
            hint=lambda: (
                f"resume=True goes on from {last}" if last.exists() else "there is no checkpoint yet"
            ),
            log=folder / "logs" / "launcher.log",
            shown=shown is not None,
        )
    if code:
        error = OperationError(f"{folder}: its processes ended with exit code {code}, the run can be resumed")
        error.exit_code = code
        raise error
    return Checkpoint.load(last)
