"""Convolutions against the real CUDA build: backends and buffers exactly, cuDNN's workspaces with a ratchet.

- ``ops/conv_layouts.jsonl.gz``: 1,490 random convolutions of all backends, layouts and output masks; allocations and
  frees in order, cuDNN claiming no workspace.
- ``ops/conv.jsonl.gz``: 1,224 convolutions with cuDNN 9.20's own plans for an H200.
- ``ops/conv_plans.jsonl.gz``: workspaces of plans for other devices, and of random shapes that no rule was read from.
- ``ops/conv_largest.jsonl.gz``: the largest workspace of all plans that cuDNN offers for such convolutions,
  depthwise ones left out.

``ops/conv_ratchet.json`` holds the shares of workspaces within 10 % (or one block of 512 bytes); a share may rise,
never fall. ``pytest --update-goldens`` writes it anew.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.kernels import cudnn as cudnn_convolution  # noqa: E402
from graphmem.capture.kernels import run_rule  # noqa: E402
from graphmem.capture.kernels.parts.conv_backend import (  # noqa: E402
    Backend,
    ConvParams,
    View,
    cudnn_takes,
    select_backend,
)
from graphmem.capture.kernels.parts.script import Card  # noqa: E402
from graphmem.cudnn.predicted import choice as cudnn_choice  # noqa: E402
from graphmem.cudnn.predicted import workspaces as cudnn_workspaces  # noqa: E402
from graphmem.cudnn.predicted.choice import Plan  # noqa: E402
from graphmem.cudnn.predicted.packed import Leaf  # noqa: E402
from graphmem.cudnn.predicted.problem import Direction, Problem  # noqa: E402
from graphmem.devices.capabilities import limits_of  # noqa: E402
from tests.support.cards import card_with  # noqa: E402
from tests.support.recorded_convolutions import DTYPES, OPS, Case, events  # noqa: E402
from tests.support.recorded_convolutions import lines as _lines  # noqa: E402

RATCHET = OPS / "conv_ratchet.json"
DIRECTIONS = {"fwd": Direction.FORWARD, "bwd_data": Direction.BACKWARD_DATA, "bwd_weight": Direction.BACKWARD_WEIGHT}
CARDS = {
    "h200": card_with((9, 0), 132, 2048),
    "h100pcie": card_with((9, 0), 114, 2048),
    "a100": card_with((8, 0), 108, 2048),
    "rtx4090": card_with((8, 9), 128, 1536),
    "rtx3090": card_with((8, 6), 82, 1536),
    "t4": card_with((7, 5), 40, 1024),
    "b200": card_with((10, 0), 148, 2048),
    "rtx5090": card_with((12, 0), 170, 1536),
}


# --- backends and buffers ---------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn_switch() -> Iterator[None]:
    enabled = torch.backends.cudnn.enabled
    yield
    torch.backends.cudnn.enabled = enabled


def test_buffers_are_those_of_the_cuda_build(cudnn_switch: None) -> None:
    card = card_with((9, 0), 132, 2048, cudnn_workspaces=False)
    wrong: dict[str, list[str]] = defaultdict(list)
    for line in _lines("conv_layouts.jsonl.gz"):
        case = Case(line)
        torch.backends.cudnn.enabled = line["cudnn"]
        if events(case.forward(card), [case.output]) != line["fwd"]:
            wrong[line["backend"] + " forward"].append(str(line))
        if events(case.backward(card), case.gradients()) != line["bwd"]:
            wrong[line["backend"] + " backward"].append(str(line))
    assert not wrong, {name: (len(lines), lines[0]) for name, lines in wrong.items()}


def test_backends_are_those_of_the_cuda_build() -> None:
    for line in _lines("conv_layouts.jsonl.gz"):
        case = Case(line)
        params = ConvParams.of(line["dim"], *case.params)
        chosen = select_backend(View.of(case.input), View.of(case.weight), params, line["cudnn"])
        assert chosen.value == line["backend"], line


def _backend(shape: tuple[int, ...], weight: tuple[int, ...], dtype: Any, groups: int, **options: Any) -> Backend:
    dims = len(shape) - 2
    tensor, kernel = torch.empty(shape, device="meta", dtype=dtype), torch.empty(weight, device="meta", dtype=dtype)
    if options.pop("channels_last", False):
        tensor = tensor.to(memory_format=torch.channels_last)
    enabled = options.pop("enabled", True)
    settings = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "extra": 0, **options}
    params = ConvParams.of(
        dims, settings["stride"], settings["padding"], settings["dilation"], settings["transposed"],
        settings["extra"], groups,
    )  # fmt: skip
    return select_backend(View.of(tensor), View.of(kernel), params, enabled)


def test_depthwise_convolutions_are_native_except_where_cudnn_is_faster() -> None:
    shape, weight = (8, 64, 56, 56), (64, 1, 3, 3)
    assert _backend(shape, weight, torch.float32, 64) is Backend.DEPTHWISE_2D
    assert _backend(shape, weight, torch.bfloat16, 64) is Backend.DEPTHWISE_2D
    assert _backend(shape, weight, torch.float16, 64) is Backend.CUDNN
    assert _backend(shape, weight, torch.float32, 64, channels_last=True) is Backend.CUDNN
    assert _backend(shape, weight, torch.float16, 64, stride=2) is Backend.DEPTHWISE_2D
    assert _backend((8, 512, 28, 28), (512, 1, 3, 3), torch.float16, 512, stride=2) is Backend.CUDNN
    assert _backend(shape, (64, 1, 7, 7), torch.float16, 64) is Backend.DEPTHWISE_2D
    assert _backend((8, 64, 8, 8, 8), (64, 1, 3, 3, 3), torch.float16, 64) is Backend.DEPTHWISE_3D


def test_an_output_padding_as_large_as_the_stride_is_not_for_cudnn() -> None:
    options = {"transposed": True, "stride": 2, "dilation": 3}
    assert _backend((2, 8, 9, 9), (8, 4, 3, 3), torch.float32, 1, extra=1, **options) is Backend.CUDNN_TRANSPOSE
    assert _backend((2, 8, 9, 9), (8, 4, 3, 3), torch.float32, 1, extra=2, **options) is Backend.SLOW_TRANSPOSE_2D


def test_bfloat16_needs_ampere_in_cudnn() -> None:
    assert not cudnn_takes(torch.bfloat16, limits_of((7, 5)))
    assert cudnn_takes(torch.bfloat16, limits_of((8, 0)))
    assert cudnn_takes(torch.float16, limits_of((7, 0)))


# --- workspaces -------------------------------------------------------------------------------------------------------


def _problem(line: dict[str, Any]) -> Problem:
    reach = line.get("dil", 1) * (line["R"] - 1)
    side = (line["HW"] + 2 * line["pad"] - reach - 1) // line["stride"] + 1
    return Problem(
        line["N"], line["C"], line["K"], line["HW"] ** 2, side**2, (line["R"], line["R"]), line["groups"],
        DTYPES[line["dtype"]].itemsize, bool(line["channels_last"]), tf32=bool(line.get("tf32", 1)),
        bf16=line["dtype"] == "bf16", dilated=line.get("dil", 1) > 1, input_sides=(line["HW"],) * 2,
        output_sides=(side,) * 2, stride=line["stride"], padding=line["pad"], dilation=line.get("dil", 1),
    )  # fmt: skip


def _close(predicted: int, real: int) -> bool:
    return abs(predicted - real) <= max(real // 10, 512)


def _reached(name: str, lines: list[tuple[dict[str, Any], dict[str, int], Card]]) -> dict[str, float]:
    """Shares in percent: workspaces within 10 %, and cases whose three workspaces together are."""
    workspace = cudnn_convolution.predicted_first
    if name.startswith("largest"):
        workspace = cudnn_convolution.predicted_largest
    operators = cases = count = 0
    predicted_bytes = real_bytes = 0
    for line, real, card in lines:
        sizes = {name: workspace(_problem(line), DIRECTIONS[name], card).size for name in real}
        operators += sum(_close(sizes[name], real[name]) for name in real)
        count += len(real)
        cases += _close(sum(sizes.values()), sum(real.values()))
        predicted_bytes += sum(sizes.values())
        real_bytes += sum(real.values())
    bias = 100 * (predicted_bytes / max(real_bytes, 1) - 1)
    return {
        "cases": len(lines),
        "operators within 10 %": round(100 * operators / max(count, 1), 1),
        "cases within 10 %": round(100 * cases / max(len(lines), 1), 1),
        "signed error of all bytes, %": round(bias, 1),
    }


def _sets() -> dict[str, list[tuple[dict[str, Any], dict[str, int], Card]]]:
    sets: dict[str, list[tuple[dict[str, Any], dict[str, int], Card]]] = defaultdict(list)
    for line in _lines("conv.jsonl.gz"):
        real = {}
        view = View((line["N"], line["C"], line["HW"], line["HW"]), (0, 0, 0, 0), DTYPES[line["dtype"]])
        native = line["groups"] == line["C"] and not line["channels_last"] and not _fp16_in_cudnn(line, view)
        for name in DIRECTIONS:
            buffers = [event for event in line[name][1:] if event > 0]
            if not native:
                real[name] = buffers[0] if buffers else 0
        sets["h200"].append((line, real, CARDS["h200"]))
    for line in _lines("conv_plans.jsonl.gz"):
        real = {name: line[name] for name in DIRECTIONS}
        sets[line.get("set") or line["card"]].append((line, real, CARDS[line["card"]]))
    for line in _lines("conv_largest.jsonl.gz"):
        real = {name: line[name] for name in DIRECTIONS}
        sets["largest " + line["card"]].append((line, real, CARDS[line["card"]]))
    return {**sets, **_with_groups(sets)}


def _with_groups(sets: dict[str, list[tuple[dict[str, Any], dict[str, int], Card]]]) -> dict[str, Any]:
    """The depthwise and the other grouped cases of every card."""
    parts: dict[str, Any] = defaultdict(list)
    for name in set(sets) & {*CARDS, "heldout"}:
        for case in sets[name]:
            groups = case[0]["groups"]
            if groups > 1 and any(case[1]):
                parts[f"{name}, {'depthwise' if groups == case[0]['C'] else 'groups'}"].append(case)
    return parts


def _fp16_in_cudnn(line: dict[str, Any], view: View) -> bool:
    weight = View((line["K"], 1, line["R"], line["R"]), (line["R"] ** 2, line["R"] ** 2, line["R"], 1), view.dtype)
    dense = torch.empty(view.shape, device="meta", dtype=view.dtype)
    params = ConvParams.of(2, line["stride"], line["pad"], 1, False, 0, line["groups"])
    return select_backend(View.of(dense), weight, params, True) is Backend.CUDNN


def test_workspaces_get_no_worse(request: pytest.FixtureRequest) -> None:
    reached = {name: _reached(name, lines) for name, lines in sorted(_sets().items())}
    if request.config.getoption("--update-goldens"):
        RATCHET.write_text(json.dumps(reached, indent=1) + "\n")
    expected = json.loads(RATCHET.read_text())
    for name, shares in expected.items():
        for share in ("operators within 10 %", "cases within 10 %"):
            assert reached[name][share] >= shares[share], (name, share, reached[name], shares)


def test_no_workspace_without_work() -> None:
    empty = Problem(0, 8, 8, 16, 16, (3, 3), 1, 4, False)
    for direction in Direction:
        assert cudnn_convolution.predicted_first(empty, direction, CARDS["h200"]).size == 0


def test_channels_last_half_types_need_no_copies() -> None:
    for dtype_bf16 in (False, True):
        problem = Problem(32, 256, 256, 196, 196, (3, 3), 1, 2, True, bf16=dtype_bf16)
        assert cudnn_convolution.predicted_first(problem, Direction.FORWARD, CARDS["a100"]).size == 0
        nchw = Problem(32, 256, 256, 196, 196, (3, 3), 1, 2, False, bf16=dtype_bf16)
        copies = 2 * (2 * 32 * 256 * 196 + 256 * 256 * 9)
        size = cudnn_convolution.predicted_first(nchw, Direction.FORWARD, CARDS["a100"]).size
        assert copies <= size <= copies + 512


# --- forms and trees --------------------------------------------------------------------------------------------------


def test_the_last_wave_is_shared_by_whole_clusters() -> None:
    # 9 tiles of 64 x 64 in clusters of 1 x 3: 18 blocks take two parts of each, of 16 KiB.
    problem = Problem(32, 64, 64, 56 * 56, 56 * 56, (3, 3), 1, 2, True)
    size = cudnn_workspaces.workspace_bytes("stream 64x64 1x3", problem, Direction.BACKWARD_WEIGHT)
    assert 0 <= size - 18 * 64 * 64 * 4 <= 512
    # Clusters of 1 x 5 round 9 tiles up to 10, which leave no second part in 15 blocks.
    assert cudnn_workspaces.workspace_bytes("stream 64x64 1x5", problem, Direction.BACKWARD_WEIGHT) == 0


FAMILIES = sorted({card.limits.cudnn_trees for card in CARDS.values()})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_in_the_trees_has_a_size(family: str) -> None:
    problem = Problem(8, 64, 96, 28 * 28, 28 * 28, (3, 3), 1, 4, False)
    trees = cudnn_choice.load(family)
    sections = {cudnn_choice.section(problem, direction) for direction in Direction}
    assert sections <= set(trees.sections) or family == "turing"
    features = cudnn_choice.features(problem, Direction.FORWARD)
    for section in trees.sections:
        tree = trees.get(section)
        assert tree is not None
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            if isinstance(node, Leaf):
                assert cudnn_workspaces.workspace_bytes(node.form, problem, Direction.FORWARD) >= 0
            else:
                assert node.feature in features
                nodes += [node.low, node.high]


def test_a_kind_without_trees_of_its_own_is_taken_for_a_wider_one() -> None:
    """Largest workspaces of volumes and of rows were not asked for."""
    image = Problem(2, 64, 96, 64**2, 64**2, (3, 9), 1, 4, False)
    sections = cudnn_choice.load("ampere").sections
    for special in (
        Problem(2, 64, 96, 16**3, 16**3, (3, 3, 3), 1, 4, False, input_sides=(16,) * 3, output_sides=(16,) * 3),
        Problem(2, 64, 96, 64**2, 64**2, (1, 27), 1, 4, False, input_sides=(1, 64**2), output_sides=(1, 64**2)),
    ):
        assert cudnn_choice.section(special, Direction.FORWARD) in sections
        assert cudnn_choice.section(special, Direction.FORWARD, Plan.LARGEST) not in sections
        chosen = cudnn_choice.choose("ampere", special, Direction.FORWARD, Plan.LARGEST)
        assert chosen is not None
        assert chosen == cudnn_choice.choose("ampere", image, Direction.FORWARD, Plan.LARGEST)


def test_plans_that_add_in_any_order_are_passed_over_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN says for an A100: engine 20 without a workspace, then engine 40 with 46 splits in tiles: 9,166,495 B."""
    card, weight = CARDS["a100"], Direction.BACKWARD_WEIGHT
    sides = (64, 64)
    problem = Problem(
        8, 3, 64, 64 * 64, 64 * 64, (3, 3), 1, 4, False, input_sides=sides, output_sides=sides, padding=1
    )  # fmt: skip
    assert cudnn_convolution.predicted_first(problem, weight, card).size == 0
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert cudnn_convolution.predicted_first(problem, weight, card).size == 9166495
    assert cudnn_choice.is_unordered(problem, weight, 0, "none")
    assert not cudnn_choice.is_unordered(problem, Direction.FORWARD, 0, "none")
    half = replace(problem, itemsize=2)
    assert not cudnn_choice.is_unordered(half, weight, 0, "none")


def test_an_unknown_form_is_refused() -> None:
    problem = Problem(8, 64, 96, 28 * 28, 28 * 28, (3, 3), 1, 4, False)
    with pytest.raises(ValueError, match="no form"):
        cudnn_workspaces.workspace_bytes("copy", problem, Direction.FORWARD)


def test_benchmark_times_every_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    tensor, kernel = torch.empty(8, 64, 56, 56, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    arguments = (tensor, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    card = card_with((9, 0), 132, 2048)
    first, second = (
        run_rule("aten.convolution.default", arguments, {}, [torch.empty_like(tensor)], card) for _ in range(2)
    )
    assert first is not None
    assert second is not None
    kinds = [step.kind for step in first.steps]
    assert kinds[:4] == ["output", "take", "give", "empty_cache"]
    problem = Problem(8, 64, 64, 56 * 56, 56 * 56, (3, 3), 1, 4, False)
    assert first.steps[1].bytes == cudnn_convolution.predicted_largest(problem, Direction.FORWARD, card).size
    assert first.steps[1].bytes >= tensor.numel() * 4
    assert [step.kind for step in second.steps] == ["output", *kinds[4:]]
