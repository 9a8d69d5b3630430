"""What a captured step leaves in doubt, and what it does not."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import graphmem  # noqa: E402
from graphmem.answering import causes  # noqa: E402
from graphmem.capture.record.garbage import _looks_in_one  # noqa: E402
from graphmem.diagnostics import MEANINGS, Code  # noqa: E402
from graphmem.estimate import LEVELS, Estimate  # noqa: E402
from graphmem.training.program import Program  # noqa: E402
from tests.support.examples import first_quick  # noqa: E402


class Doubling(torch.autograd.Function):
    """An operator of the user's own is made of operators that are known."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def _analysed(step: Any, **options: Any) -> Estimate:
    return graphmem.analyze(step, device="A100-40GB", cudnn="never", alloc_conf="", top=0, **options)


def _names(estimate: Estimate, level: str = "reserved") -> list[str]:
    return [cause.name for cause in estimate.doubts.about(level)]


def linear() -> None:
    model = torch.nn.Linear(512, 512, device="cuda")
    for _ in range(2):
        Doubling.apply(model(torch.zeros(64, 512, device="cuda"))).sum().backward()


def convolving() -> None:
    model = torch.nn.Conv2d(3, 8, 3, device="cuda")
    model(torch.zeros(2, 3, 16, 16, device="cuda")).sum().backward()


def convolving_without_cudnn() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        convolving()


def reading() -> None:
    x = torch.nn.Linear(64, 64, device="cuda")(torch.rand(64, 64, device="cuda"))
    count = int(x.sum().item() * 3)
    torch.zeros(count * 1024, 256, device="cuda")


def drawing() -> None:
    count = int(torch.rand((), device="cuda") * 100)
    torch.zeros(count * 1024, 256, device="cuda")


@pytest.mark.parametrize("version", ["2.6", "2.13", "2.15"])
@pytest.mark.parametrize("step", [linear, convolving_without_cudnn])
def test_a_step_of_known_operators_is_exact(step: Any, version: str) -> None:
    estimate = _analysed(step, torch_version=version)
    assert _names(estimate) == []
    assert estimate.interval("allocated") == (estimate.allocated, estimate.allocated)
    assert all(cause.spreads.keys() == {"device"} for cause in estimate.doubts.causes)


def test_a_predicted_plan_is_a_doubt() -> None:
    estimate = _analysed(convolving, torch_version="2.13")
    assert _names(estimate) == ["cuDNN's plans"]
    assert estimate.trace is not None
    assert estimate.trace.predicted_plans >= 2
    assert estimate.fit is not None
    assert estimate.fit.verdict == "yes"


