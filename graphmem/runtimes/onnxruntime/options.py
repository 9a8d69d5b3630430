"""The options of ONNX Runtime's sessions and providers, by their own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, TypeVar

from graphmem.allocators.onnxruntime_arena import ArenaConfig, ExtendStrategy
from graphmem.base.records import dataclass
from graphmem.base.tables import read_table
from graphmem.devices import DEFAULT_DEVICE, Device, device_named
from graphmem.errors import NotModelledError, UsageError
from graphmem.runtimes.onnxruntime.kernels.libraries import SEARCHES, Libraries
from graphmem.runtimes.onnxruntime.kernels.memory import KernelMemory
from graphmem.runtimes.onnxruntime.levels import level_named
from graphmem.runtimes.onnxruntime.plan.session import CALLER, RUN, SESSION, SessionSettings
from graphmem.units import parse_bytes

Value = TypeVar("Value")

STRATEGIES = {strategy.name: strategy for strategy in ExtendStrategy} | {str(s.value): s for s in ExtendStrategy}
PROVIDERS = {
    "cuda": "cuda", "cudaexecutionprovider": "cuda", "cpu": "cpu", "cpuexecutionprovider": "cpu",
}  # fmt: skip

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
_TABLES = read_table("graphmem.runtimes.onnxruntime", "options.toml")
#: Providers that are ONNX Runtime's and are not modelled, and why.
NOT_MODELLED: dict[str, str] = _TABLES["not_modelled"]
#: Options that change the memory of these operators' kernels, or of all, in a way that is not modelled; and why.
UNFOLLOWED = {key: (tuple(row["operators"]), row["reason"]) for key, row in _TABLES["unfollowed"].items()}
#: Options that change no figure, and why.
WITHOUT_EFFECT: dict[str, str] = _TABLES["without_effect"]


@dataclass(frozen=True)
class Options:
    """The options as given, and their ``text``. ``level`` is the optimization level;
    ``cudnn_workspace_bytes`` stands in for the workspace of every convolution's plan. ``card``: the one it runs on,
    None for the default one; ``cudnn``: the library that is asked for plans, None where they are predicted, with
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
        """These options on a card whose cuDNN's plans this library is asked for, None for none."""
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
        if key not in _READERS:
            raise UsageError(f"ONNX Runtime has no memory option {key!r}; accepted: {', '.join(_READERS)}")
        if not separator or not value:
            raise UsageError(f"{key} has no value; write {key}:VALUE")
        name = ARENA_OPTIONS.get(key, key)
        if name in seen:
            raise UsageError(f"{key} is given after {seen[name]}; give one of them once")
        seen[name] = key
        options = _READERS[key](options, key, value)
    return options


#: The options with one more, of a key and its text.
Reader = Callable[[Options, str, str], Options]


def _sets(field: str, read: Callable[[str, str], object], part: str = "") -> Reader:
    """Sets a field, of the options or of their ``part``, to the value that ``read`` makes of key and text; None leaves
    it as it is."""

    def set_field(options: Options, key: str, value: str) -> Options:
        changes: dict[str, Any] = {field: read(key, value)}
        if changes[field] is None:
            return options
        if part:
            changes = {part: replace(getattr(options, part), **changes)}
        return replace(options, **changes)

    return set_field


def _unfollowed(options: Options, key: str, value: str) -> Options:
    return replace(options, unfollowed=(*options.unfollowed, key)) if _number(key, value) else options


def _without_effect(options: Options, key: str, value: str) -> Options:
    _number(key, value)
    return replace(options, without_effect=(*options.without_effect, key))


def _provider(key: str, value: str) -> str:
    other = value.lower().removesuffix("executionprovider").removeprefix("nv")
    if other in NOT_MODELLED:
        raise NotModelledError(
            f"provider {value} is not modelled: {NOT_MODELLED[other]}; provider:cuda and provider:cpu are", value
        )
    return _among(key, value.lower(), PROVIDERS)


def _search(key: str, value: str) -> str:
    spelled = {name: name for name in SEARCHES} | {str(i): name for i, name in enumerate(SEARCHES)}
    return _among(key, value.upper(), spelled)


def _binding(key: str, value: str) -> tuple[str, str]:
    """Where inputs and outputs are bound: one word for both, or two (``caller/session``); 1 and 0 are on and off."""
    if value.lower() in ("0", "false"):
        return RUN, RUN
    words = ["caller"] if value.lower() in ("1", "true") else value.lower().split("/")
    bound = [_among(key, word, BINDINGS) for word in words]
    if len(bound) > 2:
        raise UsageError(f"io_binding is {value!r}; accepted: {', '.join(BINDINGS)}, or two of them: caller/session")
    return bound[0][0], bound[-1][1]


def _among(key: str, value: str, accepted: Mapping[str, Value]) -> Value:
    if value not in accepted:
        raise UsageError(f"{key} is {value!r}; accepted: {', '.join(accepted)}")
    return accepted[value]


def _strategy(key: str, value: str) -> ExtendStrategy:
    return _among(key, value, STRATEGIES)


def _arena_bytes(key: str, value: str) -> int | None:
    return None if value == "-1" else parse_bytes(value)


def _switch(key: str, value: str) -> bool:
    return _among(key, value.lower(), {"1": True, "0": False, "true": True, "false": False})


def _number(key: str, value: str) -> int:
    """A number, such as an address, or a switch."""
    text = {"true": "1", "false": "0"}.get(value.lower(), value)
    if not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise UsageError(f"{key} is {value!r}; accepted: 0, 1, or a number of at most 20 digits")
    return int(text)


def _threads(key: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal() or len(value) > 4 or not 1 <= int(value) <= 4096:
        raise UsageError(f"{key} is {value!r}; accepted: 1 to 4096")
    return int(value)


#: Every option that is accepted. ``memory.enable_memory_arena_shrinkage`` is a list of devices: gpu:0;cpu:0.
_READERS: dict[str, Reader] = {
    **{
        key: _sets(name, _strategy if key == "arena_extend_strategy" else _arena_bytes, "arena")
        for key, name in ARENA_OPTIONS.items()
    },
    **{key: _sets(name, _switch, "session") for key, name in SWITCHES.items()},
    "io_binding": _sets("io_binding", _binding, "session"),
    "memory.enable_memory_arena_shrinkage": _sets("enable_memory_arena_shrinkage", lambda key, value: True, "session"),
    "intra_op_num_threads": _sets("intra_op_num_threads", _threads, "session"),
    "provider": _sets("provider", _provider, "session"),
    "graph_optimization_level": _sets("level", lambda key, value: level_named(value)),
    "cudnn_conv_algo_search": _sets("cudnn_conv_algo_search", _search),
    "use_tf32": _sets("use_tf32", _switch),
    "cudnn_conv1d_pad_to_nc1d": _sets("conv1d_pad_to_nc1d", _switch),
    **dict.fromkeys(UNFOLLOWED, _unfollowed),
    **dict.fromkeys(WITHOUT_EFFECT, _without_effect),
    "cudnn_workspace_bytes": _sets("cudnn_workspace_bytes", lambda key, value: parse_bytes(value)),
    "cublas_workspace_bytes": _sets("cublas_workspace_bytes", lambda key, value: parse_bytes(value)),
}
