"""The kinds of recording that run PyTorch's operator database."""

from __future__ import annotations


class OpDb:
    """Every entry, on the CUDA build and in a capture. Arguments are entries for ``record``, else parts of names."""

    def record(self, arguments: list[str]) -> int:
        from tests.recorded.op_db.record import record

        record(arguments)
        return 0

    def table(self, arguments: list[str]) -> int:
        from tests.recorded.op_db import compare

        compare.table(arguments)
        return 0

    def differ(self, arguments: list[str]) -> int:
        from tests.recorded.op_db import compare

        compare.differ([part for part in arguments if part != "-v"], "-v" in arguments)
        return 0


class OutputsOnly:
    """The list of operators that take nothing but their outputs. Arguments of ``record``: parts of kind and name."""

    def record(self, arguments: list[str]) -> int:
        from tests.recorded.op_db import outputs_only

        outputs_only.record(arguments)
        return 0

    def table(self, arguments: list[str]) -> int:
        from tests.recorded.op_db import proven

        proven.table()
        return 0

    def differ(self, arguments: list[str]) -> int:
        from tests.recorded.op_db import proven

        proven.differ()
        return 0


OP_DB = OpDb()
OUTPUTS_ONLY = OutputsOnly()
