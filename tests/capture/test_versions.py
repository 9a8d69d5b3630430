"""What changed between versions of PyTorch, and what is said of the version that is predicted.

The recordings in ``golden/pytorch/<version>`` were made with other CUDA builds than the one that all kinds are recorded
of. docs/modeling/versions.md lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphmem
from graphmem.base import versions
from graphmem.diagnostics import Code
from graphmem.errors import UsageError
from graphmem.reports.estimate import headlines

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from graphmem.capture.record.cublas_workspaces import LARGE_WORKSPACE, LT_WORKSPACE  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.trace import Category  # noqa: E402
from tests import places  # noqa: E402
from tests.recorded.steps import runs  # noqa: E402
from tests.support.captures import H100, Born, births  # noqa: E402

FOLDER = places.PYTORCH_VERSIONS
OTHERS = [version for version in places.RECORDED if version not in places.WHOLE]
RECORDINGS = sorted(
    path.relative_to(FOLDER) for version in OTHERS for path in places.of_torch(version).glob(f"steps/*{runs.SUFFIX}")
)
#: Peaks are the same; in BERT under 2.11 one of a thousand allocations lies elsewhere, and CUB's scan and unique in the
#: gradient of an embedding take 256 and 512 bytes less under CUDA 12.
LINED_UP_OTHERWISE = ("2.11/steps/hf-bert", "2.6/steps/gpt2_", "2.9/steps/gpt2_", "2.6/steps/hf-", "2.9/steps/hf-")
#: Seconds each; the others take longer.
QUICK = ("mlp_64", "mlp_256_none", "mlp_256_adamw_fp32_clip", "gpt_tiny_8_adamw_bf16", "gpt_tiny_8_adamw_fp32")
#: Versions whose rules all but a few show in others.
FEW_QUICK = {
    "2.7": ("mlp_64",),
    "2.8": ("mlp_1_", "mlp_64"),
    "2.10": ("mlp_1_", "mlp_64"),
    "2.12": ("mlp_64",),
    "2.14": ("gpt_tiny_8_adamw_fp32",),
}
#: FlashAttention 1, up to 2.1, kept where sequences begin, and summed in fp32 where keys are many: bytes of both peaks.
FIRST_FLASH = {
    "2.1/steps/gpt2_4_adamw_amp_3": (-12_288, 0),
    "2.1/steps/gpt2_drop_4_adamw_bf16": (-1_847_296, 16_777_216),
    "2.1/steps/gpt_tiny_8_adamw_bf16": (-4_096, 0),
    "2.1/steps/vit_s_16_adamw_amp": (-122_880, 0),
}
#: Of equal free blocks 2.12 takes the one that was made first: of tensors that go in one moment the order decides,
#: which is not known. Bytes of the allocated peak; the reserved one is equal.
ORDER_OF_FREES = {"2.12/steps/gpt2_8_adamw_amp_ckpt=1": -655_360}


def _is_quick(path: Path) -> bool:
    return path.name.startswith(FEW_QUICK.get(path.parts[0], QUICK))


def _recordings() -> list[Any]:
    return [pytest.param(path, marks=() if _is_quick(path) else pytest.mark.slow, id=str(path)) for path in RECORDINGS]


@pytest.mark.parametrize("path", _recordings())
def test_a_step_of_another_pytorch_is_predicted_to_the_byte(path: Path) -> None:
    name = path.name.removesuffix(runs.SUFFIX)
    if runs.load(name, FOLDER / path.parent).library:
        pytest.importorskip("transformers")
    compared = runs.compare(name, FOLDER / path.parent)
    assert path.parts[0] == versions.words(compared.recorded.torch_version)
    known = str(path).removesuffix(runs.SUFFIX)
    expected = FIRST_FLASH.get(known, (ORDER_OF_FREES.get(known, 0), 0))
    assert (compared.allocated_error_bytes, compared.reserved_error_bytes) == expected
    if known in FIRST_FLASH:
        return
    assert compared.match.share == 1 or (compared.match.share > 0.99 and str(path).startswith(LINED_UP_OTHERWISE))


def test_an_installed_pytorch_that_is_too_old_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And may be predicted with a newer one."""
    monkeypatch.setattr(versions, "installed_text", lambda: "2.5.1+cu124")
    with pytest.raises(UsageError, match=r"^torch 2.5.1\+cu124 is installed, and graphmem runs with 2.6 to 2.15; "):
        versions.version_named(None)
    assert versions.version_named("2.5") == (2, 5)


