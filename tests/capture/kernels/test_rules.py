"""How rules are registered, found, called and composed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.base.versions import NEWEST  # noqa: E402
from graphmem.capture.kernels import RULES, rule_of, run_rule  # noqa: E402
from graphmem.capture.kernels.parts import script as script_module  # noqa: E402
from graphmem.capture.kernels.parts.script import Call, Script, rule, signature_of  # noqa: E402
from tests.support.cards import HOPPER  # noqa: E402


@pytest.fixture(autouse=True)
def same_rules_afterwards() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def call(operator: str, *args: Any, outputs: Any = (), **kwargs: Any) -> Call:
    signature = signature_of(operator)
    assert signature is not None
    return Call(signature, args, kwargs, outputs, HOPPER)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_arguments_have_the_names_and_defaults_of_the_schema() -> None:
    values = meta(4, 8)
    bound = call("aten.topk.default", values, 3, largest=False, outputs=[meta(4, 3), meta(4, 3, dtype=torch.int64)])
    assert bound.self is values
    assert (bound.k, bound.dim, bound.largest, bound.sorted) == (3, -1, False, True)
    assert bound.operator == "aten.topk.default"
    assert bound.dtype is torch.float32
    assert bound.all_tensors == [values]


def test_a_name_the_schema_lacks_is_an_error_that_tells_the_names() -> None:
    bound = call("aten.sum.default", meta(4))
    with pytest.raises(AttributeError, match=r"aten\.sum\.default has no argument 'dim'; it has self, dtype"):
        _ = bound.dim
    assert bound.get("dim") is None
    assert bound.get("keepdim", False) is False


def test_rules_ask_for_arguments_that_every_operator_of_theirs_has() -> None:
    own = {name for name in dir(Call) if not name.startswith("__")}
    for operator, function in RULES.items():
        signature = signature_of(operator)
        if signature is None:  # of another version, or an optional library
            continue
        asked = {
            node.attr
            for node in ast.walk(ast.parse(inspect.getsource(function)))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "call"
        }
        assert asked <= own | set(signature.positions), f"{function.__name__} for {operator}"


def test_no_argument_of_an_operator_is_hidden_by_a_name_of_the_call() -> None:
    own = {name for name in dir(Call) if not name.startswith("__")} - {"dtype"}
    for operator in RULES:
        signature = signature_of(operator)
        assert signature is None or own.isdisjoint(signature.positions), operator


def test_a_second_rule_for_an_operator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"aten\.topk\.default has a rule already: topk_rule"):
        rule("aten.topk.default")(lambda call: None)


def test_a_name_that_the_newest_torch_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "_RUNNING", NEWEST)
    with pytest.raises(ValueError, match=r"aten\.topkk\.default: PyTorch .* knows no such operator"):
        rule("aten.topkk.default")(lambda call: None)
    assert "aten.topkk.default" not in RULES


def nothing(call: Call) -> None:
    """A rule whose kernel takes nothing."""


def test_another_version_may_lack_an_operator_that_graphmem_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "_RUNNING", (2, 4))
    with pytest.raises(ValueError, match="knows no such operator"):  # a slip in somebody's own rule
        rule("aten.topkk.default")(nothing)
    monkeypatch.setattr(nothing, "__module__", "graphmem.capture.kernels.rules.sorting")
    rule("aten.topkk.default")(nothing)
    assert rule_of("aten.topkk.default") is None


def test_a_name_without_overload_is_refused() -> None:
    with pytest.raises(ValueError, match=r"aten\.topk: a rule wants namespace\.operator\.overload"):
        rule("aten.topk")(lambda call: None)


def test_names_of_older_versions_and_of_optional_libraries_can_be_said() -> None:
    rule("aten.gone_since.default", torch_before=(2, 6))(lambda call: None)
    rule("somewhere.box_overlap.default", library="somewhere")(lambda call: None)
    assert rule_of("aten.gone_since.default") is None  # this torch never calls it
    assert run_rule("somewhere.box_overlap.default", (), {}, [], HOPPER) is None


def test_a_rule_that_runs_inside_another_is_written_where_it_is_called() -> None:
    values, indices = meta(1024, 4), meta(1024, 4, dtype=torch.int64)
    alone = run_rule("aten.topk.default", (meta(1024, 1024), 4), {}, [values, indices], HOPPER)
    script = Script().output(0)
    held = script.call(
        "aten.topk", meta(1024, 1024), 4, card=HOPPER, outputs=[values, indices], births=["largest values", None]
    )
    script.give(*held)
    assert alone is not None
    inside = [(step.kind, step.bytes, step.label) for step in script.steps]
    assert inside[:2] == [("output", None, ""), ("take", 16384, "largest values")]
    assert inside[2:-1] == [(step.kind, step.bytes, step.label) for step in alone.steps[2:]]
    assert script.steps[-1].kind == "give"
    assert script.steps[-1].index == held[0]


def test_an_operator_without_a_rule_that_runs_inside_another_leaves_its_outputs() -> None:
    script = Script()
    held = script.call("aten.relu", meta(8), card=HOPPER, outputs=[meta(8)], births=["positive values"])
    script.give(*held)
    assert [(step.kind, step.bytes) for step in script.steps] == [("take", 32), ("give", None)]


def test_births_are_said_for_every_output() -> None:
    with pytest.raises(ValueError, match="2 outputs, but 1 births"):
        Script().call("aten.aminmax", meta(8), card=HOPPER, outputs=[meta(), meta()], births=["smallest"])
