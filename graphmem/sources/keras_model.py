"""``keras:module.py:factory``: a Keras 3 model, built on Keras's PyTorch backend so that its step can be captured.

The factory returns a ``keras.Model``, compiled or not, or ``(model, x)`` or ``(model, x, y)``. A compiled model trains
as ``fit`` would train it: its own ``train_step``, loss and optimizer. One that is not compiled goes through graphmem's
default loop with ``--optimizer``. Written against Keras 3.15.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from graphmem.errors import SourceError
from graphmem.sources.base import Built, Sizes, TorchModel, known_arguments, not_imported, spelled
from graphmem.sources.factory import find_factory

DEVICE_SCOPE = "gpu:0"  # Keras's name of the device that graphmem pretends to have
DEFAULT_BATCH = 1
TRAINING_ITERATIONS = 3


def load_keras(text: str) -> TorchModel:
    """Import the module and find the factory; it is called later, on fake tensors. Raises :class:`SourceError`."""
    _import_keras(text)
    factory, name = find_factory(text)

    def build(sizes: Sizes) -> Built | None:
        return _build(factory, name, sizes)

    notes = ("the model's operators are those of Keras's PyTorch backend",)
    return TorchModel(
        f"keras:{text}",
        build,
        notes,
        framework="Keras",
        runtime="tensorflow",
        step_words="train_step of the compiled Keras model, with its own optimizer and loss",
    )


def _import_keras(text: str) -> None:
    before = dict(os.environ)
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it once, while it is imported
    try:
        import keras
    except Exception as error:
        raise not_imported(f"keras:{text}", "keras", "Keras 3", "graphmem[keras]", error) from None
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


def _build(factory: Callable[..., Any], name: str, sizes: Sizes) -> Built | None:
    """Call the factory on the device. None: a compiled model, whose training steps have been run."""
    with _on_device():
        result = factory(**known_arguments(factory, name, _named_by(factory, sizes)))
        model, x, y = _checked(result, name)
        inputs = _inputs_of(model, name, sizes) if x is None else _resized(x, sizes.batch)
        outputs = _call(model, _symbolic(inputs), training=False)  # builds what is not built, as fit does
        if not sizes.training or not model.compiled:
            return Built(_keras_module(model), (inputs,), None, ())
        targets = _targets_of(model, outputs, name) if y is None else _resized(y, sizes.batch)
        _train(model, inputs, targets, sizes.iterations or TRAINING_ITERATIONS)
    return None


def _named_by(factory: Callable[..., Any], sizes: Sizes) -> Sizes:
    """The sizes that the factory has parameters for; the others still shape the inputs."""
    names = inspect.signature(factory).parameters
    return Sizes(sizes.batch if spelled("batch", names) else None, sizes.seq_len if spelled("seq_len", names) else None)


def _checked(result: Any, name: str) -> tuple[Any, Any, Any]:
    import keras

    model, *data = result if isinstance(result, tuple) else (result,)
    if not isinstance(model, keras.Model) or len(data) > 2:
        kind = type(model).__name__
        raise SourceError(f"{name} returned a {kind}; it should return a keras.Model, (model, x) or (model, x, y)")
    return model, *data, *[None] * (2 - len(data))


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


def _call(model: Any, inputs: Any, *, training: bool) -> Any:
    if getattr(model, "_call_has_training_arg", False):
        return model(inputs, training=training)
    return model(inputs)


def _keras_module(model: Any) -> Any:
    """The model as an ``nn.Module`` that runs on the device."""
    from torch import nn

    class KerasModule(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.keras = model

        def forward(self, inputs: Any) -> Any:
            with _on_device():
                return _call(model, inputs, training=self.training)

        def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
            yield from _trained(model)

        def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
            yield from _not_trained(model)

    return KerasModule()


# `value` may be a copy in the precision of the layer that is running; `_value` is the tensor itself.
def _trained(layer: Any, *_: Any, **__: Any) -> list[tuple[str, Any]]:
    return [(variable.path, variable._value) for variable in layer.trainable_variables]


def _not_trained(layer: Any, *_: Any, **__: Any) -> list[tuple[str, Any]]:
    return [(variable.path, variable._value) for variable in layer.non_trainable_variables]


# --- data -------------------------------------------------------------------------------------------------------------


def _inputs_of(model: Any, name: str, sizes: Sizes) -> Any:
    """Host tensors of the shapes that the model's ``keras.Input`` declare."""
    declared = getattr(model, "inputs", None)
    if not declared:
        raise SourceError(f"{name} returned a model without keras.Input; return (model, x) with an example batch x")
    made = [_host_tensor(_bound_shape(tensor, name, sizes), tensor.dtype) for tensor in declared]
    return made[0] if len(made) == 1 else made


def _bound_shape(tensor: Any, name: str, sizes: Sizes) -> tuple[int, ...]:
    batch, *rest = tensor.shape
    if rest and rest[0] is None and sizes.seq_len is not None:
        rest[0] = sizes.seq_len
    if None in rest:
        shown = (None, *rest)
        raise SourceError(
            f"input {tensor.name} of {name} has the shape {shown}; give --seq-len for its second dimension, or return "
            "(model, x) with an example batch x"
        )
    return (sizes.batch or batch or DEFAULT_BATCH, *rest)


def _host_tensor(shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype, torch.float32), device="cpu")


def _resized(data: Any, batch: int | None) -> Any:
    """Example data as host tensors, with ``batch`` rows if that is given."""
    if isinstance(data, dict):
        return {key: _resized(value, batch) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_resized(value, batch) for value in data]
    shape = tuple(data.shape)
    return _host_tensor((batch, *shape[1:]) if batch and shape else shape, str(data.dtype).removeprefix("torch."))


def _symbolic(data: Any) -> Any:
    """The shapes of the data, which Keras can pass through a model without computing anything."""
    import keras

    return keras.tree.map_structure(
        lambda host: keras.KerasTensor(tuple(host.shape), str(host.dtype).removeprefix("torch.")), data
    )


def _targets_of(model: Any, output: Any, name: str) -> Any:
    """Targets of the output's shape, or class numbers where the loss is a sparse one."""
    if not hasattr(output, "shape"):
        raise SourceError(f"{name} returned a model with several outputs; return (model, x, y) with example targets y")
    loss = model.loss
    words = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    if "sparse" in words.lower():
        return _host_tensor(tuple(output.shape[:-1]), "int32")
    return _host_tensor(tuple(output.shape), output.dtype)


# --- training ---------------------------------------------------------------------------------------------------------


def _train(model: Any, inputs: Any, targets: Any, iterations: int) -> None:
    """What ``fit`` does with every batch: the data go to the device, ``train_step`` does the rest."""
    from keras import tree

    model.optimizer.build(model.trainable_variables)  # fit builds it before the first batch, too
    _announce_steps(model)
    for _ in range(iterations):
        batch = tree.map_structure(lambda host: host.to("cuda"), (inputs, targets))
        model.train_step(batch)
        del batch


def _announce_steps(model: Any) -> None:
    """Let ``optimizer.apply`` be the step of a ``torch.optim.Optimizer``, which a capture watches for."""
    import torch

    optimizer, apply = model.optimizer, model.optimizer.apply

    class KerasOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
        def step(self, *arguments: Any) -> Any:
            return apply(*arguments)

    parameters = [variable.value for variable in model.trainable_variables]
    announced = KerasOptimizer(parameters, {})
    announced.state[parameters[0]] = {variable.path: variable.value for variable in optimizer.variables}
    optimizer.apply = announced.step
