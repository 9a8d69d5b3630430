"""A table of the run as comma-separated values."""

from __future__ import annotations

import csv
import io

from graphmem.estimate import Estimate
from graphmem.exports import Asked
from graphmem.reports.tables import columns


class Csv:
    name = "csv"
    suffixes = (".csv",)
    is_binary = False

    def render(self, estimate: Estimate, asked: Asked) -> str:
        """The names of the columns, and a line a row; nothing stands for what there is not."""
        table = columns(estimate, asked.table)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
        return text.getvalue()


EXPORT = Csv()
