"""``zoo:<name>``: the models of the zoo's manifest, each with its usual batch and its usual training step.

The zoo is the folder ``models_zoo`` of a checkout. An installed graphmem has it as its package ``graphmem.zoo``
(``setup.py``), so that no second package lies beside it in everybody's ``site-packages``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING

from graphmem.errors import SourceError
from graphmem.sources.base import Built, Sizes, TorchModel
from graphmem.training import Inference, Training

if TYPE_CHECKING:
    from models_zoo.manifest import Entry

#: How the name of a model of the zoo begins.
ZOO = "zoo:"


def zoo_entries() -> tuple[Entry, ...]:
    """Every entry of the manifest. Raises :class:`SourceError` where the zoo is not installed."""
    return tuple(_manifest().entries())


def zoo_entry(name: str) -> Entry:
    """The entry of that name. Raises :class:`SourceError` with the closest names."""
    try:
        entry: Entry = _manifest().entry(name)
        return entry
    except KeyError as error:
        raise SourceError(f"the zoo has no model {name!r}; {error.args[0]}") from None


def usual_step(name: str, *, training: bool = True) -> Training | Inference:
    """The entry's training step, or inference in the same precision."""
    given = dict(zoo_entry(name).training)
    given["optimizer_args"] = tuple(given.get("optimizer_args", {}).items())
    if training:
        return Training(**given)
    shared = {field.name for field in fields(Inference)}
    return Inference(**{key: value for key, value in given.items() if key in shared})


def load_zoo(name: str) -> TorchModel:
    """The model of that name, with its usual sizes where none are asked for. Raises :class:`SourceError`."""
    from graphmem.sources.huggingface import reading_once

    entry = zoo_entry(name)
    with contextlib.suppress(ImportError), reading_once():  # what is missing is said where the model is built
        zoo_module("libraries").make_torchvision_importable()  # transformers and timm import it where it is installed
        getattr(
            importlib.import_module(entry.library), entry.model.partition(":")[2], None
        )  # classes are imported, too
    return TorchModel(f"zoo:{name}", lambda sizes: _build(entry, sizes))


def _build(entry: Entry, sizes: Sizes) -> Built:
    try:
        with _offline():
            step = zoo_module("build").build(entry, sizes.batch, sizes.seq_len, training=sizes.training)
    except ImportError as error:
        needed = error.name or entry.library
        raise SourceError(f"zoo:{entry.name} needs {needed}; install it with: pip install {needed}") from None
    except ValueError as error:
        raise SourceError(f"zoo:{entry.name}: {error}") from None
    notes = [] if sizes.batch else [f"batch {entry.batch} (give --batch)"]
    if entry.length is not None and sizes.seq_len is None:
        notes.append(f"sequence length {entry.length} (give --seq-len)")
    return Built(step.model, step.inputs, step.loss, tuple(notes))


def _offline() -> contextlib.AbstractContextManager[None]:
    if not importlib.util.find_spec("huggingface_hub"):
        return contextlib.nullcontext()
    from graphmem.sources.huggingface import offline

    return offline()


def zoo_module(name: str) -> ModuleType:
    """A module of the zoo, such as ``libraries``. Raises ``ImportError`` where the zoo is not, or what it needs."""
    package = "graphmem.zoo" if importlib.util.find_spec("graphmem.zoo") else "models_zoo"
    return importlib.import_module(f"{package}.{name}")


def _manifest() -> ModuleType:
    try:
        return zoo_module("manifest")
    except ImportError as error:
        raise SourceError(f"the model zoo cannot be imported: {error}; install graphmem with its zoo") from None
