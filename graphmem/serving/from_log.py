"""``graphmem serve --from-log``: what an engine printed at its start beside what is predicted of the same start.

A figure that differs says which term of the arithmetic does, which is what a reader of a log wants to know, and how a
defect of the prediction is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from graphmem.base.documents import shown
from graphmem.base.options import options_of
from graphmem.devices import Device, Loads, all_devices, custom_device, device_named
from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.reports import Answer
from graphmem.reports.document import Document, Facts, Items, Section, Text, section, table
from graphmem.serving import ENGINES, engine_named
from graphmem.serving.base import BASES, Question, Served, ServedModel, for_searches, spelled
from graphmem.serving.configurations import (
    is_quantised,
    model_named,
    model_of_log,
    models_keeping,
    models_like,
    quantised_somehow,
)
from graphmem.serving.log_terms import (
    DECIDE,
    TOKEN,
    Term,
    off_words,
    own_terms,
    predicted,
    predicted_terms,
    size_words,
    term_of,
    with_token,
)  # fmt: skip
from graphmem.serving.logs import Log, Reader, commands_in, lines_of, services_in, whole_number
from graphmem.serving.shapes import Formula
from graphmem.serving.stored import stored
from graphmem.sources.checkpoints import Checkpoint
from graphmem.units import format_bytes, parse_bytes

#: A difference up to this part of the figure is none, as digits and drivers differ.
_EQUAL = 0.02
#: Up to this part off are weights and a token's bytes of a model that is known by them, as packing differs.
_SAME_MODEL = 0.01
#: The parts of 16-bit weights that quantised ones are, from 4 bits on.
_QUANTISED = (0.2, 0.8)
#: Cards that are tried where a log does not name its own, nearest in memory first: each takes an answer of the engine,
#: a second or less; and what is said of the one that is taken.
_TRIED = 6
_TAKEN = "is taken, with which the cache comes nearest to what is printed"
#: How a field of a question is read of a log's text, by its type.
_TYPES: Mapping[str, Callable[[str], object]] = {"int": int, "float": float, "bool": lambda text: text == "True"}
_READ = {one.name: _TYPES.get(str(one.type).removesuffix(" | None"), str) for one, _ in options_of(Question)}


class NotPredicted(UsageError):
    """A log that does not tell enough for a prediction, or a model that is not followed."""


@dataclass(frozen=True)
class LogReport(Answer):
    """A log's figures beside the prediction's. ``given``: the prediction with what the log says of the ``machine``, a
    name and bytes; ``left_out``: settings of the log that are not followed. Without a prediction ``why_not`` says what
    it lacks, and the figures stand beside those that the log's other lines come to."""

    path: str
    reader: Reader
    log: Log
    prediction: Served | None
    terms: tuple[Term, ...]
    given: Term | None = None
    left_out: tuple[str, ...] = ()
    machine: tuple[str, float] | None = None
    why_not: str = ""

    @property
    def served(self) -> Served:
        """The prediction. Raises :class:`NotPredicted` where there is none."""
        if self.prediction is None:
            raise NotPredicted(self.why_not)
        return self.prediction

    @property
    def decides(self) -> Term | None:
        """The figure that says how good the prediction is: of the cache."""
        found = {term.name: term for term in self.terms}
        known = [found[name] for name in DECIDE if name in found]
        if self.prediction is None:  # of what lines come to the furthest off
            return max(known, key=lambda term: abs(term.share or 0), default=None)
        return next(iter(known), None)

    @property
    def differs(self) -> Term | None:
        """The part of the arithmetic that is furthest off; None where all are as printed."""
        parts = [term for term in self.terms if term.is_size and term.name not in DECIDE and term.difference]
        return max(parts, key=lambda term: abs(term.difference), default=None)

    def document(self, *, details: bool = False) -> Document:
        """The comparison."""
        served, name = self.prediction, Path(self.path).name
        if served is None:
            return Document("serving_log", f"{name}: {self.log.engine}", tuple(_own_sections(self)), self.to_dict)
        title = f"{name}: {served.model} on {served.gpu}, {served.engine}"
        return Document("serving_log", title, tuple(_sections(self, served)), self.to_dict, width=110)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Sizes are bytes."""
        log, decides, differs, served = self.log, self.decides, self.differs, self.prediction
        return {
            "schema": "graphmem.serving_log/1",
            "log": self.path,
            "engine": log.engine,
            "printed_version": log.version,
            "followed_version": served and served.version,
            "basis": served and served.basis,
            "model": served and served.model,
            "gpu": served and served.gpu,
            "cards": served and served.cards,
            "settings": dict(log.settings),
            "left_out": list(self.left_out),
            "terms": [_plain(term) for term in self.terms],
            "decides": None if decides is None else decides.name,
            "differs": None if differs is None else differs.name,
            "given_outside_torch": None if self.given is None else _plain(self.given),
            "refusal": served and served.refusal,
            "notes": list(served.notes) if served else [self.why_not],
        }


def _plain(term: Term) -> dict[str, Any]:
    return {
        "name": term.name, "printed": term.printed, "predicted": term.predicted, "difference": term.difference,
        "is_size": term.is_size, "note": term.note,
    }  # fmt: skip


def compared(
    path: str | Path,
    model: str | None = None,
    *,
    engine: str | None = None,
    engine_version: str | None = None,
    gpu: str | Device | None = None,
    gpu_memory: int | str | None = None,
    **options: Any,
) -> LogReport:
    """The log of a start, compared with its prediction.

    What the log does not tell may be given: ``model`` (its configuration), ``gpu``; ``options`` are those of
    :class:`graphmem.serving.base.Question`, and stronger than the log's. Where there is no prediction, as no model is
    named or none like it is followed, the log's lines are put beside each other. Raises
    :class:`graphmem.errors.GraphmemError` for a file that is no engine's log, and for wrong values.
    """
    path = Path(path)
    if others := sorted(set(options) - {one.name for one in fields(Question)}):
        raise UsageError(f"{spelled(others[0])} is not asked of a log: leave it out, or --from-log")
    reader, log = _read(path, lines_of(path), engine)
    asked = _Query(reader, log, engine_version, options)
    given_model = None if model is None else model_named(model)
    try:
        return _predicted(path, asked, given_model, gpu, gpu_memory)
    except NotPredicted as error:
        return LogReport(str(path), reader, log, None, tuple(own_terms(reader, log)), why_not=str(error))


def _predicted(
    path: Path, asked: _Query, model: ServedModel | None, gpu: str | Device | None, gpu_memory: int | str | None
) -> LogReport:
    log = asked.log
    cards = _cards(path, log, gpu, gpu_memory)
    open_figures: frozenset[str] = frozenset()
    if model is None:
        model, open_figures = _model(path, asked, cards[0])
    model, weights = asked.with_weights(model, cards[0])
    card = cards[0] if len(cards) == 1 else _nearest(asked, model, cards)
    question, left_out = asked.question(model, card)
    question, served, more = asked.served(question)
    left_out += more
    if cards[1:]:
        served = replace(served, notes=(f"the log does not name its card: {card.name} {_TAKEN}", *served.notes))
    if weights:
        served = replace(served, notes=(f"{weights} are the log's: this model's are not counted here", *served.notes))
        open_figures |= {"weights"}
    found = tuple(term for term in predicted_terms(asked.reader, log, served) if term.name not in open_figures)
    machine = _machine(asked, served)
    given = _given(asked, question, served, machine)
    return LogReport(str(path), asked.reader, log, served, found, given, left_out, machine)


class _Query:
    """What a log and its reader ask of the engine's model, but the model and the card."""

    def __init__(self, reader: Reader, log: Log, version: str | None, options: Mapping[str, Any]) -> None:
        self.reader, self.log, self.engine = reader, log, engine_named(log.engine)
        self.found, self.others = _asked(log, options)
        self.version = _version(version or (log.version if reader.follows_versions else None))
        self.options = options
        self.cards = self.found.get("tensor_parallel_size", 1)
        self.element = 1 if "8" in self.found.get("kv_cache_dtype", "auto") else 2

    def question(self, model: ServedModel, card: Device) -> tuple[Question, tuple[str, ...]]:
        """The question as it is asked quickly, and settings that are not followed."""
        question, left_out = _followed(
            self.engine, Question(model, card, version=self.version, **self.found), self.others
        )
        loaded = getattr(self.engine, "loaded_while_profiling", lambda question: 0)
        if not question.non_torch_bytes:
            question = question.with_(non_torch_bytes=loaded(question))
        return for_searches(self.engine, question), left_out

    def with_weights(self, model: ServedModel, card: Device) -> tuple[ServedModel, str]:
        """The model, with the weights that the log prints where the engine's formula counts none like it; and those."""
        printed = {name: figure.value for name, figure in self.log.printed.items()}
        if "weights" in printed:
            each, words = printed["weights"], f"weights of {format_bytes(round(printed['weights']))}"
        else:
            each, words = card.capacity_bytes - printed.get("available", math.inf), "weights and all that is loaded"
        if each < 0 or not isinstance(self.engine, Formula) or model.checkpoint or self.serve(model, card):
            return model, ""
        known = replace(model, checkpoint=Checkpoint({}, round(each) * self.cards))
        return (known, words) if self.serve(known, card) else (model, "")

    def served(self, question: Question) -> tuple[Question, Served, tuple[str, ...]]:
        """(the question, its answer, and the option that was left out), where the engine's model does not follow one.
        Raises :class:`NotPredicted` where that is not what it lacks."""
        try:
            return question, self.engine.serve(question), ()
        except UsageError as error:
            if self.options:
                raise
            reason = NotPredicted(str(error))
        for option in reversed(question.arguments):
            without = question.with_(arguments=tuple(one for one in question.arguments if one != option))
            with suppress(UsageError):
                return without, self.engine.serve(without), (f"{option[0]} {option[1]}"[:100],)
        raise reason

    def serve(self, model: ServedModel, card: Device) -> Served | None:
        """The answer; None where there is none."""
        with suppress(GraphmemError):
            return self.served(self.question(model, card)[0])[1]
        return None

    def off(self, model: ServedModel, card: Device, names: Sequence[str]) -> float:
        """The part by which the worst of these figures is off; infinite where none is known."""
        served = self.serve(model, card)
        terms = [] if served is None else predicted_terms(self.reader, self.log, served)
        shares = (abs(term.share or 0) for term in terms if term.name in names and term.printed > 0)
        return max(shares, default=math.inf)


