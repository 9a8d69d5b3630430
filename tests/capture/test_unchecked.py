"""Operators of which nobody proved what they take are counted and shown."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.kernels.parts.known import proven, unmodelled  # noqa: E402
from graphmem.capture.operators.facts import facts_of  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from tests.recorded.device import CARD, TORCH_VERSION  # noqa: E402
from tests.recorded.op_db import proven as evidence  # noqa: E402

_aten = torch.ops.aten


def _assumed(step) -> dict[str, int]:  # type: ignore[no-untyped-def]
    return capture(lambda session: step(), source="test", device=CARD, torch_version=TORCH_VERSION).assumed


def test_a_proven_operator_says_nothing() -> None:
    assert proven("aten.relu.default")
    assert not _assumed(lambda: torch.ones(8, device="cuda").relu())


def test_an_operator_that_nobody_checked_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphmem.capture.operators.facts.proven", lambda name: name != "aten.erfinv.default")
    facts_of.cache_clear()
    try:
        ones = "not checked: outputs only assumed of aten.erfinv.default"
        assert _assumed(lambda: torch.ones(8, device="cuda").erfinv().erfinv()) == {ones: 2}
        assert not _assumed(lambda: torch.ones(8).erfinv()), "it runs on the host"
    finally:
        facts_of.cache_clear()


def test_views_and_modelled_operators_need_no_proof() -> None:
    assert facts_of(_aten.view.default).is_checked
    assert facts_of(_aten.sum.dim_IntList).is_checked
    assert facts_of(_aten.linalg_matrix_exp.default).is_checked


def test_an_operator_seen_to_take_more_is_never_proven() -> None:
    document = evidence.read()
    assert not set(document["taking"]) & set(document["proven"])
    for name in evidence.unmodelled(document):
        assert unmodelled(name), name


def test_every_proof_names_its_recordings() -> None:
    for name, proofs in evidence.read()["proven"].items():
        kinds = set(proofs) - {"bytes"}
        assert kinds, name
        assert kinds <= {"functions", "loops", "op_db"}, name
        assert all(count > 0 for kind, count in proofs.items() if kind in kinds), name


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_matrix_exponential_takes_its_powers(batch: tuple[int, ...]) -> None:
    """11 to 13 matrices of the input's size; the three of its outputs alone were predicted once."""
    size = 64
    matrix = size * size * 4 * (batch[0] if batch else 1)
    trace = capture(
        lambda session: torch.linalg.matrix_exp(torch.ones(*batch, size, size, device="cuda")),
        source="test",
        device=CARD,
        torch_version=TORCH_VERSION,
    ).trace
    born = [storage.bytes for storage in trace.storages]
    assert born.count(5 * matrix) == 2, "powers of the matrix, and their combinations"
