"""Notebooks as programs: the code of their cells, in order (nbformat 4, nbformat.readthedocs.io)."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches
from graphmem.capture.program.loops import with_ends
from graphmem.errors import SourceError

#: A line for IPython and not for Python: ``%matplotlib inline``, ``!pip install``, ``?name``.
_MAGIC = re.compile(r"(\s*)[%!?].*")
#: Magics of a whole cell that leave its code as it is.
_OF_PYTHON = re.compile(r"%%(time|timeit|capture|prun)\b.*")


def cells(path: Path, content: bytes) -> Iterator[tuple[str, str]]:
    """(name, text) of every code cell. Lines for IPython alone do nothing here; cells of other languages are left out.

    Raises :class:`SourceError` for a file that is no notebook.
    """
    try:
        found = json.loads(content)["cells"]
        texts = [_text(one["source"]) for one in found if one["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise SourceError(f"{path} is no notebook: it has no cells (nbformat 4)") from None
    for number, text in enumerate(texts, 1):
        plain = _plain(text)
        if plain is not None:
            name = f"{path}[{number}]"
            linecache.cache[name] = len(plain), None, plain.splitlines(keepends=True), name
            yield name, plain


@contextlib.contextmanager
def cells_of_kernel() -> Iterator[None]:
    """Until the end the loops of cells that a kernel runs are those of a program (``InteractiveShell.transform_ast``,
    IPython/core/interactiveshell.py, 9)."""

    def follow(patches: Patches, module: ModuleType) -> None:
        transform = module.InteractiveShell.transform_ast

        def transformed(self: object, node: ast.Module) -> ast.Module:
            return with_ends(transform(self, node), "cell")

        patches.set(module.InteractiveShell, "transform_ast", transformed)

    with patched_imports({"IPython.core.interactiveshell": follow}):
        yield


def _text(source: object) -> str:
    return source if isinstance(source, str) else "".join(source)  # type: ignore[arg-type]


def _plain(text: str) -> str | None:
    """The cell as Python, lines where they were; None where it is in another language."""
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(text)
        return text
    first, newline, rest = text.partition("\n")
    if first.startswith("%%"):
        if not _OF_PYTHON.fullmatch(first):
            return None
        text = f"{newline}{rest}"
    return "\n".join(_MAGIC.sub(r"\1pass", line) if _MAGIC.fullmatch(line) else line for line in text.split("\n"))
