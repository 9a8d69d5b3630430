"""The description of a step: frozen values whose fields are the command line's options. Imports no framework."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from graphmem.base.options import (
    Given,
    OneOf,
    Option,
    Whole,
    above_zero,
    check_values,
    described,
    documented,
    is_number,
    option,
    option_of,
    part,
    share,
    switch,
)
from graphmem.base.records import public_value
from graphmem.errors import UsageError
from graphmem.training.data_parallel import DataParallel
from graphmem.training.epochs import Epoch, parse_lengths
from graphmem.training.generation import CACHE_IMPLEMENTATIONS, Generation
from graphmem.training.optimizers import (
    OPTIMIZERS,
    OptionValue,
    check_optimizer,
    check_option,
    pairs_of,
    parse_optimizer_arg,
)
from graphmem.training.parts import check_parts, checked_plan, describe_parts, plan_in_file, processes_of_parts
from graphmem.training.pipelines import PipelineParallel
from graphmem.training.processes import Processes, at_least_two, check_world_size
from graphmem.training.schedulers import SCHEDULERS, scheduler_named
from graphmem.training.sharding import FullyShard
from graphmem.training.zero import ZeRO

__all__ = [
    "CACHE_IMPLEMENTATIONS",
    "DTYPES",
    "LOOPS",
    "OPTIMIZERS",
    "SCHEDULERS",
    "WEIGHTS",
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
    "dtype_named",
    "parse_assumption",
    "parse_lengths",
    "parse_optimizer_arg",
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

#: A value that a line is assumed to read.
Assumed = int | float | bool
#: The largest budget of one host tensor, in MiB.
MOST_HOST_MIB = 1 << 16

#: How gradients are cleared: dropped (PyTorch's default), or filled with zeros and kept.
ZERO_GRAD = ("set_to_none", "zeros")
#: When they are cleared.
ZERO_GRAD_AT = ("after_step", "before_forward", "before_backward")

#: The model's output once there is a loss: a variable of the loop holds it until the next output takes
#: its place (``outputs = model(**batch)``), or nothing does (``loss = model(**batch).loss``).
LOOPS = ("hold", "drop")
#: The ``attention_mask`` that batches of a transformers model carry: one that hides nothing, as of texts cut into
#: blocks of one length; or one with padding, as of sentences of several lengths.
ATTENTION_MASKS = ("ones", "padded")
#: Batches that a loader may move ahead; each is on the card.
_MOST_PREFETCHED = 100


def _compile_mode(given: Given) -> object:
    return given["compile_mode"] or ("default" if given["compile"] else None)


_DTYPE = described(f"Precision of weights: {', '.join(DTYPES)}.", lambda _, value: dtype_named(value), metavar="TYPE")
_AMP = described(
    f"Autocast: {', '.join(AMP_DTYPES)} or off; with fsdp and zero the precision that parameters are gathered in. "
    "Default off.",
    lambda _, value: amp_named(value),
    metavar="TYPE",
)
_DATA_DEPENDENT = described(
    "How much nonzero, boolean masks and unique select where it is not known, e.g. 0.25. Default: all.",
    share,
    metavar="SHARE",
)
_COMPILE = described(
    f"Compile the model with torch.compile in this mode: {', '.join(COMPILE_MODES)}.",
    OneOf(COMPILE_MODES),
    flags="--compile-mode",
    metavar="MODE",
    make=_compile_mode,
    also=(Option("Compile the model with torch.compile.", flags=("--compile",), is_flag=True),),
)
_ASSUME = described(
    "What a line reads of unknown data: a number, true, false, or how many it selects. Repeatable.",
    lambda _, value: _checked_assumptions(value),
    metavar="FILE.py:LINE=VALUE",
    read=lambda text: parse_assumption(text),
    repeated=True,
)
_HOST_VALUES = described(
    "Host tensors up to this size hold real data, eight times as much together.",
    Whole(0, MOST_HOST_MIB),
    flags="--host-values",
    metavar="MIB",
)
_ATTENTION_MASK = described(
    f"The mask that batches carry (hf: models of text): {' or '.join(ATTENTION_MASKS)}. Default none.",
    OneOf(ATTENTION_MASKS),
    metavar="WHICH",
)
_PROCESSES = Whole(words="a number of processes of at least 1")
_TP = described("Processes that share each layer, by the model's own plan (transformers).", _PROCESSES)
_EP = described("Processes that share the experts, likewise.", _PROCESSES)


@documented
@public_value(frozen=True, slots=True)
class Training:
    """One training step: forward, loss, backward, optimizer. Raises :class:`UsageError` for a field that is not
    accepted; the message lists what is."""

    optimizer: str = option(
        "adamw",
        "sgd, adam, adamw, adafactor, lion, muon, adamw8bit, ... ('graphmem help optimizer' has all), or module:Class "
        "of your own.",
        lambda _, value: check_optimizer(value),
        metavar="NAME",
    )
    optimizer_args: tuple[tuple[str, OptionValue], ...] = option(
        (),
        "An option of the optimizer, e.g. momentum=0.9, foreach=false, betas=0.9,0.95. Repeatable.",
        pairs_of,
        flags="--optimizer-arg",
        metavar="NAME=VALUE",
        read=parse_optimizer_arg,
        repeated=True,
    )
    dtype: str = option("fp32", _DTYPE)
    amp: str | None = option(None, _AMP)
    checkpoint_activations: bool = option(False, "Recompute activations in the backward pass, block by block.")
    grad_accum: int = option(
        1,
        "Micro-batches (forward and backward passes) per optimizer step.",
        Whole(),
        flags="--grad-accum --gradient-accumulation-steps",
    )
    clip_grad_norm: float | None = option(
        None, "Clip the gradients to this norm.", above_zero, flags="--clip-grad-norm --max-grad-norm", metavar="NORM"
    )
    zero_grad: str | None = option(
        None,
        f"How gradients are cleared: {' or '.join(ZERO_GRAD)}. Default: as PyTorch does (zeros before 2.0).",
        OneOf(ZERO_GRAD),
        metavar="HOW",
    )
    ddp: DataParallel | None = option(None, part(DataParallel))
    world_size: int | None = option(None, "Processes, one card each; the analysis is of one.", check_world_size)
    data_dependent: float | None = option(None, _DATA_DEPENDENT)
    compile: str | None = option(None, _COMPILE)
    assume: tuple[tuple[str, Assumed], ...] = option((), _ASSUME)
    host_values_mb: int = option(64, _HOST_VALUES)
    zero_grad_at: str = option(
        "after_step",
        f"When gradients are cleared: {', '.join(ZERO_GRAD_AT)}, also with dashes; the first is usual.",
        OneOf(ZERO_GRAD_AT),
        metavar="WHEN",
        read=lambda text: text.replace("-", "_"),
    )
    loop: str = option(
        "hold",
        f"{' or '.join(LOOPS)}: whether a variable holds the model's output until the next one takes its place, as "
        "in loops written by hand. Default hold; transformers' Trainer drops it.",
        OneOf(LOOPS),
        metavar="HOW",
    )
    grad_scaler: bool | None = option(None, "Scale the loss (GradScaler). Default: with fp16 autocast.", switch)
    lr_scheduler: str | None = option(
        None,
        f"{', '.join(SCHEDULERS)}, or a name of transformers' (linear, cosine, ...). Default none.",
        lambda _, value: scheduler_named(value),
        metavar="NAME",
    )
    seq_lens: tuple[int, ...] = option((), option_of(Epoch, "seq_lens"))
    last_batch: int | None = option(None, option_of(Epoch, "last_batch"))
    eval_batches: int = option(0, option_of(Epoch, "eval_batches"))
    eval_batch_size: int | None = option(None, option_of(Epoch, "eval_batch_size"))
    steps_per_epoch: int | None = option(None, option_of(Epoch, "steps_per_epoch"))
    rank: int = option(0, option_of(Processes, "rank"))
    nproc_per_node: int | None = option(None, option_of(Processes, "per_node"))
    fsdp: FullyShard | None = option(None, part(FullyShard))
    zero: ZeRO | None = option(None, part(ZeRO))
    attention_mask: str | None = option(None, _ATTENTION_MASK)
    tp: int | None = option(None, _TP)
    ep: int | None = option(None, _EP)
    pp: PipelineParallel | None = option(None, part(PipelineParallel))
    cp: int | None = option(None, "Processes that share each sequence, of those of --fsdp.", at_least_two)
    sp: bool = option(False, "Share activations between layers too (PyTorch's SequenceParallel), with --tp.")
    tp_plan: tuple[tuple[str, str], ...] = option(
        (),
        "Rules for --tp beside the model's own: JSON, modules' names to styles' names.",
        lambda _, value: checked_plan(value),
        metavar="FILE",
        read=plan_in_file,
    )
    prefetch: int = option(
        0,
        "Batches that a loader moves to the card ahead of the step, on a stream of their own.",
        Whole(0, _MOST_PREFETCHED),
    )

    def __post_init__(self) -> None:
        check_values(self)
        for name, _ in self.optimizer_args:
            check_option(self.optimizer, name)
        _ = self.epoch  # refused where it is wrong
        self._check_prefetch()
        self._check_processes()

    def _check_prefetch(self) -> None:
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
            self._check_context()
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

    def _check_context(self) -> None:
        """Raise :class:`UsageError` for ``cp`` without ``fsdp``, with ``ep`` or with batches of several lengths.
        Accelerate and torchtitan share sequences among processes that FSDP2 shards parameters over."""
        if self.fsdp is None:
            raise UsageError("cp goes with fsdp, as in Accelerate and torchtitan: parameters are sharded over it too")
        if self.ep:
            raise UsageError("transformers' DistributedConfig, which ep is, has no context parallelism; leave out one")
        if self.epoch.varies:
            raise UsageError("processes share sequences of one length; leave out seq_lens, last_batch and eval_batches")

    @property
    def tp_in_mesh(self) -> bool:
        """True if ``tp`` is a dimension of :attr:`mesh`, over which layers are shared before FSDP2 shards them, as in
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
        """The number of a wrapper's processes that have the same part of the model."""
        count = math.prod(taken.values())
        size = self.wrapper.world_size if self.wrapper is not None else count
        if size % count:
            by = " x ".join(f"{name} {each}" for name, each in taken.items())
            raise UsageError(f"{'fsdp' if self.ddp is None else 'ddp'}'s {size} processes cannot be divided by {by}")
        return size // count

    def _check_parts(self) -> None:
        """Raise :class:`UsageError` for a wrapper that no framework combines with tp or ep."""
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
    def shares_out(self) -> bool:
        """Whether several processes share the step."""
        return self.wrapper is not None or self.pp is not None or bool(self.tp or self.ep)

    @property
    def casts_itself(self) -> bool:
        """True if the wrapper makes parameters of the lower precision, in place of autocast."""
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
    def has_loader(self) -> bool:
        """Whether batches come one after the other, because they differ or are moved ahead; else one is on the card."""
        return self.epoch.varies or self.prefetch > 0

    @property
    def scales_loss(self) -> bool:
        """True if a gradient scaler is used."""
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
        scaler = "gradient scaler" if self.scales_loss else "no gradient scaler"
        others: tuple[tuple[object, str], ...] = (
            (self.checkpoint_activations, "activation checkpointing"),
            (self.grad_accum > 1, f"{self.grad_accum} micro-batches per step"),
            (self.clip_grad_norm, f"gradient norm clipped to {self.clip_grad_norm or 0:g}"),
            (self.wrapper, self.wrapper.describe() if self.wrapper else ""),
            (self.tp or self.ep, ", ".join(describe_parts(self.tp, self.ep))),
            (self.sp, "sequence parallel"),
            (self.tp_plan, "by a plan of its own"),
            (self.pp, self.pp.describe() if self.pp else ""),
            (self.cp, f"context parallel over {self.cp}"),
            (self.zero_grad == "zeros", "gradients zeroed in place"),
            (self.zero_grad_at != "after_step", f"gradients cleared {self.zero_grad_at.replace('_', ' the ')} pass"),
            (self.scales_loss != (self.amp == "fp16"), scaler),
            (self.lr_scheduler, self.lr_scheduler or ""),
            (self.attention_mask, _MASKED.get(self.attention_mask or "", "")),
            (self.loop == "drop", "output dropped"),
            (self.prefetch, f"{self.prefetch} batch{'es' * (self.prefetch > 1)} prefetched"),
        )
        return ", ".join([*words, *(text for holds, text in others if holds), *self.epoch.describe()])


