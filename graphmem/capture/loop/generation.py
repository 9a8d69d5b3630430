"""The step of ``--generate``: a prompt, and transformers' own ``generate`` on the pretended card.

    with torch.no_grad():
        model.generate(**prompt, max_new_tokens=...)

``prefill``, transformers' word, is the prompt read, in one forward pass or in chunks, and its preparation; ``decode``
begins with the choice of the first token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphmem.capture.loop.strategies import Strategies
from graphmem.capture.loop.training_loop import Batch, autocast, batch_on_device
from graphmem.capture.values import device_values
from graphmem.errors import CaptureError
from graphmem.training import Generation, Inference
from graphmem.training.generation import DRAFT_LENGTHS

if TYPE_CHECKING:
    from graphmem.capture.session.session import Session

#: A program generates once; what it needs the next time is what it has given back.
GENERATIONS = 1


def run_generation(
    session: Session,
    model: nn.Module,
    prompt: Any,
    inference: Inference,
    iterations: int,
    draft: nn.Module | None = None,
) -> None:
    """Generate ``iterations`` times from the same prompt; ``draft``: the model that drafts tokens. Raises
    :class:`CaptureError` for a model that cannot."""
    generation = inference.generate
    assert generation is not None
    generates: Callable[..., Any] | None = getattr(model, "generate", None)
    if generates is None or not isinstance(prompt, dict):
        raise CaptureError(
            f"{type(model).__name__} has no generate method for a prompt of named inputs; --generate is for "
            "transformers' models (hf:...), another loop is analysed by graphmem run"
        )
    strategies = Strategies(inference)
    model = strategies.place(session, model)
    keywords = generation.keywords()
    if draft is not None:
        keywords["assistant_model"] = strategies.place(session, draft).eval()
    for name in DRAFT_LENGTHS:  # which transformers reads there alone (``AssistedCandidateGenerator``)
        if name in keywords:
            setattr((draft or model).generation_config, name, keywords.pop(name))
    prompt = batch_on_device(session, Batch(prompt), inference.dtype).inputs
    model.eval()
    for _ in range(iterations):
        session.begin_generation()
        with _followed(session, model, generation), torch.no_grad(), autocast(inference):
            output = model.generate(**prompt, **keywords)
        del output


@contextlib.contextmanager
def _followed(session: Session, model: nn.Module, generation: Generation) -> Iterator[None]:
    with _decoding_entered(session, model), device_values.drafting(generation.accepted):
        yield


@contextlib.contextmanager
def _decoding_entered(session: Session, model: nn.Module) -> Iterator[None]:
    """The session enters ``decode`` when the prompt has been read, which transformers shows since version 5."""
    own: Callable[..., Any] | None = getattr(type(model), "_prefill", None)
    if own is None:
        yield
        return

    def prefill(*args: object, **kwargs: object) -> object:
        outputs = own(model, *args, **kwargs)
        session.enter("decode")
        return outputs

    model._prefill = prefill
    try:
        yield
    finally:
        del model._prefill
