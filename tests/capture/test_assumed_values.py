"""Unknown values that decide something are named with the line that reads them; what only reaches a log is not."""

from __future__ import annotations

import importlib
import inspect
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import logging  # noqa: E402
import math  # noqa: E402

import numpy  # noqa: E402
from torch import nn  # noqa: E402

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.diagnostics import Code  # noqa: E402
from graphmem.errors import UsageError  # noqa: E402
from graphmem.run import Run  # noqa: E402
from graphmem.training import parse_assumption  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION  # noqa: E402


def captured(step: Callable[[], Any], **options: Any) -> Run:
    return capture(lambda _: step(), source="test", device=H100, torch_version=TORCH_VERSION, **options)


def lines(found: Run) -> set[int]:
    """Lines of this file that the capture names."""
    places = [one.place for one in found.decided]
    return {int(place.split(":")[1]) for place in places if place.startswith("tests/capture/test_assumed")}


def planted(function: Callable[..., Any]) -> set[int]:
    """Lines of a function that are marked as reads that decide."""
    source, first = inspect.getsourcelines(function)
    return {first + number for number, line in enumerate(source) if line.rstrip().endswith("# decides")}


def unknown(length: int) -> Any:
    """Numbers on the device that nobody knows."""
    return torch.randn(length, 5000, device="cuda").sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = 0

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        if y.sum() > 0:  # decides
            y = y * 2
        keep = int(y.argmax())  # decides
        z = y[: keep + 1]
        for _ in range(y.argmin().item()):  # decides
            z = z + 1
        self.seen += y.argmax(1).max().item()  # decides
        assert torch.isfinite(y).all()  # a check
        assert (y.abs() < 1e9).all()  # another
        if not (y == y).all() or not (y < 3).any():  # decides
            z = z - 1
        return z.sum() + y[y > 0].sum()  # decides


def _training() -> None:
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    best, correct, losses = math.inf, 0, []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, device="cuda"))
        loss.backward()
        if loss.item() > 3:  # decides
            optimizer.zero_grad()
        return loss

    def hook(gradient: Any) -> Any:
        scale = gradient.norm().item()  # decides
        return gradient * 0.5 if scale > 1 else gradient

    model.linear.weight.register_hook(hook)
    for step in range(2):
        loss = closure()
        optimizer.step()
        value = loss.item()
        if value < best:
            best = value
        losses.append(float(loss))
        correct += (model.linear.weight.argmax(1) == 1).sum().item()
        print(f"{step} {loss.item():.3f} {correct / 4}")
    print(sum(losses) / len(losses), loss.tolist())
    checkpoint = {"scaler": _scaled().state_dict(), "step": step}  # PyTorch reads how many steps were good
    torch.save(checkpoint, io.BytesIO())


def _scaled() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cuda")
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler


def _sizes() -> None:
    x = unknown(64)
    torch.zeros(x.argmax().item(), device="cuda")  # decides
    x[: x.argmax()]  # decides
    n = x.argmax().item()  # decides
    torch.empty(n + 1)
    width = math.ceil(x.sum().item() * 2)  # decides
    x.nonzero()  # decides
    torch.unique(x)  # decides
    torch.masked_select(x, x > 0)  # decides
    rows = x.argsort()[:3].tolist()  # decides
    [x[row] for row in rows]
    while x.sum() > 10:  # decides
        x = x / 2
    while not (x > 3).all():  # decides
        x = x + 1
    if torch.equal(x, x + 1):  # decides
        x = x + width
    counts = x.argsort().cpu().numpy()  # decides
    x[: counts[0]]
    bool(x.any()) and x.add_(1)  # decides


def test_places_of_an_order_differ_from_each_other() -> None:
    """What chooses rows by their rank (pruning by magnitude) chooses as many as it asks for."""

    def step() -> None:
        x = unknown(64)
        order, best = x.argsort(), x.topk(16, largest=False).indices
        assert set(order.tolist()) == set(range(64))
        assert len({int(place) for place in order[8:24]}) == len(set(order[::2].cpu().numpy()[:16])) == 16
        assert set(torch.unique(torch.cat([best])).tolist()) == set(range(16))
        rows = unknown(4 * 64).view(4, 64).sort(1).indices
        assert rows[2].tolist() == list(range(64))
        assert set(rows[:, 3].tolist()) == {3}  # every row has its own
        assert set(unknown(64).view(8, 8).argsort(0).flatten().tolist()) == {1}  # not along rows: any
        order[:4] = 7
        assert set(order.tolist()) == {1}

    captured(step)


def test_reads_that_decide_are_named() -> None:
    """Sizes, indices, bounds and branches, in modules, hooks, closures and loops: twenty and more, and none else."""
    expected = planted(Model.forward) | planted(_training) | planted(_sizes)

    def both() -> None:
        _training()
        _sizes()

    found = captured(both)
    assert len(expected) >= 20
    assert lines(found) == expected


