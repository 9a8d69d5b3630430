"""Models that take images in vLLM: what is profiled, what is refused, what a reader is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphmem
from graphmem.devices import device_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.serving.vllm.encoders import budget, parts, qwen
from graphmem.serving.vllm.engine import VLLM
from graphmem.serving.vllm.run import Batch, Run
from tests.recorded.serving import encoders, predicted, question
from tests.support.examples import examples

HEARD = ("whisper-large-v3-l4", "glm4.1v-9b-l40s")
QWEN, LLAVA, GEMMA = "qwen2.5-vl-7b-video", "llava-1.5-7b", "gemma3-4b-images"


def asked(name: str, *arguments: tuple[str, str], **changes: Any) -> Question:
    return question(name, encoders()[name]).with_(arguments=(("outside", "0"), *arguments), **changes)


def served(name: str, *arguments: tuple[str, str], **changes: Any) -> Served:
    return VLLM().serve(asked(name, *arguments, **changes))


def parts_of(answer: Served) -> dict[str, int]:
    return {part.name: part.bytes for part in answer.parts}


#: What the engine has consumed after its profile run.
HELD = ("weights", "buffers for batches", "buffers per sequence", "workspaces", "segment slack")


@pytest.mark.parametrize("name", list(encoders()))
def test_starts_with_encoders_are_the_engines(name: str) -> None:
    """Weights and buffers, the encoder's profile run, what is kept of it, graphs: all to the byte."""
    run, answer = encoders()[name], predicted(name)
    parts = {part.name: part.bytes for part in answer.parts}
    assert answer.kv_cache.available_bytes == run["available"]
    assert answer.kv_cache.blocks == run["blocks"]
    assert parts["weights"] == run["weights"]
    assert parts["activation peak"] == run["headroom"]
    assert parts.get("CUDA graphs, estimated", 0) == run["graphs_estimate"]
    assert sum(parts.get(part, 0) for part in HELD) == run["consumed"]
    wanted = run["resolved"] | {"model_runner": run["resolved"]["model_runner"].upper()}
    assert {key: answer.settings[key] for key in wanted} == wanted


def test_one_item_of_the_largest_modality_fits_always() -> None:
    batch = Batch(tokens=2048, requests=64, length=8192, block_size=16)
    found = budget.profiled({"image": 576, "video": 4096}, {"image": 999, "video": 999}, batch)
    assert found == budget.Items("video", 1, 4096, 4096)
    assert budget.profiled({"image": 576, "video": 4096}, {"image": 2, "video": 0}, batch) == budget.Items(
        "image", 3, 576, 2048
    )
    assert budget.profiled({"image": 576}, {"image": 0}, batch) is None


def test_requests_and_their_limits_bound_the_items() -> None:
    batch = Batch(tokens=65536, requests=2, length=4096, block_size=16)
    assert budget.profiled({"image": 256}, {"image": 3}, batch) == budget.Items("image", 6, 256, 65536)
    assert budget.profiled({"image": 256}, {"image": 999}, batch) == budget.Items("image", 32, 256, 65536)


@given(patches=st.integers(1, 20_000))
def test_the_largest_image_is_as_square_as_its_patches_allow(patches: int) -> None:
    down, across = qwen._largest(patches)
    assert down <= across <= 200 * down
    assert down * across <= patches
    assert patches - down * across <= 200  # a multiple of what makes the sides near enough is never far


def test_keys_are_cut_where_one_sequence_does_not_fill_the_card() -> None:
    """1,025 patches of InternVL are 6 blocks of queries for 16 heads, 96 of 132 multiprocessors: 4 parts fill 0.97."""
    run = Run("test", device_named("H100"), 0, Batch(8192, 64, 8192, 16), 1, "")
    tile, flat = parts.Widths(1024, 4096, 16, 2), parts.Widths(1152, 4304, 16, 2)
    assert parts._splits(run, parts.Sequences(65600, 64, 1025), 16, tile.head_dim) == 4
    assert parts._splits(run, parts.Sequences(8078, 14, 577), 16, tile.head_dim) == 1  # four blocks of keys
    assert parts._splits(run, parts.Sequences(4096, 1, 4096), 16, flat.head_dim) == 1  # 352 blocks of queries
    assert parts._splits(run, parts.Sequences(65600, 1000, 1025), 16, tile.head_dim) == 1
    older = Run("test", device_named("A100-80GB"), 0, Batch(8192, 64, 8192, 16), 1, "")
    assert parts._splits(older, parts.Sequences(65600, 64, 1025), 16, tile.head_dim) == 1


