"""The site builds without a warning, and its pages ask no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import places


def test_the_site_builds_and_reaches_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=places.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert "screen.svg" in page
    fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(\S+)", page)
    assert fetched
    assert not [address for address in fetched if re.match(r"(https?:)?//", address)]
