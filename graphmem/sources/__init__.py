"""Loaders of the models that a user points at, one file for each kind; here is the table of kinds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmem.base.addresses import refuse_address
from graphmem.errors import SourceError, UsageError
from graphmem.graph.asked import Asked
from graphmem.sources.base import OnnxModel, Sizes, TorchModel, require_torch
from graphmem.sources.hints import framework_of, hint_for_file, hint_for_name
from graphmem.sources.manifests import is_manifest
from graphmem.training.program import Program

if TYPE_CHECKING:
    from graphmem.sources.onnx_file import OnnxFile

__all__ = ["OnnxModel", "Sizes", "TorchModel", "load"]

_FORMS = (
    "accepted: model.onnx, model.pt2, module.py:factory, package.module:factory, hf:<config.json or model type>, "
    "timm:<name>, torchvision:<name>, keras:module.py:factory, jax:module.py:function, zoo:<name>, or the YAML or TOML "
    "of a fine-tuning tool"
)


#: Bytes of a file's name on the usual file systems.
_LONGEST_NAME = 255


def load(
    model: Any,
    example_inputs: Any = None,
    *,
    asked: Asked | None = None,
    shapes: str | None = None,
    optimization: tuple[str | None, str] = (None, "cpu"),
    files: dict[Any, OnnxFile] | None = None,
    trust: bool = False,
) -> OnnxModel | TorchModel:
    """Load ``model``: a path or name (see the command line's help), an ``nn.Module``, a factory or step function, or a
    whole :class:`Program`.

    ``asked`` binds the dimensions of ONNX files, ``shapes`` those of several runs; ``optimization`` is the (level,
    provider) ONNX Runtime optimizes them for, and ``files`` keeps those that were read for the next call. A list of
    ONNX files is one session each. ``trust`` lets PyTorch's own loader read a ``.pt2`` file, which can run code of it.
    Raises :class:`SourceError`.
    """
    if isinstance(model, (list, tuple)):
        models = [load(one, asked=asked, shapes=shapes, optimization=optimization, files=files) for one in model]
        if not models or not all(isinstance(one, OnnxModel) for one in models):
            raise SourceError("several models can be analysed together if all are ONNX files")
        sessions = [session for one in models if isinstance(one, OnnxModel) for session in one.sessions]
        return OnnxModel(", ".join(one.name for one in models), tuple(sessions))
    if isinstance(model, Program):
        require_torch(model.name)
        return TorchModel(model.words, lambda _: None, program=model)
    if isinstance(model, (str, os.PathLike)):
        text = os.fspath(model)
        if not text.strip():
            raise SourceError(f"no model given; {_FORMS}")
        refuse_address(text)
        if max(len(part.encode("utf-8", "surrogatepass")) for part in text.split("/")) > _LONGEST_NAME:
            raise SourceError(f"{text[:60]!r}... is too long to be the name of a file or model")
        if _suffix(text) == ".onnx":
            from graphmem.sources.onnx_file import read_onnx

            key, kept = (text, *optimization), {} if files is None else files
            if key not in kept:
                kept[key] = read_onnx(text, *optimization)
            return kept[key].model_of(asked or Asked(), shapes)
        kind, name = _kind_of(text)
        if kind == "jax":
            from graphmem.sources.jax_function import load_jax

            _refuse_values(asked)
            return load_jax(name, shapes)
        _refuse_sizes(shapes, asked)
        return _load_torch(text, kind, name, trust)
    _refuse_sizes(shapes, asked)
    if is_jitted(model):
        from graphmem.sources.jax_function import from_jitted

        return from_jitted(model, example_inputs)
    from graphmem.sources.module_object import from_object

    return from_object(model, example_inputs)


def _refuse_sizes(shapes: str | None, asked: Asked | None) -> None:
    """Raises :class:`UsageError` for sizes that only the inputs of ONNX files have, or a JAX function's arguments."""
    if shapes is not None:
        raise UsageError(
            "--shapes gives the runs of an ONNX session, or names the arguments of a JAX function (jax:step.py:step); "
            "the model is neither"
        )
    _refuse_values(asked)


def _refuse_values(asked: Asked | None) -> None:
    given = asked or Asked()
    if given.input_values or given.trip_count is not None:
        raise UsageError("--input-value and --trip-count are for ONNX files; the model is no .onnx file")


def _kind_of(text: str) -> tuple[str, str]:
    """The word before the colon, and what is behind it; of a file of Python that imports another framework than
    PyTorch, the kind of that framework and the whole."""
    kind, separator, name = text.partition(":")
    framework = framework_of(Path(kind)) if kind.endswith(".py") and separator else ""
    return (_KINDS[framework], text) if framework else (kind, name)


def is_jitted(model: object) -> bool:
    """Whether this is what ``jax.jit`` gives, without importing JAX."""
    return "jax" in sys.modules and callable(model) and hasattr(model, "trace") and hasattr(model, "lower")


def compiles_for_card(model: object) -> bool:
    """Whether a compiler of its own framework makes the model's step, for which it looks at all facts of the card."""
    return _kind_of(os.fspath(model))[0] == "jax" if isinstance(model, (str, os.PathLike)) else is_jitted(model)


def _load_torch(text: str, kind: str, name: str, trust: bool) -> TorchModel:
    separator = ":" in text
    if not separator and _suffix(text) == ".py" and Path(text).exists():
        raise _no_kind(text)
    if kind != "keras":  # which needs it where there is no TensorFlow
        require_torch(text, _EXTRAS.get(kind, "torch"))
    if separator and kind in _EXAMPLES:
        if not name:
            raise SourceError(f"{text!r} names no model; write for example {_EXAMPLES[kind]}")
        return _loader(kind)(name)
    if is_manifest(text):
        from graphmem.sources.manifests import load_manifest

        return load_manifest(text)
    if _suffix(text) == ".pt2":
        from graphmem.sources.exported_program import load_exported_program

        return load_exported_program(text, trust=trust)
    if separator:
        return _loader("factory")(text)
    if Path(text).exists():
        raise _no_kind(text)
    raise SourceError(f"{text} is neither a file nor a known kind of model; {hint_for_name(text) or _FORMS}")


def _no_kind(text: str) -> SourceError:
    return SourceError(f"{text}: not a kind of file that graphmem reads; {hint_for_file(Path(text)) or _FORMS}")


_EXAMPLES = {"hf": "hf:gpt2", "timm": "timm:resnet50", "torchvision": "torchvision:resnet50", "zoo": "zoo:bert-base",
             "keras": "keras:model.py:build"}  # fmt: skip


#: Kinds of models by the framework that their file imports.
_KINDS = {"Keras": "keras", "TensorFlow": "keras", "JAX": "jax"}
#: Extras of graphmem that bring the library of a kind of model, and PyTorch with it.
_EXTRAS = {"hf": "hf", "timm": "timm"}


#: The module and the function that load a model by name. They are imported when they are needed, for the libraries
#: that they import.
_LOADERS = {
    "hf": ("huggingface", "load_huggingface"), "keras": ("keras_model", "load_keras"),
    "timm": ("image_models", "load_timm"), "torchvision": ("image_models", "load_torchvision"),
    "zoo": ("zoo", "load_zoo"), "factory": ("factory", "load_factory"),
}  # fmt: skip


def _loader(kind: str) -> Callable[[str], TorchModel]:
    module, function = _LOADERS[kind]
    found: Callable[[str], TorchModel] = getattr(import_module(f"graphmem.sources.{module}"), function)
    return found


def _suffix(text: str) -> str:
    return Path(text).suffix.lower()
