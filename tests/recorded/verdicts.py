"""Verdicts against truth: ``python -m tests.recorded.verdicts [--cudnn-library PATH] [KIND ...] [--part NAME ...]``.

Every recorded whole program is answered as a user is answered, without a cuDNN and, where it has convolutions or
recurrent networks, with the one that PATH names asked too. A row of ``verdicts.jsonl`` beside the recordings has the
claims about the allocated and the reserved peak (predicted, least, most) with what was recorded, the verdict, and the
causes of doubt. Programs whose packages are not installed keep their rows. Captures are shared with the tests of the
ratchets by ``GRAPHMEM_CAPTURES``. ``reports/verdicts.md`` is made of the rows, and so are the short table of ``graphmem
accuracy`` and the records of diagnostics in ``graphmem/answering/causes/measured.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests import places
from tests.recorded import kinds, spreads
from tests.recorded.everyday import EverydayProgram
from tests.recorded.whole import CARD, WholeProgram, WholePrograms

if TYPE_CHECKING:
    from graphmem.estimate import Estimate

ROWS = places.PYTORCH / "verdicts.jsonl"
REPORT = places.ROOT / "reports" / "verdicts.md"
#: The table of the accuracy report.
SHORT = places.ROOT / "graphmem" / "accuracy" / "published" / "verdicts.json"
KINDS = ("left_early", "everyday", "libraries", "generations", "written", "sharded")
#: For one program, both ways of cuDNN.
_SECONDS = 1800
LEVELS = ("allocated", "reserved")
ASKED, PREDICTED, NEITHER = "asked", "predicted", "none needed"

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.one:
        kind: Any = kinds.load(options.one[0])
        for row in _rows(kind, kind.cases()[options.one[1]], options):
            print(json.dumps(row), flush=True)
        return 0
    rows = {_key(row): row for row in read()}
    there = set() if options.anew else {key[:2] for key in rows}
    wanted = [one for one in _programs(options) if one not in there]
    with ThreadPoolExecutor(options.jobs) as pool:
        for (name, program), made in zip(
            wanted, pool.map(lambda one: _apart(one[0], one[1], arguments), wanted), strict=True
        ):
            print(f"{name} {program}: {len(made)} rows", file=sys.stderr, flush=True)
            kept = {key: row for key, row in rows.items() if key[:2] != (name, program)}
            rows = rows if not made else kept | {_key(row): row for row in made}
            write(list(rows.values()))
    write_records(rows.values())
    write_tables(read())
    return 0


def write_records(rows: Iterable[Row]) -> None:
    """What the rows say of causes, into ``measured.json``; predicted plans are a cause of their own."""
    told = [row for row in rows if row["cudnn"] != PREDICTED]
    left = [row for row in told if "steps left out" in row["causes"]]
    spreads.replace_rows("programs", "", [_record(row) for row in told])
    spreads.replace_rows("shortened", "", [[_name(row), *_changes(row)] for row in left])


def write_tables(rows: Sequence[Row]) -> None:
    """The page, and the short table of the accuracy report."""
    REPORT.write_text(report(rows), encoding="utf-8")
    lines = ",\n".join(f"  {json.dumps(row)}" for row in _short(rows))
    SHORT.write_text(
        f'{{\n"command": "python -m tests.recorded.verdicts",\n"rows": [\n{lines}\n]\n}}\n', encoding="utf-8"
    )


def _programs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The kinds and names of the programs that are meant."""
    loaded: list[tuple[str, Any]] = [(name, kinds.load(name)) for name in options.kinds or KINDS]
    return [(name, one.name) for name, kind in loaded for one in kind._chosen(options.part, recorded=True)]


