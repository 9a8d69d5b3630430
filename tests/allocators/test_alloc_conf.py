"""Allocator settings are read as PyTorch reads them: what it takes, what it makes of it, and why it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.alloc_conf import UNLIMITED, AllocConf, parse_alloc_conf
from graphmem.base.versions import ALLOCATOR_OPTIONS, NEWEST
from graphmem.errors import UsageError
from graphmem.units import MIB
from tests import places
from tests.support.examples import examples

OFF = (0,) * 16


def test_defaults() -> None:
    conf = parse_alloc_conf("")
    assert conf == AllocConf()
    assert (conf.max_split_size_bytes, conf.max_non_split_rounding_bytes) == (UNLIMITED, 20 * MIB)
    assert (conf.large_segment_size_bytes, conf.roundup_power2_divisions) == (20 * MIB, OFF)
    assert (conf.per_process_memory_fraction, conf.expandable_segments) == (1.0, False)


def test_every_setting_that_changes_device_memory() -> None:
    conf = parse_alloc_conf(
        "expandable_segments:True, max_split_size_mb:512, large_segment_size_mb:64, max_non_split_rounding_mb:200,"
        "garbage_collection_threshold:0.8, roundup_power2_divisions:[256:1,512:2,1024:4,>:8],"
        "per_process_memory_fraction:0.5, throw_on_cudamalloc_oom:True, backend:native"
    )
    assert conf.expandable_segments
    assert conf.max_split_size_bytes == 512 * MIB
    assert conf.large_segment_size_bytes == 64 * MIB
    assert conf.max_non_split_rounding_bytes == 200 * MIB
    assert conf.garbage_collection_threshold == 0.8
    assert conf.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert conf.per_process_memory_fraction == 0.5
    assert conf.throw_on_cudamalloc_oom
    assert (conf.ignored, conf.remarks) == ((), ())


def test_the_rest_is_taken_and_listed() -> None:
    conf = parse_alloc_conf(
        "release_lock_on_hipmalloc:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8,"
        "pinned_reserve_segment_size_mb:512,pinned_use_background_threads:False,pinned_max_cached_size_mb:1"
    )
    assert conf.ignored == (
        ("release_lock_on_cudamalloc", "True"),
        ("pinned_use_cuda_host_register", "True"),
        ("pinned_num_register_threads", "8"),
        ("pinned_reserve_segment_size_mb", "512"),
        ("pinned_use_background_threads", "False"),
        ("pinned_max_cached_size_mb", "1"),
    )


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("8", (8,) * 16),
        ("1", (1,) * 16),
        ("[]", OFF),
        ("[4:2]", (2, 2, 2) + (0,) * 13),
        ("[1:8,64:4,256:2,>:1]", (8, 0, 0, 0, 0, 0, 4, 0, 2) + (1,) * 7),
        ("[>:4]", (0,) + (4,) * 15),
        ("[2:0,4:2]", (0, 0, 2) + (0,) * 13),
        ("[131072:2]", (2,) * 16),
        ("[32768:2,>:4]", (2,) * 16),
    ],
)
def test_divisions(text: str, slots: tuple[int, ...]) -> None:
    assert parse_alloc_conf(f"roundup_power2_divisions:{text}").roundup_power2_divisions == slots


#: Tried on the parser of torch 2.13 (``torch._C._accelerator_setAllocatorSettings``): these it takes ...
TAKEN = [
    "max_split_size_mb,128",
    "max_split_size_mb:128MB",
    "max_split_size_mb:-1",
    "max_split_size_mb:20",
    " max_split_size_mb : 1 2 8 ",
    "max_split_size_mb:128,",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[]",
    "garbage_collection_threshold:0.5x",
    "garbage_collection_threshold:1e-3",
    "garbage_collection_threshold:0x1p-1",
    "large_segment_size_mb:11",
    "",
    "   ",
    "max_split_size_mb:128,max_split_size_mb:256",
    "max_split_size_mb:+128",
    "max_split_size_mb: 0128",
    "roundup_power2_divisions:8,expandable_segments:True",
]
#: ... and these not, with its own words where it has any.
REFUSED = {
    "max_split_size_mb:abc": "not a whole number",
    "max_split_size_mb:": "ends where a value",
    "max_split_size_mb": "ends where a value",
    "max_split_size_mb:19": "max_split_size_mb too small, must be >= 20",
    "expandable_segments:true": "Expected 'True' or 'False' but got 'true'",
    "expandable_segments:1": "Expected 'True' or 'False'",
    "expandable_segments:[True]": "Expected 'True' or 'False'",
    "expandable_segments:True max_split_size_mb:128": "got 'Truemax_split_size_mb'",
    "roundup_power2_divisions:3": "the divisions has to be power of 2",
    "roundup_power2_divisions:0": "the divisions has to be power of 2",
    "roundup_power2_divisions:[3:2]": "the intervals have to be power of 2",
    "roundup_power2_divisions:[2:3]": "has to be power of 2 or 0 to disable",
    "roundup_power2_divisions:[2:4": "ends where a value",
    "roundup_power2_divisions:[2:4 8:2]": "has to be power of 2 or 0",
    "garbage_collection_threshold:0": r"garbage_collect_threshold is invalid, set it in \(0.0, 1.0\)",
    "garbage_collection_threshold:1.0": "garbage_collect_threshold is invalid",
    "garbage_collection_threshold:nan": "garbage_collect_threshold is invalid",
    "garbage_collection_threshold:-0.1": "garbage_collect_threshold is invalid",
    "large_segment_size_mb:10": "large_segment_size_mb must be > 10 MB",
    "large_segment_size_mb:64,max_split_size_mb:32": "must be >= 64",
    "max_split_size_mb:32,large_segment_size_mb:64": "must be >= 64",
    "max_non_split_rounding_mb:10": "max_non_split_rounding_mb too small, must be >= 20",
    "max_split_size_mb:99999999999999999999999": "out of range",
    "max_split_size_mb:1.5": "must be >= 20",
    "max_split_size_mb:[128]": "not a whole number",
    "max_split_size_mb:0x80": "must be >= 20",
}


@pytest.mark.parametrize("text", TAKEN)
def test_what_torch_takes(text: str) -> None:
    parse_alloc_conf(text)


@pytest.mark.parametrize("text", REFUSED)
def test_what_torch_refuses(text: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[text]):
        parse_alloc_conf(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bogus:1", "Unrecognized key 'bogus' in CUDA allocator config of torch 2.15; accepted: backend, "),
        ("MAX_SPLIT_SIZE_MB:128", "Unrecognized key"),
        (",max_split_size_mb:128", "Unrecognized key ','"),
        ("backend:other", "options are native and cudaMallocAsync"),
        ("per_process_memory_fraction:1.5", "0.0, 1.0"),
        ("pinned_num_register_threads:3", "power of 2"),
        ("pinned_num_register_threads:256", "at most 128"),
    ],
)
def test_what_the_cuda_part_refuses(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason.replace(".", r"\.")):
        parse_alloc_conf(text)


def test_an_error_names_the_key_and_what_is_accepted() -> None:
    with pytest.raises(UsageError) as caught:
        parse_alloc_conf("expandable_segments:True,max_split_size_mb:8")
    message = str(caught.value)
    assert "key 'max_split_size_mb'" in message
    assert "accepted: whole MiB, at least large_segment_size_mb (20)" in message


def test_surprising_readings_are_remarked() -> None:
    assert parse_alloc_conf("max_split_size_mb:128MB").remarks == ("max_split_size_mb: PyTorch reads '128MB' as 128",)
    assert "PyTorch takes ','" in parse_alloc_conf("max_split_size_mb,128").remarks[0]
    assert parse_alloc_conf("garbage_collection_threshold:0.5x").garbage_collection_threshold == 0.5


@pytest.mark.parametrize(
    ("key", "value", "since"),
    [
        ("max_non_split_rounding_mb", "32", (2, 6)),
        ("per_process_memory_fraction", "0.5", (2, 10)),
        ("large_segment_size_mb", "32", (2, 11)),
        ("throw_on_cudamalloc_oom", "True", (2, 12)),
    ],
)
def test_keys_begin_with_a_version(key: str, value: str, since: tuple[int, int]) -> None:
    assert ALLOCATOR_OPTIONS[key] == since
    parse_alloc_conf(f"{key}:{value}", since)
    before = (since[0], since[1] - 1)
    with pytest.raises(UsageError, match=rf"Unrecognized key '{key}'.*it came with torch {since[0]}\.{since[1]}"):
        parse_alloc_conf(f"{key}:{value}", before)


def test_up_to_2_8_separators_are_checked_and_a_split_size_of_20_is_refused() -> None:
    with pytest.raises(UsageError, match="expected ':', found ','"):
        parse_alloc_conf("max_split_size_mb,128", (2, 8))
    with pytest.raises(UsageError, match="must be > 20"):
        parse_alloc_conf("max_split_size_mb:20", (2, 8))
    assert parse_alloc_conf("max_split_size_mb:21", (2, 4)).max_split_size_bytes == 21 * MIB


PIECES = st.sampled_from(
    [
        *ALLOCATOR_OPTIONS,
        ":",
        ",",
        "[",
        "]",
        ">",
        "True",
        "False",
        "1",
        "0",
        "8",
        "20",
        "64",
        "0.5",
        "-1",
        " ",
        "x",
        "native",
        "1e9",
    ]
)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=30), st.sampled_from([(2, 4), (2, 9), (2, 13)]))
def test_nothing_but_a_usage_error_comes_out(text: str, version: tuple[int, int]) -> None:
    try:
        conf = parse_alloc_conf(text, version)
    except UsageError:
        return
    assert conf.large_segment_size_bytes > 10 * MIB
    assert len(conf.roundup_power2_divisions) == 16


GENERIC = ("expandable_segments", "garbage_collection_threshold", "large_segment_size_mb", "max_split_size_mb",
           "max_non_split_rounding_mb", "roundup_power2_divisions", "pinned_use_background_threads")  # fmt: skip
VALUES = st.sampled_from(
    ["True", "False", "0", "1", "8", "11", "20", "64", "0.5", "1.0", "-1", "x", "[2:4]", "[2:4,>:8]", "[1:3]", "[", ""]
)
ITEMS = st.tuples(st.sampled_from(GENERIC), st.sampled_from([":", ",", " : "]), VALUES).map("".join)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(ITEMS, max_size=4).map(",".join))
def test_the_real_parser_agrees(text: str) -> None:
    """Only for the generic keys: the CUDA part of the parser is not in a CPU build."""
    torch = pytest.importorskip("torch")
    if (places.installed_torch() or NEWEST) < NEWEST:
        pytest.skip("an older parser than the newest that is known")
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        real = True
    except (ValueError, RuntimeError, IndexError):
        real = False
    finally:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings("")
    try:
        parse_alloc_conf(text)
        ours = True
    except UsageError as error:
        if "Unrecognized key" in str(error):
            return  # a CPU build passes over keys that it does not know
        ours = False
    assert ours == real
