"""Models by their Hub names: the local cache, the table, and what a name may leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphmem.errors import SourceError
from graphmem.sources import hub
from graphmem.sources.hints import hint_for_name

#: Parameters as the models' own pages and checkpoints count them (tied weights once).
PARAMETERS = {
    "01-ai/Yi-1.5-34B": 34_388_917_248,
    "01-ai/Yi-1.5-9B": 8_829_407_232,
    "01-ai/Yi-34B": 34_388_917_248,
    "ai21labs/AI21-Jamba-1.5-Mini": 51_570_323_328,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/Olmo-3-7B": 7_298_011_136,
    "arcee-ai/AFM-4.5B": 4_619_189_760,
    "BAAI/bge-base-en-v1.5": 109_482_240,
    "BAAI/bge-large-en-v1.5": 335_141_888,
    "BAAI/bge-m3": 567_754_752,
    "BAAI/bge-reranker-v2-m3": 567_755_777,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21_825_437_888,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-7b1": 7_069_016_064,
    "ByteDance-Seed/Seed-OSS-36B": 36_151_104_512,
    "codellama/CodeLlama-13b": 13_016_028_160,
    "codellama/CodeLlama-34b": 33_743_970_304,
    "codellama/CodeLlama-7b": 6_738_546_688,
    "CohereForAI/aya-expanse-8b": 8_028_033_024,
    "CohereForAI/c4ai-command-a-03-2025": 111_057_580_032,
    "CohereForAI/c4ai-command-r-08-2024": 32_296_476_672,
    "CohereForAI/c4ai-command-r-v01": 34_980_831_232,
    "databricks/dbrx": 131_596_523_520,
    "deepseek-ai/deepseek-coder-33b": 33_342_991_360,
    "deepseek-ai/deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-ai/deepseek-llm-7b": 6_910_365_696,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "distilbert/distilbert-base-uncased": 66_985_530,
    "distilbert/distilgpt2": 81_912_576,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "EleutherAI/gpt-neo-125m": 125_198_592,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "facebook/bart-base": 139_420_416,
    "facebook/bart-large": 406_291_456,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-6.7b": 6_658_473_984,
    "FacebookAI/roberta-base": 124_697_433,
    "FacebookAI/roberta-large": 355_412_057,
    "FacebookAI/xlm-roberta-base": 278_295_186,
    "google-bert/bert-base-uncased": 109_514_298,
    "google-bert/bert-large-uncased": 335_174_458,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "google-t5/t5-small": 60_506_624,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-3-12b": 12_187_325_040,
    "google/gemma-3-1b": 999_885_952,
    "google/gemma-3-27b": 27_432_406_640,
    "google/gemma-3-4b": 4_300_079_472,
    "google/gemma-4-31b": 31_273_086_512,
    "google/gemma-7b": 8_537_680_896,
    "google/vit-base-patch16-224": 86_567_656,
    "google/vit-large-patch16-224": 304_326_632,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "ibm-granite/granite-3.1-8b": 8_170_848_256,
    "ibm-granite/granite-3.3-8b": 8_170_864_640,
    "ibm-granite/granite-4.0-h-small": 32_207_337_984,
    "intfloat/e5-mistral-7b-instruct": 7_110_660_096,
    "intfloat/multilingual-e5-large": 559_890_432,
    "LGAI-EXAONE/EXAONE-4.0-32B": 32_003_216_384,
    "LiquidAI/LFM2-8B-A1B": 8_339_929_856,
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": 8_030_807_584,
    "llava-hf/llava-v1.6-mistral-7b": 7_566_747_648,
    "meta-llama/Llama-2-13b": 13_015_864_320,
    "meta-llama/Llama-2-70b": 68_976_648_192,
    "meta-llama/Llama-2-7b": 6_738_415_616,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-11B-Vision": 10_642_941_475,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-4-Maverick-17B-128E": 401_583_781_376,
    "meta-llama/Llama-4-Scout-17B-16E": 108_641_793_536,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/Phi-3.5-MoE-instruct": 41_873_153_344,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "MiniMaxAI/MiniMax-M2": 228_689_748_992,
    "mistral-community/pixtral-12b": 12_682_739_712,
    "mistralai/Codestral-22B-v0.1": 22_247_282_688,
    "mistralai/Ministral-8B-2410": 8_019_808_256,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Large-2407": 122_610_069_504,
    "mistralai/Mistral-Nemo-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-2501": 23_572_403_200,
    "mistralai/Mistral-Small-3.1-24B-2503": 24_011_361_280,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mosaicml/mpt-7b": 6_649_286_656,
    "NousResearch/Hermes-2-Pro-Llama-3-8B": 8_030_523_392,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": 31_577_937_344,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-xl": 1_557_611_200,
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/whisper-base": 72_593_920,
    "openai/whisper-large-v3": 1_543_490_560,
    "openai/whisper-large-v3-turbo": 808_878_080,
    "openai/whisper-medium": 763_857_920,
    "openai/whisper-small": 241_734_912,
    "openai/whisper-tiny": 37_760_640,
    "OpenGVLab/InternVL3-8B-hf": 7_944_373_760,
    "OpenGVLab/InternVL3_5-8B-HF": 8_528_318_464,
    "Qwen/Qwen1.5-14B": 14_167_290_880,
    "Qwen/Qwen1.5-7B": 7_721_324_544,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "Qwen/Qwen2-Audio-7B": 8_397_094_912,
    "Qwen/Qwen2-VL-2B": 2_208_985_600,
    "Qwen/Qwen2-VL-7B": 8_291_375_616,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-Omni-7B": 10_732_225_408,
    "Qwen/Qwen2.5-VL-32B": 33_452_718_336,
    "Qwen/Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen/Qwen2.5-VL-72B": 73_410_777_344,
    "Qwen/Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-Coder-480B-A35B": 480_154_875_392,
    "Qwen/Qwen3-VL-235B-A22B": 235_670_022_896,
    "Qwen/Qwen3-VL-2B": 2_127_532_032,
    "Qwen/Qwen3-VL-30B-A3B": 31_070_754_032,
    "Qwen/Qwen3-VL-4B": 4_437_815_808,
    "Qwen/Qwen3-VL-8B": 8_767_123_696,
    "Qwen/Qwen3.5-27B": 27_356_728_560,
    "Qwen/Qwen3.5-35B-A3B": 35_107_181_936,
    "rednote-hilab/dots.llm1.inst": 142_774_373_888,
    "sentence-transformers/all-MiniLM-L6-v2": 22_713_216,
    "Skywork/Skywork-Reward-Llama-3.1-8B": 7_504_928_768,
    "state-spaces/mamba-2.8b-hf": 2_768_345_600,
    "swiss-ai/Apertus-8B-2509": 8_053_338_176,
    "tencent/Hunyuan-A13B": 80_393_183_232,
    "THUDM/GLM-4-32B-0414": 32_566_081_536,
    "THUDM/GLM-4-9B-0414": 9_400_279_040,
    "tiiuae/falcon-40b": 41_303_293_952,
    "tiiuae/falcon-7b": 6_921_720_704,
    "tiiuae/falcon-mamba-7b": 7_272_665_088,
    "tiiuae/Falcon3-10B": 10_305_653_760,
    "tiiuae/Falcon3-7B": 7_455_550_464,
    "TinyLlama/TinyLlama-1.1B": 1_100_048_384,
    "upstage/SOLAR-10.7B-v1.0": 10_731_524_096,
    "zai-org/GLM-4.5V": 107_744_743_936,
    "zai-org/GLM-4.7-Flash": 29_943_390_976,
    "Zyphra/Zamba2-7B": 7_356_749_648,
}
FAST = ("openai-community/gpt2", "google-t5/t5-small", "openai/whisper-tiny", "HuggingFaceTB/SmolLM2-135M")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("meta-llama/Llama-3-70B", "meta-llama/Meta-Llama-3-70B"),
        ("Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("gemma-2-2b-it", "google/gemma-2-2b"),
        ("CohereLabs/aya-expanse-8b", "CohereForAI/aya-expanse-8b"),
        ("zai-org/GLM-4-9B-0414", "THUDM/GLM-4-9B-0414"),
        ("unsloth/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("NousResearch/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"),
        ("unsloth/gpt-oss-20b-BF16", None),
        ("roberta", None),
        ("someone/Llama-3.1-8B", None),
    ],
)
def test_a_name_may_leave_out_who_made_it_and_what_it_was_tuned_for(name: str, meant: str | None) -> None:
    assert hub.known_model(name) == meant


def test_a_bare_name_of_the_table_is_no_file_for_the_dot_in_it() -> None:
    assert hint_for_name("Llama-3.1-8B").startswith("write hf:Llama-3.1-8B, which is meta-llama/Llama-3.1-8B in")
    assert hint_for_name("model.onxx") == ""
    assert hint_for_name("src/train.py --batch 8").endswith("graphmem run src/train.py --batch 8")


def test_every_name_of_the_table_means_itself() -> None:
    for name in hub.known_models():
        assert hub.known_model(name) == hub.known_model(name.split("/")[-1]) == name


def test_the_cache_comes_first_and_its_main_branch_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--gpt2-of--mine"
    for revision in ("aaa", "bbb"):
        (model / "snapshots" / revision).mkdir(parents=True)
        (model / "snapshots" / revision / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaa\n")
    assert hub.cached_configuration("gpt2-of/mine") == model / "snapshots" / "aaa" / "config.json"
    assert hub.cached_configuration("gpt2-of/other") is None
    assert hub.cached_configuration("../../etc") is None


def test_a_model_of_the_table_says_so_and_an_unknown_name_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from graphmem.sources.huggingface import load_huggingface

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert any("openai-community/gpt2-medium" in note for note in load_huggingface("gpt2-medium").notes)
    with pytest.raises(SourceError, match="did you mean google-bert/bert-base-uncased") as error:
        load_huggingface("bert-bse-uncased")
    assert "\n" not in str(error.value)


def test_a_folder_in_the_place_of_a_model_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from graphmem.sources.huggingface import load_huggingface

    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.chdir(tmp_path)
    assert any("gpt2 is the folder of that name here" in note for note in load_huggingface("gpt2").notes)
    assert not any("folder" in note for note in load_huggingface(str(tmp_path / "gpt2")).notes)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PARAMETERS]
)
def test_the_table_has_the_shapes_of_the_models(name: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    values = json.loads(json.dumps(hub.known_models()[name]))
    values.pop("quantization_config", None)  # counted unpacked
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    with torch.device("meta"):
        model = getattr(transformers, values["architectures"][0])(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
