"""The start of a program by a launcher: the environment that ``torchrun`` and ``accelerate launch`` give it.

One process is analysed: the first of its machine. A setting in a launcher's file that no analysis follows is refused by
its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphmem.base.documents import read_yaml, shown
from graphmem.errors import UsageError
from graphmem.training.processes import Processes


@dataclass(frozen=True)
class Launch:
    """``environment``: the variables that the launcher sets beside the numbers of ``processes``, which are None where
    no launcher starts any."""

    environment: tuple[tuple[str, str], ...] = ()
    processes: Processes | None = None
    words: str = ""


def launch_of(
    nproc_per_node: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    config: str | None,
) -> Launch:
    """The start that the options ask for. Raises :class:`UsageError`."""
    if config is not None:
        if (nproc_per_node, nnodes, node_rank, master_addr, master_port) != (None,) * 5:
            raise UsageError(
                "--config says how many processes there are; leave out the options of torchrun, or --config"
            )
        return accelerate_launch(Path(config))
    if nproc_per_node is None:
        if (nnodes, node_rank, master_addr, master_port) != (None,) * 4:
            raise UsageError("--nnodes, --node-rank, --master-addr and --master-port need --nproc-per-node")
        return Launch()
    return _torchrun(nproc_per_node, nnodes or 1, node_rank or 0, master_addr, master_port)


def _torchrun(each: int, nodes: int, node: int, address: str | None, port: int | None) -> Launch:
    """The first process of a machine. Other processes have the same environment but for their numbers."""
    if node >= nodes:
        raise UsageError(f"--node-rank {node} of {nodes} node{'s' * (nodes > 1)}; the first is 0")
    values: dict[str, Any] = {
        "MASTER_ADDR": address or "127.0.0.1", "MASTER_PORT": port or 29500, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "none", "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }  # fmt: skip
    processes = Processes(each * nodes, each * node, each)
    return Launch(tuple((name, str(value)) for name, value in values.items()), processes)


# --- accelerate -------------------------------------------------------------------------------------------------------

_PRECISIONS = ("no", "fp16", "bf16")
#: Keys that say where and how processes are started, which no analysis depends on.
_OF_NO_INFLUENCE = {
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "gpu_ids", "main_training_function",
    "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo",
}  # fmt: skip
_READ = {
    "distributed_type", "mixed_precision", "num_processes", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port", "use_cpu", "dynamo_config", "fsdp_config", "deepspeed_config", "gradient_accumulation_steps",
    "parallelism_config",
}  # fmt: skip
_DISTRIBUTED = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")


def accelerate_launch(path: Path) -> Launch:
    """The start that ``accelerate launch --config_file`` makes of a file (``prepare_simple_launcher_cmd_env`` and
    ``prepare_multi_gpu_env``, accelerate/utils/launch.py). Raises :class:`UsageError`."""
    given = _read_yaml(path)
    for key, value in given.items():
        if key not in _READ | _OF_NO_INFLUENCE and value not in (None, {}, False):
            raise UsageError(f"{path}: {key} is not modelled; analyse the program without it")
    kind = str(given.get("distributed_type", "NO")).upper()
    if kind not in _DISTRIBUTED:
        raise UsageError(f"{path}: distributed_type {kind} is not modelled; accepted: {', '.join(_DISTRIBUTED)}")
    if given.get("use_cpu"):
        raise UsageError(f"{path}: use_cpu is set, and then nothing runs on a GPU")
    precision = str(given.get("mixed_precision") or "no").lower()
    if given.get("mixed_precision") is False:  # "no" without quotes, to YAML
        precision = "no"
    if precision not in _PRECISIONS:
        raise UsageError(f"{path}: mixed_precision {precision} is not modelled; accepted: {', '.join(_PRECISIONS)}")
    values = {"ACCELERATE_USE_CPU": "False", "ACCELERATE_MIXED_PRECISION": precision}
    if given.get("gradient_accumulation_steps") is not None:
        values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(_whole(path, given, "gradient_accumulation_steps", 1, 1))
    values |= _sections(given, path, kind)
    machines = _whole(path, given, "num_machines", 1, 1)
    processes = _whole(path, given, "num_processes", 1, 1)
    if kind == "NO":
        return Launch(tuple(values.items()), None, f"accelerate, mixed precision {precision}")
    if processes % machines:
        raise UsageError(f"{path}: num_processes {processes} is no multiple of num_machines {machines}")
    port = _whole(path, given, "main_process_port", 1, 29500)
    rank = _whole(path, given, "machine_rank", 0, 0)
    started = _torchrun(processes // machines, machines, rank, given.get("main_process_ip"), port)
    words = f"accelerate {kind}, mixed precision {precision}"
    return Launch((*started.environment, *values.items()), started.processes, words)


#: Keys that ``accelerate config`` writes about FSDP, below ``fsdp_config``.
_FSDP = (
    "auto_wrap_policy", "backward_prefetch", "forward_prefetch", "offload_params", "min_num_params", "state_dict_type",
    "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states", "activation_checkpointing",
    "reshard_after_forward", "version", "transformer_layer_cls_to_wrap", "sharding_strategy",
    "activation_checkpointing_offload", "ignored_modules",
)  # fmt: skip
#: Variables that are set where the file says nothing (``launch_command_parser``, accelerate/commands/launch.py).
_FSDP_DEFAULTS = {
    "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}  # fmt: skip
_FSDP_SPELLED = {"transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}


#: Below ``deepspeed_config``, and how the launcher passes it on (``prepare_deepspeed_cmd_env``).
_DEEPSPEED = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
#: How its processes are started.
_DEEPSPEED_STARTED = ("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_inclusion_filter",
                      "deepspeed_exclusion_filter")  # fmt: skip


#: Variables that the launcher sets for ``parallelism_config`` where the file says nothing
#: (``prepare_extend_env_parallelism_config``, accelerate/utils/launch.py of 1.15).
_PARALLELISM_DEFAULTS = {
    "DP_REPLICATE_SIZE": "1", "DP_SHARD_SIZE": "1", "TP_SIZE": "1", "CP_SIZE": "1", "CP_BACKEND": "torch",
    "SP_SIZE": "1", "SP_BACKEND": "deepspeed",
}  # fmt: skip
_PARALLELISM = (*_PARALLELISM_DEFAULTS, "CP_COMM_STRATEGY", "SP_SEQ_LENGTH", "SP_SEQ_LENGTH_IS_VARIABLE",
                "SP_ATTN_IMPLEMENTATION")  # fmt: skip


_DYNAMO = ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")


def _lower(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class _Section:
    """A table of accelerate's file. ``variables``: its keys with the environment variables that the launcher makes of
    them; ``always``: variables it sets besides, and where the file has no key; ``spelled``: how it writes a value."""

    name: str
    variables: Mapping[str, str]
    always: Mapping[str, str] = field(default_factory=dict)
    spelled: Callable[[object], str] = str

    def environment(self, config: Mapping[str, object], path: Path) -> dict[str, str]:
        """The launcher's variables. Raises :class:`UsageError` for a key that is not modelled."""
        for key in config:
            if key not in self.variables:
                raise UsageError(f"{path}: {self.name}.{key} is not modelled; analyse the program without it")
        given = {self.variables[key]: self.spelled(value) for key, value in config.items() if value is not None}
        return {**self.always, **given}