def test_a_plain_float_is_hardly_a_size() -> None:
    """What becomes of ``float(loss)`` is not followed, as with an array of losses; ``int`` makes a size of it."""

    def step() -> None:
        plain, whole = float(unknown(3).sum()), int(unknown(3).sum())
        if plain > 2:
            torch.empty(whole)

    found = {one.code: one.meaning.any_size for one in captured(step).decided}
    assert found == {Code.NUMBERS: False, Code.NUMBER: True}


def test_what_is_logged_is_counted_only() -> None:
    def step() -> None:
        loss = unknown(3).requires_grad_().sum()
        with torch.autograd.set_detect_anomaly(True):
            loss.backward()
        total, metrics = 0.0, {}
        total += loss.item()
        metrics["loss"] = loss.item()
        print(f"{loss:.3f} {loss.item()} {total}", loss.argmax().item(), float(loss), metrics)
        if math.isnan(loss.item()) or loss.item() == math.inf:
            raise ValueError

    found = captured(step)
    assert not found.decided
    assert Code.ONLY_LOGGED.about() in found.assumed


def test_a_line_can_be_told() -> None:
    seen: list[Any] = []

    def step() -> None:
        x = unknown(64)
        seen.append(x.argmax().item())
        seen.append(tuple(x.nonzero().shape))
        seen.append(bool((x > 0).any()))
        seen.append(x.sum().item())

    first = step.__code__.co_firstlineno + 2
    told = [(f"test_assumed_values.py:{first + at}", value) for at, value in enumerate([7, 12, True, 2.5])]
    found = captured(step, assume=(*told, ("nowhere.py:3", 1)))
    assert seen == [7, (12, 1), True, 2.5]
    assert not found.decided
    assert Code.ASSUMPTION_UNUSED.about(place="nowhere.py:3") in found.assumed


def test_the_report_names_them_at_the_top() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return y * 2 if y.max() > 1 else y

    report = analyze(Branching(4, 4), torch.zeros(2, 4), iterations=1).report(details=True)
    line = Branching.forward.__code__.co_firstlineno + 2
    assert f"test_assumed_values.py:{line}: a question" in " ".join(report.split()).replace("/ ", "/")
    assert report.index("your data decides here") < report.index("Peak memory")
    told = Training(assume=((f"test_assumed_values.py:{line}", True),))
    assert "your data decides" not in analyze(Branching(4, 4), torch.zeros(2, 4), training=told).report(details=True)


def _drawing() -> None:
    x = torch.randn(4, 8, device="cuda")
    if torch.rand(1, device="cuda") < 0.5:  # decides
        x = x.repeat(2, 1)
    noise = torch.empty((), device="cuda").uniform_()
    for _ in range(int(3 * noise)):  # decides
        x = x + 1
    assert (x.abs() < 99).all()
    print(x.mean().item(), torch.rand((), device="cuda").item())
    torch.distributions.Normal(x, 1.0)
    if torch.ones(2, device="cuda").all():
        x = x * 2


def test_random_numbers_of_the_card_are_named_where_they_decide() -> None:
    assert lines(captured(_drawing)) == planted(_drawing)
    (branch, _) = sorted(planted(_drawing))
    sizes = []
    for answer in (False, True):
        assume = ((f"test_assumed_values.py:{branch}", answer),)
        sizes.append(max(storage.bytes for storage in captured(_drawing, assume=assume).trace.storages))
    assert sizes == [128, 256]


def _drawn_sizes() -> None:
    """Masks, lengths, boxes, routing: what random numbers of the card make sizes of."""
    dev = "cuda"
    n = int(torch.rand((), device=dev) * 100)  # decides
    torch.zeros(n, device=dev)

    def share() -> float:
        return float(torch.rand((), device=dev))  # decides

    torch.zeros(int(share() * 100), device=dev)
    ratio = torch.rand(1, device=dev).item()  # decides
    torch.zeros(1 + round(32 * ratio), device=dev)
    mix = torch.rand((), device=dev).item()  # decides
    side = int(32 * math.sqrt(1 - mix))
    torch.zeros(side, device=dev)
    tokens = torch.randn(4, 32, 8, device=dev)
    tokens[torch.rand(4, 32, device=dev) < 0.15]  # decides
    masked = torch.bernoulli(torch.full((4, 32), 0.15, device=dev)).bool()
    masked.nonzero()  # decides
    torch.zeros((torch.rand(100, device=dev) > 0.5).sum().item(), device=dev)  # decides
    torch.zeros((torch.rand(100, device=dev).cpu() > 0.5).sum().item(), device=dev)  # decides
    steps = torch.randint(10, 100, (), device=dev).item()  # decides
    torch.zeros(steps, device=dev)
    [torch.zeros(each, device=dev) for each in torch.randint(10, 100, (3,), device=dev).tolist()]  # decides
    [torch.zeros(int(each * 9), device=dev) for each in torch.rand(3, device=dev).tolist()]  # decides
    torch.arange(torch.randint(10, 100, (), device=dev), device=dev)  # decides
    tokens[0].repeat_interleave(torch.randint(1, 5, (32,), device=dev), 0)  # decides
    chosen = numpy.where(torch.rand(32, device=dev).cpu().numpy() > 0.5)[0]  # decides
    torch.zeros(32, device=dev)[chosen]
    scores = unknown(32).cpu().numpy()  # decides
    kept = numpy.flatnonzero(scores)
    torch.zeros(32, device=dev)[kept]


