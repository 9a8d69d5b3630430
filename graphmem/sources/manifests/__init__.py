"""Configuration files of fine-tuning tools as models with their usual step; none of the tools has to be installed.

Each tool has a table beside this file (``axolotl.toml``): the keys by which its files are known, what the tool does
where a file is silent, which key sets what, and which have no size. All other keys of a file are named in the report.
A file is read as data, and nothing in it is run.

In a table, ``keys`` are copied; of ``choices`` the first pattern that the whole value matches says what it sets;
``models`` are the tool's own names of models, as far as ``model_pattern`` takes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from os.path import splitext
from pathlib import Path
from typing import Any

from graphmem.base.documents import LARGEST_CONFIGURATION, check_fields, read_content, read_yaml, shown, text_of
from graphmem.base.tables import parse_table, read_table
from graphmem.errors import SourceError, UsageError, first_line
from graphmem.sources.base import TorchModel
from graphmem.training import DataParallel, FullyShard, Training, ZeRO

_TOOLS = ("llamafactory", "axolotl", "trl", "torchtune", "torchtitan", "automodel")
_SUFFIXES = (".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class Settings:
    """What files set. ``dtype`` is that of weights that are trained, ``base_dtype`` of those below adapters; sizes of
    batches are in samples. A file that shares the model out need not say among how many (``world_size`` 0)."""

    model: str = ""
    batch: int = 1
    global_batch: int | None = None
    grad_accum: int | None = None
    seq_len: int | None = None
    optimizer: str = "adamw"
    fused: bool = False
    amp: str | None = None
    dtype: str = "fp32"
    base_dtype: str = "fp32"
    adapter_dtype: str = "fp32"
    checkpoint_activations: bool = False
    clip_grad_norm: int | float | None = None
    loop: str = "drop"
    adapter: bool = False
    quantized: str | None = None
    lora_rank: int = 8
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_mlp: bool = False
    lora_output: bool = False
    fsdp: bool = False
    zero: str | None = None
    replicas: int = 1
    shards: int = 0
    tp: int = 1
    cp: int = 1
    compile: bool = False


@dataclass(frozen=True)
class Manifest:
    """A file: the table of its tool, what it sets, the keys that set it, and those that are not followed."""

    path: str
    table: Mapping[str, Any]
    settings: Settings
    taken: tuple[str, ...]
    left: tuple[str, ...]

    def step(self, world_size: int | None = None) -> Training:
        """The step of one process. Raises :class:`UsageError` where the number of processes is not known."""
        found = self.settings
        try:
            return Training(
                optimizer=found.optimizer,
                optimizer_args=(("fused", True),) if found.fused else (),
                amp=found.amp,
                dtype="fp32" if found.adapter else found.dtype,
                checkpoint_activations=found.checkpoint_activations,
                grad_accum=self._accumulated(world_size),
                clip_grad_norm=found.clip_grad_norm or None,
                loop=found.loop,
                compile="default" if found.compile else None,
                tp=found.tp if found.tp > 1 else None,
                cp=found.cp if found.cp > 1 else None,
                **self._shared(world_size),
            )
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from None

    def _shared(self, world_size: int | None) -> dict[str, Any]:
        found = self.settings
        if found.zero is not None:
            return {"zero": ZeRO(self._processes(world_size), config=found.zero)}
        if not found.fsdp:
            return {"ddp": DataParallel(found.replicas)} if found.replicas > 1 and found.tp == 1 else {}
        replicas = max(found.replicas, 1)
        shards = found.shards if found.shards > 0 else self._processes(world_size) // replicas
        shards *= found.cp if found.shards > 0 else 1
        if replicas * shards < 2:
            return {}
        hybrid = f"hybrid:{replicas}x{shards}" if replicas > 1 else "full"
        return {"fsdp": FullyShard(replicas * shards, shard=hybrid)}

    def _processes(self, world_size: int | None) -> int:
        if world_size is None:
            raise UsageError(
                f"{self.table['title']} shares the model out among processes, and the file does not say how many; "
                "give --world-size N"
            )
        return world_size // self.settings.tp

    def _accumulated(self, world_size: int | None) -> int:
        found = self.settings
        if found.grad_accum is not None:
            return found.grad_accum
        if not found.global_batch or found.global_batch < 0:
            return 1
        processes = (world_size or max(found.replicas, 1) * max(found.shards, 1)) // found.tp // found.cp
        return max(1, found.global_batch // (found.batch * max(processes, 1)))

    def notes(self) -> tuple[str, ...]:
        """What was taken from the file, and what was not."""
        notes = [f"{self.path} is read as a file of {self.table['title']}; taken: {', '.join(self.taken)}"]
        if self.left:
            notes.append(f"of {self.path} not followed: {', '.join(self.left)}")
        return tuple(notes) + tuple(self.table["notes"])


def is_manifest(model: object) -> bool:
    """True for the name of a file of this kind."""
    return isinstance(model, (str, Path)) and splitext(model)[1].lower() in _SUFFIXES


def read_manifest(path: str) -> Manifest:
    """The file as what it sets. Raises :class:`SourceError` for one that is of no tool, or cannot be read."""
    values = dict(_flat(_document(Path(path))))
    for tool in _TOOLS:
        table = _table(tool)
        if any(all(key in values for key in marks) for marks in table["marks"]):
            return _read(path, table, values)
    titles = ", ".join(_table(tool)["title"] for tool in _TOOLS)
    raise SourceError(f"{path} has the keys of none of the tools whose files are read: {titles}; run its own command "
                      "with graphmem run before it")  # fmt: skip


def load_manifest(path: str) -> TorchModel:
    """The model that a file names, with its adapters. Raises :class:`SourceError`."""
    from graphmem.sources.manifests.adapters import built_model

    return built_model(read_manifest(path))


@cache
def _table(tool: str) -> dict[str, Any]:
    return {"models": {}, "adapters": {}, **read_table(__name__, f"{tool}.toml")}


def _document(path: Path) -> Mapping[str, Any]:
    try:
        if path.suffix.lower() == ".toml":
            values: object = parse_table(text_of(read_content(path, LARGEST_CONFIGURATION)))
        else:
            values = read_yaml(path)
    except ImportError:
        raise SourceError(f"{path} is YAML, which PyYAML reads; install it: pip install pyyaml") from None
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise SourceError(f"{path} is no configuration: it holds {shown(values)}")
    return values


def _flat(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by the keys that lead to it, with dots between."""
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _read(path: str, table: Mapping[str, Any], values: Mapping[str, Any]) -> Manifest:
    found, taken, left = dict(table["defaults"]), [], []
    for key, value in values.items():
        if key in table["model"] or value is None:
            continue
        chosen = _chosen(table["choices"].get(key), value)
        refusal = _chosen(table["refused"].get(key), value)
        if refusal is not None:
            raise SourceError(
                f"{path}: {key}: {shown(value)}: {refusal}; run it: graphmem run {table['command']} {path}"
            )
        if chosen is not None:
            found.update(chosen)
        elif key in table["keys"]:
            found[table["keys"][key]] = value
        elif not any(re.fullmatch(pattern, key) for pattern in table["sizeless"]):
            left.append(key)
            continue
        if chosen or (chosen is None and key in table["keys"]):
            taken.append(f"{key}={shown(value)}")
    found["model"] = _model(path, table, values)
    named = " ".join(str(values[key]) for key in table["names"][0] if key in values)
    found.update(_chosen(table["adapters"], named) or {})
    found["optimizer"] = _optimizer(found)
    try:
        check_fields(Settings, found)
    except ValueError as error:
        raise SourceError(f"{path}: {error}, which {table['title']} takes as something else") from None
    return Manifest(path, table, Settings(**found), (f"model {found['model']}", *taken), tuple(left))


