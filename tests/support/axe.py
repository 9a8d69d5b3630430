"""Deque's axe-core, the checker of what readers with other senses need, on the page that a browser shows."""

from __future__ import annotations

from typing import Any

import pytest

_SERIOUS = """
axe.run(document).then(({ violations }) => violations.filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 200))}`))
"""


def serious(driver: Any) -> list[str]:
    """The rules that the page breaks seriously, each with the elements that do; skips the test where there is no axe.
    The debugger runs it, as pages let no script but their own run."""
    base = pytest.importorskip("axe_core_python.base")
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": f"{base.AXE_SCRIPT};0"})
    asked = {"expression": _SERIOUS, "awaitPromise": True, "returnByValue": True}
    found: list[str] = driver.execute_cdp_cmd("Runtime.evaluate", asked)["result"]["value"]
    return found
