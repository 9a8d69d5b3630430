"""Starts of vLLM that people published: their settings and figures against predictions, and the report of all."""

from __future__ import annotations

import pytest

from tests.serving import public_logs
from tests.serving.public_logs import compared, logs, served


@pytest.mark.parametrize("name", logs())
def test_the_cache_is_within_two_percent_of_what_was_printed(name: str) -> None:
    """And of the first engine activations are as printed, in two digits of a GiB."""
    log, found = logs()[name], compared(name)
    assert abs(found.share) <= 0.02
    parts = {part.name: part.bytes / 2**30 for part in served(log).parts}
    if "activation" in log["printed"]:
        assert parts["activation peak"] == pytest.approx(log["printed"]["activation"], abs=0.006)
    if "weights" in log["printed"]:
        assert parts["weights"] == pytest.approx(log["printed"]["weights"], rel=0.007)


def test_the_report_is_of_today() -> None:
    page = public_logs.REPORT.read_text()
    assert public_logs.with_table(page) == page, "run python -m tests.serving.public_logs"
