"""The context of a process: its memory on a card outside the allocator, as a sum of figures, each with the least and
the most that its sources allow.

Public figures, in MiB, that the constants below come from (all read in 2026; *bare* is a context with nothing run):

=========================  ==========================  ==============================================================
card                       figure                      source
=========================  ==========================  ==============================================================
RTX 6000 Ada               426 bare                    unsloth-zoo#1053, torch 2.10.0+cu130
B200                       612 bare                    unsloth#8669, nvidia-smi's line of the process
RTX 3090                   256 bare                    InvokeAI#9413, torch 2.7.1+cu128
RTX PRO 6000               "550" bare                  llama.cpp#20595
Titan V                    320 bare, 1008 PyTorch 1.3  pytorch#28394 (kernels loaded at once)
A100-80GB                  414 with a model loaded,    optimum-benchmark's records: process less reserved; 884 more
                           508 after a prefill         belonged to no process
A100-40GB                  1427 to 1431 whole card     GPUMemNet's multilayer networks: measured less reserved
A100-40GB                  250 to 350 more             GPUMemNet's convolutional networks, against the others
RTX 3060                   18, with cuDNN 26           xMem's runs of language models and of small image networks: by so
                                                       much a second run in the same process is less than the first
any                        274 lazy, 636 at once       pytorch#86509, torch 1.13, a 20 MiB segment in both
T4, V100                   1210, 1232 process          SchedTune, PyTorch of 2021, CUDA before 11.7
V100                       1343 process                Hugging Face's guide to training on one GPU, CUDA 11.2
RTX 3090                   1687, with 2 of a tensor    pytorch#55277, torch 1.8.2+cu111
RTX 2080 Ti                1035, with 164 of a tensor  pytorch#49877, torch 1.6.0+cu101
A100, 4090, T4, A40, P100  303 to 512 a process        OutOfMemoryError texts of twelve processes: in use less allocated
                                                       less reserved; beyond the rule's context 3 to 120, median 70
=========================  ==========================  ==============================================================

The twelve are train-llm-from-scratch#5 (74 MiB beyond it), Keye#11 (80), Mask2DiT#4 (80), flux-webui#11 (89),
3DTopia/Phidias-Diffusion#8 (120), CatVTON#133 (55), leetgpu-challenges#52 (43), MTVCrafter#21 (3), cell2location#398
(65), florence2-finetuning#17 (79), CogVLM#236 (8), and VAREdit#6, whose whole process (409) is 23 less than the rule.
Left out: sd-scripts#2029 with 922, where something else is in the process.

Not explained: of GPUMemNet's 1427 to 1431 MiB on A100-40GB the parts here give 432 + 128 and the driver's 621: 248 MiB
are missing; with the 884 MiB that belonged to no process of its sister with 80 GB it would be 15 too many. Nor is it
known why whole cards of A100 held 300 MiB more with convolutions, and processes of A100 and RTX 3060 4 and 8.
"""

from __future__ import annotations

from graphmem.base.figures import Figure, Loads
from graphmem.devices.capabilities import Capability
from graphmem.units import MIB

#: Bytes of a CUDA context per thread that can be resident on the card (local memory for the default 1 KiB stack and
#: the driver's own). Inferred: 2 KiB meets five measured empty contexts within 5 %: RTX 6000 Ada 142 SMs x 1536 = 426
#: MiB (measured 426), B200 148 x 2048 = 592 (612), RTX 3090 82 x 1536 = 246 (256), Titan V 80 x 2048 = 320 (320),
#: RTX PRO 6000 188 x 1536 = 564 ("550").
CONTEXT_BYTES_PER_THREAD = 2048
#: How far the measured ones lie from that rule at most, A100's 414 (rule: 432) included.
CONTEXT_SPREAD = 0.05

#: Kernels loaded lazily during a step and the handle of cuBLAS: the median, the least and the most of the twelve
#: processes above. Others agree: on A100 76 MiB after a prefill (508 less the rule's 432) and 113 to 117 for a training
#: step, if the driver's share is the 884 of its bigger sister; on RTX 3060 18 for language models (``grown_mib`` of
#: ``accuracy/published/cited.json``).
LIBRARY_BYTES = 70 * MIB
LIBRARY_LEAST_BYTES = 3 * MIB
LIBRARY_MOST_BYTES = 120 * MIB

