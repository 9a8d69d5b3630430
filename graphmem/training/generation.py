"""``--generate``: the arguments of transformers' ``generate``, by its own names. No framework is imported here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from graphmem.base.options import REQUIRED, Given, OneOf, Option, Whole, check_values, option, switch
from graphmem.base.records import public_value
from graphmem.errors import UsageError
from graphmem.training.optimizers import OptionValue, pairs_of, parse_optimizer_arg

#: What ``cache_implementation`` may be (transformers 5.23, generation/configuration_utils.py): kinds of caches, and the
#: names that older configurations have for the static ones.
CACHE_IMPLEMENTATIONS = (
    "dynamic",
    "static",
    "offloaded",
    "offloaded_static",
    "quantized",
    "sliding_window",
    "hybrid",
    "hybrid_chunked",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
)

#: Arguments that are fields of their own, or decided by them.
_FIELDS = (
    "max_new_tokens",
    "do_sample",
    "num_beams",
    "num_return_sequences",
    "cache_implementation",
    "cache_config",
    "prefill_chunk_size",
    "assistant_model",
)
#: Arguments that make a draft of the model itself or of the prompt.
DRAFTING = ("prompt_lookup_num_tokens", "assistant_early_exit")
#: Arguments of the length and the kind of drafts: transformers reads them from the ``generation_config``
#: of the model that drafts.
DRAFT_LENGTHS: dict[str, tuple[object, ...] | type] = {
    "num_assistant_tokens": int,
    "num_assistant_tokens_schedule": ("constant", "heuristic", "heuristic_transient"),
    "assistant_confidence_threshold": float,
}
#: Arguments that are objects of a program, which no option can name.
OBJECTS = ("tokenizer", "assistant_tokenizer")
_DECIDED = ("max_length", "min_length", "min_new_tokens", "inputs", "input_ids", "attention_mask", "streamer")

Options = tuple[tuple[str, OptionValue], ...]


def _further(given: Given) -> Options:
    """``--generation-arg`` and the options that are arguments too."""
    drafts = [(name, given[name]) for name in ("num_assistant_tokens", "prompt_lookup_num_tokens") if given.get(name)]
    texts = map(parse_optimizer_arg, cast("Iterable[str]", given.get("generation_arg") or ()))
    return (*cast("Options", drafts), *texts)


@public_value(frozen=True, slots=True)
class Generation:
    """A call of ``model.generate`` of transformers: the batch's inputs are its prompt. None stands for what the model's
    ``generation_config`` has, and transformers' default where that has none. Raises :class:`UsageError`."""

    max_new_tokens: int = option(
        REQUIRED,
        "Generate N tokens after a prompt of --seq-len (model.generate of transformers); none of them ends a text "
        "before. Implies --inference.",
        Whole(),
        flags="--generate --max-new-tokens",
        opens=True,
    )
    do_sample: bool | None = option(None, "Draw tokens. Default: the model's own, else greedy.", switch)
    num_beams: int | None = option(None, "Beams of a beam search.", Whole())
    num_return_sequences: int | None = option(None, "Texts for each prompt.", Whole())
    cache_implementation: str | None = option(
        None, f"{', '.join(CACHE_IMPLEMENTATIONS[:5])}. Default: dynamic.", OneOf(CACHE_IMPLEMENTATIONS), metavar="KIND"
    )
    cache_config: Options = option(
        (),
        "An option of a quantized cache, e.g. backend=quanto, nbits=4. Repeatable.",
        pairs_of,
        metavar="NAME=VALUE",
        read=parse_optimizer_arg,
        repeated=True,
    )
    prefill_chunk_size: int | None = option(None, "Tokens of the prompt read at once. Default: all.", Whole())
    assistant_model: str | None = option(
        None, "A smaller model that drafts tokens, in the same dtype.", metavar="hf:NAME"
    )
    accepted: int | None = option(
        None,
        "Drafted tokens of a round that are right, at most. Default: all and none are tried, the larger one is shown.",
        Whole(0),
    )
    arguments: Options = option(
        (),
        "Another option of GenerationConfig, e.g. top_k=20, repetition_penalty=1.2. Repeatable.",
        pairs_of,
        flags="--generation-arg",
        metavar="NAME=VALUE",
        repeated=True,
        make=_further,
        also=(
            Option("Tokens of a draft. Default: the model's.", Whole(), ("--num-assistant-tokens",), "N"),
            Option("Draft N tokens from the text itself.", Whole(), ("--prompt-lookup-num-tokens",), "N"),
        ),
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.cache_config and self.cache_implementation != "quantized":
            raise UsageError("cache_config is for a quantised cache; give cache_implementation quantized too")
        for name, _ in self.arguments:
            if name in _FIELDS:
                raise UsageError(f"{name} is an option of its own; leave it out of the generation's arguments")
            if name in OBJECTS:
                raise UsageError(f"{name} is an object of a program; graphmem run follows a program that passes one")
            if name in _DECIDED:
                raise UsageError(f"{name} is not for generation's arguments: max_new_tokens says how long texts are")
        self._check_drafts()

    def _check_drafts(self) -> None:
        for name, value in self.arguments:
            allowed = DRAFT_LENGTHS.get(name)
            if isinstance(allowed, tuple) and value not in allowed:
                raise UsageError(f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}")
            is_count = name in ("num_assistant_tokens", *DRAFTING)
            if is_count and (type(value) is not int or value < 1):
                raise UsageError(f"{name} is a whole number of at least 1, not {value!r}")
            if allowed is float and (type(value) not in (int, float) or not 0 <= float(str(value)) <= 1):
                raise UsageError(f"{name} is a number from 0 to 1, not {value!r}")
        given = [name for name, _ in self.arguments if name in DRAFT_LENGTHS]
        if given and self.assistant_model is None and "assistant_early_exit" not in dict(self.arguments):
            raise UsageError(f"{given[0]} is for a model that drafts; give assistant_model or assistant_early_exit")
        if self.accepted is not None and not self.is_assisted:
            raise UsageError("accepted is for assisted decoding; give what drafts: an assistant_model, for instance")

    @property
    def is_assisted(self) -> bool:
        """True if tokens are drafted and then checked."""
        drafting = any(value is not None for name, value in self.arguments if name in DRAFTING)
        return self.assistant_model is not None or drafting

    @property
    def is_open(self) -> bool:
        """True if tokens are drafted and the share of accepted ones is not given."""
        return self.is_assisted and self.accepted is None

    def keywords(self) -> dict[str, object]:
        """The arguments of ``generate`` beside the prompt and the model that drafts."""
        named = {name: getattr(self, name) for name in _FIELDS if name not in ("cache_config", "assistant_model")}
        given: dict[str, object] = {name: value for name, value in named.items() if value is not None}
        if self.cache_config:
            given["cache_config"] = dict(self.cache_config)
        return given | dict(self.arguments)

    def describe(self) -> list[str]:
        """In words: ``512 tokens generated``, ``4 beams``, ``static cache``."""
        words = [f"{self.max_new_tokens:,} tokens generated"]
        if self.do_sample is not None:
            words.append("sampled" if self.do_sample else "greedy")
        if self.num_beams is not None and self.num_beams > 1:
            words.append(f"{self.num_beams} beams")
        if self.num_return_sequences is not None:
            words.append(f"{self.num_return_sequences} texts a prompt")
        if self.cache_implementation is not None:
            options = ", ".join(f"{name}={value}" for name, value in self.cache_config)
            words.append(f"{self.cache_implementation} cache{f' ({options})' if options else ''}")
        if self.prefill_chunk_size is not None:
            words.append(f"prompt read in chunks of {self.prefill_chunk_size:,}")
        if self.assistant_model is not None:
            words.append(f"drafted by {self.assistant_model}")
        if self.accepted is not None:
            words.append(f"{self.accepted or 'no'} drafted {'token' if self.accepted == 1 else 'tokens'} a round right")
        return [*words, *(f"{name}={value}" for name, value in self.arguments)]
