"""Logs as people paste them: cut off at the top, of several services, without the model's files, on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphmem.serving.configurations import model_named, model_of_log
from graphmem.serving.from_log import LogReport, compared
from graphmem.units import GIB

#: The end of a start, without its version and its options.
END = """\
INFO 03-01 10:30:42 model_runner.py:1110] Starting to load model ../models/Qwen2.5-Math-1.5B...
INFO 03-01 10:30:55 model_runner.py:1115] Loading model weights took 2.8797 GB
INFO 03-01 10:30:57 worker.py:267] the current vLLM instance can use total_gpu_memory (22.06GiB) x \
gpu_memory_utilization (0.90) = 19.85GiB
INFO 03-01 10:30:57 worker.py:267] model weights take 2.88GiB; non_torch_memory takes 0.05GiB; PyTorch activation \
peak memory takes 1.40GiB; the rest of the memory reserved for KV Cache is 15.52GiB.
INFO 03-01 10:30:57 executor_base.py:110] # CUDA blocks: 36332, # CPU blocks: 9362
INFO 03-01 10:30:57 executor_base.py:115] Maximum concurrency for 4096 tokens per request: 141.92x
"""
START = (
    "(APIServer pid=1) INFO [api_server.py:1354] vLLM API server version 0.13.0\n"
    "(APIServer pid=1) INFO [utils.py:253] non-default args: {'model': '%s', 'max_model_len': 8192, "
    "'enforce_eager': True}\n"
    "(EngineCore_DP0 pid=14) INFO [gpu_worker.py:375] Available KV cache memory: %s GiB\n"
)
SGLANG = """\
$ python -m sglang.launch_server \\
    --model Qwen/Qwen3-32B \\
    --mem-fraction-static 0.9 --context-length 8192