def test_the_recordings_span_the_versions() -> None:
    every = {versions.words(version) for version in versions.RECORDED}
    assert {path.parts[0] for path in RECORDINGS} == every - {versions.words(version) for version in places.WHOLE}


# --- one rule each ----------------------------------------------------------------------------------------------------


def born_under(version: tuple[int, int], step: Callable[[], object]) -> list[Born]:
    """The device storages of a step under a version, in order of birth."""
    run: Callable[[Any], Any] = lambda _: step()  # noqa: E731
    return births(capture(run, source="test", device=H100, torch_version=version).trace)


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("index", ["first token", "last token", "rows"])
@pytest.mark.parametrize(("version", "slices"), [((2, 8), True), ((2, 9), False)])
def test_a_whole_slice_has_a_gradient_of_its_own_up_to_2_8(index: str, version: tuple[int, int], slices: bool) -> None:
    rows = torch.zeros(3, dtype=torch.long)
    chosen: dict[str, tuple[Any, ...]] = {
        "first token": (slice(None), 0),
        "last token": (slice(None), -1, slice(None)),
        "rows": (slice(None), rows),
    }
    taken: dict[str, list[tuple[int, ...]]] = {
        "first token": [(4, 8, 64)],
        "last token": [(4, 64), (4, 8, 64)],
        "rows": [(4, 8, 64)],
    }

    def step() -> None:
        x = _leaf(4, 8, 64)
        parts = tuple(part.to("cuda") if isinstance(part, torch.Tensor) else part for part in chosen[index])
        out = x[parts]
        assert out.shape == ((4, 3, 64) if index == "rows" else (4, 64))
        out.sum().backward()

    born = [storage.bytes for storage in born_under(version, step) if storage.operator == "aten.slice_backward.default"]
    assert born == ([4 * math.prod(shape) for shape in taken[index]] if slices else [])


def test_indices_that_slice_nothing_whole_are_the_same_under_every_version() -> None:
    def step() -> None:
        x = _leaf(4, 8, 64)
        (x[1].sum() + x[..., None, 3].sum() + x[1:3, :8, 2].sum() + x[x > 1].sum()).backward()

    old, new = (capture(lambda _: step(), source="", device=H100, torch_version=v, data_dependent=0.0).trace
                for v in ((2, 8), (2, 9)))  # fmt: skip
    assert [s.bytes for s in births(old)] == [s.bytes for s in births(new)]


@pytest.mark.parametrize(
    ("version", "first"),
    [((2, 4), "aten.pow.Tensor_Scalar"), ((2, 6), "aten._to_copy.default"), ((2, 9), "aten._fused_rms_norm.default")],
)
def test_rms_norm_is_one_kernel_since_2_9(version: tuple[int, int], first: str) -> None:
    def step() -> None:
        torch.nn.RMSNorm(64, device="cuda", dtype=torch.bfloat16)(_leaf(4, 64, dtype=torch.bfloat16))

    normed = [storage for storage in born_under(version, step) if storage.module]
    assert normed[0].operator == first


@pytest.mark.parametrize(("version", "kept"), [((2, 4), False), ((2, 8), False), ((2, 9), True), ((2, 11), True)])
def test_a_product_of_one_row_takes_cublaslts_buffer_up_to_2_11(version: tuple[int, int], kept: bool) -> None:
    def step() -> None:
        for _ in range(2):
            F.linear(
                torch.zeros(1, 64, device="cuda"), torch.zeros(8, 64, device="cuda"), torch.zeros(8, device="cuda")
            )

    buffers = [storage for storage in born_under(version, step) if storage.bytes == LT_WORKSPACE]
    assert len(buffers) == (1 if kept else 2)
    assert not any(storage.bytes == LT_WORKSPACE for storage in born_under((2, 12), step))


