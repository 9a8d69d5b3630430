"""Addresses of the network where a file or a model is asked for."""

from __future__ import annotations

import re

from graphmem.errors import SourceError

_ADDRESS = re.compile(r"(?:\w+:)?(https?:/+(?P<site>[^/]+)/?(?P<path>\S*))")


def refuse_address(text: str) -> None:
    """Raise :class:`SourceError` for an address of the network, with what to write for it."""
    found = _ADDRESS.match(text)
    if found is None:
        return
    owner_and_name = "/".join(found["path"].split("/")[:2])
    is_hub = found["site"].endswith(("huggingface.co", "hf.co")) and owner_and_name
    instead = f"for this model of the Hub write hf:{owner_and_name}" if is_hub else "save the file and give its path"
    raise SourceError(f"{found[1]} is an address, and graphmem uses no network; {instead}")
