"""``@pytest.mark.limit_gpu_memory("16GiB", gpu="T4")``: a test fails where its body would need more on that card.

The body runs once, as an analysis of graphmem: on a pretended card, where tensors have sizes and no values. Tests
without the mark are left alone.
"""

from __future__ import annotations

from typing import Any

import pytest

_MARK = "limit_gpu_memory"
_HELP = (
    f"{_MARK}(limit=None, gpu=None, level='device'): fail where the body would need more memory than this, or than the "
    "card has; nothing is computed, and no GPU is needed (graphmem)"
)


def pytest_configure(config: pytest.Config) -> None:
    """The mark is known."""
    config.addinivalue_line("markers", _HELP)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on the pretended card; the others are pytest's own."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    words = _over(pyfuncitem, *mark.args, **mark.kwargs)
    if words:
        pytest.fail(words, pytrace=False)
    return True


def _over(item: pytest.Function, limit: str | None = None, *, gpu: str | None = None, level: str = "device") -> str:
    """Why the test fails; nothing where it stays below its limit."""
    from graphmem import analyze
    from graphmem.estimate import LEVELS
    from graphmem.units import format_bytes, parse_size

    if level not in LEVELS:
        raise ValueError(f"{_MARK}: unknown level {level!r}; accepted: {', '.join(LEVELS)}")
    most = None if limit is None else parse_size(limit)
    given: dict[str, Any] = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}

    def body() -> None:
        item.obj(**given)

    body.__name__ = item.name
    estimate = analyze(body, device=gpu)
    needed = getattr(estimate.peak, f"{level}_bytes")
    item.user_properties.append((f"gpu_memory_{level}_bytes", needed))
    if most is not None and needed > most:
        return f"{item.name} needs {format_bytes(needed)} ({level}), limited to {limit}\n\n{estimate}"
    if most is None and estimate.fit is not None and not estimate.fit.passes:
        return f"{item.name} does not fit {estimate.gpu}\n\n{estimate}"
    return ""