def _model(path: Path, asked: _Query, card: Device) -> tuple[ServedModel, frozenset[str]]:
    """The model that is named, or printed, or of the table that which has what is printed of it; and the figures that
    this leaves open."""
    log = asked.log
    method = log.settings.get("quantization")
    named, why = None, "does not name its model"
    try:
        named = model_of_log(log.model) if log.model is not None else None
    except SourceError as error:
        why = f"names the model {shown(log.model or '')}, whose configuration is not here ({error})"
    if named is not None and is_quantised(named, method):
        return named, frozenset()
    if named is None and log.own_model is not None:
        return log.own_model
    like = [*models_like(named, log.architecture, method)]
    if named is None and log.mentioned is not None:
        like.append(model_named(log.mentioned))
    off, nearest = _closest(asked, like, card)
    if named is None and log.architecture is None and off > _SAME_MODEL:
        off, nearest = _by_token(asked, card)
    if nearest is not None and off <= _SAME_MODEL:
        known = "its class, weights" if log.architecture else "weights"
        name = f"{nearest.name}, or one of its shape: by {known} and bytes of a token"
        return replace(nearest, name=name), frozenset()
    if named is not None and nearest is not None and off < math.inf:  # quantised as the log says, and not by its name
        return nearest, frozenset()
    if named is None:
        raise NotPredicted(f"{path.name} {why}")
    return named, frozenset()


