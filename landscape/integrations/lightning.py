"""A callback for Lightning's Trainer, of the package lightning or pytorch_lightning."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from landscape.core.errors import InputError
from landscape.integrations import Recorded, batch_size, shallow_copy
from landscape.problem.batches import as_tensors, is_resident
from landscape.problem.ranks import is_sharded

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the same classes, twice


def _bases() -> tuple[type, ...]:
    """Return the callback of a package that is installed; a Trainer accepts only its own package's."""
    bases = []
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            bases.append(importlib.import_module(name).Callback)
    if not bases:
        raise ImportError("lightning is not installed; pip install 'sgd-landscape[lightning]'")
    return tuple(bases)


# Under this name a step's model gets a whole batch.
BATCH = "landscape_batch"
# Callbacks that put other weights into the module after the last step.
AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")
HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")


class LandscapeCallback(Recorded, *_bases()):  # type: ignore[misc]
    """Records a training of Lightning's Trainer as :class:`landscape.Recorder` records a loop.

    A step is one of the optimizer: with gradient accumulation, clipping and mixed precision as the Trainer
    makes it. Under DDP rank 0 records, while the other ranks wait for it at their next exchange. A run that
    is resumed from a checkpoint of Lightning's (``ckpt_path``) is resumed in its folder, too.

    Args:
        folder: where the files go.
        loss: ``loss(outputs, targets)`` of the module's ``forward``, a mean. Default: the loss that
            ``training_step`` returns, in eval mode, as a mean over the samples of its batches.
        data: the training set, as the recorder takes it; without ``loss`` it is made of batches that
            ``training_step`` takes. Default: the data set behind the train dataloader, in order.
        test: data of the same kind, for the test loss.
        settings: ``every``, ``samples``, ``sharpness``, ``monitor``, ``save_every``, ``batch``, ``resume``,
            ``scalars``, ``seed``, ``terms`` and ``randomness`` of the recorder. ``batch`` is by default that
            of the train dataloader; ``terms`` takes a whole batch where the loss is training_step's.

    Raises:
        InputError: for a setting that is not the recorder's, or not allowed; at the start of the training for
            what the recorder refuses, several optimizers, shards of the parameters, batches that the Trainer
            changes on their way, and a ``training_step`` that cannot be evaluated on its own.
        OperationError: at the start of the training, for a folder that the recorder refuses.

    Example::

        Trainer(callbacks=[LandscapeCallback("runs/mine", every=50)]).fit(module, data)
    """

    _resume = 0
    _stepping = False  # the optimizer's step has begun, and with it its closure

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the recorder."""
        self._check(trainer)
        loader = trainer.train_dataloader
        model, terms = shallow_copy(pl_module), self._settings["terms"]
        data, test = self._splits(loader)
        if self._loss is None:
            _check_own_loss(trainer, pl_module)
            model, data, test = step_model(pl_module), as_steps(data), as_steps(test)
            user_terms = terms
            terms = user_terms and (lambda inputs: user_terms(inputs[BATCH]))
        (optimizer,) = trainer.optimizers
        batch = batch_size(loader) if trainer.accumulate_grad_batches == 1 else 0
        resume = self._resume if trainer.global_step else 0  # another Trainer's first fit does not resume
        self._begin(model, data, test, optimizer, batch=batch, resume=resume, terms=terms)
        self._stepping = False
        self._hooks.callback(optimizer.register_step_pre_hook(self._started).remove)
        self._hooks.callback(optimizer.register_step_post_hook(self._ended).remove)

    def _started(self, *step: Any) -> None:
        self._stepping = True

    def _ended(self, *step: Any) -> None:
        self._stepping = False
        if not self._within:
            raise InputError("LandscapeCallback: a step went past Lightning; use step() of self.optimizers()")
        self._after()

    def _check(self, trainer: Any) -> None:
        number, strategy = len(trainer.optimizers), trainer.strategy
        if number != 1:
            remedy = "one step must change all parameters; use landscape.Recorder in training_step"
            raise InputError(f"LandscapeCallback: {number} optimizers are not allowed, {remedy}")
        if strategy.handles_gradient_accumulation:
            allowed = "only a single device or DDP"
            raise InputError(f"LandscapeCallback: {type(strategy).__name__} is not allowed, {allowed}")
        if is_sharded(trainer.lightning_module):
            remedy = "use a single device or DDP, or landscape.Recorder in hooks of the module, on all ranks"
            raise InputError(f"LandscapeCallback: parameters in shards are not allowed; {remedy}")
        for callback in trainer.callbacks:
            if callback is self:
                return
            if any(kind.__name__ in AVERAGING for kind in type(callback).__mro__):
                name = type(callback).__name__
                raise InputError(f"LandscapeCallback: it must come before {name} in the Trainer's callbacks")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin a step of the recorder: after backward, before gradients are clipped."""
        if not (self._stepping and self._within):  # LBFGS calls its closure several times within a step
            self._before()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step that a GradScaler skipped, and record the minibatch's loss."""
        self._after()
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if trainer.accumulate_grad_batches == 1 and isinstance(loss, Tensor):
            self._log(loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the recorder."""
        self._end()
        self._resume = self._steps  # a second fit resumes

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the recorder; after an exception within a step nothing is written."""
        self._abort()

    def state_dict(self) -> dict[str, Any]:
        """Return the step, for a checkpoint of Lightning's."""
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the step of a checkpoint of Lightning's."""
        self._resume = int(state_dict["steps"])


# The loss of training_step.


def as_steps(data: Any) -> Any:
    """Return ``data`` made of batches for training_step, as inputs of a :func:`step_model`."""
    data = as_tensors(data)
    if data is None or isinstance(data, Iterator):  # Problem refuses both
        return data
    return {BATCH: data} if is_resident(data) else StepBatches(data)


class StepBatches:
    """An iterable of batches, each as the one input of a :func:`step_model`."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({BATCH: batch} for batch in self.batches)


def step_model(module: Any) -> nn.Module:
    """Return a module that shares the parameters of ``module`` and whose output is training_step's loss.

    The new module is called with ``landscape_batch=batch``, and returns {"loss": Tensor}. It logs nothing.
    What training_step appends to lists of the module, and adds to metrics, is removed after each call
    (:func:`_loss_of_step`). ``current_epoch`` and ``global_step`` of the new module are always those of
    ``module``, because the loss may depend on them. The new module's class has the name of the user's class.
    """
    user_class = type(module)

    class LossModule(user_class):  # type: ignore[misc, valid-type]
        current_epoch = property(lambda self: module.current_epoch)
        global_step = property(lambda self: module.global_step)
        trainer = property(_refuse_trainer)

        def log(self, *args: Any, **kwargs: Any) -> None: ...

        def log_dict(self, *args: Any, **kwargs: Any) -> None: ...

        def print(self, *args: Any, **kwargs: Any) -> None: ...

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if BATCH not in kwargs:  # training_step itself calls the module
                return super().forward(*args, **kwargs)
            return {"loss": _loss_of_step(self, kwargs[BATCH])}

    # Checkpoints name the model's class: the user's, not LossModule.
    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(LossModule, attribute, getattr(user_class, attribute))
    loss_module = shallow_copy(module)
    loss_module.__class__ = LossModule
    return loss_module


def _loss_of_step(module: Any, batch: Any) -> Tensor:
    """Return the loss of training_step for ``batch``; lists and metrics of the module stay unchanged."""
    lists = [(value, len(value)) for value in vars(module).values() if type(value) is list]
    batch_idx = [0] if _indices(module) > 0 else []
    try:
        result = module.training_step(batch, *batch_idx)
    finally:
        # Modules collect outputs for the end of an epoch, which a copy never reaches.
        for items, length in lists:
            del items[length:]
        for child in module.modules():
            if hasattr(child, "_defaults") and hasattr(child, "reset"):  # a metric of torchmetrics
                child.reset()
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise InputError(f"loss: training_step gives a {type(loss).__name__}, it must give the mean")
    return loss


def _refuse_trainer(module: Any) -> Any:
    raise InputError("loss: training_step uses the trainer; give loss=…, of forward's outputs, and data=…")


def _indices(module: Any) -> int:
    """Return the number of arguments of training_step after the batch: 1 with batch_idx, else 0."""
    parameters = inspect.signature(module.training_step).parameters.values()
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters if p.kind in kinds and p.default is p.empty]) - 1


def _check_own_loss(trainer: Any, module: Any) -> None:
    """Raise InputError if the optimizer's steps may follow another loss than that of training_step."""
    reason = ""
    if not module.automatic_optimization:
        reason = "training_step makes the optimizer's steps itself (manual optimization)"
    elif "dataloader_iter" in inspect.signature(module.training_step).parameters or _indices(module) > 1:
        reason = "training_step takes more than batch and batch_idx"
    changing = [name for name in HOOKS if _overrides(module, name) or _overrides(trainer.datamodule, name)]
    if changing:
        reason = f"{changing[0]} changes the batches on their way to training_step"
    if reason:
        raise InputError(f"loss: {reason}; give loss=…, of the outputs of forward, with data=…")


def _overrides(owner: Any, name: str) -> bool:
    """Return whether the method ``name`` of a module or datamodule is not Lightning's own."""
    method = getattr(type(owner), name, None)
    packages = [package.partition(".")[0] for package in PACKAGES]
    return method is not None and method.__module__.partition(".")[0] not in packages