def test_nothing_of_the_encoder_is_loaded_where_nothing_may_be_encoded() -> None:
    with_images = parts_of(served(QWEN))
    for alone in (
        served(QWEN, ("language_model_only", "true")),
        served(QWEN, ("limit_mm_per_prompt", '{"image": 0, "video": 0}')),
    ):
        assert parts_of(alone)["weights"] < with_images["weights"]
        assert not any("encoder" in note for note in alone.notes)
    images = served(QWEN, ("limit_mm_per_prompt", '{"video": 0}'))
    assert parts_of(images)["weights"] == with_images["weights"]


def test_what_is_profiled_is_told() -> None:
    assert "the encoder is profiled with 14 image items of 576 tokens" in " ".join(served(LLAVA).notes)
    told = " ".join(served(LLAVA, ("skip_mm_profiling", "true")).notes)
    assert "not profiled" in told


def test_smaller_images_leave_more_for_the_cache() -> None:
    small = served(QWEN, ("mm_processor_kwargs", '{"max_pixels": 1003520}'), ("limit_mm_per_prompt", '{"video": 0}'))
    nested = served(
        QWEN, ("mm_processor_kwargs", '{"images_kwargs": {"max_pixels": 1003520}}'),
        ("limit_mm_per_prompt", '{"video": 0}'),
    )  # fmt: skip
    assert small.kv_cache.blocks == nested.kv_cache.blocks > served(QWEN).kv_cache.blocks


def test_leaving_a_modality_out_is_among_what_brings_more(tmp_path: Path) -> None:
    run = encoders()[QWEN]
    for name, values in (("config.json", run["model_config"]), *run["files"].items()):
        (tmp_path / name).write_text(json.dumps(values))
    found = graphmem.serve(
        str(tmp_path), gpu="H100", enforce_eager=True, arguments=(("limit_mm_per_prompt", '{"image": 3}'),)
    )
    options = [change.option for change in found.changes]
    assert "--language-model-only" in options
    assert '--limit-mm-per-prompt \'{"image": 3, "video": 0}\'' in options


def test_without_the_processors_file_usual_sizes_are_taken_and_told() -> None:
    run = encoders()[QWEN]
    model = ServedModel("qwen", run["model_config"])
    answer = VLLM().serve(asked(QWEN).with_(model=model))
    assert answer.kv_cache.blocks == run["blocks"]
    assert any("preprocessor_config.json" in note for note in answer.notes)


def test_configurations_of_transformers_5_are_the_same_model() -> None:
    """The language model's values in a configuration of their own."""
    config = dict(encoders()[QWEN]["model_config"])
    outer = ("architectures", "model_type", "vision_config", "torch_dtype", "image_token_id", "video_token_id")
    text = {name: value for name, value in config.items() if name not in outer} | {"model_type": "qwen2_5_vl_text"}
    nested = {name: config[name] for name in outer} | {"text_config": text}
    answer = VLLM().serve(asked(QWEN).with_(model=ServedModel("qwen", nested)))
    assert answer.kv_cache.blocks == encoders()[QWEN]["blocks"]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (QWEN, (("limit_mm_per_prompt", '{"audio": 1}'),), "accepted for this model: image, video"),
        (QWEN, (("limit_mm_per_prompt", '{"image": -1}'),), "whole number"),
        (QWEN, (("limit_mm_per_prompt", '{"image": {"count": 1, "width": 9}}'),), "'width' of image"),
        (QWEN, (("mm_processor_kwargs", "7"),), "JSON object"),
        (QWEN, (("mm_processor_kwargs", '{"max_pixels": 1}'),), "less than one patch"),
        (QWEN, (("mm_processor_kwargs", '{"max_pixels": "many"}'),), "max_pixels"),
        (QWEN, (("mm_processor_kwargs", '{"do_resize": false}'),), "'do_resize' of mm_processor_kwargs"),
        (QWEN, (("mm_processor_kwargs", '{"images_kwargs": 3}'),), "accepted: an object"),
        (GEMMA, (("mm_processor_kwargs", '{"do_pan_and_scan": true}'),), "'do_pan_and_scan' of mm_processor_kwargs"),
        (QWEN, (("enable_lora", "true"),), "adapters of a model with an encoder"),
        (QWEN, (("pipeline_parallel_size", "2"),), "a pipeline of a model with an encoder"),
        (LLAVA, (("speculative_config", '{"method": "ngram", "num_speculative_tokens": 2}'),), "drafts"),
    ],
)
def test_what_is_not_followed_is_refused_in_one_line(
    name: str, arguments: tuple[tuple[str, str], ...], words: str
) -> None:
    with pytest.raises(GraphmemError, match=words) as refused:
        served(name, *arguments)
    assert "\n" not in str(refused.value)


