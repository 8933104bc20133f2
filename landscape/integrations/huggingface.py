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

    A step is one of the optimizer, the Trainer's global step, with gradient accumulation, clipping and mixed
    precision. Under DDP rank 0 records, and the other ranks wait for it at their next exchange.
    ``trainer.train(resume_from_checkpoint=…)`` also resumes the run in the folder, from the checkpoint's
    step. The Trainer's logged loss becomes the column ``loss``.

    Args:
        folder: where the files go.
        loss: ``loss(outputs, labels)``, a mean. Default: the model's own loss, a mean over all tokens of the
            data, without anything that a ``compute_loss`` adds. If the Trainer divides the sum over a step's
            tokens by another number (for GPT-2 by that of all labels, even the first of a sequence), α_e is
            smaller than lr by this factor.
        data: the training set, as the recorder takes it; default: the Trainer's, through its collator.
        test: data of the same kind, or a data set, for the test loss.
        settings: ``every``, ``samples``, ``sharpness``, ``monitor``, ``save_every``, ``batch``, ``resume``,
            ``scalars``, ``seed``, ``terms`` and ``randomness`` of the recorder. With ``samples`` the whole
            training set is collated at once.

    Raises:
        InputError: a setting that the recorder does not have or allow; in training, what the recorder
            refuses; without ``loss``, label smoothing or a loss of the Trainer's own; a data set without a
            length or with a random collator (of masked words); optimizers that step in the backward pass.
        OperationError: in training, a folder that the recorder refuses.

    Example::

        Trainer(model, args, train_dataset=data, callbacks=[LandscapeCallback("runs/mine", every=50)]).train()
    """

    _through_loss: list[Tensor] | None = None  # gradients that went through the model's own loss
    _begun = False
    _last: dict[str, Tensor] | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **others: Any
    ) -> None:
        """Check the Trainer's arguments before the first step."""
        self._abort()  # closes the recorder of a training that an exception ended
        self._begun, self._last, self._through_loss = False, None, None
        _check(args, optimizer, own_loss=self._loss is None)
        if self._loss is None and not args.torch_compile:  # a hook would have it compiled again
            self._through_loss = []
            self._hooks.callback(watch_loss(model, self._through_loss))

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, train_dataloader: Any,
        **others: Any,
    ) -> None:  # fmt: skip
        """Begin a step of the recorder: gradients are computed and clipped."""
        if not self._begun:  # the weights are still those at the start of the training
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
        """End the step of the recorder."""
        self._after()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **others: Any) -> None:
        """Record the training loss: the Trainer's mean since its last log."""
        if self._recorder is not None and "loss" in (logs or {}):
            self._recorder.log(loss=logs["loss"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Keep the weights if the Trainer may replace them by the best ones at the end."""
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
    """Raise InputError if arguments of the Trainer make other steps or losses than the recorded ones."""
    name = str(getattr(args.optim, "value", args.optim))
    if "lomo" in name or "layerwise" in name:
        raise InputError(f"LandscapeCallback: optim '{name}' steps in the backward pass; use another")
    if args.deepspeed or type(optimizer).__name__ == "DeepSpeedOptimizerWrapper":
        raise InputError("LandscapeCallback: DeepSpeed makes the steps itself; use a single device or DDP")
    if own_loss and args.label_smoothing_factor:
        reason = f"label_smoothing_factor={args.label_smoothing_factor} changes the model's own"
        raise InputError(f"loss: {reason}; give loss=…, of outputs and labels, with terms=… if they differ")


def watch_loss(model: nn.Module, gradients: list[Tensor]) -> Callable[[], None]:
    """Collect in ``gradients`` those of the losses that a model returns; call the result to stop."""

    def collect(module: nn.Module, args: Any, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if isinstance(loss, Tensor) and loss.requires_grad and torch.is_grad_enabled():
            loss.register_hook(gradients.append)  # type: ignore[no-untyped-call]

    return model.register_forward_hook(collect).remove


def bare(model: nn.Module) -> nn.Module:
    """Return ``model`` with its own ``forward``, without mixed precision; a sharded one is unchanged."""
    if is_sharded(model):
        return model
    model_copy = shallow_copy(model)
    original_forward = vars(model_copy).pop("_original_forward", None)
    if original_forward is not None:
        vars(model_copy)["forward"] = original_forward
    return model_copy
