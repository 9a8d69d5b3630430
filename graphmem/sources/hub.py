"""Models by the names that they have on the Hugging Face Hub, without a network: the configuration that a download left
in the local cache, else that of a table of public models (``hub_models.json``: the fields of their ``config.json`` that
set sizes). Neither torch, transformers nor huggingface_hub is imported here."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from graphmem.base.documents import open_file
from graphmem.base.tables import read_table

#: Parts of a name that say how a model was trained further, which leaves its shape as it was.
_VARIANTS = r"[-_](instruct|chat|it|hf|base|thinking)(?=[-_]|$)"
#: Names that organisations had and have.
_RENAMED = (("CohereForAI", "CohereLabs"), ("THUDM", "zai-org"))
#: Organisations that publish the models of others too, by the names that these have.
_COPIES = r"^(hugging-quants|lmstudio-community|neuralmagic|nm-testing|nousresearch|redhatai|unsloth)/"


def cached_configuration(name: str) -> Path | None:
    """The ``config.json`` of a model that was downloaded before (the layout of huggingface_hub's cache): that of the
    main branch, else the newest."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = hub / f"models--{name.replace('/', '--')}"
    found = sorted((model / "snapshots").glob("*/config.json"), key=lambda one: one.stat().st_mtime)
    main = model / "refs" / "main"
    if main.is_file():
        with open_file(main) as file:
            commit = file.read(80).decode("utf-8", "replace").strip()
        found += (model / "snapshots" / commit).glob("config.json")
    return found[-1] if found else None


@cache
def known_models() -> dict[str, dict[str, object]]:
    """Configurations of public models by their Hub names; ``like`` names the one that has the other values, and those
    of the configurations within."""
    table: dict[str, dict[str, object]] = read_table("graphmem.sources", "hub_models.json")

    def whole(name: str) -> dict[str, object]:
        values = dict(table[name])
        like = values.pop("like", None)
        others = {} if like is None else whole(str(like))
        for key, value in values.items():
            within = others.get(key)
            others[key] = {**within, **value} if isinstance(within, dict) and isinstance(value, dict) else value
        return others

    return {name: whole(name) for name in table}


def known_model(name: str) -> str | None:
    """The model of the table that ``name`` means, with or without its organisation and what it was tuned for:
    ``Llama-3.1-8B-Instruct`` and ``unsloth/Llama-3.1-8B`` are ``meta-llama/Llama-3.1-8B``."""
    found = _spelled(name)
    if found is None and (unpacked := _spelled(re.sub(r"[-_]bf16$", "", name.lower()))):
        return None if "quantization_config" in known_models()[unpacked] else unpacked
    return found


def _spelled(name: str) -> str | None:
    spelled, copied = _spellings(), re.sub(_COPIES, "", name.lower())
    candidates = (one for known in (name, copied) for one in (known, re.sub(_VARIANTS, "", known.lower())))
    return next((spelled[plain] for plain in map(_plain, candidates) if plain in spelled), None)


def close_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """Up to three names of the table, or of ``others``, that look like ``name``."""
    short = {known.split("/")[-1].lower(): known for known in known_models()}
    spelled = {
        **{other.lower(): other for other in others},
        **short,
        **{known.lower(): known for known in short.values()},
    }
    last = name.lower().rpartition("/")[2]  # whoever publishes it
    close = difflib.get_close_matches(last, spelled, n=1, cutoff=0.75)
    close += difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.5)
    return list(dict.fromkeys(spelled[one] for one in close))[:3]


@cache
def _spellings() -> dict[str, str]:
    spelled: dict[str, str] = {}
    for known in known_models():
        organisation, _, short = known.partition("/")
        owners = next((names for names in _RENAMED if organisation in names), (organisation,))
        for one in (short, short.removeprefix("Meta-"), f"Meta-{short}" if organisation == "meta-llama" else short):
            spelled |= {_plain(owner + one): known for owner in ("", *owners)}
    return spelled


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