@documented
@public_value(frozen=True, slots=True)
class Inference:
    """One forward pass without gradients, or one generation. Raises :class:`UsageError` for a field that is not
    accepted."""

    dtype: str = option("fp32", _DTYPE)
    amp: str | None = option(None, _AMP)
    data_dependent: float | None = option(None, _DATA_DEPENDENT)
    compile: str | None = option(None, _COMPILE)
    assume: tuple[tuple[str, Assumed], ...] = option((), _ASSUME)
    host_values_mb: int = option(64, _HOST_VALUES)
    weights: str | None = option(
        None,
        f"Quantised weights of linear layers (hf: models, inference): {', '.join(WEIGHTS)}.",
        lambda _, value: weights_named(value),
        metavar="TYPE",
    )
    attention_mask: str | None = option(None, _ATTENTION_MASK)
    tp: int | None = option(None, _TP)
    ep: int | None = option(None, _EP)
    generate: Generation | None = option(None, part(Generation, "Generation (transformers)"))

    def __post_init__(self) -> None:
        check_values(self)
        check_parts(self.tp, self.ep)
        if self.weights is not None and (self.tp or self.ep):
            raise UsageError("quantised weights are not distributed here; leave out weights, or tp and ep")
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


def dtype_named(name: object) -> str:
    """The canonical precision (``fp32``, ``bf16``, ``fp16``, ``fp64``). Raises :class:`UsageError`."""
    key = str(name).strip().lower().removeprefix("torch.")
    for canonical, spellings in DTYPES.items():
        if key == canonical or key in spellings:
            return canonical
    raise UsageError(f"unknown dtype {name!r}; accepted: {', '.join(DTYPES)}")


def amp_named(name: object) -> str | None:
    """The canonical autocast precision, None for ``None`` and ``"off"``. Raises :class:`UsageError`."""
    if name is None or str(name).strip().lower() in ("off", "none", "no"):
        return None
    key = str(name).strip().lower().removeprefix("torch.")
    for canonical in AMP_DTYPES:
        if key == canonical or key in DTYPES[canonical]:
            return canonical
    raise UsageError(f"unknown amp precision {name!r}; accepted: {', '.join(AMP_DTYPES)}, off")


def weights_named(name: object) -> str | None:
    """The canonical type of quantised weights. Raises :class:`UsageError`."""
    if name is None:
        return None
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


#: Words for the masks of a step.
_MASKED = {"ones": "attention mask of ones", "padded": "attention mask with padding"}


class Tried(float):
    """A value that is assumed in order to try its effect, not because it is known: a loop that does not end with it is
    left."""


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
        if not isinstance(value, bool) and not is_number(value):
            raise UsageError(f"{place} is assumed to be {value!r}; accepted: numbers, true, false")
    return checked
