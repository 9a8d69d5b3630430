"""The same model under every combination of some settings.

Combinations that one capture serves are asked together: the step is captured once, and replayed for each of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import graphmem
from graphmem.answering.question import CaptureKey, Question, capture_key
from graphmem.answering.runs import Progress, RunCache, counted, labelled, silent
from graphmem.answering.sized import SIZES, SizedRuns, SizedRunsOfLayers
from graphmem.answering.stages import estimate_of
from graphmem.base.spellings import also_named
from graphmem.devices import Device, device_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import LEVELS, Estimate
from graphmem.planning.documents import of_sweep, verdict_words
from graphmem.planning.request import Request, option_of
from graphmem.planning.stores import Store, key_of
from graphmem.replay import expect_replays
from graphmem.reports import Answer
from graphmem.reports.document import Document
from graphmem.workers import Workers

if TYPE_CHECKING:
    from graphmem.workers.crew import Crew


@dataclass(frozen=True)
class Row:
    """One combination: its settings, and its estimate or the reason why there is none. ``kept``: the figures that a
    store has of it, in place of an estimate."""

    settings: Mapping[str, Any]
    estimate: Estimate | None
    error: str = ""
    kept: Mapping[str, Any] | None = None
    raised: GraphmemError | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def failed(settings: Mapping[str, Any], why: GraphmemError) -> Row:
        """The row of a combination that could not be analysed."""
        return Row(settings, None, str(why), raised=why)

    @property
    def words(self) -> dict[str, str]:
        """The settings as people write them."""
        return words_of(self.settings)

    @property
    def figures(self) -> Mapping[str, Any]:
        """What a table shows: bytes of each level and of the card, the verdict, and where it has none the reason."""
        if self.kept is not None:
            return self.kept
        estimate, fit = self.estimate, self.estimate.fit if self.estimate else None
        figures: dict[str, Any] = {level: getattr(estimate, level) if estimate else None for level in LEVELS}
        return figures | {
            "capacity": fit.capacity_bytes if fit else None,
            **self._verdict,
            "error": self.error or None,
        }

    @property
    def _verdict(self) -> dict[str, str | None]:
        """Whether it fits, briefly and as a table says it; what fails on every card does not."""
        fit = self.estimate.fit if self.estimate else None
        if self.estimate is not None and self.estimate.failure:
            return {"fits": "no" if fit else None, "on_card": "FAILS on any card"}
        if fit is None:
            return {"fits": None, "on_card": ""}
        briefly = ", ".join(filter(None, (fit.verdict, fit.chance)))
        return {"fits": briefly, "on_card": f"{verdict_words(fit, 'DOES NOT FIT')} {fit.gpu}"}

    @property
    def brief(self) -> Row:
        """The row without its estimate."""
        return replace(self, estimate=None, kept=self.figures)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values, memory in bytes. A row of a store has its ``figures`` in place of an estimate."""
        settings = {name: _plain(value) for name, value in self.settings.items()}
        found = {
            "settings": settings,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "error": self.figures["error"],
        }
        return found if self.kept is None else found | {"figures": dict(self.kept)}


