"""What operators gave is made anew as PyTorch's fake mode makes it: traces are the same, event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem.answering.question import Question  # noqa: E402
from graphmem.answering.runs import RunCache  # noqa: E402
from graphmem.capture.device.fake_results import FakeResults  # noqa: E402
from graphmem.sources.zoo import usual_step  # noqa: E402
from graphmem.trace import Trace, to_json  # noqa: E402
from graphmem.training import FullyShard, Inference, Training  # noqa: E402
from models_zoo.manifest import entries, entry  # noqa: E402
from tests.support.captures import record  # noqa: E402


def through_the_dispatcher(_: FakeResults, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@pytest.fixture
def both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Trace]], None]:
    """Asserts that a trace is the same where every operator goes to the fake mode."""

    def check(make: Callable[[], Trace]) -> None:
        quick = to_json(make())
        monkeypatch.setattr(FakeResults, "run", through_the_dispatcher)
        assert quick == to_json(make())

    return check


def captured(question: Question) -> Trace:
    cache = RunCache()
    return cache.run(question).trace


def images() -> Any:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(8 * 7 * 7, 10))
    x = torch.zeros(4, 3, 16, 16).to(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), x, torch.zeros(4, dtype=torch.long), nn.CrossEntropyLoss()


def texts() -> Any:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.GRU(32, 16))
    return model, torch.zeros((2, 12), dtype=torch.long), lambda output: output[0].mean()


@pytest.mark.parametrize(
    ("factory", "step"),
    [
        (images, Training(amp="fp16", grad_accum=2, clip_grad_norm=1.0)),
        (images, Inference(dtype="bf16")),
        (texts, Training(optimizer="sgd", zero_grad="zeros")),
        pytest.param(texts, Training(fsdp=FullyShard(4), amp="bf16"), marks=pytest.mark.slow),
    ],
)
def test_a_step_is_recorded_alike(factory: Any, step: Training | Inference, both_ways: Callable[..., None]) -> None:
    both_ways(lambda: captured(Question(factory, training=step)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in entries()])
def test_a_model_of_the_zoo_is_recorded_alike(name: str, both_ways: Callable[..., None]) -> None:
    pytest.importorskip(entry(name).library)
    both_ways(lambda: captured(Question(f"zoo:{name}", batch=2, training=usual_step(name), iterations=2)))


def test_results_are_of_these_arguments_and_alias_what_they_alias() -> None:
    seen: list[Any] = []

    def step() -> None:
        x = torch.empty(6, 4, device="cuda")
        for _ in range(2):  # the second time everything is known
            views = x.t(), x[2:], x.view(4, 6), torch.ops.aten._unsafe_view(x, [24])
            seen.append([each.untyped_storage()._cdata == x.untyped_storage()._cdata for each in views])
            seen.append([(each.shape, each.stride(), each.storage_offset()) for each in views])
            seen.append([torch.full((2,), value, device="cuda").dtype for value in (True, 1, 1.0)])
            seen.append([(x.add_(1) is x), (x + 1).untyped_storage()._cdata == x.untyped_storage()._cdata])
            seen.append([each.is_cuda for each in (x.sum(), torch.zeros(2) + 1, x.cpu())])
            seen.append([tuple(each.shape) for each in (*x.max(1), x.narrow(0, 1, 2).max())])
            torch.set_default_dtype(torch.float64)
            seen.append([torch.ones(1, device="cuda").dtype])
            torch.set_default_dtype(torch.float32)

    record(step)
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert first == second
    shared, shapes, dtypes, in_place, places, sizes, default = second
    assert shared == [True] * 4
    assert shapes[1] == ((4, 4), (4, 1), 8)
    assert dtypes == [torch.bool, torch.int64, torch.float32]
    assert in_place == [True, False]
    assert places == [True, False, False]
    assert sizes == [(6,), (6,), ()]
    assert default == [torch.float64]


def inference_results() -> list[Any]:
    """Of views of ordinary tensors in inference mode, and of what is written into ``out=``, twice."""
    seen: list[Any] = []

    def step() -> None:
        x, y = torch.empty(6, 4, device="cuda"), torch.empty(4, 6, device="cuda")
        with torch.inference_mode():
            inside = torch.empty(6, 6, device="cuda")
            for _ in range(2):
                made = torch.mm(x, y, out=inside)
                views = (x.as_strided((3,), (2,), 1), x[1:3], x.expand(2, 6, 4), inside[1:], *x.unbind())
                seen.append((made is inside, torch.mm(x, x.t()).shape))
                seen.extend(
                    (view.shape, view.stride(), view.storage_offset(), view.is_inference(), view.requires_grad,
                     torch._C._dispatch_keys(view).raw_repr(),
                     view.untyped_storage()._cdata in (x.untyped_storage()._cdata, inside.untyped_storage()._cdata))
                    for view in views
                )  # fmt: skip
        empty = torch.empty(0, device="cuda")
        for _ in range(2):  # which is resized, once
            seen.append(torch.mm(x, y, out=empty).shape)

    record(step)
    return seen


def test_views_within_inference_mode_and_outs_give_what_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = inference_results()
    assert [one[3] for one in quick[1:5]] == [False, False, False, True]
    monkeypatch.setattr(FakeResults, "run", through_the_dispatcher)
    assert quick == inference_results()


def foreach_results() -> list[Any]:
    """Of operators on lists of unlike tensors, with unlike numbers, twice."""
    seen: list[Any] = []

    def step() -> None:
        shapes = ((4, 3), (5,), (4, 3), ())
        given = [torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        full = [torch.ones(shape[::-1], device="cuda").t() for shape in shapes]
        for rate in (0.1, 0.2):
            made = [torch._foreach_sqrt(given), torch._foreach_mul(given, full)]
            made += [torch._foreach_div(full, [rate, 2, 3, 4]), torch._foreach_norm(given, 2)]
            made += [torch._foreach_add(given, torch.ones((), device="cuda"))]
            torch._foreach_add_(full, given, alpha=rate)
            torch._foreach_lerp_(full, full, rate)
            torch._foreach_addcdiv_(full, full, full, [rate, 1.0, 2.0, 3.0])
            seen.extend([[(x.shape, x.stride(), x.dtype, x.device) for x in each] for each in made])
            with pytest.raises(RuntimeError):
                torch._foreach_add(given, full[:-1])

    record(step)
    return seen


def test_operators_on_lists_give_what_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = foreach_results()
    monkeypatch.setattr(FakeResults, "run", through_the_dispatcher)
    assert quick == foreach_results()