[2026-09-20 01:05:00] Load weight end. type=Qwen3ForCausalLM, avail mem=17.40 GB, mem usage=61.07 GB.
[2026-09-20 01:05:01] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 39078, K size: 4.77 GB, V size: 4.77 GB
"""
LLAMA_CPP = """\
llama_model_loader: - kv  15:                     llama.embedding_length u32              = 4096
llama_model_loader: - kv  26:                      tokenizer.ggml.tokens arr[str,128256]  = ["!", "\\"", "#", ...
print_info: arch                  = llama
print_info: n_layer               = 32
print_info: n_head                = 32
print_info: n_head_kv             = 8
print_info: n_embd_head_k         = 128
print_info: n_embd_head_v         = 128
print_info: n_ff                  = 14336
load_tensors: offloaded 33/33 layers to GPU
load_tensors:        CUDA0 model buffer size =  4403.49 MiB
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 8192
llama_context: n_batch       = 2048
llama_context: n_ubatch      = 512
llama_context: flash_attn    = 0
llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB
llama_kv_cache: size = 1024.00 MiB (8192 cells, 32 layers, 1/1 seqs), K (f16):  512.00 MiB, V (f16):  512.00 MiB
llama_context:      CUDA0 compute buffer size =   560.00 MiB
"""


def _compared(tmp_path: Path, text: str, *, model: str | None = None, gpu: str = "A10G", **options: Any) -> LogReport:
    path = tmp_path / "engine.log"
    path.write_text(text)
    return compared(path, model, gpu=gpu, **options)


@pytest.mark.parametrize(
    ("named", "known"),
    [
        ("/data/Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("/home/user/qwen/Qwen2___5-7B", "Qwen/Qwen2.5-7B"),
        ("/root/.cache/huggingface/hub/models--openai--gpt-oss-120b/snapshots/b5c9", "openai/gpt-oss-120b"),
        ("someone/Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)
def test_a_folder_of_another_machine_is_the_model_of_its_name(named: str, known: str) -> None:
    assert model_of_log(named).name == known


@pytest.mark.parametrize(
    ("named", "known", "method"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B", "awq"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-72B", "gptq"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B", "compressed-tensors"),
        ("RedHatAI/Qwen3-32B-FP8", "Qwen/Qwen3-32B", "compressed-tensors"),
        ("Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-30B-A3B", "fp8"),
        ("nvidia/Qwen3-30B-A3B-NVFP4", "Qwen/Qwen3-30B-A3B", "modelopt_fp4"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B", "bitsandbytes"),
    ],
)
def test_a_name_says_how_its_checkpoint_is_quantised(named: str, known: str, method: str) -> None:
    """As its publisher does it as a rule, which the answer's name of the model says."""
    model = model_named(named)
    assert model.name.startswith(f"{known} (")
    assert named.rpartition("/")[2] in model.name
    assert model.config["quantization_config"]["quant_method"] == method


def test_a_name_says_that_a_quantised_model_is_published_unpacked() -> None:
    model = model_named("unsloth/gpt-oss-20b-BF16")
    assert model.name == "openai/gpt-oss-20b (bfloat16: by the name gpt-oss-20b-BF16)"
    assert "quantization_config" not in model.config


def test_encoders_of_quantised_checkpoints_stay_as_they_are() -> None:
    plain, packed = (model_of_log(f"Qwen/Qwen2.5-VL-7B-Instruct{ending}").config for ending in ("", "-AWQ"))
    assert packed["vision_config"] == plain["vision_config"]
    assert "visual" in packed["quantization_config"]["modules_to_not_convert"]
    assert "vision_tower" in model_of_log("unsloth/gemma-3-4b-it-bnb-4bit").config["quantization_config"][
        "llm_int8_skip_modules"
    ]  # fmt: skip


def test_a_log_that_is_cut_off_is_known_by_its_words(tmp_path: Path) -> None:
    report = _compared(tmp_path, END)
    assert report.log.version == "0.7 by its words"
    assert (report.served.version, report.served.model) == ("0.7", "Qwen/Qwen2.5-Math-1.5B")
    assert report.given is not None
    assert report.given.share == pytest.approx(0, abs=0.002)
    assert "no line of the options" in str(report)


def test_a_build_of_a_checkout_has_no_version_and_a_compiling_start_is_the_first(tmp_path: Path) -> None:
    text = START.replace("0.13.0", "0.1.dev15312+g690e127b1") % ("Qwen/Qwen3-0.6B", "1.0")
    assert _compared(tmp_path, text, gpu="L4").log.version == "0.13 by its words"
    compiled = (
        "(EngineCore_DP0 pid=14) INFO [backends.py:278] Compiling a graph for compile range (1, 2048) takes 8 s\n"
    )
    text = text.replace("'enforce_eager'", "'x'").replace("(EngineCore", compiled + "(EngineCore", 1)
    assert _compared(tmp_path, text, gpu="L4").served.settings["cold"]


def test_a_share_in_two_digits_is_what_it_comes_to(tmp_path: Path) -> None:
    log = _compared(tmp_path, END.replace("= 19.85GiB", "= 19.70GiB")).log
    assert float(log.settings["gpu_memory_utilization"]) == pytest.approx(19.70 / 22.06, abs=1e-4)
    assert _compared(tmp_path, END).log.settings["gpu_memory_utilization"] == "0.90"


def test_one_of_several_services_of_a_compose_file_is_compared(tmp_path: Path) -> None:
    small, large = (START % one for one in (("Qwen/Qwen3-0.6B", "1.0"), ("Qwen/Qwen3-1.7B", "2.0")))
    lines = zip(small.splitlines(), large.splitlines(), strict=True)
    report = _compared(tmp_path, "\n".join(f"small-1  | {one}\nlarge-1  | {other}" for one, other in lines))
    assert (report.log.service, report.served.model) == ("small-1", "Qwen/Qwen3-0.6B")
    assert report.log.printed["KV cache"].value == GIB


def test_windows_keeps_nothing_of_the_board(tmp_path: Path) -> None:
    wsl = "WARNING [interface.py:525] Using 'pin_memory=False' as WSL is detected.\n"
    text = START % ("Qwen/Qwen3-0.6B", "1.0")
    first, rest = text.split("\n", 1)
    assert _compared(tmp_path, f"{first}\n{wsl}{rest}", gpu="RTX-4060").served.total_bytes == 8188 * 2**20
    assert _compared(tmp_path, text, gpu="RTX-4060").served.total_bytes < 8188 * 2**20


def test_the_command_before_a_log_tells_its_options(tmp_path: Path) -> None:
    report = _compared(tmp_path, SGLANG, gpu="H100")
    assert report.served.model == "Qwen/Qwen3-32B"
    assert report.served.settings["mem_fraction_static"] == 0.9
    assert report.log.names_options
    assert report.given is not None  # of what the log says was free once the weights were there
    assert report.given.predicted == pytest.approx(39_078, rel=1e-3)


def test_a_model_is_known_by_what_llama_cpp_prints_of_it(tmp_path: Path) -> None:
    """But for its weights, unless the log lists tensors."""
    report = _compared(tmp_path, LLAMA_CPP)
    assert {term.name: term.difference for term in report.terms} == {"KV buffer": 0.0, "compute buffer": 0.0}
    tensors = "".join(
        f"llama_model_loader: - tensor {number}: {name} q8_0 [ 4096, {rows}, 1, 1 ]\n"
        for number, (name, rows) in enumerate((("token_embd.weight", 128256), ("blk.0.attn_q.weight", 4096)))
    )
    listed = _compared(tmp_path, tensors + LLAMA_CPP)
    journal = "".join(f"Oct 08 16:50:22 host llama[12]: {line}\n" for line in LLAMA_CPP.splitlines())
    assert _compared(tmp_path, journal).terms == report.terms
    (weights,) = (term for term in listed.terms if term.name == "weights")
    assert weights.predicted == (4096 + 128256) * 4096 // 32 * 34  # the output reads the embeddings


def test_bytes_of_a_token_are_the_models_whatever_the_card_holds(tmp_path: Path) -> None:
    text = (
        "[TensorRT-LLM][INFO] Number of tokens per block: 64.\n"
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).\n"
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 26.91 GiB for max tokens in paged KV cache (220480).\n"
    )
    report = _compared(tmp_path, text, model="meta-llama/Llama-3.1-8B", gpu="H100")
    terms = {term.name: term for term in report.terms}
    assert terms["tokens"].printed == 220_480  # the last, after a try
    assert terms["a token"].difference == 0
    assert terms["a token"].predicted == 2**17


