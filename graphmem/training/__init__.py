"""The description of a step: frozen values whose fields are the command line's options. Imports no framework."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from graphmem.errors import UsageError
from graphmem.training.data_parallel import DataParallel
from graphmem.training.epochs import Epoch, parse_lengths
from graphmem.training.generation import CACHE_IMPLEMENTATIONS, Generation
from graphmem.training.optimizers import (
    OPTIMIZERS,
    OptionValue,
    check_optimizer,
    check_option,
    freeze,
    parse_optimizer_arg,
    parse_value,
)
from graphmem.training.parts import check_parts, checked_plan, describe_parts, processes_of_parts
from graphmem.training.pipelines import PipelineParallel
from graphmem.training.processes import Processes
from graphmem.training.schedulers import SCHEDULERS, scheduler_named
from graphmem.training.sharding import SHARDS, FullyShard
from graphmem.training.zero import ZeRO

__all__ = [
    "AMP_DTYPES",
    "ATTENTION_MASKS",
    "CACHE_IMPLEMENTATIONS",
    "COMPILE_MODES",
    "DTYPES",
    "LOOPS",
    "OPTIMIZERS",
    "SCHEDULERS",
    "SHARDS",
    "WEIGHTS",
    "ZERO_GRAD",
    "ZERO_GRAD_AT",
    "DataParallel",
    "Epoch",
    "FullyShard",
    "Generation",
    "Inference",
    "OptionValue",
    "PipelineParallel",
    "Training",
    "ZeRO",
    "amp_named",
    "check_optimizer",
    "dtype_named",
    "parse_assumption",
    "parse_lengths",
    "parse_optimizer_arg",
    "parse_value",
    "weights_named",
]

#: Accepted precisions of weights, and the spellings read as them.
DTYPES: Mapping[str, tuple[str, ...]] = {
    "fp32": ("float32", "float", "f32"),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "f16"),
    "fp64": ("float64", "double", "f64"),
}

#: Accepted precisions of autocast.
AMP_DTYPES = ("bf16", "fp16")

#: Quantised weights of linear layers: bitsandbytes' types, by its names (``quant_type``, ``load_in_8bit``).
WEIGHTS = ("nf4", "fp4", "int8")
#: Others that are asked for, and have no analysis.
_NO_WEIGHTS = ("fp8", "int4", "mxfp4", "nvfp4", "gptq", "awq", "gguf", "hqq")

#: Modes of ``torch.compile``.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

#: What a line can be told to read.
Assumed = int | float | bool
#: The largest budget of one host tensor, in MiB.
MOST_HOST_MIB = 1 << 16

#: How gradients are cleared: dropped (PyTorch's default), or filled with zeros and kept.
ZERO_GRAD = ("set_to_none", "zeros")
#: When they are cleared.
ZERO_GRAD_AT = ("after_step", "before_forward", "before_backward")

#: What becomes of the model's output once there is a loss: a variable of the loop holds it until the next output takes
#: its place (``outputs = model(**batch)``), or nothing does (``loss = model(**batch).loss``).
LOOPS = ("hold", "drop")
#: The ``attention_mask`` that batches of a transformers model carry: one that hides nothing, as of texts cut into
#: blocks of one length; or one with padding, as of sentences of several lengths.
ATTENTION_MASKS = ("ones", "padded")
#: Batches that a loader may move ahead; each is on the card.
_MOST_PREFETCHED = 100


@dataclass(frozen=True, slots=True)
class Training:
    """One training step: forward, loss, backward, optimizer.

    Args:
        optimizer: a name in any case, of ``torch.optim``, bitsandbytes and others, see :data:`OPTIMIZERS`; or
            ``package.module:Class``, any subclass of ``torch.optim.Optimizer``.
        optimizer_args: the optimizer's options as ``(name, value)`` pairs or a mapping, ``{"momentum": 0.9}``.
        dtype: precision of the weights, one of :data:`DTYPES`.
        amp: precision of autocast, one of :data:`AMP_DTYPES`, or None for no autocast; of the parameters that ``fsdp``
            gathers, or that ``zero`` computes with.
        checkpoint_activations: recompute activations in the backward pass, block by block.
        grad_accum: number of forward and backward passes (micro-batches) per optimizer step.
        clip_grad_norm: maximum norm of the gradients, or None for no clipping.
        zero_grad: ``set_to_none`` or ``zeros``.
        zero_grad_at: when gradients are cleared, one of :data:`ZERO_GRAD_AT`.
        loop: ``hold``: the model's output lives until the next one takes its place, as in ``outputs = model(**batch)``;
            ``drop``: it is dropped before the backward pass.
        grad_scaler: whether a ``GradScaler`` scales the loss; None: with fp16 autocast.
        lr_scheduler: a class of ``torch.optim.lr_scheduler`` or an ``lr_scheduler_type`` of transformers, see
            :data:`SCHEDULERS`; None for none.
        seq_lens, last_batch, eval_batches, eval_batch_size, steps_per_epoch: what differs between batches, as in
            :class:`Epoch`.
        prefetch: batches that are on the card, moved there on a stream of their own, while the step runs on the one
            before, as a prefetching loader has them. 0: the step's own batch alone.
        ddp: data-parallel training, or None for a single process.
        fsdp: training whose states are shared out, or None; in place of ``ddp``.
        zero: training in a DeepSpeed engine, or None; in place of ``ddp``.
        tp, ep: how many processes share each layer, or the experts, of a transformers model (``DistributedConfig``);
            with ``fsdp``, whose processes they divide, or alone. With ``sp``, ``pp`` or ``cp`` ``tp`` is the innermost
            dimension of one mesh, as in torchtitan.
        pp: a pipeline of a transformers model's layers, or None; with ``fsdp`` or ``ddp``, whose processes it divides,
            and ``tp``, or alone.
        sp: between layers of ``tp`` activations are shared out too, by PyTorch's styles (``SequenceParallel``).
        tp_plan: rules that ``tp`` applies beside the model's own, or in their place, as ``(module, style)`` pairs or a
            mapping with transformers' names of styles: ``{"lm_head": "colwise_rep"}``.
        cp: how many processes share each sequence of a transformers model, of those that ``fsdp`` shards over, or None.
        world_size: number of processes that a step of your own finds when it calls ``init_process_group``.
        rank: which of the processes is analysed, from 0.
        nproc_per_node: processes, and cards, of a machine; None for 8 where there are more that fill machines of 8,
            else all.
        data_dependent: the share of candidates, above 0 and at most 1, that operators select whose result's size is
            data (``nonzero``, boolean masks, ``unique``) and is not known; None takes all of them.
        assume: what lines read of unknown data, as ``("train.py:31", 300)`` pairs or a mapping: a number or a boolean,
            or how many elements an operator there selects.
        host_values_mb: how much of host tensors is real, in MiB: of one, and eight times as much of all together.
        compile: mode of ``torch.compile``, one of :data:`COMPILE_MODES`, or None for eager mode.
        attention_mask: what of :data:`ATTENTION_MASKS` the batches of a transformers model (``hf:``) carry, or None.

    Raises:
        UsageError: a field is not accepted; the message lists what is.
    """

    optimizer: str = "adamw"
    optimizer_args: tuple[tuple[str, OptionValue], ...] = ()
    dtype: str = "fp32"
    amp: str | None = None
    checkpoint_activations: bool = False
    grad_accum: int = 1
    clip_grad_norm: float | None = None
    zero_grad: str = "set_to_none"
    ddp: DataParallel | None = None
    world_size: int | None = None
    data_dependent: float | None = None
    compile: str | None = None
    assume: tuple[tuple[str, Assumed], ...] = ()
    host_values_mb: int = 64
    zero_grad_at: str = "after_step"
    loop: str = "hold"
    grad_scaler: bool | None = None
    lr_scheduler: str | None = None
    seq_lens: tuple[int, ...] = ()
    last_batch: int | None = None
    eval_batches: int = 0
    eval_batch_size: int | None = None
    steps_per_epoch: int | None = None
    rank: int = 0
    nproc_per_node: int | None = None
    fsdp: FullyShard | None = None
    zero: ZeRO | None = None
    attention_mask: str | None = None
    tp: int | None = None
    ep: int | None = None
    pp: PipelineParallel | None = None
    cp: int | None = None
    sp: bool = False
    tp_plan: tuple[tuple[str, str], ...] = ()
    prefetch: int = 0

    def __post_init__(self) -> None:
        optimizer = check_optimizer(self.optimizer)
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "optimizer_args", _checked_args(optimizer, self.optimizer_args))
        object.__setattr__(self, "dtype", dtype_named(self.dtype))
        object.__setattr__(self, "amp", amp_named(self.amp))
        if type(self.grad_accum) is not int or self.grad_accum < 1:
            raise UsageError(f"grad_accum is a whole number of at least 1, not {self.grad_accum!r}")
        clip = self.clip_grad_norm
        if clip is not None and not (_is_number(clip) and clip > 0):
            raise UsageError(f"clip_grad_norm is a number above 0 or None, not {clip!r}")
        _check_share(self.data_dependent)
        object.__setattr__(self, "assume", _checked_assumptions(self.assume))
        _check_budget(self.host_values_mb)
        _check_compile(self.compile)
        for name, accepted in (("zero_grad", ZERO_GRAD), ("zero_grad_at", ZERO_GRAD_AT), ("loop", LOOPS)):
            if getattr(self, name) not in accepted:
                raise UsageError(f"unknown {name} {getattr(self, name)!r}; accepted: {', '.join(accepted)}")
        if self.grad_scaler not in (None, True, False):
            raise UsageError(f"grad_scaler is True, False or None, not {self.grad_scaler!r}")
        object.__setattr__(self, "lr_scheduler", scheduler_named(self.lr_scheduler))
        _check_mask(self.attention_mask)
        object.__setattr__(self, "seq_lens", self.epoch.seq_lens)
        self._check_prefetch()
        self._check_processes()

    def _check_prefetch(self) -> None:
        if type(self.prefetch) is not int or not 0 <= self.prefetch <= _MOST_PREFETCHED:
            raise UsageError(f"prefetch is a whole number from 0 to {_MOST_PREFETCHED}, not {self.prefetch!r}")
        if not self.prefetch:
            return
        if self.optimizer == "lbfgs":
            raise UsageError("lbfgs evaluates one batch many times; leave out prefetch")
        given = [name for name in ("pp", "cp", "sp") if getattr(self, name)]
        if given:
            raise UsageError(
                f"prefetch with {given[0]} is not modelled: each process takes a part of the batch; leave it out"
            )

    def _check_processes(self) -> None:
        _ = self.processes  # refused where they are wrong
        given = [name for name in ("ddp", "fsdp", "zero") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} wrap the same model; give one of them")
        check_parts(self.tp, self.ep)
        if self.pp is not None:
            self._check_pipeline()
        if self.cp is not None:
            self._check_context(self.cp)
        object.__setattr__(self, "tp_plan", checked_plan(self.tp_plan))
        if (self.sp or self.tp_plan) and self.tp is None:
            raise UsageError(f"{'sp' if self.sp else 'tp_plan'} is of tensor parallelism: give tp too")
        if self.sp and (self.ep or self.tp_plan):
            raise UsageError("sp has PyTorch's styles, not transformers' plan: leave out ep and tp_plan, or sp")
        self._check_parts()
        _ = self.mesh
        if self.zero is not None and self.zero.own_optimizer is not None and self.lr_scheduler is not None:
            raise UsageError(
                "DeepSpeed builds the optimizer that its configuration names; name the scheduler there too, and leave "
                "out lr_scheduler"
            )
        wrapper = self.wrapper
        if wrapper is None:
            return
        name = given[0]
        if self.world_size not in (None, wrapper.world_size):
            raise UsageError(
                f"world_size is {self.world_size} and that of {name} is {wrapper.world_size}; give one of them"
            )
        if self.compile:
            raise UsageError(f"torch.compile of a model in {name} is not modelled; leave out compile or {name}")

    def _check_pipeline(self) -> None:
        """Raise :class:`UsageError` for options that PyTorch and torchtitan do not combine with a pipeline."""
        if self.zero is not None:
            raise UsageError(
                "DeepSpeed's pipelines are of models written as its PipelineModule, ZeRO-2 and 3 go with none of them: "
                "give fsdp with pp, or write the program (graphmem run)"
            )
        if self.ep:
            raise UsageError(
                "transformers does not combine ep with pp (DistributedConfig: token dispatch with pipeline parallelism "
                "is not supported); leave out one of them"
            )
        if self.fsdp is None and self.amp is not None:
            raise UsageError(
                "in a pipeline amp is FSDP's mixed precision, as in torchtitan: give fsdp too, or dtype bf16"
            )
        if self.scales_loss:
            raise UsageError(
                "schedules of pipelines run the backward pass themselves, without a gradient scaler: use bf16"
            )
        if self.compile:
            raise UsageError("torch.compile of a pipeline's stages is not modelled; leave out compile or pp")
        if self.epoch.varies:
            raise UsageError("stages of a pipeline have one shape; leave out seq_lens, last_batch and eval_batches")
        if self.zero_grad_at == "before_backward":
            raise UsageError("a schedule runs both passes: zero_grad_at is after_step or before_forward in a pipeline")

    def _check_context(self, cp: int) -> None:
        """Accelerate shares sequences among processes that FSDP2 shards parameters over, and so does torchtitan."""
        if type(cp) is not int or cp < 2:
            raise UsageError(f"cp is a number of processes of at least 2, not {cp!r}")
        if self.fsdp is None:
            raise UsageError("cp goes with fsdp, as in Accelerate and torchtitan: parameters are sharded over it too")
        if self.ep:
            raise UsageError("transformers' DistributedConfig, which ep is, has no context parallelism; leave out one")
        if self.epoch.varies:
            raise UsageError("processes share sequences of one length; leave out seq_lens, last_batch and eval_batches")

    @property
    def tp_in_mesh(self) -> bool:
        """Whether ``tp`` is a dimension of :attr:`mesh`, over which layers are shared before FSDP2 shards them, as in
        torchtitan and Accelerate; else transformers distributes the model."""
        return self.tp is not None and (self.sp or self.pp is not None or self.cp is not None)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh of processes by the names of its dimensions, the outermost first: ``pp``, then ``replicate`` and
        ``shard`` of FSDP2 or ``replicate`` of DDP, then ``cp``, over which FSDP2 shards too, then ``tp``; {} for a step
        without any, and where transformers makes its own. Raises :class:`UsageError` where the processes cannot be
        divided so."""
        if (self.tp is not None or self.ep is not None) and not self.tp_in_mesh:
            return {}
        outer = {"pp": self.pp.ranks} if self.pp is not None else {}
        inner = {"tp": self.tp} if self.tp is not None and self.tp_in_mesh else {}
        taken = outer | inner
        left = self._left_by(taken)
        middle: dict[str, int] = {}
        if self.fsdp is not None:
            middle = self.fsdp.mesh_of(left)
        elif self.ddp is not None and taken:
            middle = {"replicate": left}
        if self.cp is not None:
            if middle["shard"] % self.cp:
                raise UsageError(f"cp {self.cp} does not divide the {middle['shard']} processes that fsdp shards over")
            middle |= {"shard": middle["shard"] // self.cp, "cp": self.cp}
        return outer | middle | inner

    def _left_by(self, taken: Mapping[str, int]) -> int:
        """How many of a wrapper's processes have the same part of the model."""
        count = math.prod(taken.values())
        size = self.wrapper.world_size if self.wrapper is not None else count
        if size % count:
            by = " x ".join(f"{name} {each}" for name, each in taken.items())
            raise UsageError(f"{'fsdp' if self.ddp is None else 'ddp'}'s {size} processes cannot be divided by {by}")
        return size // count

    def _check_parts(self) -> None:
        """Which wrapper goes with model parallelism is the frameworks' choice."""
        if self.wrapper is None or (self.tp is None and self.ep is None):
            return
        if self.ddp is not None:
            raise UsageError(
                "tp and ep are not combined with ddp, by Accelerate and transformers neither; leave out ddp, replicas "
                "are fsdp's (fsdp with fsdp_shard hybrid:NxM)"
            )
        if self.zero is not None and self._is_for_autotp(self.zero):
            return
        if self.fsdp is None:
            raise UsageError(
                "with zero, tp is DeepSpeed's AutoTP, by rules of its own, and divides its processes: leave out "
                "ep, sp and tp_plan"
            )
        if self.tp_in_mesh:
            return
        if self.fsdp.world_size % (self.tp or 1):
            raise UsageError(f"fsdp's {self.fsdp.world_size} processes cannot be divided by tp {self.tp}")
        _ = self.fsdp.mesh_of(self.fsdp.world_size // (self.tp or 1))
        if self.fsdp.shard == "grad-op" or self.amp == "fp16":
            raise UsageError(
                "with tp or ep, fsdp_shard is full or hybrid, and amp bf16 or off: transformers has no other way"
            )

    def _is_for_autotp(self, zero: ZeRO) -> bool:
        return not (self.ep or self.sp or self.tp_plan) and zero.world_size % (self.tp or 1) == 0

    @property
    def wrapper(self) -> DataParallel | FullyShard | ZeRO | None:
        """The model's wrapper in training of several processes: ``ddp``, ``fsdp`` or ``zero``; None without one."""
        return self.ddp or self.fsdp or self.zero

    @property
    def casts_itself(self) -> bool:
        """Whether the wrapper makes parameters of the lower precision, in place of autocast."""
        return self.fsdp is not None or self.zero is not None

    @property
    def processes(self) -> Processes | None:
        """The analysed process and the number of all; None where no number was given. Raises :class:`UsageError`."""
        size = self.world_size if self.wrapper is None else self.wrapper.world_size
        if self.wrapper is None and self.pp is not None:
            size = self.pp.ranks * (self.tp or 1)
            if self.world_size not in (None, size):
                raise UsageError(
                    f"world_size is {self.world_size}, and the pipeline has {size} processes; add fsdp for the others"
                )
        elif self.wrapper is None and (self.tp or self.ep):
            size = processes_of_parts(self.tp, self.ep, self.world_size)
        if size is not None:
            return Processes(size, self.rank, self.nproc_per_node)
        if self.rank or self.nproc_per_node is not None:
            raise UsageError("rank and nproc_per_node need world_size, the number of processes")
        return None

    @property
    def epoch(self) -> Epoch:
        """The differences between the batches of an epoch."""
        return Epoch(
            self.seq_lens,
            self.last_batch,
            self.eval_batches,
            self.eval_batch_size,
            self.steps_per_epoch,
            self.grad_accum,
        )

    @property
    def scales_loss(self) -> bool:
        """Whether a gradient scaler is used."""
        return self.amp == "fp16" if self.grad_scaler is None else self.grad_scaler

    @property
    def optimizer_class(self) -> str:
        """The name of the class in its library: ``AdamW``."""
        named = OPTIMIZERS.get(self.optimizer)
        return named.class_name if named else self.optimizer.rpartition(":")[2]

    def describe(self, weights: str | None = None) -> str:
        """The step in words: ``training, adamw(foreach=False), fp32 weights, bf16 autocast, 4 micro-batches``.

        ``weights`` is the precision that the model's weights really have, where it is known.
        """
        options = ", ".join(f"{name}={value!r}" for name, value in self.optimizer_args)
        named = f"{self.optimizer}({options})" if options else self.optimizer
        own = self.zero.own_optimizer if self.zero is not None else None
        words = ["training", named if own is None else f"DeepSpeed's {own}", *_precision(self, weights)]
        if self.checkpoint_activations:
            words.append("activation checkpointing")
        if self.grad_accum > 1:
            words.append(f"{self.grad_accum} micro-batches per step")
        if self.clip_grad_norm is not None:
            words.append(f"gradient norm clipped to {self.clip_grad_norm:g}")
        if self.wrapper is not None:
            words.append(self.wrapper.describe())
        words += describe_parts(self.tp, self.ep)
        words += ["sequence parallel"] * self.sp + ["by a plan of its own"] * bool(self.tp_plan)
        words += [self.pp.describe()] if self.pp is not None else []
        words += [f"context parallel over {self.cp}"] if self.cp is not None else []
        if self.zero_grad != "set_to_none":
            words.append("gradients zeroed in place")
        if self.zero_grad_at != "after_step":
            words.append(f"gradients cleared {self.zero_grad_at.replace('_', ' the ')} pass")
        if self.scales_loss != (self.amp == "fp16"):
            words.append("gradient scaler" if self.scales_loss else "no gradient scaler")
        if self.lr_scheduler is not None:
            words.append(self.lr_scheduler)
        if self.attention_mask is not None:
            words.append(_MASKED[self.attention_mask])
        if self.loop == "drop":
            words.append("output dropped")
        if self.prefetch:
            words.append(f"{self.prefetch} batch{'es' * (self.prefetch > 1)} prefetched")
        words += self.epoch.describe()
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Inference:
    """One forward pass without gradients. ``dtype``, ``amp``, ``data_dependent``, ``compile``, ``assume`` and
    ``host_values_mb`` and ``attention_mask`` as in :class:`Training`. ``weights``: one of :data:`WEIGHTS`, in which the
    weights of the linear layers of a transformers model (``hf:``) are kept, or None for ``dtype``. ``tp``, ``ep``:
    as in :class:`Training`. ``generate``: the inputs are a prompt for ``model.generate``, in place of the forward pass.
    Raises :class:`UsageError`."""

    dtype: str = "fp32"
    amp: str | None = None
    data_dependent: float | None = None
    compile: str | None = None
    assume: tuple[tuple[str, Assumed], ...] = ()
    host_values_mb: int = 64
    weights: str | None = None
    attention_mask: str | None = None
    tp: int | None = None
    ep: int | None = None
    generate: Generation | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_named(self.dtype))
        object.__setattr__(self, "amp", amp_named(self.amp))
        object.__setattr__(self, "weights", weights_named(self.weights))
        _check_mask(self.attention_mask)
        check_parts(self.tp, self.ep)
        if self.weights is not None and (self.tp or self.ep):
            raise UsageError("quantised weights are not distributed here; leave out weights, or tp and ep")
        _check_share(self.data_dependent)
        object.__setattr__(self, "assume", _checked_assumptions(self.assume))
        _check_budget(self.host_values_mb)
        _check_compile(self.compile)
        if self.generate is not None and self.compile:
            raise UsageError(
                "torch.compile(model) does not compile what generate calls; leave out compile: transformers itself "
                "compiles the decoding of a static cache (cache_implementation static)"
            )

    def describe(self, weights: str | None = None) -> str:
        """The step in words: ``inference, fp32 weights, bf16 autocast``; ``weights`` as in :class:`Training`."""
        if self.weights is not None:
            weights = f"{self.weights} and {self.dtype}"
        masked = [] if self.attention_mask is None else [_MASKED[self.attention_mask]]
        generated = [] if self.generate is None else self.generate.describe()
        parts = describe_parts(self.tp, self.ep)
        return ", ".join(["inference", *_precision(self, weights), *masked, *parts, *generated])

    @property
    def processes(self) -> Processes | None:
        """The process that is analysed, of how many; None for a single one."""
        return Processes(processes_of_parts(self.tp, self.ep, None)) if self.tp or self.ep else None


def other_loop(loop: str) -> str:
    """The other of :data:`LOOPS`."""
    return "drop" if loop == "hold" else "hold"


def dtype_named(name: str) -> str:
    """The canonical precision (``fp32``, ``bf16``, ``fp16``, ``fp64``). Raises :class:`UsageError`."""
    key = str(name).strip().lower().removeprefix("torch.")
    for canonical, spellings in DTYPES.items():
        if key == canonical or key in spellings:
            return canonical
    raise UsageError(f"unknown dtype {name!r}; accepted: {', '.join(DTYPES)}")


def amp_named(name: str | None) -> str | None:
    """The canonical autocast precision, None for ``None`` and ``"off"``. Raises :class:`UsageError`."""
    if name is None or str(name).strip().lower() in ("off", "none", "no"):
        return None
    key = str(name).strip().lower().removeprefix("torch.")
    for canonical in AMP_DTYPES:
        if key == canonical or key in DTYPES[canonical]:
            return canonical
    raise UsageError(f"unknown amp precision {name!r}; accepted: {', '.join(AMP_DTYPES)}, off")


def weights_named(name: str | None) -> str | None:
    """The canonical type of quantised weights. Raises :class:`UsageError`."""
    if name is None or name in WEIGHTS:
        return name
    key = str(name).strip().lower()
    if key in WEIGHTS:
        return key
    known = f"{key} weights have no analysis" if key in _NO_WEIGHTS else f"unknown weights {name!r}"
    raise UsageError(f"{known}; accepted: {', '.join(WEIGHTS)}; for 16 or 32 bits give dtype")


def _precision(step: Training | Inference, weights: str | None) -> list[str]:
    words = [f"{weights or step.dtype} weights"]
    if step.amp and isinstance(step, Training) and step.casts_itself:
        words.append(f"{step.amp} copies of them")
    elif step.amp:
        words.append(f"{step.amp} autocast")
    if step.compile:
        words.append("torch.compile" if step.compile == "default" else f"torch.compile({step.compile})")
    return words


#: What a step's words say of its masks.
_MASKED = {"ones": "attention mask of ones", "padded": "attention mask with padding"}


def _check_mask(mask: object) -> None:
    if mask is not None and mask not in ATTENTION_MASKS:
        raise UsageError(f"unknown attention_mask {mask!r}; accepted: {', '.join(ATTENTION_MASKS)}")


def _check_compile(mode: object) -> None:
    if mode is not None and mode not in COMPILE_MODES:
        raise UsageError(f"unknown compile mode {mode!r}; accepted: {', '.join(COMPILE_MODES)}")


def _check_share(share: object) -> None:
    if share is not None and not (_is_number(share) and 0 < share <= 1):  # type: ignore[operator]
        raise UsageError(f"data_dependent is a share above 0 and at most 1, or None, not {share!r}")


class Tried(float):
    """A value that a line is told to see what would follow, not because anybody says so: a loop that does not end with
    it is left."""


def parse_assumption(text: str) -> tuple[str, Assumed]:
    """``FILE.py:LINE=VALUE`` as a pair. Raises :class:`UsageError`."""
    place, equals, value = text.rpartition("=")
    words = {"true": True, "false": False}
    known: Assumed | None = words.get(value.strip().lower())
    if known is None:
        try:
            known = float(value) if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value) else int(value)
        except ValueError:
            known = math.nan
    if not equals or (not isinstance(known, bool) and not math.isfinite(known)):
        raise UsageError(
            f"--assume is FILE.py:LINE=VALUE with a number, true or false, as train.py:31=300, not {text!r}"
        )
    return _checked_assumptions(((place.strip(), known),))[0]


def _checked_assumptions(given: object) -> tuple[tuple[str, Assumed], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        checked = tuple((str(place), value) for place, value in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UsageError(f'assume is pairs as ("train.py:31", 300), not {given!r}') from None
    for place, value in checked:
        if not re.fullmatch(r"[^\0]+:[1-9][0-9]{0,8}", place):
            raise UsageError(f"assume names lines as train.py:31, not {place!r}")
        if not isinstance(value, bool) and not _is_number(value):
            raise UsageError(f"{place} is assumed to be {value!r}; accepted: numbers, true, false")
    return checked


def _check_budget(mib: object) -> None:
    if type(mib) is not int or not 0 <= mib <= MOST_HOST_MIB:
        raise UsageError(f"host_values_mb is a whole number from 0 to {MOST_HOST_MIB}, not {mib!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _checked_args(optimizer: str, given: object) -> tuple[tuple[str, OptionValue], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    checked: dict[str, OptionValue] = {}
    try:
        for name, value in pairs:  # type: ignore[attr-defined]
            checked[str(name)] = freeze(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"optimizer_args are (name, value) pairs of numbers, text, booleans or tuples, not {given!r}"
        ) from None
    for name in checked:
        check_option(optimizer, name)
    return tuple(checked.items())
