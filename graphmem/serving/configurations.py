"""The model that a user names: a ``config.json``, a folder with one, a Hub model in the local cache, or of the table.

No network, no weights, no code of a model, and neither torch nor transformers: a configuration is JSON.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from graphmem.documents import shown
from graphmem.errors import SourceError
from graphmem.serving import gguf
from graphmem.serving.base import ServedModel
from graphmem.sources.checkpoints import checkpoint_in
from graphmem.sources.configurations import values_of


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
    cached = _cached(plain)
    if cached is not None:
        return _read(cached, plain)
    table = known_models()
    key = _key(plain)
    for known, config in table.items():
        if key in (_key(known), _key(known.split("/")[-1])):
            return ServedModel(known, config)
    close = difflib.get_close_matches(plain, [*table, *(one.split("/")[-1] for one in table)], n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise SourceError(
        f"{shown(plain)} is neither a config.json, a folder with one, a model in this machine's Hugging Face cache nor "
        f"one of graphmem's table{hint}"
    )


def _gguf(path: Path) -> ServedModel:
    """A GGUF file by its header; the metadata stand for the configuration."""
    found = gguf.read(path)
    architecture = found.metadata.get("general.architecture")
    return ServedModel(path.name, {**found.metadata, "model_type": f"gguf: {architecture}"}, found)


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Configurations of public models by their Hub names."""
    text = files("graphmem.serving").joinpath("configurations.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def _key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"(instruct|chat|it|hf|base)+$", "", key)


def _cached(name: str) -> Path | None:
    """The configuration of a Hub model that was downloaded before (the layout of huggingface_hub's cache)."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda one: one.stat().st_mtime) if snapshots.is_dir() else []
    return found[-1] if found else None


def _read(path: Path, name: str) -> ServedModel:
    values = values_of(path)
    text = values.get("text_config")
    if isinstance(text, dict) and "hidden_size" not in values:  # a multimodal wrapper
        raise SourceError(f"{path} is the configuration of a multimodal model, whose encoder is not followed yet")
    return ServedModel(name, values, checkpoint_in(path.parent), path)
