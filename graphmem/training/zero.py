"""Training in a DeepSpeed engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphmem.base.documents import parse_json, read_json
from graphmem.base.options import Whole, check_values, documented, option
from graphmem.base.records import public_value
from graphmem.errors import UsageError
from graphmem.training.processes import check_world_size

_STAGE = Whole(0, 3, "0, 1, 2 or 3")


@documented
@public_value(frozen=True, slots=True)
class ZeRO:
    """A DeepSpeed engine around model and optimizer (``deepspeed.initialize``); the analysis is of one of
    ``world_size`` processes, and the batch is that of one. ``config`` is a path, a mapping, or JSON; what it leaves
    open or calls ``"auto"`` follows the step, as ``Trainer`` does it. Raises :class:`UsageError` for a field that is
    not accepted, or that the configuration contradicts."""

    world_size: int
    stage: int | None = option(
        None,
        "Train in a DeepSpeed engine with ZeRO's stage 0, 1, 2 or 3 (nothing, optimizer states, gradients too, "
        "parameters too are shared out); needs --world-size and DeepSpeed.",
        _STAGE,
        flags="--zero",
        metavar="STAGE",
        opens=True,
    )
    config: Any = option(
        "{}",
        "DeepSpeed's configuration, as it is; implies --zero. Default: none.",
        flags="--zero-config",
        metavar="FILE",
        opens=True,
    )

    def __post_init__(self) -> None:
        check_values(self)
        check_world_size("world_size", self.world_size)
        config = _read(self.config)
        own = config.setdefault("zero_optimization", {})
        if not isinstance(own, dict):
            raise UsageError(f"zero_optimization is an object in DeepSpeed's configuration, not {own!r}")
        if self.stage is not None and own.get("stage") not in (None, "auto", self.stage):
            raise UsageError(f"the stage is {self.stage}, and {own['stage']} in the configuration; give one of them")
        stage = self.stage if self.stage is not None else own.get("stage", 0)
        _ = _STAGE("the stage of ZeRO", stage)
        for section in ("optimizer", "scheduler"):
            if section in config and not (
                isinstance(config[section], dict) and isinstance(config[section].get("type"), str)
            ):
                raise UsageError(f"{section} in DeepSpeed's configuration is an object with a type")
        own["stage"] = stage
        object.__setattr__(self, "stage", stage)
        object.__setattr__(self, "config", json.dumps(config, sort_keys=True))

    @property
    def own_optimizer(self) -> str | None:
        """The optimizer that DeepSpeed builds itself, as its configuration names it; None where it takes the loop's."""
        optimizer = json.loads(self.config).get("optimizer")
        return None if optimizer is None else str(optimizer["type"])

    def describe(self) -> str:
        """The engine in words: ``DeepSpeed ZeRO-3 over 8 processes (optimizer on cpu)``."""
        own = json.loads(self.config)["zero_optimization"]
        moved = [
            f"{what} on {own[f'offload_{key}']['device']}"
            for what, key in (("optimizer", "optimizer"), ("parameters", "param"))
            if isinstance(own.get(f"offload_{key}"), dict) and own[f"offload_{key}"].get("device", "none") != "none"
        ]
        return f"DeepSpeed ZeRO-{self.stage} over {self.world_size} processes" + (
            f" ({', '.join(moved)})" * bool(moved)
        )


def _read(config: Any) -> dict[str, Any]:
    """DeepSpeed's configuration as a new dictionary."""
    if isinstance(config, Mapping):
        config = json.dumps(config)
    is_text = isinstance(config, str) and config.lstrip().startswith("{")
    where = "the configuration of DeepSpeed" if is_text else str(config)
    try:
        read = parse_json(config) if is_text else read_json(Path(config))
    except OSError as error:
        raise UsageError(f"cannot read {where}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"cannot read {where}: {error}") from None
    if not isinstance(read, dict):
        raise UsageError(f"{where} is no configuration of DeepSpeed, which is a JSON object")
    return read
