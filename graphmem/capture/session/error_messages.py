"""Messages for the actions of a step that fail on shapes alone: PyTorch's own errors describe its internals."""

from __future__ import annotations

import re

from graphmem.capture.values.callers import function_in_torch_cuda

#: (regular expression on "<type>: <message>", message for the user); a third word is of what a card refuses too. The
#: first that is found counts.
_EXPLAINED: tuple[tuple[str, ...], ...] = (
    (
        r"Cannot access accelerator device when none is available",
        'a device is named by a bare number; write torch.device("cuda", 0)',
    ),
    (
        r"Triton|triton|0 active drivers",
        "a Triton kernel is launched, which no analysis of shapes can follow; wrap it in torch.library.triton_op or "
        "custom_op with register_fake, or choose the model's PyTorch implementation",
    ),
    (
        r"Cannot access data pointer|data_ptr",
        "code outside PyTorch (a custom CUDA kernel, numpy, dlpack) asks for a tensor's memory, and an analysis has "
        "only shapes; wrap it in torch.library.custom_op with register_fake, or choose the model's PyTorch "
        "implementation",
    ),
    (
        r"HigherOrderOperator flex_attention",
        "flex_attention is not modelled; use scaled_dot_product_attention with a mask for the analysis",
    ),
    (r"HigherOrderOperator (?P<name>\w+)", "the higher-order operator {name} is not modelled; write plain Python"),
    (
        r"arguments from the 'Sparse|sparse_(csr|csc|bsr|bsc|coo|compressed)_tensor|storage of Sparse",
        "of sparse tensors on the device, COO ones are multiplied, summed, coalesced and transposed, CSR and CSC ones "
        "are made, moved, transposed and multiplied with dense ones; this operator or layout is not modelled: work on "
        "its values(), or on a COO or dense tensor, for the analysis",
    ),
    (
        r"arguments from the 'Quantized|_affine_quantized|quantized::",
        "quantized tensors are not modelled; analyse the model before it is quantized",
    ),
    (
        r"_nested_|arguments from the 'NestedTensor|shape_env must not be None",
        "this operator of nested tensors is not modelled (nor is layout=torch.strided); pad to a rectangular tensor "
        "for the analysis",
    ),
    (
        r"Could not run 'aten::empty_strided' with arguments from the 'CUDA'",  # the fake mode tries real tensors
        "the operator of this line has no implementation for shapes alone, as those of sparse tensors in blocks (BSR, "
        "BSC) have none; choose to_sparse_csr(), or another one, for the analysis",
    ),
    (
        r"Could not run '(?P<name>[\w:.]+)' with arguments from the",
        "operator {name} has no implementation for shapes alone; choose another one for the analysis",
    ),
    (
        r"TorchScript|torch\.jit",
        "TorchScript runs outside Python, where an analysis cannot follow it; analyse the module before torch.jit",
    ),
    (
        r"InternalTorchDynamoError|TorchRuntimeError|torch\._dynamo|BackendCompilerFailed",
        "torch.compile cannot be followed; analyse the module before it is compiled",
    ),
    (
        r"FakeTensorDeviceMismatchError.*(cuda:\d+ and cpu|cpu and cuda:\d+)",
        "an operator gets tensors of the device and of the host, which would fail on a card too; move them with .to(), "
        "or give them as example inputs or targets, which are moved: return (model, inputs, targets, loss)",
        "refused",
    ),
    (
        r"All operands in aten\.stack\.default must have the same mesh",
        "gradients are clipped by norms that are shared out over different processes, which PyTorch refuses on a card "
        "too; leave out clipping (--clip-grad-norm), or let PyTorch's styles share all of them (--sp)",
        "refused",
    ),
    (
        r"_foreach_\w+\.\w+ got mixed torch\.Tensor and DTensor",
        "the optimizer puts sharded and whole parameters in one list, which PyTorch refuses on a card too; "
        "have it take them one by one: foreach=False (--optimizer-arg foreach=False)",
        "refused",
    ),
    (
        r"Storage size calculation overflowed with sizes=(?P<sizes>\[[\d, ]*\])",
        "a tensor of sizes {sizes} has more than 2^63 - 1 bytes, more than any memory; make a size smaller",
        "refused",
    ),
    (r"Legacy CUDA profiling", "torch.profiler finds no device; leave it out of the analysed step"),
    (
        r"not compiled with CUDA|without ATen_cuda|not linked with support for cuda|no NVIDIA driver",
        "compiled code (a kernel of a library, or an operator of PyTorch that is not modelled) asks for a driver, and "
        "there is none; choose the model's PyTorch implementation for the analysis",
    ),
)
_MISSING_C_FUNCTION = re.compile(r"module 'torch\._C' has no attribute '_?cuda_?\w*'")


def explained(error: BaseException) -> str | None:
    """The message for an error that PyTorch raised because tensors have no data; None for any other."""
    text = f"{type(error).__name__}: {error}"
    if _MISSING_C_FUNCTION.search(text):
        return f"{function_in_torch_cuda(error.__traceback__)} cannot be analysed: it needs a driver"
    for pattern, message, *_ in _EXPLAINED:
        found = re.search(pattern, text)
        if found:
            return message.format(**found.groupdict())
    return None


def is_refused_by_cards(error: BaseException) -> bool:
    """Whether an error that is explained is raised on a card too."""
    text = f"{type(error).__name__}: {error}"
    return any(rest for pattern, _, *rest in _EXPLAINED if re.search(pattern, text))
