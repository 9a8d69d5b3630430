"""Models that transformers loads from a folder with ``config.json`` and no weights: they load as if those were there.

Nobody reads the weights, and their names and shapes are the model's own. So the file that is missing is taken to hold
the model's parameters and buffers, each once (``_get_resolved_checkpoint_files`` and ``_load_pretrained_model``,
``transformers/modeling_utils.py``, 5.x), and what places, casts and quantises them runs as it is. Of a configuration
that says its weights are quantised already nothing can be known without them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphmem.base.documents import read_json, shown
from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches
from graphmem.capture.program.safetensors_files import Described, SafeFile
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError

_MODULE = "transformers.modeling_utils"
_CONFIGURATION, _WEIGHTS = "config.json", "model.safetensors"


@contextlib.contextmanager
def missing_weights(
    add_file: Callable[[str], None], remark: Callable[[Diagnostic], None], folders: Mapping[str, str]
) -> Iterator[None]:
    """Until the end transformers finds weights where only a configuration is. ``add_file`` gets the file that
    stands for them, ``remark`` notes it; ``folders``: names on the Hub -> where their configurations are."""

    def follow(patches: Patches, module: ModuleType) -> None:
        if hasattr(module, "_get_resolved_checkpoint_files"):
            _patch(patches, module, add_file, remark, folders)

    with patched_imports({_MODULE: follow}):
        yield


def _patch(
    patches: Patches,
    module: ModuleType,
    add_file: Callable[[str], None],
    remark: Callable[[Diagnostic], None],
    folders: Mapping[str, str],
) -> None:
    """Let ``from_pretrained`` load a folder that has a configuration and no weights: a file in it is made up, for which
    the model's own checkpoint is loaded."""
    missing: set[str] = set()
    resolve, load = module._get_resolved_checkpoint_files, module.PreTrainedModel._load_pretrained_model

    def resolved(*args: object, **kwargs: object) -> object:
        try:
            return resolve(*args, **kwargs)
        except OSError:
            name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            folder = folders.get(str(name)) or _folder(name)
            if folder is None:
                raise
        _refuse_quantized(folder)
        file = os.path.join(folder, _WEIGHTS)
        missing.add(file)
        add_file(file)
        remark(Code.WEIGHTS_ABSENT.about(place=folder))
        return [file], None

    def loaded(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: object, **kwargs: object
    ) -> object:
        if state_dict is None and checkpoint_files and checkpoint_files[0] in missing:
            state_dict = checkpoint_of(model)
        return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    patches.set(module, "_get_resolved_checkpoint_files", resolved)
    patches.set(module.PreTrainedModel, "_load_pretrained_model", staticmethod(loaded))


def _folder(name: Any) -> str | None:
    """The folder with a configuration that is meant: on the disk, or in the Hub's cache."""
    if name is None:
        return None
    if os.path.isfile(os.path.join(name, _CONFIGURATION)):
        return str(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(str(name), _CONFIGURATION)
    except HFValidationError:
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def _refuse_quantized(folder: str) -> None:
    path = Path(folder, _CONFIGURATION)
    quantized = read_json(path).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        raise CaptureError(
            f"{path} is of weights that are quantised already ({shown(method or quantized)}), and they are not there: "
            "how they are packed is known from them alone; put the weights beside it, or take quantization_config out "
            "and give one to from_pretrained"
        )


def checkpoint_of(model: Any) -> dict[str, Any]:
    """A checkpoint of the model as safetensors shows it: by name, each tensor once, made when it is subscripted."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    named = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    plain = {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}
    file = SafeFile({name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in plain.items()})
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - as safetensors has it
