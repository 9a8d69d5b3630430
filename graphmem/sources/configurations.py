"""JSON files of a transformers model's folder: read with limits, one message for what is none. Neither torch nor
transformers is imported here."""

from __future__ import annotations

from pathlib import Path

from graphmem.base.documents import read_json, shown
from graphmem.errors import SourceError, UsageError, first_line
from graphmem.training.generation import DRAFTING, Generation


def values_of(path: Path) -> dict[str, object]:
    """The values of a ``config.json`` that names its ``model_type``. Raises :class:`SourceError`."""
    values = read(path, "a readable JSON configuration")
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(values, dict) or kind is None:
        raise SourceError(f"{path} names no model_type; give the config.json of a transformers model")
    if not isinstance(kind, str):
        raise SourceError(f"{path} names the model type {shown(kind)}, which is no name")
    return values


def generation_values(path: Path) -> dict[str, object]:
    """The values of a ``generation_config.json``. Raises :class:`SourceError`, for assisted decoding too."""
    values = read(path, "a readable JSON configuration")
    if not isinstance(values, dict):
        raise SourceError(f"{path} is no configuration of a generation: it holds {shown(values)}")
    for name in DRAFTING:
        if (value := values.get(name)) is not None:
            raise SourceError(
                f"{path}: {name}: assisted decoding is asked for by options; remove it there, and give "
                f"--generation-arg {name}={shown(value)} for it"
            )
    try:
        Generation(1, **{name: values[name] for name in _CHECKED if values.get(name) is not None})
    except UsageError as error:
        raise SourceError(f"{path}: {error}") from None
    return values


#: What is checked as the options of the same names are.
_CHECKED = ("do_sample", "num_beams", "num_return_sequences", "cache_implementation", "prefill_chunk_size")


def read(path: Path, what: str) -> object:
    """The value of a JSON file; ``what`` it should be, for messages. Raises :class:`SourceError`."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} is not {what}: {first_line(error)}") from None
