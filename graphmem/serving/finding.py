"""``--find``: the most of something, or the fewest cards, with which an engine does."""

from __future__ import annotations

from graphmem.base.searching import largest
from graphmem.devices.prices import COUNTS
from graphmem.errors import UsageError
from graphmem.serving.base import Engine, Question
from graphmem.serving.lengths import MOST_SEQS, Quantiles, held

#: What is looked for.
FOUND = ("max-model-len", "max-num-seqs", "tp")
#: The question with what was found, its name and its value.
Found = tuple[Question, tuple[str, int]]


def found(engine: Engine, question: Question, find: str, lengths: Quantiles, load: float | None) -> Found:
    """What is looked for, ``load``: the requests at once that the fewest cards should hold. Raises :class:`UsageError`
    if nothing does."""
    if find not in FOUND:
        raise UsageError(f"--find {find!r}; accepted: {', '.join(FOUND)}")
    if find == "tp":
        return _fewest_cards(engine, question, lengths, load)
    name = find.replace("-", "_")
    value = (_by_the_engine if getattr(engine, "searches", False) else _by_trying)(engine, question, name, lengths)
    return question.with_(**{name: value}), (find, value)


def _by_trying(engine: Engine, question: Question, name: str, lengths: Quantiles) -> int:
    """The largest length that starts, or as many requests as the cache holds."""
    by_length, tokens = name == "max_model_len", question.max_num_batched_tokens
    top = int(engine.serve(question).settings[name]) if by_length else MOST_SEQS if tokens is None else tokens

    def does(value: int) -> bool:
        wide = tokens if by_length or value <= 1024 else max(value, tokens or 0)
        answer = engine.serve(question.with_(**{name: value}, max_num_batched_tokens=wide))
        return answer.refusal is None and (by_length or held(answer, lengths) >= value)

    value = largest(does, top)
    if not value:
        refusal = engine.serve(question.with_(**{name: 1})).refusal
        raise UsageError(f"no {name.replace('_', '-')} does: {refusal or 'not even 1'}")
    return value


def _by_the_engine(engine: Engine, question: Question, name: str, lengths: Quantiles) -> int:
    """The same of an engine whose answer looks for what is not given."""
    asked = question.with_(**{name: None})
    if name == "max_model_len" and asked.max_num_seqs is None:
        asked = asked.with_(max_num_seqs=1)
    served = engine.serve(asked)
    if served.refusal is not None:
        raise UsageError(f"no {name.replace('_', '-')} does: {served.refusal}")
    return int(served.settings[name])


def _fewest_cards(engine: Engine, question: Question, lengths: Quantiles, load: float | None) -> Found:
    why = ""
    for cards in COUNTS:
        asked = question.with_(tensor_parallel_size=cards)
        try:
            answer = engine.serve(asked)
        except UsageError as error:
            why = str(error)
            continue
        if answer.refusal is None and (load is None or held(answer, lengths) >= load):
            return asked, ("tp", cards)
        why = answer.refusal or f"{cards} cards hold {held(answer, lengths):.1f} requests at once"
    raise UsageError(f"no tensor-parallel size up to {COUNTS[-1]} does: {why}")
