"""Long generations of transformers: what is written from probes is what following every token gives, event by event."""

from __future__ import annotations

from typing import Any

import pytest

from graphmem.capture.program import decoding
from graphmem.capture.session.session import capture
from graphmem.run import RunMode
from graphmem.trace import Trace
from graphmem.training.program import Steps
from tests.support.captures import H100, TORCH_VERSION, rows

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def generated(
    tokens: int, *, shortens: bool, batch: int = 1, hidden: int = 256, mode: Any = torch.no_grad, **options: Any
) -> tuple[Trace, Any]:
    """The trace of a small Llama that generates, and calls itself once more with what it has generated."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes = []

    def run() -> None:
        config = LlamaConfig(
            vocab_size=500, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        )  # fmt: skip
        model = LlamaForCausalLM(config).bfloat16().cuda().eval()
        ids = torch.randint(0, 500, (batch, 40), device="cuda")
        with mode():
            out = model.generate(ids, max_new_tokens=tokens, pad_token_id=0, **options)
        shapes.append(tuple(out.shape))
        with torch.no_grad():
            model(out)

    captured = capture(
        lambda _: run(),
        source="test",
        device=H100,
        torch_version=TORCH_VERSION,
        leave_after=Steps(3),
        mode=RunMode(shortens=shortens),
    )
    return captured.trace, shapes[0]


def _written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True for every generation that is written from probes from now on."""
    written, write = [], decoding.Decoding._write

    def noted(self: decoding.Decoding) -> None:
        write(self)
        written.append(True)

    monkeypatch.setattr(decoding.Decoding, "_write", noted)
    return written


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        pytest.param(60, {}, marks=pytest.mark.slow),
        (60, {"batch": 2, "do_sample": True, "top_k": 5}),
        pytest.param(100, {"hidden": 512}, marks=pytest.mark.slow),  # over two blocks
    ],
)
def test_probing_gives_what_following_gives(
    tokens: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shape = generated(tokens, shortens=False, **options)
    written = _written(monkeypatch)
    probed, shape_too = generated(tokens, shortens=True, **options)
    assert written == [True]
    assert shape == shape_too == (options.get("batch", 1), 40 + tokens)
    assert rows(probed) == rows(whole)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        pytest.param(
            torch.no_grad,
            {"num_beams": 2, "eos_token_id": [7, 8], "do_sample": True, "num_return_sequences": 2},
            marks=pytest.mark.slow,
        ),
        (torch.inference_mode, {"num_beams": 3, "eos_token_id": 7, "early_stopping": True, "length_penalty": 2.0}),
    ],
)
def test_beams_grow_to_the_largest_length(mode: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not end early, and no token of theirs is written from probes."""
    written = _written(monkeypatch)
    _, shape = generated(decoding.FEWEST + 2, shortens=True, hidden=64, mode=mode, **options)
    assert written == []
    assert shape == (options.get("num_return_sequences", 1), 40 + decoding.FEWEST + 2)


def test_few_tokens_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding.Decoding, "_begin", lambda self: pytest.fail("probed"))
    generated(decoding.FEWEST, shortens=True)
