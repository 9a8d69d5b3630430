"""vLLM's logs: what its versions from 0.6 on print of their start.

Words are those of ``entrypoints``, ``v1/engine/core.py``, ``v1/worker``, ``v1/core/kv_cache_utils.py`` (0.8 to 0.32),
and of ``worker/worker.py`` and ``executor`` of the engine before (0.6 to 0.10). Settings come from three places: what
the user gave (``non-default args``, or all of ``args``), what the engine made of it (``config:``), and other lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from graphmem.serving.logs import Log, Reader, figure, settings_in

#: Names of the engine's configuration -> of the options, where they are others.
_OF_CONFIG = {"max_seq_len": "max_model_len"}
#: What is read of the engine's configuration: it has all settings, most as they are by default.
_RESOLVED = (
    "model", "dtype", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "quantization", "enforce_eager", "kv_cache_dtype",
)  # fmt: skip
#: What is read of a list of all arguments, for the same reason.
_OF_ARGUMENTS = (
    *_RESOLVED, "model_tag", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "block_size",
    "enable_lora", "max_loras", "max_lora_rank", "enable_chunked_prefill", "speculative_config", "cpu_offload_gb",
    "load_format", "enable_expert_parallel", "limit_mm_per_prompt",
)  # fmt: skip
#: Settings that other lines tell: their words, and the expression that finds them.
_BESIDE = (
    ("gpu_memory_utilization", re.compile(r"gpu_memory_utilization(?: is)? ?[=(]+(\d\.\d+)")),
    ("gpu_memory_utilization", re.compile(r"Desired GPU memory utilization is \((\d\.\d+)")),
    ("max_num_batched_tokens", re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")),
    ("max_model_len", re.compile(r"Using max model len (\d+)")),
    ("max_model_len", re.compile(r"Maximum concurrency for ([\d,]+) tokens")),
    ("max_model_len", re.compile(r"the model's max seq len \((\d+)\)")),
    ("max_num_batched_tokens", re.compile(r"Unsloth: .*Chunked prefill tokens = (\d+)")),
    ("max_num_seqs", re.compile(r"Unsloth: .*Num Sequences = (\d+)")),
    ("model", re.compile(r"[█▀▄ ]{4}model +(\S+)")),
    ("model", re.compile(r"Starting to load model (\S+?)\.\.\.")),
)
#: Names of workers that share tensors, and experts.
_WORKER = re.compile(r"\(Worker_TP(\d{1,3})(_EP)?")
#: The ranks, where neither a command nor the configuration tells them; only tensors are shared where no other rank is.
_RANKS = re.compile(r" in world size (\d+) is assigned as DP rank \d+, PP rank \d+")
_OTHER_RANKS = re.compile(r" [DP]P rank [1-9]")

#: The first engine's memory, its share in two digits, and what that comes to.
_SHARE = re.compile(r"total_gpu_memory \((\d+\.\d+)GiB\) x gpu_memory_utilization \((\d\.\d+)\) = (\d+\.\d+)GiB")
_DIGIT = 0.005
#: What is chosen by variables of the environment, and what the machine's disk had, by words of lines that tell it.
_TOLD = (
    ("a V0 LLM engine", "use_v1", "False"),
    ("Using FlashInfer for top-p & top-k sampling", "use_flashinfer_sampler", "True"),
    ("Compiling a graph for ", "cold", "True"),
    ("pooler_config=PoolerConfig(", "runner", "pooling"),
)
#: Releases whose second engine took 1,024 requests on every card: vllm#16158 left that to the largest, in 0.8.4.
_MANY_REQUESTS = re.compile(r"a V1 LLM engine \(v0\.8\.[0-3]\b")


def _settings(lines: Sequence[str]) -> Mapping[str, str]:
    """What was given is stronger than what was made of it; what other lines say is the weakest."""
    given: dict[str, str] = {}
    for line in lines:
        if "non-default args:" in line:
            given |= settings_in(line.partition("non-default args:")[2])
        elif "args: Namespace(" in line:
            every = settings_in(line.partition("args: Namespace(")[2])
            given |= {name: every[name] for name in _OF_ARGUMENTS if name in every}
    for line in lines:
        if "LLM engine (v" in line and "with config:" in line:
            made = settings_in(line.partition("with config:")[2])
            made = {_OF_CONFIG.get(name, name): value for name, value in made.items()}
            made["dtype"] = made.get("dtype", "auto").removeprefix("torch.")
            given = {name: made[name] for name in _RESOLVED if name in made} | given
            break
    for name, expression in _BESIDE:
        if name not in given:
            value = next((match[1] for match in map(expression.search, lines) if match), None)
            if value is not None:
                given[name] = value.replace(",", "")
    workers = [match for match in map(_WORKER.search, lines) if match]
    if len({match[1] for match in workers}) > 1:
        given.setdefault("tensor_parallel_size", str(1 + max(int(match[1]) for match in workers)))
        if workers[0][2]:
            given.setdefault("enable_expert_parallel", "True")
    ranks = next((match[1] for match in map(_RANKS.search, lines) if match), None)
    if ranks is not None and not any(map(_OTHER_RANKS.search, lines)):
        given.setdefault("tensor_parallel_size", ranks)
    for line in lines:
        if match := _SHARE.search(line):  # of a share that is printed in two digits
            total, share, asked = map(float, match.groups())
            if abs(asked - total * share) > _DIGIT * (1 + share):
                given["gpu_memory_utilization"] = f"{asked / total:.4f}"
    if not any("APIServer" in line or "api_server" in line for line in lines):
        given["entry"] = "llm"
    for words, option, text in _TOLD:
        if any(words in line for line in lines):
            given[option] = text
    if any(map(_MANY_REQUESTS.search, lines)):
        given = {"max_num_seqs": "1024"} | given
    return given


def _adds_up(log: Log) -> Mapping[str, float]:
    """The cache as what the engine may use less what it counts, and requests of the longest kind in its tokens."""
    printed = {name: one.value for name, one in log.printed.items()}
    found: dict[str, float] = {}
    version = tuple(map(int, re.findall(r"\d+", log.version or "0")[:2]))
    share = float(log.settings.get("gpu_memory_utilization", _SHARES[version >= (0, 20)]))
    counted = next((names for names in _COUNTED if all(name in printed for name in names)), None)
    if log.total_bytes is not None and counted is not None:
        graphs = printed.get("CUDA graphs, estimated", 0) if version >= _GRAPHS_COUNTED else 0
        found["KV cache"] = log.total_bytes * share - sum(printed[name] for name in counted) - graphs
    length = float(log.settings.get("max_model_len", 0))
    if "blocks" in printed:
        found["tokens"] = printed["blocks"] * float(log.settings.get("block_size", _BLOCK))
    if "blocks" in printed and length:
        found["concurrency"] = found["tokens"] / length
    if "one request" in printed and "KV cache" in printed and length:
        found["longest request"] = printed["KV cache"] / printed["one request"] * length
    return found


#: The default share before 0.20 and since; the first version that counts graphs; figures that it counts; and tokens of
#: a block, where nothing else is said.
_SHARES, _GRAPHS_COUNTED, _BLOCK = (0.9, 0.92), (0, 21), 16
_COUNTED = (("weights", "activation peak", "outside torch"), ("consumed", "activation peak and graphs"))
#: Words that lines began to have, or had for the last time, with a version: those of the logs of public starts.
_WORDS = (
    ("[kv_cache_utils.py:2032] GPU KV cache size", "0.29"),
    ("tokens, Maximum concurrency for", "0.28"),
    ("[kv_cache_utils.py:2146] GPU KV cache size", "0.24"),
    ("CUDA graph memory profiling is enabled (default since", "0.21"),
    ("[kv_cache_utils.py:1711] GPU KV cache size", "0.20"),
    ("In v0.19, CUDA graph memory profiling", "0.19"),
    ("[kv_cache_utils.py:1316] GPU KV cache size", "0.17"),
    ("[kv_cache_utils.py:864] GPU KV cache size", "0.10"),
    ("(EngineCore pid=", "0.18"),
    ("(EngineCore_DP0 pid=", "0.13"),
    ("(EngineCore_0 pid=", "0.10"),
    ("Available KV cache memory", "0.10"),
    ("Model loading took", "0.8"),
    ("Loading model weights took", "0.7"),
)

READER = Reader(
    engine="vllm",
    follows_versions=True,
    by_words=_WORDS,
    options_lines=("non-default args:", "args: Namespace("),
    adds_up=_adds_up,
    begins=("vLLM API server version", "LLM engine (v", "non-default args:"),
    # A build of a checkout without tags says 0.1.dev, which is none.
    version=re.compile(r"(?:vLLM API server version |LLM engine \(v|[█▀▄ ]{4}version )(?!0\.1\.dev)(\d+\.\d+[\w.+]*)"),
    settings=_settings,
    model=("model_tag", "model"),
    total=(
        re.compile(r"total_gpu_memory ?[=(]+(\d+\.\d+) ?GiB"),
        re.compile(r"Free memory on device [^(]*\(\d+\.\d+/(\d+\.\d+) GiB\)"),
    ),
    sums={
        **{one: (one,) for one in ("activation peak", "outside torch", "CUDA graphs, estimated")},
        "weights": ("weights", "adapters", "draft model"),
        "activation peak and graphs": ("activation peak", "CUDA graphs, estimated"),
        "peak of torch": ("weights", "activation peak"),
        "consumed": (
            "weights", "adapters", "draft model", "buffers for batches", "buffers per sequence", "workspaces",
            "segment slack", "outside torch",
        ),
    },
    figures=(
        figure("weights", "Model loading took", r"Model loading took # G"),
        figure("weights", "Loading model weights took", r"Loading model weights took # G"),
        figure("weights", "model weights take", r"model weights take # ?GiB"),
        figure("activation peak", "PyTorch activation peak memory takes", r"activation peak memory takes # ?GiB"),
        figure("activation peak and graphs", "for peak activation", r"# GiB for peak activation"),
        figure("outside torch", "non_torch_memory takes", r"non_torch_memory takes # ?GiB"),
        figure("outside torch", "non_torch_memory=", r"non_torch_memory=# ?GiB"),
        figure("outside torch", "for non-torch memory", r"# GiB for non-torch memory"),
        figure("consumed", "for consumed memory", r"# ?GiB for consumed memory"),
        figure("peak of torch", "peak_torch_memory=", r"peak_torch_memory=# ?GiB"),
        figure("CUDA graphs, estimated", "Estimated CUDA graph memory", r"Estimated CUDA graph memory: # GiB"),
        figure("CUDA graphs", "Graph capturing finished", r"took # GiB"),
        figure("KV cache", "Available KV cache memory", r"Available KV cache memory: # GiB", worst=min),
        figure("KV cache", "reserved for KV Cache is", r"reserved for KV Cache is # ?GiB", worst=min),
        figure("KV cache", "kv_cache_size=", r"kv_cache_size=# ?GiB", worst=min),
        figure("blocks", " blocks:", r"(?:GPU|cuda|CUDA) blocks: #", 0, min),
        figure("tokens", "KV cache size:", r"KV cache size: # tokens", 0, min),
        figure("one request", "KV cache is needed", r"# GiB KV cache is needed"),
        figure("longest request", "maximum model length is", r"estimated maximum model length is #", 0),
        figure("concurrency", "Maximum concurrency for", r"tokens per request: #x", 0, min),
    ),
)  # fmt: skip
