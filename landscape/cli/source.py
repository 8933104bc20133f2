"""Where an analysis takes model, data and loss from, and whether they are those of its checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import click
from torch import nn

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.core.errors import FailedError
from landscape.data.base import Dataset
from landscape.problem.problem import Loss

F = TypeVar("F", bound=Callable[..., Any])

data_dir = click.option(
    "--data-dir",
    metavar="D",
    help="Folder with the data sets that are not bundled. [default: $LANDSCAPE_DATA or data]",
)


@dataclass(frozen=True)
class Source:
    """Where an analysis takes model, data and loss from; None: from the checkpoint, or the data.

    ``typed``: the options of ``data`` and ``model`` that were typed, without a built-in one's defaults.
    """

    model: user_code.Spec | None
    data: user_code.Spec | None
    loss: str | None
    data_dir: str | None
    typed: dict[str, dict[str, Any]]

    def build_model(self) -> nn.Module:
        """The user's model, new at each call."""
        assert self.model is not None
        return user_code.build_model("--model", self.model)

    @cached_property
    def own_data(self) -> user_code.UserData | Dataset | None:
        """The user's data, made once."""
        return user_code.load_data("--data", self.data, self.data_dir) if self.data else None

    def other_data(self, checkpoint: Checkpoint) -> str:
        """What the data is called where it is knowingly not the checkpoint's; "" where it is, or may be.

        FailedError for data that goes by the checkpoint's name, and is not what that was made with.
        """
        known = checkpoint.data
        if self.data is None or not known["name"]:
            return ""
        assert self.own_data is not None
        found = self.own_data.fingerprint
        if found and found == known["fingerprint"]:
            return ""
        left_out = self._left_out("data", self.data, known)
        if not left_out and (self.data.name != known["name"] or self.data.options != known["options"]):
            return user_code.spelled(self.data.name, self.typed["data"])
        if left_out or (found and known["fingerprint"]):
            cause = (
                f"its options are left out, give --data {user_code.spelled(known['name'], known['options'])}"
                if left_out
                else "does it draw without a seed?"
            )
            raise FailedError(
                f"--data: {self.data.name} gives other data than {checkpoint.path} was made with: "
                f"fingerprint {found[:12]}…, not {known['fingerprint'][:12]}… ({cause})"
            )
        return ""

    def check_model(self, checkpoint: Checkpoint) -> None:
        """FailedError for a model that goes by the checkpoint's name, its options left out."""
        if self.model and self._left_out("model", self.model, checkpoint.model):
            whole = user_code.spelled(checkpoint.model["name"], checkpoint.model["options"])
            raise FailedError(
                f"--model: {self.model.name} without its options is not the model of {checkpoint.path}; give "
                f"--model {whole}"
            )

    def _left_out(self, what: str, spec: user_code.Spec, known: dict[str, Any]) -> bool:
        """Whether ``spec`` is the checkpoint's own but for options that were not typed."""
        same = all(known["options"].get(key) == value for key, value in self.typed[what].items())
        return spec.name == known["name"] and spec.options != known["options"] and same

    @cached_property
    def own_loss(self) -> Loss | Literal["data"] | None:
        """The user's loss, or "data", as Checkpoint.problem takes it."""
        return user_code.load_loss("--loss", self.loss) if self.loss else "data"


def source(function: F) -> F:
    """The options that say where model, data and loss come from; the command is given them as one Source."""

    @functools.wraps(function)
    def command(
        *args: Any,
        model: str | None,
        data: str | None,
        loss: str | None,
        data_dir: str | None,
        **options: Any,
    ) -> Any:
        from_where = Source(
            user_code.model_spec("--model", model) if model else None,
            user_code.data_spec("--data", data) if data else None,
            loss,
            data_dir,
            {
                "data": user_code.parse("--data", data).options if data else {},
                "model": user_code.parse("--model", model).options if model else {},
            },
        )
        return function(*args, source=from_where, **options)

    own = "MODULE:NAME, called to make it, or a built-in name; options follow in brackets"
    for option in (
        data_dir,
        click.option(
            "--loss",
            metavar="NAME",
            help="MODULE:NAME of loss(outputs, targets), a mean (a class, or a name with brackets, is called "
            "to make it); or output: the model's output carries it. [default: the data's, else "
            "cross-entropy, or output where batches are single dicts]",
        ),
        click.option(
            "--data",
            metavar="NAME",
            help=f"{own}: (x, y), batches, or splits of them. [default: the checkpoint's]",
        ),
        click.option("--model", metavar="NAME", help=f"{own}. [default: the checkpoint's, if built in]"),
    ):
        command = option(command)
    return cast(F, command)
