"""The end of a run in words: its numbers, where it stands to its stability limit, what to try next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.checkpoint.history import latest


def numbers(end: Checkpoint) -> dict[str, Any]:
    """The numbers of the summary, for --json; None where they are not known."""
    sharpness, limit = latest(end.history, "lr_lambda_max"), latest(end.history, "lr_lambda_limit")
    return {
        "algorithm": end.algorithm,
        "seed": end.seed,
        "step": end.step,
        "loss": latest(end.history, "loss"),
        "test_loss": latest(end.history, "test_loss"),
        "test_error": 1 - latest(end.history, "test_accuracy"),
        "consensus": latest(end.history, "consensus"),
        "seconds": latest(end.history, "wall_s"),
        "diverged": end.diverged,
        "diverged_at": end.diverged_at,
        "lr_lambda_max": sharpness,
        "lr_lambda_limit": limit,
        "share_of_limit": sharpness / limit if limit else math.nan,
    }


def closing(end: Checkpoint) -> str:
    """One line about the end of a run."""
    if not len(end.history["step"]):
        return "no step that could be made" if end.diverged else "no step to make"
    last = {name: float(column[-1]) for name, column in end.history.items()}
    wrong = 1 - last["test_accuracy"]
    error = "" if math.isnan(wrong) else f", test error {100 * wrong:.2f}%"
    drift = f"diverged at step {end.diverged_at}: the {end.diverged}" if end.diverged else "did not diverge"
    return (
        f"step {end.step}: test loss {last['test_loss']:.4g}{error}, consensus distance "
        f"{last['consensus']:.3g}{standing(end)}, {drift}, {last['wall_s']:.1f} s"
    )


def standing(end: Checkpoint) -> str:
    """The last ηλ_max beside its limit: ", ηλ_max …"; "" if it was not measured."""
    value, limit = latest(end.history, "lr_lambda_max"), latest(end.history, "lr_lambda_limit")
    if math.isnan(value):
        return ""
    return f", ηλ_max {value:.3g}{against(value, limit)}"


def present(row: Mapping[str, float]) -> str:
    """The last numbers of a run that goes on, by column, in a few words.

    Example:
        >>> present({"loss": 0.25, "test_accuracy": 0.9})
        'loss 0.25, test error 10.00%'
    """
    words = [f"loss {row['loss']:.3g}"] if "loss" in row else []
    words += [f"test error {1 - row['test_accuracy']:.2%}"] if "test_accuracy" in row else []
    words += [f"ηλ_max {row['lr_lambda_max']:.3g}"] if "lr_lambda_max" in row else []
    return ", ".join(words)


def against(value: float, limit: float) -> str:
    """The limit on ηλ_max and the share of it that is reached; "" where it is not known.

    Example:
        >>> against(0.5, 2.0)
        ' of 2 (25% of the limit)'
    """
    return f" of {limit:.3g} ({value / limit:.0%} of the limit)" if limit > 0 else ""


def next_command(end: Checkpoint, folder: str, data_dir: str | None) -> str:
    """The command to try next, and what it shows."""
    if end.diverged:
        return f"{shlex.join(['landscape', 'plot', folder])}  # where the run left its bounds"
    if math.isnan(latest(end.history, "lr_lambda_max")):
        words, shows = ["stability", folder], "ηλ_max and its limit"
    else:
        words, shows = ["contour", folder, "--plot", f"{folder}/contour.png"], "the landscape around the end"
    words += ["--data-dir", data_dir] if data_dir else []
    line = shlex.join(["landscape", *words])
    for option, spec in (("--model", end.model), ("--data", end.data)):
        if ":" in spec["name"]:  # a file names a user's code and never runs it
            line += f" {option} {user_code.command_text(spec['name'], spec['options'])}"
    return f"{line}  # {shows}"
