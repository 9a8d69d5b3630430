"""``keras:module.py:factory``: a Keras 3 model. Where TensorFlow is installed, its step is TensorFlow's
(:mod:`graphmem.sources.keras_tensorflow`); else it is built on Keras's PyTorch backend and captured.

The factory returns a ``keras.Model``, compiled or not, or ``(model, x)`` or ``(model, x, y)``. A compiled model trains
as ``fit`` would train it: its own ``train_step``, loss and optimizer. One that is not compiled goes through graphmem's
default loop with ``--optimizer``. Written against Keras 3.15.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from graphmem.errors import SourceError
from graphmem.sources import keras_tensorflow
from graphmem.sources.base import Built, Sizes, TorchModel, not_imported
from graphmem.sources.factory import find_factory
from graphmem.sources.keras_data import call, model_with_data

if TYPE_CHECKING:
    import keras
    from keras.src.backend.torch.layer import TorchLayer
    from torch import Tensor, nn

STEP_WORDS = "train_step of the compiled Keras model, with its own optimizer and loss"
DEVICE_SCOPE = "gpu:0"  # Keras's name of the device that graphmem pretends to have
TRAINING_ITERATIONS = 3


def load_keras(text: str) -> TorchModel:
    """The model, whose factory is called later. Raises :class:`SourceError`."""
    on_tensorflow = keras_tensorflow.is_installed() and os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
    if not on_tensorflow:
        _import_keras(text)
        find_factory(text)

    def build(sizes: Sizes) -> Built | None:
        _import_keras(text)
        return _build(*find_factory(text), sizes)

    notes = ("the model's operators are those of Keras's PyTorch backend",)
    return TorchModel(
        f"keras:{text}",
        build,
        notes,
        framework="Keras",
        runtime="tensorflow",
        step_words=STEP_WORDS,
        planned=partial(keras_tensorflow.plan_keras, text) if on_tensorflow else None,
    )


def _import_keras(text: str) -> None:
    before = dict(os.environ)
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it once, while it is imported
    try:
        import keras
    except Exception as error:
        what = "Keras 3 and PyTorch, or TensorFlow"
        raise not_imported(f"keras:{text}", "keras", what, "graphmem[keras]", error) from None
    finally:
        for name in ("KERAS_BACKEND", "TF_FORCE_GPU_ALLOW_GROWTH"):  # Keras sets the second for all but TensorFlow
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
    version = getattr(keras, "__version__", "0")
    if int(version.split(".")[0]) < 3:
        raise SourceError(f"keras:{text} needs Keras 3, and {version} is installed; pip install -U keras")
    if keras.backend.backend() != "torch":
        raise SourceError(
            f"Keras is loaded with its {keras.backend.backend()} backend; set KERAS_BACKEND=torch for the analysis"
        )


def _build(factory: Callable[..., object], name: str, sizes: Sizes) -> Built | None:
    """Call the factory on the device. None: a compiled model, whose training steps have been run."""
    with _on_device():
        model, x, y = model_with_data(factory, name, sizes)
        if y is None:
            return Built(_keras_module(model), (_host_tensors(x),), None, ())
        _train(model, _host_tensors(x), _host_tensors(y), sizes.iterations or TRAINING_ITERATIONS)
    return None


@contextlib.contextmanager
def _on_device() -> Iterator[None]:
    """Keras puts tensors on the GPU, draws random numbers without a generator, whose seed no fake tensor has, and calls
    its variables by their own paths, those that are not trained being buffers."""
    import keras
    from keras.src.backend.torch import random
    from keras.src.backend.torch.layer import TorchLayer

    from graphmem.capture.patches import Patches

    patches = Patches()
    try:
        patches.set(random, "torch_seed_generator", lambda seed: None)
        patches.set(TorchLayer, "named_parameters", _trained)
        patches.set(TorchLayer, "named_buffers", _not_trained)
        with keras.device(DEVICE_SCOPE):
            yield
    finally:
        patches.undo()


# --- the model as PyTorch sees it -------------------------------------------------------------------------------------


def _keras_module(model: keras.Model) -> nn.Module:
    """The model as an ``nn.Module`` that runs on the device."""
    from torch import nn

    class KerasModule(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.keras = model

        def forward(self, inputs: object) -> object:
            with _on_device():
                return call(model, inputs, training=self.training)

        def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, Tensor]]:
            yield from _trained(model)

        def named_buffers(self, *_: object, **__: object) -> Iterator[tuple[str, Tensor]]:
            yield from _not_trained(model)

    return KerasModule()


# `value` may be a copy in the precision of the layer that is running; `_value` is the tensor itself.
def _trained(layer: TorchLayer, *_: object, **__: object) -> list[tuple[str, Tensor]]:
    return [(variable.path, variable._value) for variable in layer.trainable_variables]


def _not_trained(layer: TorchLayer, *_: object, **__: object) -> list[tuple[str, Tensor]]:
    return [(variable.path, variable._value) for variable in layer.non_trainable_variables]


def _host_tensors(data: object) -> object:
    import torch
    from keras import tree

    return tree.map_structure(
        lambda one: torch.zeros(one.shape, dtype=getattr(torch, str(one.dtype), torch.float32), device="cpu"), data
    )


# --- training ---------------------------------------------------------------------------------------------------------


def _train(model: keras.Model, inputs: object, targets: object, iterations: int) -> None:
    """Train as ``fit`` does: every batch goes to the device, ``train_step`` does the rest."""
    from keras import tree

    model.optimizer.build(model.trainable_variables)  # fit builds it before the first batch, too
    _announce_steps(model)
    for _ in range(iterations):
        batch = tree.map_structure(lambda host: host.to("cuda"), (inputs, targets))
        model.train_step(batch)
        del batch


def _announce_steps(model: keras.Model) -> None:
    """Let ``optimizer.apply`` be the step of a ``torch.optim.Optimizer``, which a capture watches for."""
    import torch

    optimizer, apply = model.optimizer, model.optimizer.apply

    class KerasOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
        def step(self, *arguments: object) -> object:
            return apply(*arguments)

    parameters = [variable.value for variable in model.trainable_variables]
    announced = KerasOptimizer(parameters, {})
    announced.state[parameters[0]] = {variable.path: variable.value for variable in optimizer.variables}
    optimizer.apply = announced.step
