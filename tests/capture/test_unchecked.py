"""Operators of which nobody proved what they take are counted and shown."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from graphmem.analyze import analyze  # noqa: E402
from graphmem.capture.kernels import PROOFS  # noqa: E402
from graphmem.capture.kernels.parts.known import ASSUMED, proven, unmodelled  # noqa: E402
from graphmem.capture.operators.facts import CALLS_CUBLAS, facts_of  # noqa: E402
from graphmem.capture.operators.kernel_decompositions import _selected_rows  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.diagnostics import Code, Diagnostic  # noqa: E402
from graphmem.training import Inference  # noqa: E402
from tests.recorded.device import CARD, TORCH_VERSION  # noqa: E402
from tests.recorded.op_db import proven as evidence  # noqa: E402

_aten = torch.ops.aten


def _assumed(step) -> dict[Diagnostic, int]:  # type: ignore[no-untyped-def]
    return dict(capture(lambda session: step(), source="test", device=CARD, torch_version=TORCH_VERSION).assumed)


def test_a_proven_operator_says_nothing() -> None:
    assert proven("aten.relu.default")
    assert proven("aten.randn.generator"), "what randn itself calls"
    assert proven("aten.randint.low_out"), "what randint does with the tensor that it makes: seeds of compiled dropout"
    assert not _assumed(lambda: torch.ones(8, device="cuda").relu())


def test_an_operator_that_nobody_checked_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphmem.capture.operators.facts.proven", lambda name: name != "aten.erfinv.default")
    facts_of.cache_clear()
    try:
        ones = Code.NOT_CHECKED.about(operator="aten.erfinv.default")
        assert _assumed(lambda: torch.ones(8, device="cuda").erfinv().erfinv()) == {ones: 2}
        assert not _assumed(lambda: torch.ones(8).erfinv()), "it runs on the host"
    finally:
        facts_of.cache_clear()


def test_a_rule_that_declares_no_proof_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PROOFS, "aten.sum.default")
    facts_of.cache_clear()
    try:
        assert facts_of(_aten.sum.default).remark == Code.NOT_CHECKED.about(operator="aten.sum.default")
        monkeypatch.setitem(PROOFS, "aten.sum.default", "recordings of the package that has the rule")
        facts_of.cache_clear()
        assert facts_of(_aten.sum.default).remark is None
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
        assert kinds <= {"functions", "in_place", "loops", "op_db", "sharded"}, name
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


def test_a_report_says_what_a_matrix_exponential_was_taken_to_need() -> None:
    class Rotation(torch.nn.Module):
        def forward(self, angles: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(angles)

    estimate = analyze(Rotation(), torch.ones(32, 32), training=Inference(), device="H200")
    assert ASSUMED["aten.linalg_matrix_exp.default"].about().message in " ".join(estimate.report(details=True).split())


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_products_of_another_type_call_cublas_as_others_do(name: str) -> None:
    for overload in ("dtype", "dtype_out"):
        func = getattr(getattr(_aten, name), overload)
        assert func in CALLS_CUBLAS
        assert facts_of(func).rule is not None


def test_a_product_of_another_type_copies_what_cublas_cannot_read() -> None:
    def step() -> None:
        gaps = torch.ones(64, 256, device="cuda", dtype=torch.bfloat16)[:, ::4]
        torch.mm(gaps, gaps, out_dtype=torch.float32)

    trace = capture(lambda session: step(), source="test", device=CARD, torch_version=TORCH_VERSION).trace
    born = [storage.bytes for storage in trace.storages]
    assert born.count(64 * 64 * 2) == 2, "both operands"
    assert born.count(64 * 64 * 4) == 1, "the product"
    assert max(born) > 2**23, "the workspace of cuBLAS"


@pytest.mark.parametrize(
    ("indices", "values", "rows"),
    [((1,), (40,), None), ((1,), (7, 40), 7), ((2,), (9,), 9), ((1,), (1, 40), None), ((0, 1), (40, 5), 5)],
)
def test_values_tell_how_many_a_mask_selects_only_where_they_have_its_dimension(
    indices: tuple[int, ...], values: tuple[int, ...], rows: int | None
) -> None:
    """``indices``: dimensions of each mask, 0 for no index. A row of 40 under a mask of 40 rows says nothing."""
    masks = [torch.ones((40,) * dims, dtype=torch.bool) if dims else None for dims in indices]
    assert _selected_rows(torch.empty(40, 40), masks, torch.empty(values)) == rows


def test_writing_in_place_is_as_proven_as_making_an_output() -> None:
    """Of pointwise operators alone: ``addbmm_`` takes more than ``addbmm``."""
    aten = torch.ops.aten
    assert not proven("aten.gt_.Scalar")
    assert facts_of(aten.gt_.Scalar).remark is None
    assert facts_of(aten.addbmm_.default).remark is not None or facts_of(aten.addbmm_.default).rule is not None
