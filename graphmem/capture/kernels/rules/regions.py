"""torchvision's pooling of regions: the outputs, then contiguous copies of the inputs.

Sources: ``roi_align_kernel.cu``, ``roi_pool_kernel.cu``, ``ps_roi_align_kernel.cu`` and ``ps_roi_pool_kernel.cu`` of
``torchvision/csrc/ops/cuda``, 0.28.
"""

from __future__ import annotations

from graphmem.capture.kernels.parts.script import Call, Script, rule


@rule(
    "torchvision.roi_align.default", "torchvision.roi_pool.default",
    "torchvision.ps_roi_align.default", "torchvision.ps_roi_pool.default",
    library="torchvision",
)  # fmt: skip
def pooled_regions_rule(call: Call) -> Script:
    """Where an operator has a second output, the positions taken or the channels, it is made before the copies."""
    script = Script()
    for index in range(len(call.outputs)):
        script.output(index)
    copies = script.contiguous(call.input, "contiguous input") + script.contiguous(call.rois, "contiguous regions")
    script.give(*reversed(copies))
    return script


@rule(
    "torchvision._roi_align_backward.default", "torchvision._roi_pool_backward.default",
    "torchvision._ps_roi_align_backward.default", "torchvision._ps_roi_pool_backward.default",
    library="torchvision",
)  # fmt: skip
def region_gradients_rule(call: Call) -> Script:
    """The kernel adds into the input's gradient, and follows the strides of the output's."""
    script = Script().output(0)
    script.give(*script.contiguous(call.rois, "contiguous regions"))
    return script
