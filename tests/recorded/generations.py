"""transformers' ``generate`` on configurations of the common families: recorded as a program that a user writes, under
:mod:`tests.recorded.whole`, and predicted as ``graphmem analyze hf:config.json --generate N`` predicts it.

No text ends before its last token: what a card's weights would choose is nobody's to know. Greedy decoding and
sampling read that back truly (:mod:`tests.recorded.true_values`); what decides by scores (beams, drafted
tokens) is answered here, after the question was asked of the card. Every recording prints how long its texts became.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmem.training import Generation, Inference
from tests import places
from tests.recorded.whole import CARD, WholePrograms

if TYPE_CHECKING:
    from graphmem.capture.patches import Patches
    from graphmem.run import Run

Values = Mapping[str, Any]

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 2432,
    "num_hidden_layers": 4, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645,
    "pad_token_id": 151643,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 384, "n_layer": 6, "n_head": 6,
    "vocab_size": 50257, "n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 256, "d_ff": 1024, "num_layers": 4,
    "num_heads": 8, "d_kv": 32, "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_MISTRAL = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 512, "intermediate_size": 1792,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 32768, "sliding_window": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GEMMA = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 640, "intermediate_size": 2048,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 65536,
    "sliding_window": 128, "max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class GeneratingProgram:
    """A configuration, a prompt of ``batch`` rows of ``length`` tokens, and what ``generate`` is called with."""

    name: str
    config: Values
    generation: Generation
    batch: int = 1
    length: int = 64
    dtype: str = "bf16"
    is_padded: bool = False
    iterations: int = 1
    more_needs: tuple[str, ...] = field(default=())
    assistant: Values | None = None

    @property
    def is_assisted(self) -> bool:
        return self.assistant is not None or self.generation.is_assisted

    @property
    def is_compiled(self) -> bool:
        """Whether transformers compiles its decoding: recorded in the first run, which tries padded products."""
        kind = self.generation.cache_implementation
        return kind in ("static", "offloaded_static") and not dict(self.generation.arguments).get("disable_compile")

    @property
    def needs(self) -> tuple[str, ...]:
        """The packages that it imports beside torch."""
        return ("transformers", *self.more_needs)

    def run(self) -> Any:
        """As a user writes it; the options are the case's."""
        import torch

        model = _built(self.config, self.dtype)
        keywords = self.generation.keywords()
        drafting = {} if self.assistant is None else {"assistant_model": _built(self.assistant, self.dtype)}
        ids = torch.zeros(self.batch, self.length, dtype=torch.long)
        mask = torch.ones_like(ids)
        if self.is_padded:
            mask[-1, 0] = 0
        ids, mask = ids.to("cuda"), mask.to("cuda")
        for _ in range(self.iterations):
            with torch.no_grad(), _answered(self):
                output = model.generate(input_ids=ids, attention_mask=mask, **keywords, **drafting)
            print(self.name, "made", tuple(output.shape))
            del output
        return model

    def captured(self, torch_version: tuple[int, int], library: str | None) -> Run:
        from graphmem.answering import runs
        from graphmem.answering.question import Question

        with tempfile.TemporaryDirectory() as folder:
            generation = self.generation
            if self.assistant is not None:
                (Path(folder) / "draft").mkdir()
                draft = _file(folder, "draft/config", self.assistant)
                generation = replace(generation, assistant_model=f"hf:{draft}")
            question = Question(
                f"hf:{_file(folder, 'config', self.config)}",
                batch=self.batch,
                seq_len=self.length,
                training=Inference(
                    self.dtype, attention_mask="padded" if self.is_padded else None, generate=generation
                ),
                device=CARD,
                iterations=self.iterations,
                torch_version=".".join(map(str, torch_version)),
                cudnn=library or "never",
            )
            return runs.record(question, runs.load(question))


def _file(folder: str, name: str, values: Values) -> Path:
    path = Path(folder) / f"{name}.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def _built(values: Values, dtype: str) -> Any:
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
    model = getattr(transformers, values["architectures"][0])(config)
    return model.to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype])).to("cuda").eval()


@contextlib.contextmanager
def _answered(program: GeneratingProgram) -> Iterator[None]:
    """What scores decide on a card, answered after it was asked."""
    from graphmem.capture.patches import Patches

    patches = Patches()
    _beams_to_the_end(patches, program.generation.max_new_tokens)
    if program.is_compiled:
        _compiled_unfollowed(patches)
    if program.is_assisted:
        _drafts_are_right(patches)
    try:
        yield
    finally:
        patches.undo()