def _by_token(asked: _Query, card: Device) -> tuple[float, ServedModel | None]:
    """The same of all models of the table that keep so many bytes of a token, as they lie or quantised."""
    printed = with_token(asked.reader, asked.log)
    if not {TOKEN, "weights"} <= set(printed):
        return math.inf, None
    weights, (low, high) = printed["weights"].value, _QUANTISED
    shares = [
        (weights / size, one)
        for one in models_keeping(printed[TOKEN].value, asked.cards, asked.element)
        for size in [stored(one, cards=asked.cards)]
    ]
    off, nearest = _closest(asked, [one for share, one in shares if share > high], card)
    if off > _SAME_MODEL:
        packed = [packed for share, one in shares if low < share < high for packed in quantised_somehow(one)]
        off, nearest = _closest(asked, packed, card)
    return off, nearest


def _closest(asked: _Query, models: Sequence[ServedModel], card: Device) -> tuple[float, ServedModel | None]:
    """(how far off, the one of these models whose weights and bytes of a token are nearest)."""
    tried = ((asked.off(one, card, ("weights", TOKEN)), one) for one in models)
    return min(tried, key=lambda one: one[0], default=(math.inf, None))


def _read(path: Path, lines: list[str], engine: str | None) -> tuple[Reader, Log]:
    """The log as the engine's reader has it, that of the engine which says most in it."""
    readers = _readers() if engine is None else [_reader(engine)]
    parts = services_in(lines)
    found = [
        (reader, replace(log, service=service))
        for service, own in parts.items()
        for commands in [commands_in(own)]
        for reader in readers
        if (log := reader.read(own, commands)) is not None
    ]
    if not found:
        names = ", ".join(reader.engine for reader in readers)
        raise SourceError(
            f"{path} has no figure of memory that {names} prints at its start; give the whole log, from the command on"
        )
    return max(found, key=lambda one: len(one[1].printed))


