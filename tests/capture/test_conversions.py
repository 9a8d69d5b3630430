"""What a program sees of parameters and buffers after ``.cuda()``, ``.to()`` and the like is what the CUDA build shows:
identity, hooks, attributes, gradients, versions, references.

The whole database takes a minute: all but a few modules are marked slow.
"""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.conversions import differences, predict, recorded  # noqa: E402

QUICK = ("nn.Linear", "nn.LSTM", "parametrized_weight_norm")
RECORDED = recorded()
#: Facts that differ, and why.
_KNOWN = {
    r"num_batches_tracked\.references|parameter_list\.\w+: (1\.references|held)": "numbers on the host are real "
    "tensors in a capture: those of a module that is moved are borrowed, and kept to be given back",
    r"(weight_norm|pruned)\.\w+: weight_(g|v|orig)\.references": "the node of a graph that is kept refers to what the "
    "parameter was to C++, which it is no longer",
    r"weight_norm\.swap_cuda": "swapping is refused where others refer to a tensor; here nothing counts references",
}


def _groups() -> list[str]:
    names = {name.rpartition(".")[0] for name in RECORDED}
    return sorted(names)


@pytest.mark.parametrize(
    "module", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in _groups()]
)
def test_converted_parameters_and_buffers_are_what_they_are_on_a_card(module: str) -> None:
    predicted = {name: seen for name, seen in predict([f"{module}."]).items() if name.startswith(f"{module}.")}
    assert predicted.keys() == {name for name in RECORDED if name.rpartition(".")[0] == module}
    found = [
        f"{name}: {path}: recorded {theirs}, predicted {ours}"
        for name, seen in predicted.items()
        for path, (theirs, ours) in differences(RECORDED[name], seen).items()
        if not any(re.search(pattern, f"{name}: {path}") for pattern in _KNOWN)
    ]
    assert not found
