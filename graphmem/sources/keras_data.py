"""A Keras model and the shapes of its data, of any of Keras's backends. Data are arrays without memory: one zero."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphmem.errors import SourceError
from graphmem.sources.base import Sizes, known_arguments, spelled

if TYPE_CHECKING:
    import keras
    import torch

DEFAULT_BATCH = 1
#: An array (or a tensor of another library), or lists and dictionaries of them.
Data: TypeAlias = "NDArray[np.generic] | list[Data] | tuple[Data, ...] | dict[str, Data]"


def model_with_data(factory: Callable[..., object], name: str, sizes: Sizes) -> tuple[keras.Model, Data, Data | None]:
    """Call the factory: the model, built, its inputs, and its targets if its own compiled step is to train it.

    Raises :class:`SourceError` where the factory returns something else, or where a shape is not known.
    """
    result = factory(**known_arguments(factory, name, _named_by(factory, sizes)))
    model, x, y = _checked(result, name)
    inputs = _inputs_of(model, name, sizes) if x is None else _resized(x, sizes.batch)
    outputs = call(model, _symbolic(inputs), training=False)  # builds what is not built, as fit does
    if not sizes.training or not model.compiled:
        return model, inputs, None
    return model, inputs, _targets_of(model, outputs, name) if y is None else _resized(y, sizes.batch)


def call(model: keras.Model, inputs: object, *, training: bool) -> object:
    """The model on its inputs; ``training`` goes to models that take it."""
    if getattr(model, "_call_has_training_arg", False):
        return model(inputs, training=training)
    return model(inputs)


def _named_by(factory: Callable[..., object], sizes: Sizes) -> Sizes:
    """The sizes that the factory has parameters for; the others still shape the inputs."""
    names = inspect.signature(factory).parameters
    return Sizes(sizes.batch if spelled("batch", names) else None, sizes.seq_len if spelled("seq_len", names) else None)


def _checked(result: object, name: str) -> tuple[keras.Model, Data | None, Data | None]:
    import keras

    model, *data = result if isinstance(result, tuple) else (result,)
    if not isinstance(model, keras.Model) or len(data) > 2:
        kind = type(model).__name__
        raise SourceError(f"{name} returned a {kind}; it should return a keras.Model, (model, x) or (model, x, y)")
    return model, *data, *[None] * (2 - len(data))


def _inputs_of(model: keras.Model, name: str, sizes: Sizes) -> Data:
    """Data of the shapes that the model's ``keras.Input`` declare."""
    declared = getattr(model, "inputs", None)
    if not declared:
        raise SourceError(f"{name} returned a model without keras.Input; return (model, x) with an example batch x")
    made: list[Data] = [_zeros(_bound_shape(tensor, name, sizes), tensor.dtype) for tensor in declared]
    return made[0] if len(made) == 1 else made


def _bound_shape(tensor: keras.KerasTensor, name: str, sizes: Sizes) -> tuple[int, ...]:
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


def _zeros(shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    try:
        kind = np.dtype(dtype)
    except TypeError:  # a type that numpy does not have
        kind = np.dtype("float32")
    return np.broadcast_to(np.zeros((), kind), shape)


def _resized(data: Data, batch: int | None) -> Data:
    """Example data, with ``batch`` rows if that is given."""
    if isinstance(data, dict):
        return {key: _resized(value, batch) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_resized(value, batch) for value in data]
    shape = tuple(data.shape)
    return _zeros((batch, *shape[1:]) if batch and shape else shape, _name_of(data.dtype))


def _name_of(dtype: np.dtype[Any] | torch.dtype) -> str:
    """A dtype of NumPy, PyTorch or TensorFlow by its bare name."""
    return getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]


def _symbolic(data: Data) -> Data:
    """The shapes of the data, which Keras can pass through a model without computing anything."""
    import keras

    found: Data = keras.tree.map_structure(lambda one: keras.KerasTensor(tuple(one.shape), str(one.dtype)), data)
    return found


def _targets_of(model: keras.Model, output: keras.KerasTensor, name: str) -> NDArray[np.generic]:
    """Targets of the output's shape, or class numbers where the loss is a sparse one."""
    if not hasattr(output, "shape"):
        raise SourceError(f"{name} returned a model with several outputs; return (model, x, y) with example targets y")
    loss = model.loss
    words = loss if isinstance(loss, str) else getattr(loss, "name", getattr(loss, "__name__", ""))
    if "sparse" in words.lower():
        return _zeros(tuple(output.shape[:-1]), "int32")
    return _zeros(tuple(output.shape), str(output.dtype))
