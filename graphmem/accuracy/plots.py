"""The report's plots as SVG text, the same bytes for the same figures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from graphmem.errors import UsageError
from graphmem.units import GIB

_SIZE = (6.0, 4.0)


def scatter_plot(pairs: Sequence[tuple[int, int]], level: str = "reserved") -> str:
    """Predicted against measured bytes, on logarithmic axes in GiB; ``level`` names the memory."""
    figure, axes = _figure()
    measured, predicted = ([value / GIB for value in column] for column in zip(*pairs, strict=True))
    span = [min(*measured, *predicted), max(*measured, *predicted)]
    axes.plot(span, span, color="0.7", linewidth=1)
    axes.scatter(measured, predicted, s=12)
    axes.set(xscale="log", yscale="log", xlabel=f"measured {level}, GiB", ylabel=f"predicted {level}, GiB")
    return _svg(figure)


def error_plot(errors: Sequence[float], level: str = "reserved memory") -> str:
    """Signed errors in percent, in ascending order; ``level`` names the memory."""
    figure, axes = _figure()
    axes.axhline(0, color="0.7", linewidth=1)
    axes.bar(range(len(errors)), sorted(100 * error for error in errors), width=1.0)
    axes.set(xlabel="cases, by error", ylabel=f"error of {level}, %")
    return _svg(figure)


def _figure() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plots need matplotlib; install it with: pip install 'graphmem[report]'") from None
    matplotlib.use("svg")
    # Ids in the file are random unless salted, and glyphs as paths would depend on the fonts installed.
    matplotlib.rcParams.update({"svg.hashsalt": "graphmem", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