def test_random_numbers_of_the_card_are_named_where_they_are_sizes() -> None:
    assert lines(captured(_drawn_sizes)) == planted(_drawn_sizes)


def test_random_numbers_of_the_card_that_decide_nothing_are_silent() -> None:
    """Order, masks of the same shape, weights of a mixture, noise, targets and metrics of them."""

    def step() -> None:
        x = torch.randn(4, 32, 8, device="cuda")
        kept = torch.rand(4, 32, device="cuda").argsort(1)[:, :8]
        torch.gather(x, 1, kept.unsqueeze(-1).expand(-1, -1, 8))
        beta = torch.full((), 0.2, device="cuda")
        mix = torch.distributions.Beta(beta, beta).sample().item()
        x = mix * x + (1 - mix) * x[torch.randperm(4, device="cuda")]
        ids = torch.randint(0, 9, (4, 32), device="cuda")
        ids[torch.rand(4, 32, device="cuda") < 0.1] = 3
        found, targets = [], []
        for _ in range(2):
            found.extend(x.sum(2).argmax(1).tolist())
            targets.extend(torch.randint(0, 9, (4,), device="cuda").tolist())
        hits = sum(one == other for one, other in zip(found, targets, strict=True))
        rate = 1e-3 * (1 + math.cos(torch.rand((), device="cuda").item()))
        losses = [x.mean(2).cpu().numpy()]
        logging.debug(f"{mix:.2f} {hits / len(found)} {rate} {numpy.concatenate(losses).mean()}")
        if 7 in ids:
            text = "a pad was found"
            logging.debug(text)

    assert not captured(step).decided


@pytest.mark.parametrize(
    ("given", "value"), [("a/train.py:31=300", 300), ("t.py:1=true", True), ("t.py:2=-0.5", -0.5), ("a=b.py:3=2", 2)]
)
def test_assumptions_are_read(given: str, value: Any) -> None:
    place, read = parse_assumption(given)
    assert (place, read) == (given.rpartition("=")[0], value)
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "given", ["", "=", "train.py=3", "train.py:0=3", "train.py:3=", "train.py:3=x", "a:3=nan", "3"]
)
def test_assumptions_that_are_none(given: str) -> None:
    with pytest.raises(UsageError, match="assume"):
        parse_assumption(given)


@pytest.mark.parametrize("given", [3, [("train.py:3",)], [("train.py", 3)], {"train.py:3": "x"}])
def test_settings_that_are_none(given: Any) -> None:
    for kind in (Training, Inference):
        with pytest.raises(UsageError, match="assume"):
            kind(assume=given)


_MEASURES = """
import math
import torch

def spread():
    return math.sqrt(torch.rand((), device="cuda").item())

def share():
    return torch.rand(3, device="cuda").tolist()

def rows(x, part):
    return torch.zeros(int(part * 8), 4, device="cuda")

def note(x, part, name="share"):
    print(f"{name}: {part:.2f}")
"""
_PROGRAM = """
import math
import measures_of_a_test as measures
from measures_of_a_test import note, rows, spread, share
import torch

def returned():
    number = spread()
    torch.zeros(int(32 * number), device="cuda")

def returned_in_a_list():
    first, *_ = share()
    torch.zeros(int(100 * first), device="cuda")

def given():
    rows(None, math.sqrt(torch.rand((), device="cuda").item()))

def given_by_name():
    measures.rows(None, part=float(torch.rand((), device="cuda").item()))

def noted():
    note(None, math.sqrt(torch.rand((), device="cuda").item()))
    measures.note(None, part=float(torch.rand((), device="cuda").item()))
    print(spread(), share())
"""


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("returned", "measures_of_a_test.py:6"),
        ("returned_in_a_list", "measures_of_a_test.py:9"),
        ("given", "program_of_a_test.py:16"),
        ("given_by_name", "program_of_a_test.py:19"),
        ("noted", None),
    ],
)
def test_numbers_are_followed_into_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, line: str | None
) -> None:
    (tmp_path / "measures_of_a_test.py").write_text(_MEASURES)
    (tmp_path / "program_of_a_test.py").write_text(_PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    program = importlib.import_module("program_of_a_test")
    try:
        estimate = analyze(getattr(program, function), cudnn="never", torch_version="2.13")
    finally:
        for name in ("program_of_a_test", "measures_of_a_test"):
            del sys.modules[name]
    named = [one.message for one in estimate.diagnostics if one.kind == "assumed"]
    assert [line in message for message in named] == [True] if line is not None else named == []
