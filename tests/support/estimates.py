"""Hand-made estimates for the tests of reports and commands."""

from __future__ import annotations

from dataclasses import replace

import graphmem
from graphmem.diagnostics import Code, Diagnostic
from graphmem.estimate import Estimate, Fit, LiveStorage, Moment, Peak, PhasePeak
from graphmem.runtimes import runtime_named
from graphmem.trace import Category, Place, Trace, TraceBuilder
from graphmem.units import GIB, MIB

PEAK_MOMENT = Moment(1042, "iteration 2 backward", "aten.mm", "transformer.h.11.mlp.c_fc", "model.py:117")


def phase(iteration: int, name: str, requested: int) -> PhasePeak:
    peak = Peak(requested, requested + 3 * MIB, requested + 40 * MIB, requested + 696 * MIB)
    return PhasePeak(iteration, name, peak)


def training_estimate() -> Estimate:
    """A training step that fits, with something in every section."""
    breakdown = {
        "PARAMETER": 497_759_232,
        "BUFFER": 0,
        "GRADIENT": 497_759_232,
        "OPTIMIZER_STATE": 995_519_056,
        "ACTIVATION": 3 * GIB + 17,
        "INPUT": 65_536,
        "TEMPORARY": 154_389_504,
        "WORKSPACE": 8_519_680,
        "COMMUNICATION": 0,
        "ROUNDING": 44_015,
        "FRAGMENTATION": 35 * MIB,
        "CONTEXT": 656 * MIB,
    }
    device = sum(breakdown.values())
    reserved = device - breakdown["CONTEXT"]
    allocated = reserved - breakdown["FRAGMENTATION"]
    requested = allocated - breakdown["ROUNDING"]
    steps = ("zero_grad", "forward", "backward", "optimizer")
    return Estimate(
        model="hf:gpt2",
        runtime="pytorch",
        levels=runtime_named("pytorch").levels,
        allocator="pytorch caching",
        step="training, adamw, fp32 weights, batch 8, sequence 1024",
        gpu="H100-80GB (assumed: no GPU was named)",
        peak=Peak(requested, allocated, reserved, device),
        ideal_bytes=requested,
        phases=(
            phase(0, "build", 497_759_232),
            *(phase(i, name, i * GIB + n * 100 * MIB) for i in (1, 2, 3) for n, name in enumerate(steps)),
        ),
        moment=PEAK_MOMENT,
        breakdown=breakdown,
        top=(
            LiveStorage(154_389_504, "PARAMETER", "transformer.wte.weight", "", "", "", "build"),
            LiveStorage(
                1_646_821_376, "ACTIVATION", "", "aten.addmm", "lm_head", "model.py:182", "iteration 2 forward"
            ),
            LiveStorage(
                402_653_184, "ACTIVATION", "saved", "aten.gelu", "transformer.h.0.mlp.act", "", "iteration 2 forward"
            ),
            *(
                LiveStorage(100 * MIB - n, "GRADIENT", f"h.{n}.weight.grad", "", "", "", "iteration 2 backward")
                for n in range(5)
            ),
        ),
        fit=Fit("H100-80GB", 85_017_755_648, device, 85_017_755_648 - device, True, probability=1.0),
        assumptions=("the card is an H100-80GB: none was named", "context of 656 MiB: not measured for this card"),
        diagnostics=(
            Diagnostic(Code.UNKNOWN, "aten._made_up has no rule for its hidden buffers", 3),
            Diagnostic(Code.WARNING, "the model was traced with a sequence of 1024 tokens"),
            Diagnostic(Code.NOTE, "two parameters are tied"),
        ),
        details={"torch_version": "2.13.0", "workspace_bytes": 8_519_680, "storages": {"device": 1234, "host": 3}},
    )


def stepping_estimate() -> Estimate:
    """Three small steps with their events, whose names are hostile."""
    return graphmem.replay_trace(_steps(), device="T4")


def _steps() -> Trace:
    builder = TraceBuilder("hand-made")
    build = builder.operator("aten.empty", "", builder.phase(0, "build"), "train.py:3")
    for layer in range(4):
        builder.alloc((layer + 1) * MIB, build, Category.PARAMETER, label=f"layers.{layer}.weight")
    builder.alloc(MIB, build, Category.INPUT, place=Place.PINNED)
    for step in (1, 2, 3):
        forward, backward = (builder.phase(step, name) for name in ("forward", "backward"))
        kept = []
        for layer in range(4):
            operator = builder.operator("aten.mm", f"layers.{layer}", forward, f"model.py:{10 + layer}")
            kept.append(builder.alloc(3 * MIB + 7 * step, operator, Category.ACTIVATION))
        for layer in reversed(range(4)):
            operator = builder.operator("<img src=x>", f"layers.{layer}", backward)
            scratch = builder.alloc(2 * MIB, operator, Category.TEMPORARY, label="</script>" if layer else "")
            builder.free(kept[layer], operator)
            builder.free(scratch, operator)
    return builder.build()


def failing_estimate() -> Estimate:
    """The same step on a card of 4 GiB."""
    estimate = training_estimate()
    capacity = 4 * GIB
    missing = capacity - estimate.device
    fit = Fit("RTX-SMALL", capacity, estimate.device, missing, False, failed_at=PEAK_MOMENT, probability=0.0)
    return replace(estimate, gpu="RTX-SMALL", fit=fit)


def inference_estimate() -> Estimate:
    """A minimal estimate: an ONNX graph, nothing assumed, no card."""
    device = 300 * MIB
    return Estimate(
        model="m.onnx",
        runtime="onnxruntime",
        levels=runtime_named("onnxruntime").levels,
        allocator="bfc arena",
        step="inference, fp32 weights",
        gpu="",
        peak=Peak(90 * MIB, 91 * MIB, 128 * MIB, device + 10 * MIB),
        ideal_bytes=80 * MIB,
        phases=(),
        moment=Moment(7, "run", "", "", ""),
        breakdown={"PARAMETER": 50 * MIB, "ACTIVATION": 40 * MIB, "FRAGMENTATION": 38 * MIB, "CONTEXT": 172 * MIB},
        top=(),
        fit=None,
        host_bytes=5 * MIB,
        pinned_bytes=0,
    )