#: All kernels of PyTorch and its libraries, loaded at once: before CUDA 11.7, and with ``CUDA_MODULE_LOADING=EAGER``.
#: What is left of the measured processes above without the rule's context, by the name of the card.
_EAGER_MEASURED = {
    "T4-16GB": (1130, 1130, 1130, "SchedTune: processes of 1210 MiB on a T4"),
    "V100-16GB": (912, 912, 1023, "SchedTune: processes of 1232 MiB on a V100; Hugging Face's guide: 1343"),
    "V100-32GB": (912, 912, 1023, "SchedTune: processes of 1232 MiB on a V100; Hugging Face's guide: 1343"),
    "RTX-3090": (1439, 1439, 1439, "pytorch#55277: 1687 MiB, torch 1.8.2+cu111"),
    "RTX-2080-Ti": (735, 735, 735, "pytorch#49877: 1035 MiB with 164 MiB of a tensor, torch 1.6.0+cu101"),
}
_EAGER_ELSEWHERE = (1024, 362, 1439)
#: The first CUDA that loads kernels when they are first used; PyTorch asks for it since 1.13 (pytorch#86509).
LAZY_SINCE = (11, 7)

#: Makers whose cards' memory outside the allocator is known from out-of-memory messages alone, that is, what is neither
#: free nor PyTorch's: the name of the figure, the least and the most. AMD: ten messages of HIP, whose median the table
#: has. Apple: sixteen of MPS ("other allocations"), which go up to 141 GiB; half of them have no more than this.
#: docs/modeling/other_makers.md lists them.
_OTHER_MAKERS = {
    "AMD": ("HIP context and libraries", 178 * MIB, 1290 * MIB),
    "Apple": ("beside PyTorch's heaps", 2 * MIB, 1490 * MIB),
}


def loads_at_once(loads: Loads) -> bool:
    """True if all kernels are loaded when the process begins."""
    return loads.eager or (loads.cuda is not None and loads.cuda < LAZY_SINCE)


def bare_context(sms: int, threads: int, measured_bytes: int | None, measured_source: str) -> Figure:
    """An empty CUDA context: as measured, else by the rule."""
    name = "CUDA context"
    if measured_bytes is not None:
        return Figure(name, measured_bytes, measured_bytes, measured_bytes, measured_source)
    size = sms * threads * CONTEXT_BYTES_PER_THREAD
    spread = int(size * CONTEXT_SPREAD)
    words = f"assumed: 2 KiB for each of {sms} x {threads} resident threads (within 5 % of six measured contexts)"
    return Figure(name, size, size - spread, size + spread, words)


def kernels() -> Figure:
    """Kernels loaded when first used, with the handle of cuBLAS."""
    words = "the median of twelve processes (OutOfMemoryError texts), which had 3 to 120 MiB"
    return Figure("kernels and cuBLAS", LIBRARY_BYTES, LIBRARY_LEAST_BYTES, LIBRARY_MOST_BYTES, words)


def all_kernels(card: str) -> Figure:
    """All kernels at once, on the card of this name."""
    name = "all kernels, loaded at once"
    if card in _EAGER_MEASURED:
        *sizes, source = _EAGER_MEASURED[card]
        size, least, most = (int(one) * MIB for one in sizes)
        return Figure(name, size, least, most, f"{source}, less 2 KiB a resident thread")
    size, least, most = (one * MIB for one in _EAGER_ELSEWHERE)
    return Figure(name, size, least, most, "assumed: 362 (pytorch#86509) to 1439 MiB (RTX 3090, pytorch#55277)")


def cudnn_engines(limits: Capability) -> Figure:
    """The bytes that cuDNN loads on a card of this capability at the first convolution or recurrent layer."""
    size, least, most = (mib * MIB for mib in limits.cudnn_engine_mib)
    return Figure("cuDNN's engines", size, least, most, limits.cudnn_engine_source)


def of_other_maker(vendor: str, size: int, source: str) -> Figure:
    """The memory of a process outside its allocator on a card that is not NVIDIA's, ``size`` bytes: between the least
    and the most that anybody saw, where nobody did between half and twice as much."""
    name, least, most = _OTHER_MAKERS.get(vendor, ("context", size // 2, 2 * size))
    return Figure(name, size, min(size, least), max(size, most), source)
