"""A callback for Hugging Face's Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.integrations import Recorded, batch_size, shallow_copy
from landscape.problem.ranks import is_sharded

try:
    from transformers import TrainerCallback
except ImportError as error:
    why = "transformers is not installed; pip install 'sgd-landscape[huggingface]'"
    raise ImportError(why) from error


class LandscapeCallback(Recorded, TrainerCallback):  # type: ignore[misc]  # Any, where it is not installed
    """Records a training of Hugging Face's Trainer as :class:`landscape.Recorder` records a loop.

    A step is one of the optimizer, the Trainer's global step: with gradient accumulation, clipping and mixed
    precision as the Trainer makes it. Under DDP rank 0 records, while the other ranks wait for it at their
    next exchange. ``trainer.train(resume_from_checkpoint=…)`` resumes the run in the folder, too, from
    the checkpoint's step. The Trainer's logged loss becomes the column ``loss``.

    Args:
        folder: where the files go.
        loss: ``loss(outputs, labels)``, a mean. Default: the model's own, which the Trainer trains unless it
            smooths labels or has a loss of its own: a mean over the tokens of the whole data. Where the
            Trainer divides the sum over a step's tokens by another number (of GPT-2 by all labels, the first
            of a sequence included), α_e is less than lr by that. What a ``compute_loss`` adds to the model's
            own loss is not known here.
        data: the training set, as the recorder takes it. Default: the Trainer's, through its collator.
        test: data of the same kind, or a data set, for the test loss.
        settings: ``every``, ``samples``, ``sharpness``, ``monitor``, ``save_every``, ``batch``, ``resume``,
            ``scalars``, ``seed``, ``terms`` and ``randomness`` of the recorder. With ``samples`` the whole
            training set is collated at once.

    Raises:
        InputError: for a setting that is not the recorder's, or not allowed; in training for what the
            recorder refuses, label smoothing or a loss of the Trainer's without ``loss``, a data set without
            a length or with a random collator (such as of masked words), and optimizers that step in the
            backward pass.
        OperationError: in training, for a folder that the recorder refuses.

    Example::

        Trainer(model, args, train_dataset=data, callbacks=[LandscapeCallback("runs/mine", every=50)]).train()
    """

    _through_loss: list[Tensor] | None = None  # gradients that went through the model's own loss
    _begun = False
    _last: dict[str, Tensor] | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **others: Any
    ) -> None:
        """Check what can be checked before the first step."""
        self._abort()  # of a training that an exception ended
        self._begun, self._last, self._through_loss = False, None, None
        _check(args, optimizer, own_loss=self._loss is None)
        if self._loss is None and not args.torch_compile:  # a hook would have it compiled again
            self._through_loss = []
            self._hooks.callback(watch_loss(model, self._through_loss))

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, train_dataloader: Any,
        **others: Any,
    ) -> None:  # fmt: skip
        """Measure what a step needs before it is made: the gradients are there, and clipped."""
        if not self._begun:  # the weights are still those of the training's start
            self._hooks.close()
            if self._through_loss == []:
                reason = "the Trainer trains another one than the model's own (compute_loss)"
                raise InputError(f"loss: {reason}; give loss=…, of outputs and labels, a mean")
            data, test = self._splits(train_dataloader)
            inner = getattr(optimizer, "optimizer", optimizer)
            batch = batch_size(train_dataloader) if args.gradient_accumulation_steps == 1 else 0
            self._begin(bare(model), data, test, inner, batch=batch, resume=state.global_step)
            self._begun = True
        self._before()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Record a step after it is made."""
        self._after()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **others: Any) -> None:
        """Record the training loss, the Trainer's mean since it logged last."""
        if self._recorder is not None and "loss" in (logs or {}):
            self._recorder.log(loss=logs["loss"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Keep the weights where the Trainer may put others in their place at the end."""
        if args.load_best_model_at_end and self._recorder is not None:
            self._last = copy.deepcopy(model.state_dict())

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Close the recorder, with the weights of the last step."""
        best = copy.deepcopy(model.state_dict()) if self._last else None
        if self._last:
            model.load_state_dict(self._last)
        self._end()
        if best:
            model.load_state_dict(best)
        self._last = None


def _check(args: Any, optimizer: Any, *, own_loss: bool) -> None:
    """Raise InputError for arguments of the Trainer with which steps or losses are not those recorded."""
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        raise InputError(f"LandscapeCallback: optim '{name}' steps in the backward pass; use another")
    if args.deepspeed or type(optimizer).__name__ == "DeepSpeedOptimizerWrapper":
        raise InputError("LandscapeCallback: DeepSpeed makes the steps itself; use a single device or DDP")
    if own_loss and args.label_smoothing_factor:
        reason = f"label_smoothing_factor={args.label_smoothing_factor} makes it another than the model's own"
        raise InputError(
            f"loss: {reason}; give loss=…, of outputs and labels, with terms=… where they differ"
        )


def watch_loss(model: nn.Module, gradients: list[Tensor]) -> Callable[[], None]:
    """Collect in ``gradients`` those of the losses that a model returns; call the result to stop."""

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and torch.is_grad_enabled():
            loss.register_hook(gradients.append)  # type: ignore[no-untyped-call]

    return model.register_forward_hook(after).remove


def bare(model: nn.Module) -> nn.Module:
    """Return ``model`` with its own ``forward``, without mixed precision; a sharded one is unchanged."""
    if is_sharded(model):
        return model
    copied = shallow_copy(model)
    original = vars(copied).pop("_original_forward", None)
    if original is not None:
        vars(copied)["forward"] = original
    return copied
