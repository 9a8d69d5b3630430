"""``python -m graphmem.explain``: what is known of an operator, and one clear line for a name that nothing bears."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

from graphmem.errors import UsageError
from graphmem.explain import explain, main


def test_an_operator_is_explained_with_the_places_of_its_rule_and_decomposition() -> None:
    text = explain("aten.index_put_")
    assert text.startswith("aten.index_put_.default\n  aten::index_put_(Tensor(a!) self")
    assert "capture/kernels/rules/indexing.py:" in text
    assert "decomposition  index_put (capture/operators/kernel_decompositions.py:" in text
    assert "intercepted    lists in subscripts" in text
    assert "decomposition  waited_for (capture/operators/collectives.py:" in explain("_c10d_functional.wait_tensor")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("aten.mm.default", "cuBLAS is called, and takes its workspace at a thread's first call"),
        (
            "aten.index_put.default",
            "in backward aten.index_put_.default in place, where IndexBackward0 calls it",
        ),
        ("aten.linear.default", "autocast arguments are cast to the lower precision"),
        ("aten.relu.default", "kernel rule none; it is taken to allocate its outputs and nothing else"),
        ("aten.linalg_lu", "not modelled the factorization's workspace (cuSOLVER)"),
        ("aten._ctc_loss.default", "shapes ctc_loss (capture/operators/meta_kernels.py:"),
        ("aten.max_unpool2d", "not checked proven of contiguous inputs, not of those that are "),
    ],
)
def test_each_fact_has_a_line(name: str, line: str) -> None:
    assert line in " ".join(explain(name).split())


def test_composites_and_answered_operators_have_no_kernel() -> None:
    for name in ("aten.linear.default", "c10d.allreduce_.default", "aten.equal.default"):
        assert "kernel rule" not in explain(name)


@pytest.mark.parametrize("name", ["topk", "aten::topk", "torch.ops.aten.topk", " aten.topk "])
def test_names_may_be_written_in_several_ways(name: str) -> None:
    assert explain(name) == explain("aten.topk")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten.indx_put_", "knows no operator 'aten.indx_put_'; near it: aten.index_put_, "),
        ("aten.mm.Foo", "aten.mm has no overload 'Foo'; it has aten.mm.default, "),
        ("no.such.thing.at.all", "knows no operator 'no.such.thing.at.all'"),
        ("", "knows no operator ''"),
        (".", "knows no operator '.'"),
    ],
)
def test_unknown_names_are_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        explain(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_command_prints_or_fails_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["explain", "aten.index_put_", "mm"])
    main()
    assert capsys.readouterr().out.count("\n\n") == 4
    monkeypatch.setattr(sys, "argv", ["explain", "aten.indx_put_"])
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("graphmem: PyTorch ")
    assert len(said.err.splitlines()) == 1


def test_what_is_made_of_other_operators_is_not_called_unchecked() -> None:
    text = explain("aten.matmul.default")
    assert "composite " in text
    assert "not checked" not in text