def _readers() -> list[Reader]:
    return [reader for engine in ENGINES.all() if (reader := getattr(engine, "log", None)) is not None]


def _reader(engine: str) -> Reader:
    found: Reader | None = getattr(engine_named(engine), "log", None)
    if found is None:
        raise UsageError(f"logs of {engine} are not read; accepted: {', '.join(one.engine for one in _readers())}")
    return found


def _cards(path: Path, log: Log, gpu: str | Device | None, gpu_memory: int | str | None) -> list[Device]:
    """The card that is given or named; else one of each kind that it may be, of the table, those first whose memory is
    nearest to what the log says of it."""
    if gpu is not None:
        return [_sized(path, log, gpu if isinstance(gpu, Device) else device_named(gpu), gpu_memory)]
    if log.gpu is not None:  # some are sold with another's memory, or as another's name
        return [_sized(path, log, device_named(log.gpu), gpu_memory, as_named=False)]
    kinds: dict[object, Device] = {}
    for card in all_devices() if log.is_cuda else ():
        if card.compute_capability is not None:
            kinds.setdefault((card.capacity_bytes, card.compute_capability), card)
    found, size = list(kinds.values()), log.total_bytes or log.free_bytes
    if size is not None:
        found = [card for card in found if card.capacity_bytes > size * (1 - _EQUAL)]
        found.sort(key=lambda card: abs(card.capacity_bytes - size))
    sized = []
    for card in found:
        with suppress(UsageError):
            sized.append(_sized(path, log, card, gpu_memory))
    if not sized and found:
        return [_sized(path, log, found[0], gpu_memory, as_named=False)]
    if not sized:
        has = "" if log.total_bytes is None else f"; it has {format_bytes(log.total_bytes)}"
        raise NotPredicted(f"{path.name} does not name its card: give --gpu (see 'graphmem gpus'){has}")
    return sized


def _nearest(asked: _Query, model: ServedModel, cards: Sequence[Device]) -> Device:
    """The card with which the cache comes nearest to what is printed, of those whose memory does."""
    served = next((served for card in cards if (served := asked.serve(model, card)) is not None), None)
    if served is None:
        return cards[0]
    cache, printed = served.kv_cache, asked.log.printed
    name = next((name for name in DECIDE if name in printed), None)
    if name is None:
        return cards[0]
    units = {"tokens": cache.block_bytes / cache.block_size, "blocks": float(cache.block_bytes)}
    lacks = printed[name].value * units.get(name, 1) - cache.available_bytes
    size = served.total_bytes + lacks * served.total_bytes / max(1, served.requested_bytes)
    if asked.off(model, cards[0], (name,)) <= _EQUAL:
        return cards[0]
    near = set(sorted(cards, key=lambda card: abs(card.capacity_bytes - size))[:_TRIED])
    off = {card: asked.off(model, card, (name,)) for card in cards if card in near}
    return next((card for card in off if off[card] <= _EQUAL), min(off, key=lambda card: off[card]))