def _apart(kind: str, program: str, arguments: Sequence[str]) -> list[Row]:
    """The rows of one program, made in a process of its own; none if it fails, which standard error says."""
    options = _options(arguments)
    command = [*options.through.split(), sys.executable, "-m", "tests.recorded.verdicts", *arguments]
    try:
        made = subprocess.run([*command, "--one", kind, program], stdout=subprocess.PIPE, timeout=_SECONDS, text=True)
    except subprocess.TimeoutExpired:
        print(f"{program}: not done after {_SECONDS} s", file=sys.stderr)
        return []
    return [json.loads(line) for line in made.stdout.splitlines() if line.startswith('{"kind"')]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded.verdicts")
    parser.add_argument("kinds", nargs="*", choices=(*KINDS, []), metavar="KIND")
    parser.add_argument("--part", nargs="*", default=[], help="programs whose names contain one of these")
    parser.add_argument("--cudnn-library", metavar="PATH", default=os.environ.get("GRAPHMEM_CUDNN") or None)
    parser.add_argument("--anew", action="store_true", help="programs that have rows too")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--through", default="", metavar="COMMAND", help="what starts each of them, as 'nice -n 5'")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "NAME"), help="print the rows of this program")
    return parser.parse_args(arguments)


def read() -> list[Row]:
    """The rows that are there."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


def write(rows: Sequence[Row]) -> None:
    """One line a row, in order."""
    ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in sorted(rows, key=_key)), encoding="utf-8")


def _key(row: Row) -> tuple[str, str, str]:
    return row["kind"], row["program"], row["cudnn"]


def _rows(kind: WholePrograms, program: WholeProgram, options: argparse.Namespace) -> Iterator[Row]:
    """The answer with plans predicted, and, where there are any, with the library asked."""
    for library in dict.fromkeys((None, options.cudnn_library)):
        try:
            estimate = answer(kind, program, library)
        except Exception as error:
            print(f"{program.name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
            return
        assert estimate.card is not None
        plans = estimate.card.loads.cudnn
        yield _row(kind, program, (PREDICTED if library is None else ASKED) if plans else NEITHER, estimate)
        if not plans:
            return


def answer(kind: WholePrograms, program: WholeProgram, library: str | None) -> Estimate:
    """The estimate of a program on the recordings' card, in as many steps as ``graphmem run`` takes."""
    from graphmem.answering.question import Question
    from graphmem.answering.stages import replay_on

    version = kind.load(program.name).torch_version
    question = Question(program.name, device=CARD, torch_version=".".join(map(str, version)), cudnn=library or "never")
    if isinstance(program, EverydayProgram):
        program = replace(program, steps=None)
    start = time.perf_counter()
    run = kind.capture(program, version, library)
    print(f"{program.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return replay_on(question, replace(run, model=program.name, runtime="pytorch"))


def _row(kind: WholePrograms, program: WholeProgram, mode: str, estimate: Estimate) -> Row:
    recorded = kind.load(program.name)
    truth = {"allocated": recorded.peak_allocated_bytes, "reserved": recorded.peak_reserved_bytes}
    levels = {level: [getattr(estimate, level), *estimate.interval(level), truth[level]] for level in LEVELS}
    assert estimate.fit is not None
    return {
        "kind": kind.kind,
        "program": program.name,
        "cudnn": mode,
        **levels,
        "verdict": estimate.fit.verdict,
        "causes": [cause.name for cause in estimate.doubts.about("reserved")],
        "codes": sorted({one.code.name.lower() for one in estimate.diagnostics if one.meaning.cause}),
        "made": datetime.date.today().isoformat(),
    }


# --- what the rows show -----------------------------------------------------------------------------------------------

#: Diagnostics of loops that were left early.
_LEFT = {"steps_differ", "steps_keep"}


def _record(row: Row) -> list[Any]:
    """The row of a program in ``measured.json``. What a program takes more than was predicted, because its loops were
    left early, is no record of its other diagnostics: followed to its end it is predicted to the byte."""
    changes = _changes(row)
    codes = set(row["codes"])
    if any(changes) and codes & _LEFT and _is_equal_to_its_end(row):
        codes &= _LEFT
    return [_name(row), sorted(changes, key=abs)[-1], *sorted(codes)]


def _name(row: Row) -> str:
    return f"{row['kind']}/{row['program']}"


def _changes(row: Row) -> list[float]:
    """The parts by which the peaks are more than predicted."""
    return [round(truth / said - 1, 6) for said, _, _, truth in (row[level] for level in LEVELS)]


def _is_equal_to_its_end(row: Row) -> bool:
    """Whether a program is predicted to the byte where none of its loops is left, by its ratchet."""
    path = places.PYTORCH / f"{row['kind']}_ratchet.json"
    held = json.loads(path.read_text(encoding="utf-8")).get(row["program"], {}) if path.exists() else {}
    return not held.get("allocated_error_bytes", 1) and not held.get("reserved_error_bytes", 1)


def claim(level: Sequence[int | None]) -> str:
    """The claim about a level: ``exact``, ``interval``, or ``open``, where nothing bounds it on one side or both."""
    said, least, most, _ = level
    return "open" if least is None or most is None else "exact" if least == most == said else "interval"


def is_met(level: Sequence[int | None]) -> bool:
    """Whether the recorded peak lies where it was said to lie."""
    _, least, most, truth = level
    assert truth is not None
    return (least is None or least <= truth) and (most is None or truth <= most)


def report(rows: Sequence[Row]) -> str:
    """The tables of ``reports/verdicts.md``."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["cudnn"]), []).append(row)
    causes = dict.fromkeys(name for row in rows for name in row["causes"])
    lines = [
        _HEAD,
        *(_line(f"{kind}, cuDNN {mode}", group) for (kind, mode), group in sorted(groups.items())),
        _line("all", rows),
        "",
        f"Made: {_days(rows)}.",
        _CAUSES,
        *(_cause(name, [row for row in rows if name in row["causes"]]) for name in sorted(causes)),
        _cause("none", [row for row in rows if not row["causes"]]),
    ]
    return "\n".join(lines) + "\n"


_HEAD = """# Verdicts against truth

Recorded whole programs whose packages were installed, answered as `graphmem run` answers them (short ones to their end,
loops of others left after three optimizer steps, on the card of the recordings), against both peaks that the stub
driver recorded. *Exact*, *interval*
and *open* (not bounded on one side at least) are the claims about the reserved peak; *met*: both recorded peaks
lie where they were said to lie. *Likely*: verdicts that are neither yes nor no, and those whose peaks were equal.
`python -m tests.recorded.verdicts` makes this page of `tests/golden/pytorch/2.13/verdicts.jsonl`, and that file anew.

| programs | number | equal in both peaks | exact | met | interval | met | open | met | likely | though equal |
|---|---|---|---|---|---|---|---|---|---|---|"""
_CAUSES = """
## By cause of doubt

A program counts for each of its causes. *Moved*: recorded programs whose peaks were others than predicted.

| cause | cuDNN | programs | moved | least | most | outside of what was said |
|---|---|---|---|---|---|---|"""


def _days(rows: Sequence[Row]) -> str:
    """How many rows were made on which day, the newest first."""
    days = Counter(row.get("made", "") for row in rows)
    return ", ".join(f"{days[day]} {f'on {day}' if day else 'before'}" for day in sorted(days, reverse=True))


def _is_equal(row: Row) -> bool:
    return all(row[level][0] == row[level][3] for level in LEVELS)


def _short(rows: Sequence[Row]) -> list[list[object]]:
    """The rows by what is known of cuDNN's plans."""
    modes = sorted({row["cudnn"] for row in rows})
    return [_cells(f"cuDNN {mode}", [row for row in rows if row["cudnn"] == mode]) for mode in modes]


def _line(name: str, rows: Sequence[Row]) -> str:
    return _row_of(_cells(name, rows))


def _cells(name: str, rows: Sequence[Row]) -> list[object]:
    cells: list[object] = [name, len(rows), sum(map(_is_equal, rows))]
    for kind in ("exact", "interval", "open"):
        claimed = [row for row in rows if claim(row["reserved"]) == kind]
        cells += [len(claimed), sum(all(is_met(row[level]) for level in LEVELS) for row in claimed)]
    likely = [row for row in rows if row["verdict"].startswith("likely")]
    return [*cells, len(likely), sum(map(_is_equal, likely))]


def _cause(name: str, rows: Sequence[Row]) -> str:
    changes = [row[level][3] / row[level][0] - 1 for row in rows for level in LEVELS]
    modes = ", ".join(f"{mode} {count}" for mode, count in sorted(Counter(row["cudnn"] for row in rows).items()))
    ends = [f"{100 * end:+.1f} %" for end in (min(changes, default=0), max(changes, default=0))]
    outside = sum(not all(is_met(row[level]) for level in LEVELS) for row in rows)
    return _row_of([name, modes, len(rows), sum(not _is_equal(row) for row in rows), *ends, outside])


def _row_of(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
