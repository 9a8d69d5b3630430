"""The options of ONNX Runtime's sessions and providers, by their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphmem.allocators.onnxruntime_arena import ArenaConfig, ExtendStrategy
from graphmem.devices import DEFAULT_DEVICE, Device, device_named
from graphmem.errors import NotModelledError, UsageError
from graphmem.runtimes.onnxruntime.kernels.libraries import SEARCHES, Libraries
from graphmem.runtimes.onnxruntime.kernels.memory import KernelMemory
from graphmem.runtimes.onnxruntime.levels import level_named
from graphmem.runtimes.onnxruntime.plan.session import CALLER, RUN, SESSION, SessionSettings
from graphmem.units import parse_bytes

STRATEGIES = {strategy.name: strategy for strategy in ExtendStrategy} | {str(s.value): s for s in ExtendStrategy}
PROVIDERS = {
    "cuda": "cuda", "cudaexecutionprovider": "cuda", "cpu": "cpu", "cpuexecutionprovider": "cpu",
}  # fmt: skip

#: Providers that are ONNX Runtime's and are not modelled, and why.
NOT_MODELLED = {
    "tensorrt": "TensorRT builds engines of its own, and tells their memory to itself",
    "openvino": "OpenVINO plans and allocates by itself",
    "dml": "DirectML's heaps are not the arena",
    "rocm": "MIOpen's workspaces are not known",
    "migraphx": "MIGraphX compiles programs with buffers of their own",
    "coreml": "Core ML shares the machine's memory and says nothing of it",
    "webgpu": "its buffer cache is not the arena",
}

#: Arena options: ``gpu_mem_limit`` and ``arena_extend_strategy`` of the CUDA provider, the rest of ``OrtArenaCfg``
#: (onnxruntime_c_api.h, ``CreateArenaCfgV2``), each with the field of the arena it sets.
ARENA_OPTIONS = {
    "arena_extend_strategy": "arena_extend_strategy",
    "gpu_mem_limit": "max_mem",
    "max_mem": "max_mem",
    "initial_chunk_size_bytes": "initial_chunk_size_bytes",
    "max_dead_bytes_per_chunk": "max_dead_bytes_per_chunk",
    "initial_growth_chunk_size_bytes": "initial_growth_chunk_size_bytes",
    "max_power_of_two_extend_bytes": "max_power_of_two_extend_bytes",
}
#: Session and run options that are on or off, each with the field of :class:`SessionSettings` it sets.
SWITCHES = {
    "enable_mem_pattern": "enable_mem_pattern",
    "enable_mem_reuse": "enable_mem_reuse",
    "session.disable_prepacking": "disable_prepacking",
    "session.use_device_allocator_for_initializers": "use_device_allocator_for_initializers",
    "session.use_env_allocators": "use_env_allocators",
    "enable_cuda_graph": "enable_cuda_graph",
}
#: Whose memory inputs and outputs are bound to, by word. What is bound in host memory is copied: an input when it is
#: bound, an output when the run ends.
BINDINGS = {"caller": (CALLER, CALLER), "session": (SESSION, SESSION), "host": (SESSION, RUN)}
_ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention", "PackedMultiHeadAttention")
_IMAGES = (
    "Conv", "FusedConv", "ConvTranspose", "BatchNormalization", "MaxPool", "AveragePool", "GlobalMaxPool",
    "GlobalAveragePool", "LRN", "GridSample", "DepthToSpace", "SpaceToDepth",
)  # fmt: skip
#: Options that change what kernels of these operators take, or of all, in a way that is not modelled; what they do.
UNFOLLOWED = {
    "fuse_conv_bias": (("Conv", "FusedConv"), "cuDNN plans convolution and bias as one operation, which is not asked"),
    "prefer_nhwc": (_IMAGES, "the graph is laid out anew, which only a build with the CUDA provider does"),
    "gpu_external_alloc": ((), "chunks come from the caller's allocator, which has rules of its own"),
    "sdpa_kernel": (_ATTENTION, "which of its kernels an attention takes, each with scratch of its own"),
}
#: Options that change no figure, and why.
WITHOUT_EFFECT = {
    "enable_skip_layer_norm_strict_mode": "sums are of fp32 then, in the same buffers",
    "cudnn_conv_use_max_workspace": "with cuDNN 9 the chosen plan's own workspace is taken",
    **dict.fromkeys(
        ("use_ep_level_unified_stream", "has_user_compute_stream", "user_compute_stream", "do_copy_in_default_stream",
         "disable_synchronize_execution_providers"), "kernels run on one stream either way",
    ),
    **dict.fromkeys(
        ("tunable_op_enable", "tunable_op_tuning_enable", "tunable_op_max_tuning_duration_ms"),
        "no kernel of the CUDA provider takes more memory to be tuned",
    ),
    "enable_cudnn": "kernels that call cuDNN go on doing so",
    "external_data_loader_reading_threads": "weights are read through host memory",
    **dict.fromkeys(("gpu_external_free", "gpu_external_empty_cache"), "gpu_external_alloc says it"),
    "device_id": "one card is looked at",
}  # fmt: skip
#: Everything :func:`parse_options` reads.
OPTIONS = (
    *ARENA_OPTIONS, *SWITCHES, "io_binding", "memory.enable_memory_arena_shrinkage",
    "intra_op_num_threads", "provider", "graph_optimization_level", "cudnn_conv_algo_search",
    "use_tf32", "cudnn_conv1d_pad_to_nc1d", *UNFOLLOWED, *WITHOUT_EFFECT,
    "cudnn_workspace_bytes", "cublas_workspace_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What was asked for, and the ``text`` that asked for it. ``level`` is the optimization level;
    ``cudnn_workspace_bytes`` stands in for the workspace of every convolution's plan. ``card``: the one it runs on,
    None for the default one; ``cudnn``: the library that tells its plans, None where they are predicted, with
    ``extreme`` at one end of what they may take."""

    arena: ArenaConfig = field(default_factory=ArenaConfig)
    session: SessionSettings = field(default_factory=SessionSettings)
    level: str = "all"
    cudnn_conv_algo_search: str = "EXHAUSTIVE"
    use_tf32: bool = True
    conv1d_pad_to_nc1d: bool = False
    cudnn_workspace_bytes: int | None = None
    cublas_workspace_bytes: int | None = None
    without_effect: tuple[str, ...] = ()
    unfollowed: tuple[str, ...] = ()
    card: Device | None = None
    cudnn: str | Path | None = None
    extreme: str = ""
    text: str = field(default="", compare=False)

    @property
    def fusion_level(self) -> str:
        """The level to run ONNX Runtime's optimizer at. Its layout level is the CPU provider's alone."""
        cpu_only = self.session.provider == "cuda" and self.level in ("layout", "all")
        return "extended" if cpu_only else self.level

    def kernel_memory(self) -> KernelMemory:
        """The working buffers of the provider's kernels."""
        libraries = None
        if self.session.provider == "cuda":
            card = self.card or device_named(DEFAULT_DEVICE)
            libraries = Libraries(
                card, self.cudnn_conv_algo_search, self.use_tf32, self.conv1d_pad_to_nc1d, self.cudnn, self.extreme
            )
        return KernelMemory(
            self.session.provider, self.session.intra_op_num_threads, libraries, self.cudnn_workspace_bytes
        )

    def on(self, card: Device, cudnn: str | Path | None = None) -> Options:
        """These options on a card whose cuDNN's plans this library tells, None for none."""
        return self if self.session.provider != "cuda" else replace(self, card=card, cudnn=cudnn)


