"""No library finds out that it is being analysed: what they ask to recognise exporters, compilers and fake tensors has
the same answer under a capture as on plain tensors.

Two kinds of questions: PyTorch's, asked from the place of each library, for the answer depends on who asks; and the
libraries' own helpers. Those of a library that is not installed are skipped. peft, trl and Lightning ask nothing of the
kind of tensors in the versions that were looked through (peft 0.21, trl 1.16, Lightning 2.6).
"""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

for _module in ("torch._dynamo", "torch.fx", "torch.onnx"):
    importlib.import_module(_module)

from tests.support.captures import record  # noqa: E402

LIBRARIES = (
    "transformers", "accelerate", "peft", "trl", "diffusers", "timm", "torchvision", "lightning", "torch_geometric",
    "bitsandbytes", "deepspeed",
)  # fmt: skip

#: Expressions of a tensor ``t`` and a parameter ``p``.
QUESTIONS = (
    "isinstance(t, torch._subclasses.FakeTensor)",
    "isinstance(t, torch._subclasses.fake_tensor.FakeTensor)",
    "torch._subclasses.fake_tensor.is_fake(t)",
    "IS_FAKE(t)",
    "torch.compiler.is_compiling()",
    "torch.compiler.is_exporting()",
    "torch.compiler.is_dynamo_compiling()",
    "torch._dynamo.is_compiling()",
    "torch.jit.is_tracing()",
    "torch.jit.is_scripting()",
    "torch._C._get_tracing_state()",
    "isinstance(t, torch.fx.Proxy)",
    "torch.onnx.is_in_onnx_export()",
    "torch.overrides.has_torch_function((t,))",
    "torch._C._is_torch_function_mode_enabled()",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass(t)",
    "torch._is_functional_tensor(t)",
    "torch._C._functorch.is_functorch_wrapped_tensor(t)",
    "isinstance(t, torch.Tensor)",
    "isinstance(p, torch.nn.Parameter)",
    "t.is_meta",
    "t.is_inference()",
    "str(t.layout)",
)
#: What a library imported before the capture began.
IS_FAKE = torch._subclasses.fake_tensor.is_fake

#: Helpers of libraries: module, function, and what it is asked of: nothing, a tensor ``t``, a parameter ``p``, a module
#: ``m``.
HELPERS = (
    ("transformers.utils.import_utils", "is_tracing", "t"),
    ("transformers.utils.import_utils", "is_fake_tensor", "t"),
    ("transformers.utils.import_utils", "is_torch_fx_proxy", "t"),
    ("transformers.utils.import_utils", "is_jax_jitting", "t"),
    ("transformers.utils.import_utils", "is_jit_tracing", ""),
    ("transformers.utils.import_utils", "is_torchdynamo_compiling", ""),
    ("transformers.utils.import_utils", "is_torchdynamo_exporting", ""),
    ("transformers.utils.import_utils", "is_cuda_stream_capturing", ""),
    ("transformers.utils.generic", "is_tensor", "t"),
    ("transformers.utils.generic", "is_torch_tensor", "t"),
    ("accelerate.utils.operations", "is_torch_tensor", "t"),
    ("accelerate.utils.other", "is_compiled_module", "m"),
    ("accelerate.utils.other", "has_compiled_regions", "m"),
    ("diffusers.utils.torch_utils", "is_compiled_module", "m"),
    ("torch_geometric", "is_compiling", ""),
    ("torch_geometric._onnx", "is_in_onnx_export", ""),
    ("torch_geometric.utils", "is_torch_sparse_tensor", "t"),
    ("timm.optim._helpers", "_is_compiling", ""),
    ("timm.layers", "is_exportable", ""),
    ("timm.layers", "is_scriptable", ""),
    ("torchvision", "_is_tracing", ""),
    ("bitsandbytes.autograd._functions", "_is_compiling", ""),
    ("lightning.fabric.wrappers", "is_wrapped", "m"),
    ("deepspeed.runtime.compiler", "is_compiling", ""),
    ("deepspeed.utils.pin_memory", "_is_fake_tensor", "t"),
)


def _asked_by(library: str) -> dict[str, Callable[[Any, Any], Any]]:
    """The questions as code of the library."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {library}")
    scope = {"torch": torch, "IS_FAKE": IS_FAKE, "__name__": f"{library}.module"}
    return {text: eval(compile(f"lambda t, p: {text}", spec.origin, "eval"), scope) for text in QUESTIONS}


def _answers(questions: dict[str, Callable[[Any, Any], Any]], device: str) -> dict[str, Any]:
    tensor = torch.zeros(3, 4, device=device)
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    return {text: question(tensor, parameter) for text, question in questions.items()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_pytorch_tells_a_library_what_it_tells_of_plain_tensors(library: str) -> None:
    questions = _asked_by(library)
    plain = _answers(questions, "cpu")
    captured: list[dict[str, Any]] = []
    record(lambda: captured.extend(_answers(questions, device) for device in ("cuda", "cpu")))
    for answers in captured:
        assert {text: answer for text, answer in answers.items() if answer != plain[text]} == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name", "of"), HELPERS, ids=[f"{module}.{name}" for module, name, _ in HELPERS])
def test_a_helper_of_a_library_answers_as_on_plain_tensors(module: str, name: str, of: str) -> None:
    library = module.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    helper = getattr(importlib.import_module(module), name)

    def ask(device: str) -> Any:
        linear = torch.nn.Linear(3, 4, device=device)
        given: dict[str, Any] = {"t": torch.zeros(3, 4, device=device), "p": linear.weight, "m": linear}
        return helper(given[of]) if of else helper()

    captured: list[Any] = []
    plain = ask("cpu")
    record(lambda: captured.extend([ask("cuda"), ask("cpu")]))
    assert captured == [plain, plain]


def test_pytorch_itself_still_knows() -> None:
    """Its own code has to: asked from a file of torch, the class and the function say what is."""
    found: list[bool] = []
    scope = {"fake_tensor": torch._subclasses.fake_tensor, "is_fake": IS_FAKE, "__name__": "torch.module"}
    asked = eval("lambda t: (isinstance(t, fake_tensor.FakeTensor), is_fake(t))", scope)
    record(lambda: found.extend(asked(torch.zeros(3, device="cuda"))))
    assert found == [True, True]
    assert isinstance(IS_FAKE, types.FunctionType)
    assert not IS_FAKE(torch.zeros(3))
