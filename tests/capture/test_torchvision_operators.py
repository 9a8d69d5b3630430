"""What torchvision's own operators take, where torchvision is not installed: their schemas stand for it.

The bytes were recorded with torchvision 0.28 on PyTorch 2.13's CUDA build (stub driver): allocations, and frees with a
minus, from the call's first to its last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.predict import predicted_changes  # noqa: E402

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "box_iou_rotated": "(Tensor boxes1, Tensor boxes2) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "deform_conv2d": "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward": "(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}


@pytest.fixture
def operators() -> Iterator[Any]:
    """``torch.ops.torchvision``: torchvision's own, or those schemas with what a shape needs."""
    with contextlib.suppress(ImportError, RuntimeError):
        import torchvision  # noqa: F401
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(name + schema)
        with contextlib.suppress(RuntimeError):
            torch.library.register_fake("torchvision::roi_align", _pooled, lib=library)
        yield torch.ops.torchvision
    finally:
        library._destroy()


def _pooled(x: Any, rois: Any, scale: float, height: int, width: int, ratio: int, aligned: bool) -> Any:
    return x.new_empty((rois.shape[0], x.shape[1], height, width))


def _changes(run: Callable[..., Any], make: Callable[[], Any] = lambda: None, selected: float = 0.0) -> list[int]:
    def marked(mark: Callable[[], None]) -> None:
        given = make()
        mark()
        held = run(*given) if given is not None else run()
        mark()
        del held

    return predicted_changes(marked, "torchvision", data_dependent=selected)


def _boxes(count: int) -> Any:
    return torch.rand(count, 4, device="cuda"), torch.rand(count, device="cuda")


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        (1000, [4000, 8000, 8000, -8000, -4000, 16000, 128000, 1000, 4, 1, -1, 1023, -1023, -4, -1000, -128000, -16000,
                -8000]),
        (5000, [20000, 40000, 40000, 70143, -70143, -40000, -20000, 80000, 3160000, 5000, 4, 21503, -21503, 1023,
                -1023, -4, -5000, -3160000, -80000, -40000]),
    ],
)  # fmt: skip
def test_suppression_compares_every_pair_of_boxes(operators: Any, boxes: int, expected: list[int]) -> None:
    """As recorded where nothing is kept."""
    assert _changes(lambda x, y: operators.nms(x, y, 0.5), lambda: _boxes(boxes)) == expected


def test_what_suppression_keeps_is_all_boxes_unless_told(operators: Any) -> None:
    changes = _changes(lambda x, y: operators.nms(x, y, 0.5), lambda: _boxes(100), 1.0)
    assert sum(changes) == 800
    assert sum(_changes(lambda x, y: operators.nms(x, y, 0.5), lambda: _boxes(100), 0.25)) == 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_turned_boxes_are_compared_in_single_precision(operators: Any, dtype: Any) -> None:
    def make() -> Any:
        return torch.rand(1000, 5, device="cuda", dtype=dtype), torch.rand(500, 5, device="cuda", dtype=dtype)

    assert _changes(operators.box_iou_rotated, make) == [2000000]


def test_where_the_second_are_too_many_for_a_grid_the_result_is_turned(operators: Any) -> None:
    """As recorded: 4,194,244,000 bytes with strides of 1 and 1000."""
    strides = []

    def run(first: Any, second: Any) -> Any:
        overlaps = operators.box_iou_rotated(first, second)
        strides.append(overlaps.stride())
        return overlaps

    def make() -> Any:
        return torch.rand(1000, 5, device="cuda"), torch.rand(65535 * 16 + 1, 5, device="cuda")

    assert _changes(run, make) == [4194244000]
    assert strides == [(1, 1000)]


def _deformable(images: int, groups: int = 1) -> Any:
    def rand(*shape: int) -> Any:
        return torch.rand(*shape, device="cuda")

    x, weight, offset = rand(images, 16, 20, 24), rand(32, 16 // groups, 3, 3), rand(images, 18, 20, 24)
    return x, weight, offset, rand(images, 9, 20, 24), rand(32), 1, 1, 1, 1, 1, 1, groups, 1, True


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (1, [61440, 61440, 276480, 61440, -276480, -61440, -61440]),
        (33, [2027520, 2027520, 3041280, 2027520, -3041280, -2027520, -2027520]),
        (40, [2457600, 2457600, 5529600, 2457600, -5529600, -2457600, -2457600]),
    ],
)
def test_deformable_convolutions_take_columns_for_as_many_images_as_divide_the_batch(
    operators: Any, images: int, expected: list[int]
) -> None:
    assert _changes(operators.deform_conv2d, lambda: _deformable(images)) == expected


@pytest.mark.parametrize(
    ("images", "groups", "expected"),
    [
        (1, 1, [30720, 34560, 17280, 276480, -276480, 18432, 276480, -276480, 128, 128, 128, -128, -128]),
        (4, 1, [122880, 138240, 69120, 1105920, 245760, -245760, -1105920, 18432, 245760, 1105920, -1105920, -245760,
                128, 128, 128, -128, -128]),
        (40, 1, [1228800, 1382400, 691200, 5529600, 1228800, -1228800, 1228800, -1228800, -5529600, 18432, 2457600,
                 5529600, -5529600, -2457600, 128, 128, 128, -128, -128]),
    ],
)  # fmt: skip
def test_their_gradients_take_columns_twice(operators: Any, images: int, groups: int, expected: list[int]) -> None:
    def make() -> Any:
        given = _deformable(images, groups)
        return torch.rand(images, 32, 20, 24, device="cuda"), *given

    assert _changes(operators._deform_conv2d_backward, make) == expected


def test_pooled_regions_are_read_from_a_contiguous_copy(operators: Any) -> None:
    def make() -> Any:
        x = torch.rand(2, 98, 40, 48, device="cuda").to(memory_format=torch.channels_last)
        return x, torch.rand(50, 5, device="cuda")

    changes = _changes(lambda x, rois: operators.roi_align(x, rois, 0.5, 7, 7, 2, False), make)
    assert changes == [960400, 1505280, -1505280]