def parse_options(text: str) -> Options:
    """Read ``key:value,key:value`` under ONNX Runtime's own names.

    Sizes are bytes and take units (``2GiB``); ``-1`` is ONNX Runtime's default, as in ``OrtArenaCfg``. Raises
    :class:`~graphmem.errors.UsageError` listing what is accepted.
    """
    options = Options(text=text)
    seen: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (part.strip() for part in entry.partition(":"))
        if key not in OPTIONS:
            raise UsageError(f"ONNX Runtime has no memory option {key!r}; accepted: {', '.join(OPTIONS)}")
        if not separator or not value:
            raise UsageError(f"{key} has no value; write {key}:VALUE")
        name = ARENA_OPTIONS.get(key, key)
        if name in seen:
            raise UsageError(f"{key} is given after {seen[name]}; give one of them once")
        seen[name] = key
        options = _with(options, key, value)
    return options


def _with(options: Options, key: str, value: str) -> Options:
    if key in ARENA_OPTIONS:
        return replace(options, arena=_with_arena(options.arena, key, value))
    if key in SWITCHES:
        return _with_session(options, **{SWITCHES[key]: _switch(key, value)})
    if key == "memory.enable_memory_arena_shrinkage":  # a list of devices: gpu:0;cpu:0
        return _with_session(options, enable_memory_arena_shrinkage=True)
    if key == "provider":
        other = value.lower().removesuffix("executionprovider").removeprefix("nv")
        if other in NOT_MODELLED:
            raise NotModelledError(
                f"provider {value} is not modelled: {NOT_MODELLED[other]}; provider:cuda and provider:cpu are", value
            )
        return _with_session(options, provider=_among(key, value.lower(), PROVIDERS))
    if key == "intra_op_num_threads":
        return _with_session(options, intra_op_num_threads=_count(key, value))
    if key == "graph_optimization_level":
        return replace(options, level=level_named(value))
    if key == "cudnn_conv_algo_search":
        spelled = {name: name for name in SEARCHES} | {str(i): name for i, name in enumerate(SEARCHES)}
        return replace(options, cudnn_conv_algo_search=_among(key, value.upper(), spelled))
    if key == "io_binding":
        return _with_session(options, io_binding=_binding(value))
    if key in UNFOLLOWED:
        return replace(options, unfollowed=(*options.unfollowed, key)) if _number(key, value) else options
    if key == "use_tf32":
        return replace(options, use_tf32=_switch(key, value))
    if key == "cudnn_conv1d_pad_to_nc1d":
        return replace(options, conv1d_pad_to_nc1d=_switch(key, value))
    if key in ("cudnn_workspace_bytes", "cublas_workspace_bytes"):
        changes: dict[str, Any] = {key: parse_bytes(value)}
        return replace(options, **changes)
    _number(key, value)
    return replace(options, without_effect=(*options.without_effect, key))


