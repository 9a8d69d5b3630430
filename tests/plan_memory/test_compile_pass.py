"""torch.compile with a pass that reports the peak of every graph, or refuses one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config  # noqa: E402
from torch._inductor.exc import InductorError  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402

from graphmem.errors import GraphmemError  # noqa: E402
from graphmem.plan_memory import CompiledPeak, CompilePass, compile_pass  # noqa: E402
from tests.plan_memory.fx_of_tests import Net  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()


def _compile(rule: CompilePass, width: int = 8) -> None:
    with config.patch(post_grad_custom_post_pass=rule):
        torch.compile(Net(width, depth=1))(torch.randn(16, width))


def test_refuses_a_graph_over_its_budget_with_one_line() -> None:
    with pytest.raises(GraphmemError, match=r"needs more than 1000 bytes: peak .* KiB at \w+, blocks.0") as caught:
        _compile(compile_pass(1000))
    assert str(caught.value).splitlines()[1:2] in ([], [""])  # what follows is Dynamo's hint at its settings


def test_without_its_caches_pytorch_wraps_the_refusal() -> None:
    with config.patch(force_disable_caches=True), pytest.raises(InductorError) as caught:
        _compile(compile_pass(1000))
    assert isinstance(caught.value.inner_exception, GraphmemError)


@pytest.mark.slow
def test_reports_forward_and_backward_and_leaves_them_as_they_are() -> None:
    reports: list[CompiledPeak] = []
    rule = compile_pass(1 << 30, report=reports.append)
    model, x = Net(8, depth=1), torch.randn(16, 8)
    expected = model(x)
    with config.patch(post_grad_custom_post_pass=rule):
        loss = torch.compile(model)(x)
        loss.backward()
    assert torch.allclose(loss, expected)
    assert len(reports) == 2
    assert rule.peaks == reports
    assert all(one.peak_bytes > one.held_bytes > 0 and one.largest for one in reports)


def test_the_cache_knows_the_budget_and_keeps_no_graph_that_is_reported() -> None:
    assert compile_pass(5).uuid() == compile_pass(5).uuid() != compile_pass(6).uuid()
    assert compile_pass(report=print).uuid() is None


@pytest.mark.parametrize("budget", [-1, 1.5, "1 GiB", float("nan")])
def test_a_budget_that_is_none_is_refused_at_once(budget: int) -> None:
    with pytest.raises(GraphmemError, match=r"a budget of .*; accepted: whole numbers of bytes from 0 on"):
        compile_pass(budget)