def test_the_math_attention_computes_half_types_in_fp32_since_2_5() -> None:
    def step() -> None:
        query = torch.zeros(2, 4, 16, 64, device="cuda", dtype=torch.float16)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(query, query, query, is_causal=True)

    largest = {
        version: max(s.bytes for s in born_under(version, step) if s.category is not Category.WORKSPACE)
        for version in ((2, 4), (2, 5))
    }
    assert largest == {(2, 4): 2 * 4 * 16 * 64 * 2, (2, 5): 2 * 4 * 16 * 64 * 4}


def test_cudnn_of_the_wheels() -> None:
    assert [versions.wheel_cudnn((2, minor)) for minor in (4, 6, 7, 9, 11, 13, 14, 15, 20)] == [
        90100, 90100, 90501, 91002, 91900, 92000, 92400, 92600, 92600,
    ]  # fmt: skip


def _products() -> None:
    weight, bias = torch.zeros(64, 64, device="cuda"), torch.zeros(64, device="cuda")
    for _ in range(2):
        _ = weight @ weight
    _ = torch.addmm(bias, weight, weight)


@pytest.mark.parametrize(
    ("version", "variables", "taken"),
    [
        ((2, 14), {}, [LARGE_WORKSPACE]),
        ((2, 14), {"TORCH_CUBLAS_WORKSPACE_CACHE": "0"}, [LARGE_WORKSPACE]),
        ((2, 14), {"CUBLASLT_WORKSPACE_SIZE": "2048"}, [LARGE_WORKSPACE]),
        ((2, 14), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, [LARGE_WORKSPACE, LT_WORKSPACE]),
        ((2, 15), {}, [LARGE_WORKSPACE, LARGE_WORKSPACE, LT_WORKSPACE]),
        ((2, 15), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, [1 << 17, 1 << 17, LT_WORKSPACE]),
        ((2, 15), {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "2048"}, [2 << 20]),
        ((2, 15), {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}, [LARGE_WORKSPACE]),
        (
            (2, 15),
            {"TORCH_CUBLAS_WORKSPACE_CACHE": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"},
            [LARGE_WORKSPACE, LT_WORKSPACE],
        ),
        ((2, 11), {}, [LARGE_WORKSPACE, LT_WORKSPACE]),
        ((2, 11), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, [LARGE_WORKSPACE]),
        ((2, 11), {"CUBLASLT_WORKSPACE_SIZE": "2048"}, [LARGE_WORKSPACE, 2 << 20]),
        ((2, 6), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, [LARGE_WORKSPACE, LT_WORKSPACE]),
        ((2, 6), {"TORCH_BLAS_PREFER_CUBLASLT": "1"}, [LARGE_WORKSPACE, LT_WORKSPACE, LT_WORKSPACE, LT_WORKSPACE]),
        ((2, 11), {"TORCH_BLAS_PREFER_CUBLASLT": "1"}, [LARGE_WORKSPACE, LT_WORKSPACE]),
        ((2, 13), {"TORCH_BLAS_PREFER_CUBLASLT": "1"}, [LARGE_WORKSPACE]),
        ((2, 13), {"TORCH_BLAS_PREFER_CUBLASLT": "1", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, [LT_WORKSPACE]),
        ((2, 15), {"TORCH_BLAS_PREFER_CUBLASLT": "1"}, [LT_WORKSPACE, LT_WORKSPACE, LT_WORKSPACE]),
    ],
)
def test_workspaces_follow_the_variables_that_a_version_reads(
    version: tuple[int, int], variables: dict[str, str], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    found = [storage for storage in born_under(version, _products) if storage.category is Category.WORKSPACE]
    assert [storage.bytes for storage in found] == taken


@pytest.mark.parametrize("text", ["many", "-1", "1.5"])
def test_a_size_of_cublaslts_workspace_that_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", text)
    with pytest.raises(UsageError, match=r"CUBLASLT_WORKSPACE_SIZE=.* is not a number of KiB"):
        born_under((2, 15), _products)


@pytest.mark.parametrize(
    ("dtype", "bias", "beta", "fused"),
    [
        (torch.float32, (64,), 1, True),
        (torch.float32, (1, 64), 1, True),
        (torch.float32, (64, 1), 1, False),
        (torch.float32, (1,), 1, False),
        (torch.float32, (64,), 2, False),
        (torch.float32, (64, 64), 1, False),
        (torch.bfloat16, (64, 64), 1, True),
        (torch.bfloat16, (64, 64), 0.5, True),
        (torch.bfloat16, (64,), 0, False),
    ],
)
def test_2_15_gives_cublaslt_what_it_can_add(
    dtype: torch.dtype, bias: tuple[int, ...], beta: float, fused: bool
) -> None:
    """As seen of 2.15.0 on the stub driver."""

    def step() -> None:
        matrix = torch.zeros(64, 64, device="cuda", dtype=dtype)
        torch.addmm(torch.zeros(bias, device="cuda", dtype=dtype), matrix, matrix, beta=beta)

    found = [storage.bytes for storage in born_under((2, 15), step) if storage.category is Category.WORKSPACE]
    assert found == [LT_WORKSPACE if fused else LARGE_WORKSPACE]


def _group_norm(make: Callable[[], torch.Tensor], version: tuple[int, int]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Bytes of a forward and a backward pass, the factors left out, and strides of the output and of the gradient."""
    strides: list[tuple[int, ...]] = []

    def step() -> None:
        x = make().requires_grad_()
        out = F.group_norm(x, 8, torch.zeros(64, device="cuda", requires_grad=True))
        (gradient,) = torch.autograd.grad(out, x, torch.empty_like(out))
        strides.extend((out.stride(), gradient.stride()))

    born = [one for one in born_under(version, step) if "group_norm" in one.operator or "clone" in one.operator]
    return [one.bytes for one in born if one.bytes > 4096], strides


def _pictures() -> torch.Tensor:
    return torch.zeros(8, 64, 28, 28, device="cuda").to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("version", "copies", "keeps"), [((2, 13), 1, False), ((2, 14), 2, False), ((2, 15), 0, True), ((2, 16), 0, True)]
)
def test_group_norm_of_channels_last(version: tuple[int, int], copies: int, keeps: bool) -> None:
    """As recorded with 2.13.0, 2.14.1 and 2.15.0; a copy of 2.13 is kept for the backward pass."""
    size, lying, plain = 8 * 64 * 28 * 28 * 4, (50176, 1, 1792, 64), (50176, 784, 28, 1)
    born, strides = _group_norm(_pictures, version)
    assert born == [size] * (2 + copies)
    assert strides == [lying if keeps else plain] * 2


@pytest.mark.parametrize("version", [(2, 14), (2, 15)])
def test_group_norm_copies_what_is_sliced_since_2_14(version: tuple[int, int]) -> None:
    born, strides = _group_norm(lambda: torch.zeros(8, 100, 64, device="cuda").transpose(1, 2), version)
    assert born == [8 * 100 * 64 * 4] * 4
    assert strides == [(6400, 100, 1)] * 2


@pytest.mark.parametrize(("version", "fused"), [((2, 13), False), ((2, 14), True), ((2, 15), True)])
def test_attention_of_three_dimensions_is_fused_since_2_14(version: tuple[int, int], fused: bool) -> None:
    def step() -> None:
        query = _leaf(8, 128, 64)
        out = F.scaled_dot_product_attention(query, query, query)
        assert out.shape == (8, 128, 64)
        out.sum().backward()

    scores = 8 * 128 * 128 * 4
    assert (scores not in [storage.bytes for storage in born_under(version, step)]) == fused


@pytest.mark.parametrize("heads", [2, 1])
def test_fewer_key_heads_are_no_matter_for_efficient_attention_since_2_14(heads: int) -> None:
    """Recorded with 2.14.1 and 2.15.0: scores of every head (2.13) or gradients of every head."""
    gradients: list[tuple[int, ...]] = []

    def step() -> None:
        query = _leaf(2, 8, 256, 64)
        key, value = _leaf(2, heads, 256, 64), _leaf(2, heads, 256, 64)
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
        gradients.append(tuple(key.grad.shape))

    every_head, scores = 2 * 8 * 256 * 64 * 4, 2 * 8 * 256 * 256 * 4
    born = born_under((2, 14), step)
    assert sum(storage.label == "key gradient of every head" for storage in born) == 1
    assert max(s.bytes for s in born if s.category is not Category.WORKSPACE) < every_head + (1 << 20) < scores
    assert max(s.bytes for s in born_under((2, 13), step) if s.category is not Category.WORKSPACE) == scores
    assert set(gradients) == {(2, heads, 256, 64)}


@pytest.mark.parametrize(
    ("version", "variables", "text"),
    [
        ("2.6", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "default configuration"),
        ("2.9", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ("2.6", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        (
            "2.15",
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            "max_split_size_mb:64",
        ),
    ],
)
def test_the_allocators_variable_has_the_name_that_the_version_reads(
    version: str, variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert f"({text})" in graphmem.analyze(_linear, training=False, torch_version=version).allocator


@pytest.mark.parametrize("value", ["1", ""])
def test_a_process_without_the_caching_allocator_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", value)
    with pytest.raises(UsageError, match="PYTORCH_NO_CUDA_MEMORY_CACHING is set"):
        graphmem.analyze(_linear, training=False)


_LT, _OWN = LT_WORKSPACE, LARGE_WORKSPACE


@pytest.mark.parametrize(
    ("version", "by_row", "workspaces"),
    [
        ((2, 6), False, [_LT, _OWN, _LT]),
        ((2, 9), False, [_OWN, _LT]),
        ((2, 9), True, []),
        ((2, 11), True, [_OWN, _LT]),
        ((2, 13), True, [_OWN]),
        ((2, 15), False, [_LT, _LT]),
        ((2, 15), True, [_LT, _LT]),
    ],
)
def test_products_of_fp8_take_the_workspaces_of_cublaslt(
    version: tuple[int, int], by_row: bool, workspaces: list[int]
) -> None:
    """Two of them, as recorded with 2.6.0, 2.9.1, 2.11.0, 2.13.0 and 2.15.0."""

    def step() -> None:
        first = torch.empty(256, 512, device="cuda", dtype=torch.float8_e4m3fn)
        second = torch.empty(1024, 512, device="cuda", dtype=torch.float8_e4m3fn).t()
        of_first = torch.empty((256, 1) if by_row else (), device="cuda")
        of_second = torch.empty((1, 1024) if by_row else (), device="cuda")
        for _ in range(2):
            torch._scaled_mm(first, second, scale_a=of_first, scale_b=of_second, out_dtype=torch.bfloat16)

    assert [one.bytes for one in born_under(version, step) if one.category is Category.WORKSPACE] == workspaces


@pytest.mark.parametrize(("version", "fused", "left"), [("2.9", 2, 1), ("2.15", LT_WORKSPACE, LARGE_WORKSPACE)])
def test_cublaslt_can_be_told_to_leave_the_bias(
    version: str, fused: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workspaces of 2.9 (how many) and of 2.15 (the largest)."""

    def seen() -> list[int]:
        run = lambda: F.linear(torch.empty(8, 8, device="cuda"), _leaf(8, 8), _leaf(8))  # noqa: E731
        born = born_under(versions.version_named(version), run)
        return [one.bytes for one in born if one.category is Category.WORKSPACE]

    before = seen()
    monkeypatch.setenv("DISABLE_ADDMM_CUDA_LT", "1")
    of = len if version == "2.9" else max
    assert (of(before), of(seen())) == (fused, left)


def test_cublaslt_can_be_preferred_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function counts from there on, also against the variable; of vectors, only those of half types are products
    of matrices (seen of 2.15.0 on the stub driver)."""
    monkeypatch.setenv("TORCH_BLAS_PREFER_CUBLASLT", "1")

    def products() -> None:
        matrix, vector = torch.zeros(64, 64, device="cuda"), torch.zeros(64, device="cuda")
        _ = torch.backends.cuda.preferred_blas_library("cublaslt"), matrix @ matrix, matrix @ vector
        _ = matrix.half() @ vector.half(), torch.backends.cuda.preferred_blas_library("cublas")

    found = [one.bytes for one in born_under((2, 15), products) if one.category is Category.WORKSPACE]
    assert found == [LT_WORKSPACE, LARGE_WORKSPACE, LT_WORKSPACE]
    assert torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublas


def test_cudnn_attention_can_be_put_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def operators(version: tuple[int, int]) -> str:
        query = lambda: torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        step = lambda: F.scaled_dot_product_attention(query(), query(), query())  # noqa: E731
        return " ".join(one.operator for one in born_under(version, step))

    assert "cudnn_attention" in operators((2, 13))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert "flash_attention" in operators((2, 13))
    assert "cudnn_attention" not in operators((2, 13))


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2.6", "2.6.0", " 2.6.1 ", "2.6.0+cu124", "2.6.0a0+git1234", "2.6.0rc3"])
def test_spellings_of_a_version(text: str) -> None:
    assert versions.version_named(text) == (2, 6)


@pytest.mark.parametrize("text", ["", "2", "2.x", "2.6garbage", "torch 2.6", "-2.6"])
def test_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a version; write it like 2\.6"):
        versions.version_named(text)


@pytest.mark.parametrize("text", ["0.4", "1.4.0", "3.0"])
def test_a_version_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"accepted: 1\.5 to 2\.15"):
        versions.version_named(text)


def test_notes_name_both_versions_and_what_is_followed() -> None:
    assert versions.version_notes((2, 13), (2, 13)) == []
    other, cudnn = versions.version_notes((2, 6), (2, 13))
    assert "PyTorch 2.6 is predicted with PyTorch 2.13 installed" in other
    assert "cuDNN" in cudnn
    assert versions.beyond_known(versions.NEWEST) == []
    assert versions.beyond_known((2, 16)) == [Code.VERSION_NEWER.about(asked="2.16", newest="2.15")]


def _linear() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Linear(8, 8), torch.zeros(1, 8)


def test_a_version_beyond_the_known_is_in_the_headline() -> None:
    estimate = graphmem.analyze(_linear, training=False, torch_version="2.16")
    assert headlines(estimate) == ["PyTorch 2.16 is newer than 2.15, the newest known: the rules of 2.15 are applied."]


def test_another_versions_compiler_is_in_the_headline() -> None:
    """Installed is never 2.5, which the package does not compile under."""
    estimate = graphmem.analyze(_linear, training=graphmem.Inference(compile="default"), torch_version="2.5")
    (headline,) = headlines(estimate)
    assert "what 2.5's compiler fuses and saves instead is not known" in headline
    assert versions.other_compiler((2, 13), (2, 13)) == []


def test_variables_about_workspaces_are_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = graphmem.analyze(_linear, training=False).peak.allocated_bytes
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    estimate = graphmem.analyze(_linear, training=False)
    assert estimate.peak.allocated_bytes < usual
    assert "CUBLAS_WORKSPACE_CONFIG=:16:8 of the environment" in estimate.assumptions


def test_an_installed_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_text", lambda: "2.3.1")
    with pytest.raises(UsageError, match=r"torch 2\.3\.1 is installed"):
        versions.installed_version()
