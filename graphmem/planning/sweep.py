"""The same model under every combination of some settings.

Combinations that one capture serves are asked together: the step is captured once, and replayed for each of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pickle import PicklingError
from typing import Any

from graphmem.answering.question import CaptureKey, Question, capture_key, check_counts
from graphmem.answering.runs import Progress, RunCache, labelled, silent
from graphmem.answering.sized import SIZES, SizedRuns
from graphmem.base.spellings import also_named
from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.documents import of_sweep
from graphmem.planning.request import Request, option_of
from graphmem.reports import Answer
from graphmem.reports.document import Document


@dataclass(frozen=True)
class Row:
    """One combination: its settings, and its estimate or the reason why there is none."""

    settings: Mapping[str, Any]
    estimate: Estimate | None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values, memory in bytes."""
        settings = {name: getattr(value, "name", value) for name, value in self.settings.items()}
        return {
            "settings": settings,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "error": self.error or None,
        }


class Rows(Answer, list[Row]):
    """All combinations, which print as a table."""

    def document(self, *, details: bool = False) -> Document:
        """The table of ``graphmem sweep``."""
        return of_sweep(self, [words_of(row.settings) for row in self])

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.sweep/1``; memory in bytes)."""
        return {"schema": "graphmem.sweep/1", "rows": [row.to_dict() for row in self]}


@also_named("device", "gpu")
def sweep(
    model: object,
    example_inputs: object = None,
    *,
    vary: Mapping[str, Sequence[object]],
    jobs: int = 1,
    say: Callable[[str], None] | None = None,
    **options: object,
) -> Rows:
    """Analyse every combination of ``vary``: name of a setting (see :meth:`Request.changed`) -> its values.

    The last setting changes fastest. A combination that cannot be analysed is a row with its error. Of four batches or
    lengths and more, a template may write all but three, and their estimates' assumptions say so. ``jobs`` processes
    work side by side, each on settings of one capture or template; more than one need joblib, and a model that can be
    pickled. ``options`` are those of :func:`graphmem.analyze`. Raises :class:`GraphmemError` where none can be
    analysed.
    """
    check_counts(1, jobs=jobs)
    for name, values in vary.items():
        if isinstance(values, (str, bytes)) or not values:
            raise UsageError(f"vary[{name!r}] is a list of at least one value, not {values!r}")
    request = Request(model, example_inputs, options)
    report = say or request.progress
    chosen = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    families = _families(request, chosen, _groups(request, chosen))
    answers: dict[int, _Answer] = {}
    if jobs == 1:
        work = _one_by_one(request, chosen, families, report)
    else:
        work = _side_by_side(request, chosen, families, jobs, report)
    for numbers, found in work:
        answers.update(zip(numbers, found, strict=True))
    return _rows(chosen, [answers[number] for number in range(len(chosen))])


#: What became of one combination.
_Answer = Estimate | GraphmemError
#: What became of a group: the numbers of its combinations, and an answer for each.
_Answers = tuple[list[int], list[_Answer]]


def _groups(request: Request, chosen: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """The combinations by their numbers, those of one capture together, card by card: a step may ask which it is on.
    One that is refused is alone."""
    keys: list[CaptureKey | None] = []
    groups: list[list[int]] = []
    cards: list[tuple[str, int]] = []
    for number, settings in enumerate(chosen):
        key, card = None, ("", 0)
        with contextlib.suppress(GraphmemError):  # its own analysis will say why
            question = request.changed(**settings).question
            card = question.setting.device.name, question.setting.device.capacity_bytes
            key = capture_key(question)
        cards.append(card)
        if key is not None and key in keys:
            groups[keys.index(key)].append(number)
        else:
            keys.append(key)
            groups.append([number])
    return [sorted(group, key=lambda number: cards[number]) for group in groups]


#: Groups that differ in one size, and that size; "" where they are too few for a template.
_Family = tuple[list[list[int]], str]
#: From so many sizes on a template takes fewer captures than they do.
_WORTH_A_TEMPLATE = 4


def _families(request: Request, chosen: Sequence[Mapping[str, Any]], groups: list[list[int]]) -> list[_Family]:
    """Groups of which one template may serve all but a few: those that differ in the batch, or in the length."""
    size = next((size for size in SIZES if size in chosen[0]), "")
    families: list[tuple[CaptureKey | None, list[list[int]]]] = []
    for group in groups:
        key, settings = None, chosen[group[0]]
        if type(settings.get(size)) is int:  # no default, and nothing that is refused
            with contextlib.suppress(GraphmemError):
                key = capture_key(request.changed(**{**settings, size: chosen[0][size]}).question)
        family = next((members for other, members in families if key is not None and other == key), None)
        if family is None:
            families.append((key, [group]))
        else:
            family.append(group)
    return [(members, size if len(members) >= _WORTH_A_TEMPLATE else "") for _, members in families]


def _answer_family(
    request: Request,
    chosen: Sequence[Mapping[str, Any]],
    family: _Family,
    report: Callable[[int], Progress] = lambda _: silent,
    captures: RunCache | None = None,
) -> list[_Answers]:
    """A capture for each group, or a template for most of them, and a replay for each combination, which has a number.

    The smallest size, the next and the largest are captured: their template is proven where it gives all three.
    """
    groups, size = family
    cache = captures or RunCache()
    if not size:
        return [(group, _answer_group(request, chosen, group, report, cache)) for group in groups]
    others = {name: value for name, value in chosen[groups[0][0]].items() if name != size}
    answers: list[_Answers] = []

    def question(value: int) -> Question:
        return request.changed(**others, **{size: value}).question

    with SizedRuns(size, question, cache) as sized:
        groups = sorted(groups, key=lambda group: chosen[group[0]][size])
        served = [group for group in groups if sized.serves(chosen[group[0]][size])]
        first = [*served[:2], *served[-1:]] if len(served) >= _WORTH_A_TEMPLATE else []
        sized.expect(chosen[group[0]][size] for group in served if group not in first)
        for group in [*first, *(group for group in groups if group not in first)]:
            value = chosen[group[0]][size]
            with contextlib.suppress(GraphmemError):  # the answers of the group will say why
                if group in first:
                    sized.capture(value, report(group[0]))
                elif sized.is_proven:
                    sized.by_template(value)
            answers.append((group, _answer_group(request, chosen, group, report, cache)))
    return answers


def _answer_group(
    request: Request,
    chosen: Sequence[Mapping[str, Any]],
    group: Sequence[int],
    report: Callable[[int], Progress],
    captures: RunCache,
) -> list[_Answer]:
    """One capture, or one that is there already, and a replay for each combination."""
    answers: list[_Answer] = []
    for number in group:
        try:
            answers.append(request.changed(**chosen[number]).run(captures, report(number)))
        except GraphmemError as error:
            answers.append(error)
    return answers


def _one_by_one(
    request: Request, chosen: Sequence[Mapping[str, Any]], families: Sequence[_Family], report: Callable[[str], None]
) -> Iterator[_Answers]:
    captures = RunCache()  # of one group at a time; an ONNX file is read for all of them
    order = [number for groups, _ in families for group in groups for number in group]

    def progress_of(number: int) -> Progress:
        words = ", ".join(map(" ".join, words_of(chosen[number]).items()))
        return labelled(report, f"{order.index(number) + 1} of {len(order)}, {words}")

    for family in families:
        yield from _answer_family(request, chosen, family, progress_of, captures)


def _side_by_side(
    request: Request,
    chosen: Sequence[Mapping[str, Any]],
    families: Sequence[_Family],
    jobs: int,
    report: Callable[[str], None],
) -> Iterator[_Answers]:
    """Every family in one of ``jobs`` processes. Raises :class:`GraphmemError` where joblib is missing, the model
    cannot be sent, or a process dies."""
    try:
        from joblib import Parallel, delayed
    except ImportError:
        raise UsageError("more than one job needs joblib; install it with: pip install 'graphmem[parallel]'") from None
    silent = replace(request, options={name: value for name, value in request.options.items() if name != "progress"})
    tasks = [delayed(_answer_family)(silent, chosen, family) for family in families]
    try:
        found = Parallel(n_jobs=min(jobs, len(families)), return_as="generator")(tasks)
        report(f"0 of {len(chosen)} done")
        done = 0
        for numbers, answers in itertools.chain.from_iterable(found):
            done += len(numbers)
            report(f"{done} of {len(chosen)} done")
            yield numbers, answers
    except PicklingError:
        raise UsageError(
            "the model cannot be sent to another process; name it (module.py:factory), or use one job"
        ) from None
    except BrokenProcessPool:
        raise SourceError("a process of the sweep was killed, perhaps for lack of memory; use fewer jobs") from None


def words_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Options and their values as people write them."""
    return {option_of(name): _value(value) for name, value in settings.items()}


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value == "" else str(getattr(value, "name", value))


def _rows(chosen: Sequence[Mapping[str, Any]], answers: Sequence[_Answer]) -> Rows:
    """The rows in the order of the combinations. Raises the first error where there is nothing else."""
    errors = [answer for answer in answers if isinstance(answer, GraphmemError)]
    if errors and len(errors) == len(answers):
        raise errors[0]
    return Rows(
        Row(settings, None, str(answer)) if isinstance(answer, GraphmemError) else Row(settings, answer)
        for settings, answer in zip(chosen, answers, strict=True)
    )
