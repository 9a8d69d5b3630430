"""Stand-ins of a stated size for tokenizers and data sets that a program names and that are not on this disk.

A row holds as many tokens as were asked for, for a stand-in of a tokenizer (four characters each) and for most real
ones: its text is one short word again and again. ``messages`` are a question and an answer of half of them each.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches
from graphmem.capture.program.hub_names import TOKENIZERS, stand_in
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import first_line
from graphmem.training.program import DataSet

#: One token of four characters in most vocabularies.
_WORD = " the"
_MESSAGES = "messages"
_SPLITS = ("train", "validation", "test")


@contextlib.contextmanager
def stand_ins(vocab: int | None, dataset: DataSet | None, remark: Callable[[Diagnostic], None]) -> Iterator[None]:
    """Until the end, what ``AutoTokenizer.from_pretrained`` and ``datasets.load_dataset`` do not find is made; without
    a size, their errors say how to give one."""

    def tokenizers(patches: Patches, module: ModuleType) -> None:
        load = module.AutoTokenizer.from_pretrained

        def loaded(name: Any, *args: object, **kwargs: object) -> Any:
            try:
                return load(name, *args, **kwargs)
            except (OSError, ValueError) as error:
                if vocab is None:
                    raise _hinted(error, "--vocab 32000", "tokenizer") from None
            remark(Code.TOKENIZER_ASKED.about(place=str(name), size=vocab))
            return stand_in(vocab, str(name))

        patches.set(module.AutoTokenizer, "from_pretrained", staticmethod(loaded))

    def data_sets(patches: Patches, module: ModuleType) -> None:
        load = module.load_dataset

        def loaded(path: Any, *args: object, **kwargs: Any) -> Any:
            try:
                return load(path, *args, **kwargs)
            except (OSError, ValueError) as error:
                if dataset is None:
                    raise _hinted(error, "--dataset rows=1000,tokens=512", "data set") from None
            remark(Code.DATA_SET_ASKED.about(place=str(path), rows=dataset.rows, tokens=dataset.tokens))
            return _made(dataset, kwargs.get("split"), bool(kwargs.get("streaming")))

        patches.where_found([module, sys.modules.get("datasets")], {"load_dataset": loaded})

    with patched_imports({TOKENIZERS: tokenizers, "datasets.load": data_sets}):
        yield


def _hinted(error: Exception, option: str, what: str) -> Exception:
    """The error, with the option that helps."""
    words = f"{first_line(error)}; graphmem run {option} lets a {what} of that size stand for one that is not here"
    try:
        return type(error)(words)
    except Exception:
        return OSError(words)


def _made(asked: DataSet, split: Any, is_streamed: bool) -> Any:
    """The data set, as ``load_dataset`` gives it for this ``split``."""
    import datasets

    def one() -> Any:
        rows = datasets.Dataset.from_dict({name: [_cell(asked, name)] * asked.rows for name in asked.columns})
        return rows.to_iterable_dataset() if is_streamed else rows

    if split is None:
        kind = datasets.IterableDatasetDict if is_streamed else datasets.DatasetDict
        return kind({name: one() for name in _SPLITS})
    return [one() for _ in split] if isinstance(split, (list, tuple)) else one()


def _cell(asked: DataSet, name: str) -> Any:
    """What one row has in a column: columns of text share the tokens."""
    if name != _MESSAGES:
        return _WORD * max(1, asked.tokens // len(asked.columns))
    half = _WORD * max(1, asked.tokens // len(asked.columns) // 2)
    return [{"role": "user", "content": half}, {"role": "assistant", "content": half}]
