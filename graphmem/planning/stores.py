"""A file of a sweep's rows: a line of JSON each, written as they come, so that a sweep that ends early can go on.

The first line says what was asked. Bytes are whole numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from graphmem.base.documents import parse_json
from graphmem.errors import GraphmemError, TraceError, UsageError

SCHEMA = "graphmem.sweep_store/1"
_LONGEST_LINE = 1 << 20


class Store:
    """The rows of one question in a file: ``rows`` maps a combination's settings in words to the row that was there.

    A file that is not there is begun; the last line of one that was being written when its process died is dropped.
    Raises :class:`UsageError` for a file of another question, :class:`TraceError` for one that is no store.
    """

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        self._path = path
        self.rows: dict[str, Mapping[str, Any]] = {}
        self._added: set[str] = set()
        head = {"schema": SCHEMA, **question}
        try:
            whole = self._read(head) if path.exists() else 0
            self._file = path.open("r+b" if whole else "wb")
            self._file.truncate(whole)
            self._file.seek(whole)
            if not whole:
                self._write(head)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row, whole, unless its combination has one."""
        key = key_of(row["settings"])
        if key not in self.rows and key not in self._added:
            self._added.add(key)
            self._write(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def _read(self, head: Mapping[str, Any]) -> int:
        """Take the rows in, and give the bytes of the lines that are whole."""
        whole = 0
        with self._path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                if not line.endswith(b"\n"):
                    break
                row = self._row(line)
                if not whole and row != json.loads(json.dumps(head)):
                    raise UsageError(f"{self._path} has the rows of another sweep; name another file")
                if whole:
                    self.rows[key_of(row["settings"])] = row
                whole += len(line)
        return whole

    def _row(self, line: bytes) -> dict[str, Any]:
        try:
            row = parse_json(line.decode())
        except (GraphmemError, ValueError):
            row = None
        if not isinstance(row, dict) or not (row.get("schema") == SCHEMA or isinstance(row.get("settings"), dict)):
            raise TraceError(f"{self._path} is no file of a sweep's rows")
        return row


def key_of(settings: Mapping[str, str]) -> str:
    """A combination by its settings in words."""
    return json.dumps(settings, sort_keys=True)
