"""Sharded training that is evaluated, saved and resumed in between, as jobs of days do it."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch

from tests.recorded.cases.sharded.fsdp import fully_sharded
from tests.recorded.cases.sharded.models import BF16, blocks, clip_norm, llama, start, tokens, train
from tests.recorded.cases.sharded.registry import add


def _evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            ids = tokens()
            model(input_ids=ids, labels=ids)


def fsdp2_saved() -> None:
    """Checkpoints by ``torch.distributed.checkpoint``: sharded, and loaded again; then whole ones on the host."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy

    start()
    model = fully_sharded(
        llama(device="cpu"), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, optimizer, iterations=2, clip=clip_norm(model))
    _evaluate(model)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    folder = tempfile.mkdtemp()
    checkpoint.save(states, checkpoint_id=folder)
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    del states
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    del whole
    train(model, optimizer, iterations=1)


def fsdp1_saved(kind: str) -> None:
    """``kind``: FULL, SHARDED or LOCAL, as FSDP1 names its state dictionaries."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    start()
    model = llama()
    model = fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={type(blocks(model)[0])}
        ),
        device_id=torch.cuda.current_device(),
        mixed_precision=fsdp.MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, optimizer, iterations=2)
    _evaluate(model)
    configuration: dict[str, tuple[Any, Any]] = {
        "FULL": (
            fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ),
        "SHARDED": (fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig()),
    }
    chosen = getattr(fsdp.StateDictType, f"{kind}_STATE_DICT")
    with fsdp.FullyShardedDataParallel.state_dict_type(model, chosen, *configuration[kind]):
        state = model.state_dict()
        states = fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer)
    del state, states
    train(model, optimizer, iterations=1)


add("f2_saved", fsdp2_saved, "transformers")
add("f1_saved_whole", fsdp1_saved, "transformers", kind="FULL")
add("f1_saved_shards", fsdp1_saved, "transformers", kind="SHARDED")