#: A start that names neither a model of the table nor its card; the figures are those of Qwen 2 and 2.5 7B on 24 GB.
UNNAMED = """\
(APIServer pid=7) INFO 03-01 10:00:00 [utils.py:233] non-default args: {'model_tag': '/ckpt/step-900', \
'model': '/ckpt/step-900', 'max_model_len': 8192}
(APIServer pid=7) INFO 03-01 10:00:01 [model.py:531] Resolved architecture: Qwen2ForCausalLM
(EngineCore pid=9) INFO 03-01 10:00:02 [core.py:103] Initializing a V1 LLM engine (v0.17.0) with config: \
model='/ckpt/step-900', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, quantization=None
(EngineCore pid=9) INFO 03-01 10:00:30 [gpu_model_runner.py:4566] Model loading took 14.25 GiB memory and 3.1 seconds
(EngineCore pid=9) INFO 03-01 10:00:40 [gpu_worker.py:456] Available KV cache memory: 6.40 GiB
(EngineCore pid=9) INFO 03-01 10:00:40 [kv_cache_utils.py:1316] GPU KV cache size: 119,840 tokens
"""


def test_a_model_and_a_card_without_names_are_known_by_what_they_have(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(UNNAMED)
    report = compared(path)
    assert report.served.model.startswith("Qwen/Qwen2-7B, or one of its shape: by its class")
    assert 22 * GIB < report.served.total_bytes < 24 * GIB
    assert any("does not name its card" in note for note in report.served.notes)
    path.write_text(UNNAMED.replace("14.25", "11.25"))
    assert "whose configuration is not here" in compared(path).why_not


def test_a_model_may_stand_in_the_words_around_a_log(tmp_path: Path) -> None:
    cut = "".join(line + "\n" for line in END.splitlines() if "Starting to load" not in line)
    words = "A start of Qwen/Qwen2.5-Math-1.5B, on and/or off.\n"
    assert _compared(tmp_path, words + cut).served.model == "Qwen/Qwen2.5-Math-1.5B"
    ranks = "INFO [parallel_state.py:954] rank 1 in world size 2 is assigned as DP rank 0, PP rank 0, TP rank 1\n"
    assert _compared(tmp_path, words + ranks + cut).served.cards == 2
    assert _compared(tmp_path, words + ranks.replace("PP rank 0", "PP rank 1") + cut).served.cards == 1
    elsewhere = words + END.replace("../models/Qwen2.5-Math-1.5B", "/out/merged")
    assert _compared(tmp_path, elsewhere).served.model.startswith("Qwen/Qwen2.5-Math-1.5B, or one of its shape")
    known = _compared(tmp_path, words + "Unlike facebook/opt-125m.\n" + cut)
    assert known.served.model.startswith("Qwen/Qwen2.5-Math-1.5B, or one of its shape: by weights and")
    assert "does not name its model" in _compared(tmp_path, cut.replace("2.8797", "3.9")).why_not


def test_first_releases_of_the_second_engine_took_many_requests(tmp_path: Path) -> None:
    """Tokens of a public log: 1,024 requests by default on an A100 until 0.8.4."""
    text = (
        "INFO [core.py:54] Initializing a V1 LLM engine (v0.8.2) with config: model='meta-llama/Llama-3.1-8B-Instruct',"
        " dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=1, quantization=None, enforce_eager=False\n"
        "INFO [api_server.py:982] args: Namespace(max_num_seqs=None, max_num_batched_tokens=2048, enable_lora=True,"
        " max_loras=2, max_lora_rank=16, gpu_memory_utilization=0.9)\n"
        "INFO [topk_topp_sampler.py:53] Using FlashInfer for top-p & top-k sampling.\n"
        "INFO [kv_cache_utils.py:566] GPU KV cache size: 148,096 tokens\n"
    )
    (tokens,) = _compared(tmp_path, text, gpu="A100-40GB").terms
    assert tokens.predicted == pytest.approx(148096, rel=0.005)
    (tokens,) = _compared(tmp_path, text.replace("v0.8.2", "v0.8.4"), gpu="A100-40GB").terms
    assert tokens.predicted > 1.05 * 148096


def test_words_of_a_command_may_stand_on_lines_of_their_own(tmp_path: Path) -> None:
    words = ["serve", "/ckpt/step-900", "--max_num_seqs", "8", "--gpu-memory-utilization", "0.5"]
    lines = [f"(Server pid=3)  {'[' * (word == 'serve')}{word!r}," for word in words]
    path = tmp_path / "engine.log"
    path.write_text("\n".join(lines) + "]\n" + UNNAMED)
    assert compared(path).log.settings["max_num_seqs"] == "8"


@pytest.mark.parametrize(
    ("architecture", "sizes", "printed", "states"),
    [
        (
            "gemma4",
            {"n_layer": 42, "n_head": 8, "n_head_kv": 2, "n_embd_head_k": 512, "n_embd_head_v": 512, "n_swa": 512,
             "n_embd_head_k_swa": 256, "n_embd_head_v_swa": 256},
            1064, 0,
        ),
        (
            "qwen35moe",
            {"n_layer": 40, "n_head": 16, "n_head_kv": 2, "n_embd_head_k": 256, "n_embd_head_v": 256,
             "ssm_d_conv": 4, "ssm_d_inner": 4096, "ssm_d_state": 128, "ssm_n_group": 16},
            1280, 62.8125,
        ),
        (
            "gemma4",
            {"n_layer": 30, "n_head": 16, "n_head_kv": [8, 8, 8, 8, 8, 2] * 5, "n_embd_head_k": 512,
             "n_embd_head_v": 512, "n_swa": 1024, "n_embd_head_k_swa": 256, "n_embd_head_v_swa": 256},
            1280 + 300, 0,
        ),
    ],
)  # fmt: skip
def test_llama_cpps_layers_differ(
    architecture: str, sizes: dict[str, Any], printed: float, states: float, tmp_path: Path
) -> None:
    """Figures of public logs: keys of another width in a window, layers that have another's cache, states."""
    lines = [f"print_info: {name} = {value}" for name, value in sizes.items()]
    path = tmp_path / "server.log"
    path.write_text(
        f"print_info: arch = {architecture}\n"
        "llama_model_loader: - kv  15: gemma4.attention.shared_kv_layers u32 = 18\n"
        * (sizes["n_layer"] == 42)
        + f"print_info: arch = {architecture}\nprint_info: n_embd = 2048\nprint_info: n_vocab = 248320\n"
        + "\n".join(lines)
        + "\nllama_context: n_ctx = 65536\nllama_context: n_seq_max = 1\nllama_context: n_ubatch = 512\n"
        f"llama_kv_cache:      CUDA0 KV buffer size =  {printed} MiB\n"
        + f"llama_memory_recurrent: CUDA0 RS buffer size = {states} MiB\n" * bool(states)
        + "sched_reserve:      CUDA0 compute buffer size =   517.50 MiB\n"
    )
    report = compared(path)
    assert report.decides is not None
    assert report.decides.predicted == pytest.approx(printed * 2**20)
    found = {term.name: term.predicted for term in report.terms}
    assert found.get("states", 0) == pytest.approx(states * 2**20)
    assert "compute buffer" not in found


#: Starts of public logs, as they were pasted: lines that somebody has broken; a day when the fraction was by cards; a
#: benchmark's command; workers' names; and what their figures come to beside the predicted ones.
BROKEN = """\
[2026-04-14 01:02:06] ServerArgs: model_path=Qwen2___5-0___5B-Instruct, port=30000,
                      mem_fraction_static=0.15, context_length=2048
[2026-04-14 01:02:18] Load weight begin. avail mem=14.70 GB
[2026-04-14 01:02:18] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16,
                      avail mem=13.72 GB, mem usage=0.98 GB
[2026-04-14 01:02:18] KV Cache is allocated. #tokens: 107319,
                      K size: 0.61 GB, V size: 0.61 GB
"""
OF_2024 = """\
python -m sglang.launch_server --model-path mistralai/Mistral-7B-Instruct-v0.1 --port 30000
[2024-12-13 01:44:59 TP0] Load weight end. type=MistralForCausalLM, dtype=torch.bfloat16, avail mem=9.69 GB
[2024-12-13 01:45:02 TP0] max_total_num_tokens=56524, max_prefill_tokens=16384, context_len=32768
"""
BENCH = """\
vllm bench latency \\
  --model /root/models/Qwen3.5-9B --tensor-parallel-size 2 --gpu-memory-utilization 0.85 --max-model-len 4096
Model loading took 8.91 GiB memory and 2.97 seconds
Available KV cache memory: 15.06 GiB
GPU KV cache size: 246,576 tokens
"""
WORKERS = """\
(Worker_TP0_EP0 pid=1) INFO [gpu_worker.py:298] Available KV cache memory: 41.72 GiB
(Worker_TP1_EP1 pid=2) INFO [gpu_worker.py:298] Available KV cache memory: 41.70 GiB
(EngineCore_DP0 pid=9) INFO [kv_cache_utils.py:864] GPU KV cache size: 911,000 tokens
local-completions (model=Qwen/Qwen3-30B-A3B-Instruct-2507-FP8,base_url=x) on 2xH100
"""


@pytest.mark.parametrize(
    ("text", "model", "cards", "off"),
    [
        (BROKEN, "Qwen/Qwen2.5-0.5B", 1, 0.004),
        (OF_2024, "mistralai/Mistral-7B-v0.1", 1, 0.002),
        (BENCH, "Qwen/Qwen3.5-9B", 2, 0.02),
    ],
)
def test_pieces_of_public_logs_are_read(text: str, model: str, cards: int, off: float, tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(text)
    report = compared(path)
    term = report.given or report.decides
    assert (report.served.model, report.served.cards) == (model, cards)
    assert term is not None
    assert term.share == pytest.approx(0, abs=off)


def test_workers_names_tell_how_many_and_words_the_card(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(WORKERS)
    report = compared(path)
    assert report.log.version == "0.10 by its words"
    assert (report.served.cards, report.served.gpu) == (2, "H100-80GB")
    assert report.served.settings["enable_expert_parallel"]
    assert report.served.model.startswith("Qwen/Qwen3-30B-A3B")
    path.write_text(WORKERS.replace("2xH100", "2xH100 or an A100"))
    assert any("does not name its card" in note for note in compared(path).served.notes)


@pytest.mark.parametrize(
    ("text", "figure", "off"),
    [
        (
            "Available KV cache memory: 22.5 GiB\nValueError: To serve at least one request with the model's max seq "
            "len (196608), 23.25 GiB KV cache is needed, which is larger than the available KV cache memory. Based on "
            "the available memory, the estimated maximum model length is 190272.\n",
            "longest request", 0.001,
        ),
        (
            "[TP0] Mamba Cache is allocated. max_mamba_cache_size: 82, conv_state size: 0.13GB, ssm_state size: "
            "7.29GB\n[TP0] KV Cache is allocated. #tokens: 580364, K size: 4.15 GB, V size: 4.15 GB\n",
            "KV buffer", 0.01,
        ),
        (
            "llama_kv_cache_init:      CUDA0 KV buffer size =  1536.00 MiB\nllama_kv_cache_init:      CUDA1 KV buffer "
            "size =  3584.00 MiB\nllama: KV self size  = 5120.00 MiB, K (f16): 2560.00 MiB, V (f16): 2560.00 MiB\n",
            "KV buffer", 0,
        ),
        (
            "[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 256, tokens per block=64, primary blocks=61848\n"
            "[TensorRT-LLM][INFO] Number of tokens per block: 64.\n"
            "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.00 GiB for max tokens in paged KV cache (3958272).\n",
            "tokens", 0,
        ),
    ],
)  # fmt: skip
def test_lines_without_a_model_come_to_their_figures(text: str, figure: str, off: float, tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(text)
    report = compared(path)
    assert "does not name its model" in report.why_not
    assert report.decides is not None
    assert report.decides.name == figure
    assert report.decides.share == pytest.approx(0, abs=off)


def test_a_card_with_more_memory_than_its_name_has_what_the_log_says(tmp_path: Path) -> None:
    report = compared(_file(tmp_path, END.replace("22.06GiB", "47.50GiB") + "on an NVIDIA GeForce RTX 4090\n"))
    assert (report.served.gpu, report.served.total_bytes) == ("RTX-4090", round(47.5 * GIB))


def test_a_start_on_the_host_is_not_predicted(tmp_path: Path) -> None:
    text = START % ("Qwen/Qwen3-0.6B", "1.0") + "INFO [core.py:1] with config: device_config=cpu\n"
    assert "does not name its card" in compared(_file(tmp_path, text)).why_not


def _file(folder: Path, text: str) -> Path:
    path = folder / "engine.log"
    path.write_text(text)
    return path
