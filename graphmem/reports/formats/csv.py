"""The tables of a document as CSV, for spreadsheets: memory in bytes, an empty line between two tables."""

from __future__ import annotations

import csv
import io

from graphmem.reports import Format
from graphmem.reports.document import Document, Table, Value, clean


class _Csv(Format):
    name = "csv"
    suffixes = (".csv",)

    def render(self, document: Document, width: int | None = None) -> str:
        """Each table under the names of its columns."""
        return "\n".join(map(_table, document.tables()))


FORMAT = _Csv()


def _table(table: Table) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    kept = [index for index, column in enumerate(table.columns) if column.unit != "exact"]  # which repeat another
    writer.writerow([clean(table.columns[index].key) for index in kept])
    writer.writerows([[_cell(row[index]) for index in kept] for row in table.rows])
    return buffer.getvalue()


def _cell(value: Value) -> Value:
    if isinstance(value, float):
        return f"{value:.6f}"
    return clean(value) if isinstance(value, str) else value
