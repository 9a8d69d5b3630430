"""ONNX Runtime's graph optimization levels by name."""

from __future__ import annotations

from graphmem.errors import UsageError

#: Level names as on ONNX Runtime's command lines, and the members of ``GraphOptimizationLevel``.
LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}


def level_named(text: str) -> str:
    """The canonical level. Raises :class:`UsageError` listing the accepted ones."""
    key = text.strip().lower().removeprefix("ort_").removeprefix("enable_").removesuffix("_all")
    key = {"disable": "disabled", "none": "disabled"}.get(key, key)
    if key not in LEVELS:
        raise UsageError(f"unknown optimization level {text!r}; accepted: {', '.join(LEVELS)}")
    return key