class Rows(Answer, list[Row]):
    """All combinations, which print as a table. ``prices``: of a card by its name; empty where none were given."""

    prices: Mapping[str, float] = {}

    def document(self, *, details: bool = False) -> Document:
        """The table of ``graphmem sweep``."""
        return of_sweep(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.sweep/1``; memory in bytes)."""
        prices = {"prices": dict(self.prices)} if self.prices else {}
        return {"schema": "graphmem.sweep/1", **prices, "rows": [row.to_dict() for row in self]}


@also_named("device", "gpu")
def sweep(
    model: object,
    example_inputs: object = None,
    *,
    vary: Mapping[str, Sequence[object]],
    prices: Mapping[str, float] | None = None,
    jobs: int = 1,
    engine: str = "",
    scheduler: str | None = None,
    store: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    **options: object,
) -> Rows:
    """Analyse every combination of ``vary``: name of a setting (see :meth:`Request.changed`) -> its values.

    The last setting changes fastest. A combination that cannot be analysed is a row with its error. Of four batches or
    lengths and more, a template may write all but three, and their estimates' assumptions say so. ``prices``, of a card
    by its name: cards are varied from the cheapest on, all of them or those of ``vary``. ``jobs`` workers
    work side by side, each on settings of one capture or template, which needs a model that can be sent to them.
    ``engine`` (``processes``, ``dask``, ``ray``) says where, ``scheduler`` at which address. ``store`` names a file
    that rows are written to as they come, their figures alone, and from which a sweep that ended goes on. ``options``
    are those of :func:`graphmem.analyze`. Raises :class:`GraphmemError` where none can be analysed.
    """
    crew = Workers(jobs, engine, scheduler).crew()
    for name, values in vary.items():
        if isinstance(values, (str, bytes)) or not values:
            raise UsageError(f"vary[{name!r}] is a list of at least one value, not {values!r}")
    if prices:
        vary = _by_price(vary, prices)
    request = Request(model, example_inputs, options)
    report = say or request.progress
    chosen = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    rows: dict[int, Row] = {}
    with contextlib.ExitStack() as stack:
        kept = None if store is None else stack.enter_context(Store(Path(store), _question(request)))
        for number, settings in enumerate(chosen if kept else ()):
            found = kept.rows.get(key_of(words_of(settings))) if kept else None
            if found is not None:
                rows[number] = Row(settings, None, kept=found["figures"])
        left = [number for number in range(len(chosen)) if number not in rows]
        families = _families(request, chosen, _groups(request, chosen, left))
        if crew is None:
            work = _one_by_one(request, chosen, families, report, brief=kept is not None)
        else:
            stack.enter_context(crew)
            work = _side_by_side(request, chosen, families, crew, report, brief=kept is not None)
        counted(report, len(rows), len(chosen))
        for number, row in work:
            if kept is not None:
                kept.add({"settings": row.words, "figures": row.figures})
            rows[number] = row
            counted(report, len(rows), len(chosen))
    answer = _in_order(rows)
    answer.prices = prices or {}
    return answer


def _by_price(vary: Mapping[str, Sequence[Any]], prices: Mapping[str, float]) -> dict[str, Sequence[Any]]:
    """The settings with the cards first, the cheapest of them first. Raises :class:`UsageError`."""
    given = vary.get("device") or vary.get("gpu") or list(prices)
    cards = [card if isinstance(card, Device) else device_named(card) for card in given]
    unknown = next((card.name for card in cards if card.name not in prices), None)
    if unknown is not None:
        raise UsageError(f"{unknown} has no price; priced: {', '.join(prices)}")
    others = {name: values for name, values in vary.items() if name not in ("device", "gpu")}
    return {"device": sorted(cards, key=lambda card: prices[card.name]), **others}


def _question(request: Request) -> dict[str, Any]:
    """What a store is for: the model, by the content of its file, and the options, under this version."""
    options = {name: str(value) for name, value in request.options.items() if value is not None and name != "progress"}
    file = Path(str(request.model).partition(":")[0])
    content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    return {"model": str(request.model), "content": content, "options": options, "graphmem": graphmem.__version__}


#: A combination by its number, and what became of it.
_Numbered = tuple[int, Row]


def _groups(request: Request, chosen: Sequence[Mapping[str, object]], left: Sequence[int]) -> list[list[int]]:
    """The combinations that are left, by their numbers, those of one capture together, card by card: a step may ask
    which it is on. One that is refused is alone."""
    groups: list[list[int]] = []
    of_sizes: dict[Hashable, list[tuple[CaptureKey | None, list[int]]]] = {}  # keys are compared, and sizes hashed
    cards: dict[int, tuple[str, int]] = {}
    for number, question in _questions(request, chosen, left):
        key: CaptureKey | None = None
        sizes: tuple[int | None, int | None] = (None, None)
        cards[number] = "", 0
        if isinstance(question, Question):
            cards[number] = question.setting.device.name, question.setting.device.capacity_bytes
            with contextlib.suppress(GraphmemError):  # its own analysis will say why
                key, sizes = capture_key(question), (question.batch, question.seq_len)
        group = _member(of_sizes.setdefault(sizes, []), key)
        if not group:
            groups.append(group)
        group.append(number)
    return [sorted(group, key=cards.__getitem__) for group in groups]


def _questions(
    request: Request, chosen: Sequence[Mapping[str, Any]], numbers: Iterable[int]
) -> Iterator[tuple[int, Question | GraphmemError]]:
    """The question of each combination, or why it is refused. Where only the allocator's settings are others than in
    the one before, all else is as it was read there."""
    before: Mapping[str, Any] | None = None
    question: Question | GraphmemError | None = None
    for number in numbers:
        others = {name: value for name, value in chosen[number].items() if name != "alloc_conf"}
        if isinstance(question, Question) and others == before and "alloc_conf" in chosen[number]:
            question = question.with_alloc_conf(chosen[number]["alloc_conf"])
        else:
            try:
                question = request.changed(**chosen[number]).question
            except GraphmemError as error:
                question = error
        before = others
        yield number, question


#: Groups that differ in one size, card by card, and that size; "" where they are too few for a template.
_Family = tuple[list[list[list[int]]], str]
#: From so many sizes on a template takes fewer captures than they do.
_WORTH_A_TEMPLATE = 4
#: So few sizes of a deep model are written from its runs with a few layers; a template of all layers takes three
#: captures of them, and writes a size sooner.
_FEW_SIZES = 24


def _families(request: Request, chosen: Sequence[Mapping[str, Any]], groups: list[list[int]]) -> list[_Family]:
    """Groups of which one template may serve all but a few: those that differ in the batch, or in the length, and in
    the card."""
    size = next((size for size in SIZES if chosen and size in chosen[0]), "")
    families: list[tuple[CaptureKey | None, list[tuple[CaptureKey | None, list[list[int]]]]]] = []
    for group in groups:
        on_card, family, settings = None, None, chosen[group[0]]
        if type(settings.get(size)) is int:  # no default, and nothing that is refused
            with contextlib.suppress(GraphmemError):
                on_card = capture_key(request.changed(**{**settings, size: chosen[0][size]}).question)
                first = {name: chosen[0][name] for name in (size, "device") if name in settings}
                family = capture_key(request.changed(**{**settings, **first}).question)
        _member(_member(families, family), on_card).append(group)
    return [
        (
            [groups for _, groups in cards],
            size if len(max(cards, key=lambda card: len(card[1]))[1]) >= _WORTH_A_TEMPLATE else "",
        )
        for _, cards in families
    ]


def _member(named: list[tuple[CaptureKey | None, list[Any]]], key: CaptureKey | None) -> list[Any]:
    """The list of this key, which is compared, not hashed; a new one for a key that is not there, or None."""
    found = next((members for other, members in named if key is not None and other == key), None)
    if found is None:
        found = []
        named.append((key, found))
    return found


def _answer_family(
    request: Request,
    chosen: Sequence[Mapping[str, Any]],
    family: _Family,
    report: Callable[[int], Progress] = lambda _: silent,
    captures: RunCache | None = None,
    *,
    brief: bool,
) -> Iterator[_Numbered]:
    """A capture for each group, or a template for most of them, and a replay for each combination, which has a number.
    ``brief``: figures alone are wanted.

    The smallest size, the next and the largest are captured: their template is proven where it gives all three, else a
    few more, of which it need not give the smallest. On another card one is enough, where the template gives it.
    """
    cards, size = family
    cache = captures or RunCache()
    expect_replays(len(_numbers(family)))
    if not size:
        for group in itertools.chain.from_iterable(cards):
            yield from _answer_group(request, chosen, group, report, cache, brief=brief)
        return
    like: SizedRuns | None = None
    for groups in cards:
        like = yield from _answer_sizes(request, chosen, groups, size, report, cache, like, brief=brief)


def _answer_sizes(
    request: Request, chosen: Sequence[Mapping[str, Any]], groups: list[list[int]], size: str,
    report: Callable[[int], Progress], cache: RunCache, like: SizedRuns | None, *, brief: bool,
) -> Generator[_Numbered, None, SizedRuns | None]:  # fmt: skip
    """The groups of one card, which differ in the ``size``; the runs whose template may serve the next card."""
    others = {name: value for name, value in chosen[groups[0][0]].items() if name != size}

    def question(value: int) -> Question:
        return request.changed(**others, **{size: value}).question

    kind = SizedRunsOfLayers if len(groups) <= _FEW_SIZES else SizedRuns
    with kind(size, question, cache, like) as sized:
        groups = sorted(groups, key=lambda group: chosen[group[0]][size])
        served = [group for group in groups if sized.serves(chosen[group[0]][size])]
        first = [*served[:2], *served[-1:]] if len(served) >= _WORTH_A_TEMPLATE else []
        sized.expect(chosen[group[0]][size] for group in served if group not in first)
        for group in [*first, *(group for group in groups if group not in first)]:
            value = chosen[group[0]][size]
            with contextlib.suppress(GraphmemError):  # the answers of the group will say why
                if sized.is_proven:
                    sized.by_template(value)
                elif first and group in served and sized.may_learn:
                    sized.capture(value, report(group[0]))
            yield from _answer_group(request, chosen, group, report, cache, brief=brief)
        return sized if sized.is_own else like


def _answer_group(
    request: Request,
    chosen: Sequence[Mapping[str, Any]],
    group: Sequence[int],
    report: Callable[[int], Progress],
    captures: RunCache,
    *,
    brief: bool,
) -> Iterator[_Numbered]:
    """One capture, or one that is there already, and a replay for each combination."""
    for number, question in _questions(request, chosen, group):
        try:
            if isinstance(question, GraphmemError):
                raise question
            estimate = estimate_of(question, captures, report(number))
            row = Row(chosen[number], estimate if brief else estimate.without_events())
        except GraphmemError as error:
            row = Row.failed(chosen[number], error)
        yield number, row.brief if brief else row


def _one_by_one(
    request: Request, chosen: Sequence[Mapping[str, Any]], families: Sequence[_Family], report: Callable[[str], None],
    *, brief: bool,
) -> Iterator[_Numbered]:  # fmt: skip
    captures = RunCache()  # of one group at a time; an ONNX file is read for all of them
    order = [number for family in families for number in _numbers(family)]
    place = {number: at for at, number in enumerate(order, 1)}

    def progress_of(number: int) -> Progress:
        words = ", ".join(map(" ".join, words_of(chosen[number]).items()))
        return labelled(report, f"{place[number]} of {len(order)}, {words}")

    for family in families:
        yield from _answer_family(request, chosen, family, progress_of, captures, brief=brief)


def _side_by_side(
    request: Request,
    chosen: Sequence[Mapping[str, Any]],
    families: Sequence[_Family],
    crew: Crew,
    report: Callable[[str], None],
    *,
    brief: bool,
) -> Iterator[_Numbered]:
    """Every family by one of the workers. ``brief``: figures alone come back. Raises :class:`GraphmemError` where there
    are no workers, or the model cannot be sent."""
    function = functools.partial(_family_of_worker, request.quiet, chosen, brief)
    count, done = sum(len(_numbers(family)) for family in families), 0
    report(f"0 of {count} done")
    for number, found in crew.results(function, families):
        if isinstance(found, GraphmemError):
            rows = [(one, Row.failed(chosen[one], found)) for one in _numbers(families[number])]
        else:
            rows = found
        done += len(rows)
        report(f"{done} of {count} done")
        yield from rows


def _numbers(family: _Family) -> list[int]:
    """The combinations of a family."""
    return [number for groups in family[0] for group in groups for number in group]


def _family_of_worker(
    request: Request, chosen: Sequence[Mapping[str, Any]], brief: bool, family: _Family
) -> list[_Numbered]:
    """The rows of a family, in a worker."""
    return list(_answer_family(request, chosen, family, brief=brief))


def words_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Options and their values as people write them."""
    return {option_of(name): _value(value) for name, value in settings.items()}


def _value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value == "" else str(_plain(value))


def _plain(value: object) -> object:
    """A card by its name, and a way of sharing out by its number of processes."""
    return getattr(value, "name", getattr(value, "world_size", value))


def _in_order(rows: Mapping[int, Row]) -> Rows:
    """The rows in the order of the combinations. Raises the first error where there is nothing else."""
    ordered = Rows(rows[number] for number in sorted(rows))
    if ordered[0].raised is not None and all(row.raised for row in ordered):
        raise ordered[0].raised
    return ordered
