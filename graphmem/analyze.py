"""The whole flow: load, trace, replay, summarize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphmem.answering import runs, stages
from graphmem.answering.question import Question
from graphmem.base.spellings import also_named
from graphmem.devices import Device
from graphmem.errors import NotModelledError
from graphmem.estimate import Estimate
from graphmem.sources.base import Arguments, OnnxModel
from graphmem.trace import Trace
from graphmem.training import Inference, Training
from graphmem.units import format_bytes


@also_named("device", "gpu")
def analyze(
    model: Any,
    example_inputs: Any = None,
    *more_inputs: Any,
    batch: int | None = None,
    seq_len: int | None = None,
    training: Training | Inference | bool | None = None,
    runtime: str | None = None,
    device: str | Device | None = None,
    alloc_conf: str | None = None,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    input_values: Mapping[str, Sequence[float]] | None = None,
    trip_count: int | None = None,
    shapes: str | None = None,
    iterations: int | None = None,
    top: int = 10,
    torch_version: str | None = None,
    build_on: str = "host",
    cudnn: str | Path = "auto",
    trust: bool = False,
    ranks: str | Sequence[int] | None = None,
    margin: str | None = None,
    bounds: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Estimate:
    """Predict the GPU memory of ``model``.

    Args:
        model: a path or name (``model.onnx``, ``model.pt2``, ``module.py:factory``, ``hf:<config.json or type>``,
            ``timm:<name>``, ``torchvision:<name>``, ``keras:module.py:factory``, ``jax:module.py:function``), an
            ``nn.Module``, a function of ``jax.jit``, a factory, or a step function that builds and runs its own
            iterations. A list of ONNX files is as many sessions in one process.
        example_inputs: for an ``nn.Module``: a tensor, a tuple, or a dict of keyword arguments. For a function of
            ``jax.jit``: its first argument, of arrays or ``jax.ShapeDtypeStruct``.
        more_inputs: further positional arguments.
        batch, seq_len: sizes, passed on to factories that name them; of ONNX files they bind the dimensions that are
            the batch and the lengths of sequences.
        training: a :class:`~graphmem.training.Training` or :class:`~graphmem.training.Inference`, or True or False for
            their defaults; by default inference for ONNX files and training with AdamW for PyTorch models.
            An ONNX file is trained under PyTorch.
        runtime: ``pytorch``, ``onnxruntime``, ``tensorflow``, ``jax``, ``mxnet`` or the name of an installed
            plug-in; by default the one natural to the model.
        device: a name of ``graphmem gpus`` or a :class:`~graphmem.devices.Device`; ``gpu`` is the same.
        alloc_conf: ``PYTORCH_ALLOC_CONF`` text, or the options of another runtime under their own names; by default
            the environment's.
        dims, input_shapes: bind dimensions of ONNX files. A dimension given as (smallest, largest) is analysed at both
            ends, in one session.
        input_values: elements of small inputs of ONNX files, where a branch or a loop depends on them; one value stands
            for all elements.
        trip_count: how often a loop of an ONNX file runs at most, where data decides.
        shapes: the shapes of the runs of an ONNX session in order, as ``batch=1;batch=16,seq=128``; of a jitted
            function in a file, the name there of its arguments, or of a function that returns them.
        iterations: how many iterations to run; by default 3 of training (2 where one has more than 5,000 operators)
            and 2 of inference.
        top: how many of the largest storages to list.
        torch_version: the version of PyTorch to predict, by default the installed one.
        build_on: ``host`` (the model is built on the host, then moved) or ``device``.
        cudnn: a cuDNN library (9.8 or later) to ask for its workspaces: its path or folder, or ``installed``; by
            default (``auto``) the installed one, if there is one that can be asked. ``never``: they are predicted, so
            that the result does not depend on what is installed.
        trust: let PyTorch's own loader read a ``.pt2`` file, which unpickles what the file holds and so can run any
            program; without it such a file is only read as data, and refused where that is not enough.
        ranks: of several processes (``Training(world_size=...)``) those to analyse: numbers, or ``all`` that differ.
            The estimate is that of the one that holds the most, and ``details["ranks"]`` has the others' figures.
            None: the step's own ``rank``.
        margin: how sure a "fits" must be, as the share of runs that do: ``p99``, ``p50`` to ``p100``; by default
            everything that is known to be possible must fit.
        bounds: analyse too what follows where a line that reads an unknown value reads another: the other way of a
            branch, no rows of a selection that is taken whole. Each is an analysis of its own, eight at most.
        progress: called with a word on what is being done.

    Raises:
        GraphmemError: with one message that says what is wrong, where, and what to do.
        NotModelledError: for a provider of ONNX Runtime that is not modelled, with the bytes that are known.
    """
    question = Question(
        model,
        Arguments((example_inputs, *more_inputs)) if more_inputs else example_inputs,
        batch=batch,
        seq_len=seq_len,
        training=training,
        runtime=runtime,
        device=device,
        alloc_conf=alloc_conf,
        dims=dims,
        input_shapes=input_shapes,
        input_values=input_values,
        trip_count=trip_count,
        shapes=shapes,
        iterations=iterations,
        top=top,
        torch_version=torch_version,
        build_on=build_on,
        cudnn=cudnn,
        trust=trust,
        margin=margin,
        bounds=bounds,
    )
    say = progress or (lambda _: None)
    if ranks is not None:
        from graphmem.answering.ranks import fullest

        return fullest(question, ranks, say)
    cache = runs.RunCache()
    try:
        return stages.beside_other_loop(stages.estimate_of(question, cache, say), question, say, cache)
    except NotModelledError as error:
        raise _with_what_is_known(error, question) from None


def _with_what_is_known(error: NotModelledError, question: Question) -> NotModelledError:
    """The error with the bytes that no provider changes, those of the run that takes the most."""
    loaded = runs.load(replace(question, runtime=None, alloc_conf=""))
    assert isinstance(loaded, OnnxModel)
    graphs = [session[-1] for session in loaded.sessions]
    known = {
        "weights": sum(graph.weight_bytes for graph in graphs),
        "inputs": sum(max(run.bytes_of(run.inputs) for run in session) for session in loaded.sessions),
        "outputs": sum(max(run.bytes_of(run.outputs) for run in session) for session in loaded.sessions),
    }
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in known.items())
    return NotModelledError(f"{error}; known, whatever the provider, and no peak: {sizes}", error.provider, known)


@also_named("device", "gpu")
def replay_trace(
    trace: Trace,
    *,
    runtime: str | None = None,
    device: str | Device | None = None,
    alloc_conf: str | None = None,
    torch_version: str | None = None,
    top: int = 10,
    margin: str | None = None,
) -> Estimate:
    """Replay a recorded or exported trace on another card or allocator configuration; arguments as :func:`analyze`.

    Without ``alloc_conf`` a recorded run keeps the configuration it was recorded under.
    """
    question = Question(
        None, runtime=runtime, device=device, alloc_conf=alloc_conf, torch_version=torch_version, top=top, margin=margin
    )
    return stages.replay_recorded(trace, question)


@also_named("device", "gpu")
def operator_graph(
    model: Any,
    example_inputs: Any = None,
    *,
    batch: int | None = None,
    seq_len: int | None = None,
    training: Training | Inference | bool | None = None,
    device: str | Device | None = None,
    iterations: int | None = 1,
    trust: bool = False,
) -> Any:
    """The operators of a PyTorch step as a ``torch.fx.Graph``, in the order they run; arguments as :func:`analyze`.

    Every operator is a ``call_function`` node whose ``meta`` names its module, source line, phase, and the shapes and
    dtypes of its outputs; parameters, inputs and literals are placeholders.
    """
    question = Question(
        model,
        example_inputs,
        batch=batch,
        seq_len=seq_len,
        training=training,
        device=device,
        iterations=iterations,
        trust=trust,
    )
    return runs.operator_graph(question)