def _chosen(choices: Mapping[str, Any] | None, value: object) -> Any:
    """What the first pattern that matches the value sets; None where none does."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return next((sets for pattern, sets in (choices or {}).items() if re.fullmatch(pattern, text)), None)


def _model(path: str, table: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The model as ``hf:`` names it."""
    for keys in table["names"]:
        if not all(key in values for key in keys):
            continue
        name = " ".join(str(values[key]) for key in keys)
        match = re.fullmatch(table.get("model_pattern", "(.+)"), name)
        short = match[1] if match else name
        if not table["models"]:
            return name
        if short in table["models"]:
            return str(table["models"][short])
    keys = " or ".join(" and ".join(keys) for keys in table["names"])
    raise SourceError(f"{path} names no model that is known by {keys}; run it: graphmem run {table['command']} {path}")


def _optimizer(found: dict[str, Any]) -> str:
    """The optimizer without what only says how it is computed: ``torch.optim.AdamW``, ``adamw_torch_fused``."""
    name = str(found.get("optimizer", "adamw")).rpartition(".")[2]
    if name.endswith("_fused"):
        found["fused"] = True
    plain = name.removesuffix("_fused").removesuffix("_torch").removesuffix("_hf")
    if plain not in ("adamw", "adam", "AdamW", "Adam", "sgd", "SGD", "adagrad"):
        found["fused"] = False
    return "transformersadafactor" if plain == "adafactor" else plain
