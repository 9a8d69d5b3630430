"""Who calls: the files and functions that are looked for on the stack are those of the installed libraries."""

from __future__ import annotations

import collections
import importlib
import inspect
import types
from typing import Any

import pytest
import torch

from graphmem.capture.values import callers
from graphmem.trace import Trace
from tests.support.captures import births, record


def _called(module: str, function: str, question: Any) -> Any:
    """The answer to a question that a function of a library's module asks: code of that name, from that file."""
    file = inspect.getsourcefile(importlib.import_module(module))
    assert file is not None
    scope: dict[str, Any] = {"question": question}
    exec(compile(f"def {function}():\n    return ask()\ndef ask():\n    return question()", file, "exec"), scope)
    return scope[function]()


def test_the_functions_that_are_looked_for_exist() -> None:
    distribution = torch.distributions.Distribution
    assert {"__init__", "_validate_sample"} <= set(vars(distribution))
    utils = pytest.importorskip("transformers.generation.utils").GenerationMixin
    # The other loops that are named are those of earlier versions of transformers.
    assert {"_sample", "_beam_search", "_assisted_decoding"} <= set(dir(utils))
    importlib.import_module("transformers.generation.stopping_criteria")


def test_questions_of_libraries_are_known_by_file_and_function() -> None:
    in_loop, validating = callers.called_in_generation_loop, callers.called_to_validate_distribution
    assert _called("torch.distributions.distribution", "_validate_sample", validating)
    assert not _called("torch.distributions.distribution", "expand", validating)
    pytest.importorskip("transformers")
    assert _called("transformers.generation.utils", "_sample", in_loop)
    assert not _called("transformers.generation.utils", "generate", in_loop)
    assert _called("transformers.generation.stopping_criteria", "any_name", callers.called_to_stop_generation)
    assert [in_loop(), validating(), callers.called_to_stop_generation()] == [False] * 3


#: What asks for a batch in Lightning, by the files that it is in.
FETCHER, EPOCH = "lightning/pytorch/loops/fetchers.py", "lightning/pytorch/loops/training_epoch_loop.py"
LIGHTNING = {
    FETCHER: "class Fetcher:\n    def __next__(self):\n        return question()",
    EPOCH: "class Epoch:\n    def advance(self, fetcher):\n        return next(fetcher)",
}


@pytest.mark.parametrize(
    ("length", "fetched", "trained"),
    [(20, 19, 19), (3, 3, 3), (None, 3, 3)],
)
def test_lightning_counts_the_batches_that_it_is_not_given(length: int | None, fetched: int, trained: int) -> None:
    """The next batch is the last one for its fetcher, and the last one trained on, behind which it validates."""
    scope: dict[str, Any] = {"question": callers.ends_lightnings_epoch}
    for file, source in LIGHTNING.items():
        exec(compile(source, f"/anywhere/{file}", "exec"), scope)
    fetcher, epoch, counts = scope["Fetcher"](), scope["Epoch"](), collections.Counter(ready=3)
    fetcher.length, fetcher.fetched = length, 3
    epoch.batch_progress = types.SimpleNamespace(increment_by=lambda number: counts.update(ready=number))
    assert epoch.advance(fetcher) is (length is not None)
    assert (fetcher.fetched, counts["ready"]) == (fetched, trained)
    assert not callers.ends_lightnings_epoch()


def test_the_engine_is_told_from_a_hook_of_the_users() -> None:
    """A hook that adds, during the backward pass, allocates; the engine's own addition of gradients is in place."""

    def step(*, hooked: bool) -> None:
        x = torch.ones(1024, device="cuda", requires_grad=True)
        shared = x * 2.0
        if hooked:
            shared.register_hook(lambda gradient: gradient + gradient)
        (shared * 3.0 + shared * 5.0).sum().backward()

    def added(trace: Trace) -> int:
        return [born.operator for born in births(trace)].count("aten.add.Tensor")

    assert added(record(lambda: step(hooked=False))) == 1  # in the forward pass
    assert added(record(lambda: step(hooked=True))) == 2


def test_an_error_is_placed_at_the_deepest_line_outside_the_libraries() -> None:
    def fails() -> None:
        torch.ones(2).view(3)

    with pytest.raises(RuntimeError) as raised:
        fails()
    line = inspect.getsourcelines(fails)[1] + 1
    assert callers.raised_at(raised.value).endswith(f"test_callers.py:{line}")
    assert callers.function_in_torch_cuda(raised.value.__traceback__) == "torch.cuda"