_SECTIONS = {
    "dynamo": _Section("dynamo_config", {f"dynamo_{name}": f"ACCELERATE_DYNAMO_{name.upper()}" for name in _DYNAMO}),
    "fsdp": _Section(
        "fsdp_config",
        {f"fsdp_{name}": _FSDP_SPELLED.get(name, f"FSDP_{name.upper()}") for name in _FSDP},
        {"ACCELERATE_USE_FSDP": "true", **_FSDP_DEFAULTS},
        _lower,
    ),
    "deepspeed": _Section("deepspeed_config", _DEEPSPEED, {"ACCELERATE_USE_DEEPSPEED": "true"}, _lower),
    "parallelism": _Section(
        "parallelism_config",
        {f"parallelism_config_{name.lower()}": f"PARALLELISM_CONFIG_{name}" for name in _PARALLELISM},
        {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            **{f"PARALLELISM_CONFIG_{name}": value for name, value in _PARALLELISM_DEFAULTS.items()},
        },
    ),
}


def _sections(given: Mapping[str, Any], path: Path, kind: str) -> dict[str, str]:
    """The variables of all tables of the file that its ``distributed_type`` reads."""
    config = {name: given.get(section.name) or {} for name, section in _SECTIONS.items()}
    if config["dynamo"].get("dynamo_backend") is not None:
        config["dynamo"] = {**config["dynamo"], "dynamo_backend": str(config["dynamo"]["dynamo_backend"]).upper()}
    values = _SECTIONS["dynamo"].environment(config["dynamo"], path)
    if kind == "FSDP":
        values |= _SECTIONS["fsdp"].environment(config["fsdp"], path)
    if kind == "DEEPSPEED":
        shared = {key: value for key, value in config["deepspeed"].items() if key not in _DEEPSPEED_STARTED}
        values["ACCELERATE_CONFIG_DS_FIELDS"] = str(
            list(config["deepspeed"])
        ).lower()  # checked against DeepSpeed's file
        values |= _SECTIONS["deepspeed"].environment(shared, path)
    mesh = config["parallelism"]
    if not mesh:
        return values
    if kind != "DEEPSPEED" and values.get("FSDP_VERSION") != "2":
        raise UsageError(
            f"{path}: accelerate takes parallelism_config with distributed_type FSDP and fsdp_version 2, or DEEPSPEED"
        )
    for key in mesh:
        if key.endswith("_size"):
            _whole(path, mesh, key, 1, 1)
    return values | _SECTIONS["parallelism"].environment(mesh, path)


def _whole(path: Path, given: Mapping[str, Any], key: str, least: int, default: int) -> int:
    value = given.get(key)
    if value is None:
        return default
    if type(value) is not int or not least <= value < 1 << 31:
        raise UsageError(f"{path}: {key} is a whole number of at least {least}, not {shown(value)}")
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        given = read_yaml(path)
    except ImportError:
        raise UsageError("a configuration of accelerate is YAML; install PyYAML to read it") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise UsageError(f"{path} is no configuration of accelerate: it has no keys")
    for section in _SECTIONS.values():
        if not isinstance(given.get(section.name) or {}, dict):
            raise UsageError(f"{path}: {section.name} is a table of keys")
    return given
