"""Predict recorded calls, compare, and show: ``python -m tests.recorded op_db table|differ [part of a name ...]``.

On the stub driver whatever is read back is zero: ``nonzero`` selects nothing, even of values that the program itself
wrote. Captures here answer the same: no values are followed, and the share that is selected is none.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from graphmem.accuracy.align import align
from graphmem.capture.values.mirrors import Mirrors
from graphmem.errors import CaptureError
from tests.recorded.device import peak_bytes
from tests.recorded.op_db import runner
from tests.recorded.op_db.entries import entries
from tests.recorded.op_db.record import recordings
from tests.recorded.predict import predicted, predicted_together

#: From the best to the worst. ``said``: the capture counts something that it assumed or does not know.
VERDICTS = ("equal", "peak equal", "differs, said", "refused", "differs in silence")
PEAK_EQUAL = VERDICTS[:2]
_SHOWN = 3
#: Calls after which ``table`` says how far it came.
_PROGRESS = 500
#: Calls that one capture makes.
_TOGETHER = 40


@dataclass(frozen=True)
class Outcome:
    """What became of one call: the verdict, bytes of the peak off, what the capture said, and both sequences."""

    call: str
    verdict: str
    peak_error: int
    said: tuple[str, ...]
    changes: tuple[list[int], list[int]]


def outcomes(documents: Iterable[dict[str, Any]]) -> Iterator[Outcome]:
    """The outcome of every call that was recorded. Those that are not equal are captured again, alone."""
    gc.collect()
    gc.freeze()
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stack.enter_context(mock.patch.object(Mirrors, "of", _nothing))
            recorded = [document for document in documents if "changes" in document]
            for part in _batches(recorded, _TOGETHER):
                together = predicted_together([_run(doc) for doc in part], "op_db", cudnn_workspaces=False)
                for document, changes in zip(part, together, strict=True):
                    if changes is not None and changes == document["changes"]:
                        yield Outcome(document["case"], "equal", 0, (), (changes, changes))
                    else:
                        yield outcome(document)
                # A collection before every call looks at what is young alone, not at what earlier captures left.
                gc.collect()
                gc.freeze()
    finally:
        gc.unfreeze()


def _nothing(*_: object) -> None:
    """No mirror of a tensor's values."""


def outcome(document: dict[str, Any]) -> Outcome:
    """Predict one recorded call."""
    call, recorded = document["case"], document["changes"]
    try:
        changes, assumed = predicted(_run(document), call, cudnn_workspaces=False, data_dependent=0.0)
    except CaptureError as error:
        return Outcome(call, "refused", 0, (str(error),), ([], recorded))
    off = peak_bytes(changes) - peak_bytes(recorded)
    verdict = "equal" if changes == recorded else "peak equal"
    if off:
        verdict = "differs, said" if assumed else "differs in silence"
    return Outcome(call, verdict, off, tuple(one.message for one in assumed), (changes, recorded))


def _batches(documents: Sequence[dict[str, Any]], size: int) -> Iterator[Sequence[dict[str, Any]]]:
    for start in range(0, len(documents), size):
        yield documents[start : start + size]


def _run(document: dict[str, Any]) -> Callable[[Callable[[], None]], None]:
    function = entries()[_entry(document["case"])].op
    return lambda mark: runner.run(function, document["sample"], mark)


def differ(parts: Sequence[str], verbose: bool = False) -> None:
    """Print what differs, of the calls whose names contain one of ``parts``; ``verbose``: all of it."""
    found = _wanted(parts)
    for one in outcomes(found.values()):
        if one.verdict != "equal" or verbose:
            _show(one, found[one.call], verbose)