def _beams_to_the_end(patches: Patches, tokens: int) -> None:
    """Beams go on until there are so many tokens, as on a card where none of them ends a text."""
    from transformers.generation.utils import GenerationMixin

    asked, original = itertools.count(1), GenerationMixin._beam_search_has_unfinished_sequences

    def answered(*args: Any, **kwargs: Any) -> bool:
        bool(original(*args, **kwargs))
        return next(asked) < tokens

    patches.set(GenerationMixin, "_beam_search_has_unfinished_sequences", staticmethod(answered))


def _compiled_unfollowed(patches: Patches) -> None:
    """Values cannot be followed through compiled code; what is asked outside of it (whether a mask has gaps, whether a
    text is long enough) decides what a card does, and is followed."""
    from torch.overrides import _pop_mode_temporarily
    from transformers import PreTrainedModel

    original = PreTrainedModel.get_compiled_call

    def compiled(*args: Any, **kwargs: Any) -> Any:
        call = original(*args, **kwargs)

        def unfollowed(*inputs: Any, **named: Any) -> Any:
            with _pop_mode_temporarily():
                return call(*inputs, **named)

        return unfollowed

    patches.set(PreTrainedModel, "get_compiled_call", compiled)


def _drafts_are_right(patches: Patches) -> None:
    """The draft says one token with confidence, and the model the same: the most likely ones are overwritten in place,
    which takes no memory, and are followed from there."""
    import torch
    from transformers.generation.stopping_criteria import ConfidenceCriteria

    drafted, chosen, confident = torch.argmax, torch.Tensor.argmax, ConfidenceCriteria.__call__

    def is_unconfident(self: Any, *args: Any, **kwargs: Any) -> bool:
        confident(self, *args, **kwargs)
        return False

    patches.set(torch, "argmax", lambda *args, **kwargs: drafted(*args, **kwargs).fill_(_DRAFTED))
    patches.set(torch.Tensor, "argmax", lambda *args, **kwargs: chosen(*args, **kwargs).fill_(_DRAFTED))
    patches.set(ConfidenceCriteria, "__call__", is_unconfident)


#: What ``optimum-quanto`` installs is imported as ``optimum.quanto``.
_QUANTO = ("optimum",)
_DRAFT = _LLAMA | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4}
#: A token that ends no text, and which the prompts consist of.
_DRAFTED = 0


def _quantized(tokens: int, **config: Any) -> Generation:
    return Generation(tokens, cache_implementation="quantized", cache_config=tuple(config.items()))


def _arguments(tokens: int, **arguments: Any) -> Generation:
    return Generation(tokens, arguments=tuple(arguments.items()))


def _cases() -> tuple[GeneratingProgram, ...]:
    case = GeneratingProgram
    sampled = (("top_k", 20), ("top_p", 0.9), ("temperature", 0.7))
    eager = (("disable_compile", True),)
    return (
        case("greedy_llama", _LLAMA, Generation(96), batch=2, length=128),
        case(
            "sampling_qwen",
            _QWEN,
            Generation(96, do_sample=True, arguments=sampled),
            batch=4,
            length=72,
            dtype="fp16",
            is_padded=True,
        ),
        case("beams_gpt2", _GPT2, Generation(40, num_beams=4), batch=2, length=50, dtype="fp32"),
        case(
            "static_llama",
            _LLAMA,
            Generation(80, cache_implementation="static", arguments=eager),
            batch=2,
            length=100,
        ),
        case("offloaded_llama", _LLAMA, Generation(32, cache_implementation="offloaded"), batch=2, length=200),
        case("sliding_mistral", _MISTRAL, Generation(120), batch=2, length=60),
        case("sliding_gemma", _GEMMA, Generation(100), batch=2, length=200),
        case("chunked_llama", _LLAMA, Generation(20, prefill_chunk_size=128), batch=2, length=600),
        case("greedy_t5", _T5, Generation(80), batch=4, length=96, dtype="fp32"),
        case("quanto4_llama", _LLAMA, _quantized(60, residual_length=40), batch=2, length=160, more_needs=_QUANTO),
        case("compiled_llama", _LLAMA, Generation(33, cache_implementation="static"), batch=2, length=96),
        case("assisted_llama", _LLAMA, Generation(64), length=80, assistant=_DRAFT),
        case("looked_up_llama", _LLAMA, _arguments(32, prompt_lookup_num_tokens=6), length=90),
    )


CASES = {program.name: program for program in _cases()}
KIND = WholePrograms("generations", places.PYTORCH / "generations", lambda: CASES)