@pytest.mark.parametrize(("step", "verdict"), [(reading, ("likely", None)), (drawing, ("yes", 1.0))])
def test_a_value_that_decides_a_size_is_one(
    step: Any, verdict: tuple[str, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a share where no recorded program had it. One that is drawn is a possible one: much room is enough."""
    monkeypatch.setattr(causes, "_changes", lambda codes: ())
    estimate = _analysed(step, torch_version="2.13")
    assert _names(estimate) == ["values assumed"]
    assert estimate.interval("reserved") == (None, None)
    assert estimate.fit is not None
    assert (estimate.fit.verdict, estimate.fit.probability) == verdict


def test_a_version_that_was_not_recorded_lies_between_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "RECORDED", ((2, 13), (2, 15)))
    before, here, after = (_analysed(linear, torch_version=version) for version in ("2.13", "2.14", "2.15"))
    assert before.allocated > after.allocated, "2.15 gives cuBLAS's workspaces back"
    assert here.interval("allocated") == (after.allocated, before.allocated)
    assert _names(here, "allocated") == ["PyTorch 2.14"]
    assert not _names(before, "allocated")


def selecting() -> None:
    x = torch.rand(4096, 64, device="cuda")
    held = [x[x.sum(1) > 1] @ x.T, torch.fft.fft(x)]
    if x.sum() > held[0].sum():
        held.append(torch.zeros(1024, 1024, device="cuda"))


def failing() -> None:
    held = torch.rand(4096, 64, device="cuda")
    torch.linalg.qr(held)
    torch.linalg.matrix_exp(held[:64])


@pytest.mark.parametrize("step", first_quick([linear, drawing, failing, convolving, reading, selecting], 3))
def test_other_words_move_no_estimate(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sentence that diagnostics have in other words: verdict, intervals and causes stay."""

    def weighed() -> list[Any]:
        estimate = _analysed(step, torch_version="2.13", bounds=True)
        assert estimate.fit is not None
        causes = [(cause.name, cause.basis, cause.spreads, cause.times) for cause in estimate.doubts.causes]
        intervals = [estimate.interval(level) for level in LEVELS]
        return [causes, intervals, estimate.fit.verdict, sorted(one.code.name for one in estimate.diagnostics)]

    before = weighed()
    for code, meaning in list(MEANINGS.items()):
        monkeypatch.setitem(MEANINGS, code, replace(meaning, words=f"{code.name}, said otherwise"))
    assert weighed() == before


def test_a_copy_of_what_is_not_contiguous_is_a_doubt() -> None:
    """``max_unpool2d`` of a sliced input takes a copy more (recorded); of a contiguous one nothing."""

    def unpool(wide: int) -> None:
        x = torch.zeros(4, 8, 56, 56 * wide, device="cuda")[..., :56]
        indices = torch.zeros(4, 8, 56, 56, dtype=torch.int64, device="cuda")
        torch.nn.functional.max_unpool2d(x, indices, 2)

    assert _names(_analysed(lambda: unpool(1), torch_version="2.13")) == []
    sliced = _analysed(lambda: unpool(2), torch_version="2.13")
    assert _names(sliced) == ["operators not checked"]
    assert [one.code for one in sliced.diagnostics if one.kind == "unknown"] == [Code.LAYOUT_NOT_CHECKED]


def test_gradients_of_channels_last_weights_are_unscaled_without_a_doubt() -> None:
    def unscale() -> None:
        gradients = [torch.zeros(16, 8, 3, 3, device="cuda").to(memory_format=torch.channels_last) for _ in range(2)]
        found, inverse = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        torch._foreach_abs_(gradients)

    assert _names(_analysed(unscale, torch_version="2.13")) == []


_CYCLES = """
import gc
import torch

class Node:
    def __init__(self):
        self.own, self.data = self, torch.zeros(256, 1024, device="cuda")

{settings}
for _ in range({times}):
    Node()
    [[] for _ in range(1000)]
    {body}
"""


def test_a_look_of_a_card_s_run_gives_back_what_several_of_a_capture_do() -> None:
    """It comes when 700 objects of the program are new; a capture makes others beside them, and two for a tensor."""
    assert _looks_in_one(99) == pytest.approx(gc.get_threshold()[0] / 49.5)
    assert _looks_in_one(5000) == 1


@pytest.mark.parametrize(
    ("times", "settings", "body", "is_told"),
    [(30, "gc.set_threshold(700, 10, 10)", "", True), (2, "gc.disable()", "gc.collect()", False)],
    ids=["found at some time", "asked for"],
)
def test_cycles_of_garbage_are_a_doubt_of_their_size(
    times: int, settings: str, body: str, is_told: bool, tmp_path: Path
) -> None:
    (tmp_path / "cycles.py").write_text(_CYCLES.format(times=times, settings=settings, body=body))
    try:
        estimate = graphmem.analyze(
            Program(str(tmp_path / "cycles.py")), device="A100-40GB", cudnn="never", alloc_conf="", top=0
        )
    finally:
        gc.enable()
    found = [cause for cause in estimate.doubts.about("allocated") if cause.name == "cycles of garbage"]
    assert len(found) == is_told
    for cause in found:
        spread = cause.spreads["allocated"]
        assert spread.points[-1][1] == -spread.points[0][1] >= 1 << 20
