"""Where an analysis takes model, data and loss from, and whether they are those of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import click
from torch import nn

from landscape.checkpoint import user_code
from landscape.checkpoint.checkpoint import Checkpoint
from landscape.cli.options import data_dir, grouped, randomness
from landscape.core import registry
from landscape.core.errors import FailedError
from landscape.data.base import Dataset
from landscape.problem.problem import Loss


@dataclass(frozen=True)
class Source:
    """Where an analysis takes model, data and loss from; None: from the checkpoint, or the data.

    ``randomness`` is as :class:`landscape.Problem` takes it.

    ``typed``: the options of ``data`` and ``model`` that were typed, without a built-in one's defaults.
    """

    model: user_code.Spec | None
    data: user_code.Spec | None
    loss: str | None
    data_dir: str | None
    randomness: str
    typed: dict[str, dict[str, Any]]

    @classmethod
    def of_options(
        cls,
        model: str | None = None,
        data: str | None = None,
        loss: str | None = None,
        data_dir: str | None = None,
        randomness: str = "refuse",
    ) -> Source:
        """From the values of --model, --data, --loss, --data-dir and --randomness."""
        return cls(
            user_code.known_spec("--model", model, registry.models) if model else None,
            user_code.known_spec("--data", data, registry.data_sets) if data else None,
            loss,
            data_dir,
            randomness,
            {
                "data": user_code.parse("--data", data).options if data else {},
                "model": user_code.parse("--model", model).options if model else {},
            },
        )

    def build_model(self) -> nn.Module:
        """The user's model, new at each call."""
        assert self.model is not None
        return user_code.build_model("--model", self.model)

    @cached_property
    def user_data(self) -> user_code.UserData | Dataset | None:
        """The user's data, made once."""
        return user_code.load_data("--data", self.data, self.data_dir) if self.data else None

    def other_data(self, checkpoint: Checkpoint) -> str:
        """The name of the data if it is certainly not the checkpoint's data; "" otherwise.

        FailedError for data with the name of the checkpoint's data but another fingerprint.
        """
        known = checkpoint.data
        if self.data is None or not known["name"]:
            return ""
        assert self.user_data is not None
        fingerprint = self.user_data.fingerprint
        if fingerprint and fingerprint == known["fingerprint"]:
            return ""
        left_out = self._left_out("data", self.data, known)
        if not left_out and (self.data.name != known["name"] or self.data.options != known["options"]):
            return user_code.command_text(self.data.name, self.typed["data"])
        if left_out or (fingerprint and known["fingerprint"]):
            whole = user_code.command_text(known["name"], known["options"])
            cause = f"options are missing, give --data {whole}" if left_out else "random without a seed?"
            raise FailedError(
                f"--data: {self.data.name} is not the data of {checkpoint.path}: "
                f"fingerprint {fingerprint[:12]}…, not {known['fingerprint'][:12]}… ({cause})"
            )
        return ""

    def check_model(self, checkpoint: Checkpoint) -> None:
        """FailedError for the name of the checkpoint's model without its options."""
        if self.model and self._left_out("model", self.model, checkpoint.model):
            whole = user_code.command_text(checkpoint.model["name"], checkpoint.model["options"])
            raise FailedError(
                f"--model: {self.model.name} without its options is not the model of {checkpoint.path}; give "
                f"--model {whole}"
            )

    def _left_out(self, what: str, spec: user_code.Spec, known: dict[str, Any]) -> bool:
        """Whether ``spec`` is the checkpoint's, except for options that were not typed."""
        same = all(known["options"].get(key) == value for key, value in self.typed[what].items())
        return spec.name == known["name"] and spec.options != known["options"] and same

    @cached_property
    def user_loss(self) -> Loss | Literal["data"] | None:
        """The user's loss, or "data", as Checkpoint.problem takes it."""
        return user_code.load_loss("--loss", self.loss) if self.loss else "data"


_MADE = "MODULE:NAME, called to make it, or a built-in name; options follow in brackets"
SOURCE = (
    click.option(
        "--model", metavar="NAME", help=f"{_MADE}. [default: the checkpoint's, if it is a built-in one]"
    ),
    click.option(
        "--data",
        metavar="NAME",
        help=f"{_MADE}: (x, y), batches, or splits of them. [default: the checkpoint's]",
    ),
    click.option(
        "--loss",
        metavar="NAME",
        help="MODULE:NAME of loss(outputs, targets), a mean (a class, or a name with brackets, is called "
        "to make it); or output: the model returns its loss. [default: the data's, else cross-entropy, or "
        "output where batches are single dicts]",
    ),
    data_dir,
    randomness,
)
OF_SOURCE = ("model", "data", "loss", "data_dir", "randomness")  # their parameters
source = grouped("source", Source.of_options, *SOURCE)