def test_encoders_by_items_have_all_weights_on_every_card() -> None:
    option = ("mm_encoder_tp_mode", "data")
    assert served(QWEN, option).kv_cache.blocks == served(QWEN).kv_cache.blocks
    shared, whole = (parts_of(served(QWEN, *more, tensor_parallel_size=2)) for more in ((), (option,)))
    assert whole["weights"] > shared["weights"]
    assert parts_of(served(LLAVA, option, tensor_parallel_size=2)) == parts_of(served(LLAVA, tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {"model_type": "eva"}}, "not followed"),
        ({"vision_config": None}, "no vision_config"),
        ({"vision_config": 3}, "accepted: an object"),
        ({"vision_feature_layer": 99}, "vision_feature_layer"),
        (
            {"vision_config": {"model_type": "clip_vision_model", "hidden_size": 1000, "num_attention_heads": 1}},
            "heads",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "llava_next"}, "image_grid_pinpoints"),
    ],
)
def test_encoders_that_are_not_known_are_refused(changes: dict[str, Any], words: str) -> None:
    config = encoders()[LLAVA]["model_config"] | changes
    with pytest.raises(UsageError, match=words):
        VLLM().serve(asked(LLAVA).with_(model=ServedModel("one", config)))


def test_tiles_of_images_need_the_processors_word() -> None:
    vision = {
        "model_type": "internvl_vision",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "image_size": [448, 448],
        "patch_size": [14, 14],
    }
    text = encoders()[QWEN]["model_config"] | {"model_type": "qwen2", "rope_scaling": None}
    config = {"model_type": "internvl", "vision_config": vision, "text_config": text, "torch_dtype": "bfloat16"}
    question = asked(QWEN).with_(model=ServedModel("one", config))
    with pytest.raises(UsageError, match="crop_to_patches"):
        VLLM().serve(question)
    tiles = (("outside", "0"), ("mm_processor_kwargs", '{"crop_to_patches": true}'))
    assert any("tokens" in note for note in VLLM().serve(question.with_(arguments=tiles)).notes)


@settings(max_examples=examples(40), deadline=None)
@given(
    name=st.sampled_from(
        [QWEN, LLAVA, GEMMA, "mistral-small-3.1", "internvl3-8b", "qwen3-vl-8b", "llava-next-7b", *HEARD]
    ),
    part=st.sampled_from(["", "vision_config", "text_config"]),
    index=st.integers(0, 60),
    value=st.sampled_from([None, 0, -1, 1, 7, "x", [], {}, [1, 2], 1e9, 1 << 40, True, 0.5]),
)
def test_any_value_is_an_answer_or_one_line(name: str, part: str, index: int, value: Any) -> None:
    config = json.loads(json.dumps(encoders()[name]["model_config"]))
    changed = config.get(part, config) if part else config
    changed[sorted(changed)[index % len(changed)]] = value
    question = asked(name, enforce_eager=True)
    said = ""
    try:
        VLLM().serve(question.with_(model=replace(question.model, config=config)))
    except GraphmemError as error:
        said = str(error)
    assert "\n" not in said


def test_heads_that_cards_do_not_divide_are_refused() -> None:
    config = json.loads(json.dumps(encoders()[GEMMA]["model_config"]))
    config["vision_config"]["num_attention_heads"] = 9
    with pytest.raises(UsageError, match="the encoder's heads"):
        VLLM().serve(asked(GEMMA, tensor_parallel_size=2).with_(model=ServedModel("one", config)))


def test_an_unknown_family_names_those_that_are_known() -> None:
    config = encoders()[LLAVA]["model_config"] | {"model_type": "newcomer"}
    with pytest.raises(UsageError, match=r"model_type 'newcomer'.*qwen2_5_vl.*--language-model-only"):
        VLLM().serve(asked(LLAVA).with_(model=ServedModel("one", config)))
    alone = asked(LLAVA, ("language_model_only", "true"))
    assert VLLM().serve(alone.with_(model=ServedModel("one", config))).kv_cache.blocks > 0


def test_old_cards_are_refused() -> None:
    model = ServedModel("one", encoders()[LLAVA]["model_config"])
    with pytest.raises(UsageError, match="compute capability"):
        VLLM().serve(Question(model, device_named("T4"), dtype="float16"))
