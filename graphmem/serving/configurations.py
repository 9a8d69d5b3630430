"""The model that a user names: a ``config.json``, a folder with one, a Hub model in the local cache, or of the table.

No network, no weights, no code of a model, and neither torch nor transformers: a configuration is JSON.
"""

from __future__ import annotations

from pathlib import Path

from graphmem.base.documents import shown
from graphmem.errors import SourceError
from graphmem.serving import gguf
from graphmem.serving.base import ServedModel
from graphmem.sources.checkpoints import checkpoint_in
from graphmem.sources.configurations import values_of
from graphmem.sources.hub import cached_configuration, close_names, known_model, known_models


def model_named(name: str) -> ServedModel:
    """The configuration of ``name``; ``hf:`` before it is allowed. Raises :class:`SourceError`."""
    plain = name.removeprefix("hf:")
    path = Path(plain)
    if path.is_dir():
        return _read(path / "config.json", path.name)
    if path.suffix.lower() == ".gguf":
        return _gguf(path)
    if path.suffix == ".json" or path.is_file():
        return _read(path, path.parent.name if path.name == "config.json" and path.parent.name else path.name)
    cached = cached_configuration(plain)
    if cached is not None:
        return _read(cached, plain)
    known = known_model(plain)
    if known is not None:
        return ServedModel(known, known_models()[known])
    close = close_names(plain)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise SourceError(
        f"{shown(plain)} is neither a config.json, a folder with one, a model in this machine's Hugging Face cache nor "
        f"one of graphmem's table{hint}; else save its config.json and give that"
    )


def _gguf(path: Path) -> ServedModel:
    """A GGUF file by its header; the metadata stand for the configuration."""
    found = gguf.read(path)
    architecture = found.metadata.get("general.architecture")
    return ServedModel(path.name, {**found.metadata, "model_type": f"gguf: {architecture}"}, found)


def _read(path: Path, name: str) -> ServedModel:
    return ServedModel(name, values_of(path), checkpoint_in(path.parent), path)


def without_encoder(model: ServedModel) -> ServedModel:
    """The same model. Raises :class:`SourceError` for a configuration around a language model and encoders."""
    if isinstance(model.config.get("text_config"), dict) and "hidden_size" not in model.config:
        raise SourceError(f"{model.name} is a multimodal model, whose encoder is not followed yet")
    return model