def _binding(value: str) -> tuple[str, str]:
    """Where inputs and outputs are bound: one word for both, or two (``caller/session``); 1 and 0 are on and off."""
    if value.lower() in ("0", "false"):
        return RUN, RUN
    words = ["caller"] if value.lower() in ("1", "true") else value.lower().split("/")
    bound = [_among("io_binding", word, BINDINGS) for word in words]
    if len(bound) > 2:
        raise UsageError(f"io_binding is {value!r}; accepted: {', '.join(BINDINGS)}, or two of them: caller/session")
    return bound[0][0], bound[-1][1]


def _with_session(options: Options, **changes: Any) -> Options:
    return replace(options, session=replace(options.session, **changes))


def _with_arena(config: ArenaConfig, key: str, value: str) -> ArenaConfig:
    if key == "arena_extend_strategy":
        return replace(config, arena_extend_strategy=_among(key, value, STRATEGIES))
    if value == "-1":
        return config
    changes: dict[str, Any] = {ARENA_OPTIONS[key]: parse_bytes(value)}
    return replace(config, **changes)


def _among(key: str, value: str, accepted: Mapping[str, Any]) -> Any:
    if value not in accepted:
        raise UsageError(f"{key} is {value!r}; accepted: {', '.join(accepted)}")
    return accepted[value]


def _switch(key: str, value: str) -> bool:
    switches = {"1": True, "0": False, "true": True, "false": False}
    return bool(_among(key, value.lower(), switches))


def _number(key: str, value: str) -> int:
    """A number, such as an address, or a switch."""
    switches = {"true": "1", "false": "0"}
    text = switches.get(value.lower(), value)
    if not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise UsageError(f"{key} is {value!r}; accepted: 0, 1, or a number of at most 20 digits")
    return int(text)


def _count(key: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal() or len(value) > 4 or not 1 <= int(value) <= 4096:
        raise UsageError(f"{key} is {value!r}; accepted: 1 to 4096")
    return int(value)