def _sized(path: Path, log: Log, card: Device, gpu_memory: int | str | None, *, as_named: bool = True) -> Device:
    """The card with the memory that the log says it has, which is about that of its name."""
    if gpu_memory is not None:
        size = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
        return custom_device(size, like=card)
    if log.total_bytes is None and log.free_bytes is None:
        whole = card.board_bytes if log.on_windows else None
        return replace(card, capacity_bytes=whole or card.capacity_bytes)
    if log.total_bytes is None:
        return replace(card, capacity_bytes=(log.free_bytes or 0) + _before(card))
    if as_named and abs(log.total_bytes - card.capacity_bytes) > 0.1 * card.capacity_bytes:
        raise UsageError(
            f"{path.name}: its card has {format_bytes(log.total_bytes)}, and {card.name} has "
            f"{format_bytes(card.capacity_bytes)}: give the card with --gpu, or --gpu-memory"
        )
    return replace(card, capacity_bytes=log.total_bytes)


def _before(card: Device) -> int:
    """Bytes in use before the engine looks."""
    return sum(figure.bytes for figure in card.outside(Loads()))


def _asked(log: Log, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """(values of a question's fields, the log's further options)."""
    found: dict[str, Any] = {}
    others: list[tuple[str, str]] = list(options.get("arguments", ()))
    for name, text in log.settings.items():
        if name in options or any(name == one[0].replace("-", "_") for one in others):
            continue
        if name not in _READ:
            others.append((name, _word(text)))
            continue
        try:
            found[name] = _READ[name](text)
        except ValueError:
            continue
    return found | {name: value for name, value in options.items() if name != "arguments"}, others


def _word(text: str) -> str:
    return {"True": "true", "False": "false"}.get(text, text.replace("'", '"') if text[:1] in "{[" else text)


def _version(text: str | None) -> tuple[int, int] | None:
    plain = (text or "").removeprefix("v").partition(" ")[0]
    numbers = [number for part in plain.split(".")[:2] if (number := whole_number(part)) is not None]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _followed(engine: Any, question: Question, others: list[tuple[str, str]]) -> tuple[Question, tuple[str, ...]]:
    """The question with those of the log's options that the engine's model follows, and the others by name."""
    check = getattr(engine, "check_arguments", lambda question: None)
    left_out = []
    for option in others:
        tried = question.with_(arguments=(*question.arguments, option))
        try:
            check(tried)
        except UsageError:
            left_out.append(f"{option[0]} {option[1]}"[:100])
        else:
            question = tried
    return question, tuple(left_out)


# --- terms ------------------------------------------------------------------------------------------------------------


def _given(asked: _Query, question: Question, served: Served, machine: tuple[str, float] | None) -> Term | None:
    """The figure that decides, as predicted with what the log says of the machine."""
    name = next((name for name in DECIDE if name in asked.log.printed), None)
    if name is None or machine is None:
        return None
    size = max(0, round(machine[1]))
    if machine[0] == "available":
        served = cast(Any, asked.engine).with_available(question, served, size)
    else:
        served = asked.engine.serve(question.with_(non_torch_bytes=size))
    found = predicted(asked.reader, served, name)
    return None if found is None else term_of(asked.log.printed[name], found)


def _machine(asked: _Query, served: Served) -> tuple[str, float] | None:
    """What a log says of the machine, in bytes: what is loaded beside torch, by itself or with the weights and all that
    stays, unless the user says it; or what was available once the weights were there."""
    printed = {name: figure.value for name, figure in asked.log.printed.items()}
    if "available" in printed:
        return "available", printed["available"]
    if asked.found.get("non_torch_bytes"):
        return None
    if "outside torch" in printed:
        return "outside torch", printed["outside torch"]
    if "consumed" not in printed or "weights" not in printed:
        return None
    own = {name: predicted(asked.reader, served, name) or 0 for name in ("consumed", "weights", "outside torch")}
    stays = own["consumed"] - own["weights"] - own["outside torch"]
    return "outside torch", printed["consumed"] - printed["weights"] - stays


# --- words ------------------------------------------------------------------------------------------------------------


def _sections(report: LogReport, served: Served) -> Iterator[Section]:
    log = report.log
    version = f"{log.version or 'a version that is not told'}"
    followed = "" if version.startswith(served.version) else f", followed as {served.version}"
    yield section(
        "",
        Facts((
            ("log", report.path),
            ("engine", f"{served.engine} {version}{followed}, from {BASES[served.basis]}"),
            ("model", served.model + ("" if log.model in (None, served.model) else f", in the log {shown(log.model)}")),
            *((("service", log.service),) if log.service else ()),
            ("card", f"{served.cards} x {served.gpu}, {format_bytes(served.total_bytes)}"),
            ("settings", _settings(log)),
        )),
    )  # fmt: skip
    yield section("", Text(tuple(_verdict(report, served)), _tone(report.given or report.decides)))
    rows = [
        (
            term.name,
            size_words(term.printed, term.is_size),
            size_words(term.predicted, term.is_size),
            off_words(term),
            term.note,
        )
        for term in report.terms
    ]
    columns = {"figure": "", "printed": "figure", "predicted": "figure", "difference": "figure", "ranks": ""}
    yield section("What was printed, and what is predicted", table(columns, rows, titled=True))
    notes = [f"not followed: {', '.join(report.left_out)}"] if report.left_out else []
    yield section("Assumed", Items((*notes, *served.notes)))


def _settings(log: Log) -> str:
    return ", ".join(f"{name} {text}"[:80] for name, text in log.settings.items()) or "none but defaults"


def _own_sections(report: LogReport) -> Iterator[Section]:
    """Without a prediction: what was printed, beside what its other lines come to."""
    log, own = report.log, {term.name: term for term in report.terms}
    version = log.version or "a version that is not told"
    facts = (
        ("log", report.path),
        ("engine", f"{engine_named(log.engine).title} {version}"),
        ("settings", _settings(log)),
    )
    yield section("", Facts(facts))
    yield section("", Text(tuple(_own_words(report)), _tone(report.decides)))
    rows = [
        (
            name, size_words(one.value, one.is_size),
            size_words(own[name].predicted, one.is_size) if name in own else "",
            off_words(own[name]) if name in own else "",
        )
        for name, one in with_token(report.reader, log).items()
    ]  # fmt: skip
    columns = {"figure": "", "printed": "figure", "by other lines": "figure", "difference": "figure"}
    yield section("What was printed, and what its other lines come to", table(columns, rows, titled=True))


def _own_words(report: LogReport) -> Iterator[str]:
    decides = report.decides
    if decides is not None:
        yield f"The {_cache_words(decides)}: {_compared(decides, 'by the other lines')}."
    yield f"No prediction: {report.why_not}."
    if report.log.model is None and report.log.own_model is None:
        yield f"With the model it has one: graphmem serve MODEL --from-log {Path(report.path).name}"


def _tone(term: Term | None) -> str:
    if term is None or term.share is None:
        return ""
    return "yes" if abs(term.share) <= _EQUAL else "no"


def _verdict(report: LogReport, served: Served) -> Iterator[str]:
    log, decides, differs = report.log, report.decides, report.differs
    if served.refusal is not None:
        yield f"Predicted: DOES NOT START: {served.refusal}"
    if decides is None:
        yield "The log prints nothing of the KV cache; its other figures are compared."
    else:
        yield f"The {_cache_words(decides)}: {_compared(decides)}."
    if report.given is not None and report.machine is not None:
        words = {"available": "were free once the weights were there"}
        said = words.get(report.machine[0], "are outside torch, which belong to the machine")
        yield f"With the {format_bytes(round(report.machine[1]))} that the log says {said}: {_compared(report.given)}."
    if not log.names_options:
        yield "The log has no line of the options that were given: what it does not say is taken by default."
    if differs is None:
        yield "No other figure differs beyond its printed digits."
    elif decides is not None and decides.is_size and 2 * abs(differs.difference) < abs(decides.difference):
        yield f"Nothing else that it prints explains that: furthest off is {differs.name}, {off_words(differs)}."
    else:
        yield f"Furthest off: {differs.name}, {off_words(differs)}."


def _cache_words(term: Term) -> str:
    return {"tokens": "tokens of the KV cache", "blocks": "blocks of the KV cache"}.get(term.name, term.name)


def _compared(term: Term, word: str = "predicted") -> str:
    printed, other = size_words(term.printed, term.is_size), size_words(term.predicted, term.is_size)
    if not term.difference:
        return f"{other} {word}, as printed"
    share = "" if term.share is None else f" ({term.share:+.1%})"
    return f"{other} {word}, {printed} printed{share}"