def _wanted(parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = recordings()
    return {name: doc for name, doc in found.items() if not parts or any(_fits(name, part) for part in parts)}


def _fits(name: str, part: str) -> bool:
    """A part that ends with a slash is the whole name of an entry."""
    return name.startswith(part) if part.endswith("/") else part in name


def _show(one: Outcome, document: dict[str, Any], verbose: bool) -> None:
    ours, theirs = one.changes
    print(f"{one.call}: {one.verdict}; peak {peak_bytes(ours)} for {peak_bytes(theirs)}", flush=True)
    for remark in one.said:
        print(f"    said: {remark}")
    if one.verdict == "refused":
        return
    if verbose:
        print(f"    {document['sample']}")
    for a, b, c, d in align(ours, theirs).differences()[: None if verbose else _SHOWN]:
        print(f"    at {a}: ours {ours[a:b][:16]} recorded {theirs[c:d][:16]}", flush=True)


def _entry(call: str) -> str:
    return call.split("/", 1)[0]


def table(parts: Sequence[str]) -> None:
    """Print how many entries and calls are equal, and what is not; meanwhile, how far it came."""
    documents = list(_wanted(parts).values())
    count = sum("changes" in document for document in documents)
    found: list[Outcome] = []
    for one in outcomes(documents):
        found.append(one)
        if one.verdict not in PEAK_EQUAL:
            print(f"{one.call}: {one.verdict}, {one.peak_error:+} bytes", flush=True)
        if len(found) % _PROGRESS == 0:
            print(f"{len(found)} of {count} calls, {time.process_time():.0f} s of CPU time", flush=True)
    _print_table(documents, found)


def worst_by_entry(found: Sequence[Outcome]) -> dict[str, Outcome]:
    """The worst outcome of every entry."""
    worst: dict[str, Outcome] = {}
    for one in found:
        before = worst.setdefault(_entry(one.call), one)
        if VERDICTS.index(one.verdict) > VERDICTS.index(before.verdict):
            worst[_entry(one.call)] = one
    return worst


def _print_table(documents: Sequence[dict[str, Any]], found: Sequence[Outcome]) -> None:
    entries_tried = {_entry(document["case"]) for document in documents}
    worst = worst_by_entry(found)
    errors = collections.Counter(_reason(d["error"]) for d in documents if "error" in d)
    not_run: dict[str, str] = {}
    for document in documents:
        if "error" in document and _entry(document["case"]) not in worst:
            not_run.setdefault(_entry(document["case"]), _reason(document["error"]))
    calls = collections.Counter(one.verdict for one in found)
    of_entries = collections.Counter(one.verdict for one in worst.values())
    print(f"{'':30} {'entries':>8} {'calls':>8}")
    print(f"{'tried':30} {len(entries_tried):8} {len(documents):8}")
    print(f"{'run by the CUDA build':30} {len(worst):8} {len(found):8}")
    for verdict in VERDICTS:
        print(f"{verdict:30} {of_entries[verdict]:8} {calls[verdict]:8}")
    share = sum(of_entries[verdict] for verdict in PEAK_EQUAL) / max(1, len(worst))
    print(f"peaks equal: {share:.2%} of the entries that run")
    print("\nwhy entries did not run:")
    for reason, count in collections.Counter(not_run.values()).most_common():
        print(f"  {count:5} {reason}")
    print("\nwhy calls did not run:")
    for reason, count in errors.most_common(25):
        print(f"  {count:5} {reason}")
    for verdict in VERDICTS[2:]:
        print(f"\n{verdict}:")
        for one in worst.values():
            if one.verdict == verdict:
                print(f"  {one.call}: {one.peak_error:+} bytes; {'; '.join(one.said)[:160]}")


def _reason(error: str) -> str:
    """An error without its details."""
    known = {
        "cuSOLVER": ("cusolver", "CUSOLVER"),
        "cuFFT": ("cuFFT", "CUFFT"),
        "cuSPARSE": ("cusparse", "CUSPARSE"),
        "MAGMA": ("MAGMA", "magma"),
        "NVRTC or Triton": ("nvrtc", "NVRTC", "triton", "jiterator"),
        "no stretched form fits": ("must match the size", "size mismatch", "shapes cannot be multiplied"),
    }
    for reason, words in known.items():
        if any(word in error for word in words):
            return reason
    return error[:90]
