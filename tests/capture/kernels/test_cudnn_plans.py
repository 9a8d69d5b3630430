"""The answers of a real cuDNN against recordings of PyTorch's CUDA build; none of them needs a GPU.

Set GRAPHMEM_CUDNN to a cuDNN 9.20, the version of the recordings, with NVIDIA's wheels for cuBLAS and NVRTC beside it.
11,367 plans and their workspaces take some minutes.

- ``ops/conv_plans.jsonl.gz``: workspaces of plans for eight cards.
- ``ops/conv.jsonl.gz``: allocations and frees of 1,224 convolutions for an H200.
- ``ops/conv_unusual.jsonl.gz``: those of 400 convolutions for five cards: 1-D to 3-D, transposed, dilated, fp64,
  grouped, at addresses that 32 does not divide, deterministic, without TF32, and timed (``tests/oracles/cudnn``).
- ``functions/second_derivatives.jsonl.gz``: gradients of gradients, all of their allocations and frees.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.kernels.parts.script import Card  # noqa: E402
from graphmem.cudnn.library import Cudnn  # noqa: E402
from graphmem.devices import Device, device_named  # noqa: E402
from tests import places  # noqa: E402
from tests.recorded import functions  # noqa: E402
from tests.recorded.cudnn_plans import CARDS, DIRECTIONS, first_workspace, question  # noqa: E402
from tests.recorded.device import CARD  # noqa: E402
from tests.support import recorded_convolutions as recorded  # noqa: E402

LIBRARY = os.environ.get("GRAPHMEM_CUDNN")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LIBRARY, reason="GRAPHMEM_CUDNN names no cuDNN to ask"),
    pytest.mark.usefixtures("cudnn_switches"),
]


@pytest.mark.parametrize("card", CARDS)
def test_every_recorded_plan_is_met(card: str) -> None:
    lines = [line for line in recorded.lines("conv_plans.jsonl.gz") if line["card"] == card]
    with Cudnn(LIBRARY or "", device_named(CARDS[card])) as cudnn:
        wrong = [
            (line, direction)
            for line in lines
            for direction in DIRECTIONS
            if first_workspace(cudnn, question(line, direction)) != line[direction]
        ]
    assert lines
    assert not wrong, (len(wrong), wrong[0])


def _card(device: Device, cudnn: Cudnn) -> Card:
    return Card(device, torch_version=places.PYTORCH_VERSION, cudnn=cudnn)


def test_every_recorded_allocation_is_met() -> None:
    device, wrong = device_named("H200"), []
    with Cudnn(LIBRARY or "", device) as cudnn:
        for line in recorded.lines("conv.jsonl.gz"):
            case, card = recorded.plain_case(line), _card(device, cudnn)
            found = {"fwd": recorded.events(case.forward(card), [case.output])}
            for name, mask in (("bwd_data", (True, False, False)), ("bwd_weight", (False, True, False))):
                found[name] = recorded.events(case.backward(card, mask), case.gradients(mask))
            wrong += [(line, name) for name in found if found[name] != line[name]]
    assert not wrong, (len(wrong), wrong[0])


@pytest.mark.parametrize("card", ["H200-141GB", "A100-40GB", "T4-16GB", "RTX-4090", "B200-180GB"])
def test_convolutions_of_all_kinds_are_met(card: str) -> None:
    lines = [line for line in recorded.lines("conv_unusual.jsonl.gz") if line["card"] == card]
    device, wrong = device_named(card), []
    with Cudnn(LIBRARY or "", device) as cudnn:
        for line in lines:
            cudnn_switches = torch.backends.cudnn
            cudnn_switches.deterministic, cudnn_switches.allow_tf32 = line["deterministic"], line["tf32"]
            cudnn_switches.benchmark = line["benchmark"]
            case, rules = recorded.unusual_case(line), _card(device, cudnn)
            forward, backward = case.forward(rules), case.backward(rules)
            if line["benchmark"]:  # which plan is the fastest only a card can tell
                sizes = [*recorded.timing_buffers(forward), *recorded.timing_buffers(backward)]
                met = all(size in (*line["fwd"], *line["bwd"]) for size in sizes)
            else:
                met = recorded.events(forward, [case.output]) == line["fwd"]
                met &= recorded.events(backward, case.gradients()) == line["bwd"]
            if not met:
                wrong.append(line)
        assert cudnn.refused() == []
    assert len(lines) == 80
    assert not wrong, (len(wrong), wrong[0])


#: The gradient that the penalty is taken of dies after the first tensor of the backward pass, four bytes, not before.
_FREED_LATER = {"penalty_conv2d_channels_last", "penalty_conv_transpose2d_channels_last"}


@pytest.mark.filterwarnings("ignore")
def test_second_derivatives_are_met() -> None:
    cases = [case for case in functions.CASES.values() if case.group == "second_derivatives"]
    recordings = functions.recordings()
    with Cudnn(LIBRARY or "", CARD) as cudnn:
        found = {case.name: functions.predict(case, cudnn=cudnn) for case in cases}
    wrong = {name for name, changes in found.items() if changes != recordings[name]["changes"]}
    assert len(found) > 20
    assert wrong == _FREED_LATER
    for name in wrong:
        assert sorted(found[name]) == sorted(recordings[name]["changes"])
