"""Starts of vLLM that people published: their settings and figures against predictions, and the report of all."""

from __future__ import annotations

import pytest

from tests.serving import public_logs
from tests.serving.public_logs import compared, logs, served

#: Quick ones of every kind: both engines, the sampler's sort, graphs that are charged, several cards.
_QUICK = [name for name, log in logs().items() if log["settings"].get("tensor_parallel_size", 1) < 4]
#: The furthest that a log with a reason may be off.
_WORST = 0.101


def _check(name: str) -> None:
    log, found = logs()[name], compared(name)
    assert abs(found.share) <= (_WORST if "off" in log else 0.02), log.get("off")
    parts = {part.name: part.bytes / 2**30 for part in served(log).parts}
    if "activation" in log["printed"]:
        assert parts["activation peak"] == pytest.approx(log["printed"]["activation"], abs=0.006)
    if "weights" in log["printed"]:
        assert parts["weights"] == pytest.approx(log["printed"]["weights"], rel=0.007)


@pytest.mark.parametrize("name", _QUICK)
def test_the_cache_is_within_two_percent_of_what_was_printed(name: str) -> None:
    """And of the first engine activations are as printed, in two digits of a GiB."""
    _check(name)


@pytest.mark.parametrize("name", [name for name in logs() if name not in _QUICK])
def test_so_it_is_on_four_and_eight_cards(name: str) -> None:
    _check(name)


def test_the_report_is_of_today() -> None:
    page = public_logs.REPORT.read_text()
    assert public_logs.with_table(page) == page, "run python -m tests.serving.public_logs"


def test_as_many_logs_are_close_as_the_report_says() -> None:
    reasons = [name for name, log in logs().items() if "off" in log]
    assert len(logs()) >= 40
    assert len(reasons) <= 12
