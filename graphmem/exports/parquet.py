"""A table of the run as Apache Parquet, written by pyarrow or polars."""

from __future__ import annotations

import io
from importlib.util import find_spec

from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.exports import Asked
from graphmem.reports.tables import columns, frame


class Parquet:
    name = "parquet"
    suffixes = (".parquet",)
    is_binary = True

    def render(self, estimate: Estimate, asked: Asked) -> bytes:
        """The bytes of the file. Raises :class:`UsageError` where neither library is installed."""
        file = io.BytesIO()
        if find_spec("pyarrow"):
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(dict(columns(estimate, asked.table))), file)
        elif find_spec("polars"):
            frame(estimate, asked.table, "polars").write_parquet(file)
        else:
            raise UsageError("Parquet needs pyarrow or polars, and neither is installed: pip install pyarrow")
        return file.getvalue()


EXPORT = Parquet()
