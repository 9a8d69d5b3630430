"""After a capture PyTorch, and the user's own objects, are exactly as before, whatever happened during it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.capture.compile.inductor import import_compiler  # noqa: E402
from graphmem.errors import CaptureError, GraphmemError  # noqa: E402
from tests.support.captures import births, record  # noqa: E402

#: Classes whose attributes a capture may touch; the modules of torch are all looked at.
CLASSES = (FakeTensor, FakeTensorMode, torch.Tensor, nn.Module, nn.Parameter, torch.amp.GradScaler, torch.autocast)

#: Statistics that fake tensors keep of themselves.
COUNTERS = ("cache_hits", "cache_misses", "cache_bypasses")

#: Operators of the kinds that are replaced in the dispatcher: substitutes, autocast's lists, in both directions.
OPERATORS = (
    "aten::dropout", "aten::softmax.int", "aten::batch_norm", "aten::scaled_dot_product_attention", "aten::linear",
    "aten::addmm", "aten::layer_norm", "aten::_convolution", "aten::cat", "aten::rms_norm", "aten::mse_loss",
)  # fmt: skip


def state() -> dict[str, Any]:
    """Everything global that a capture might leave changed, by name."""
    found: dict[str, Any] = {}
    for name, module in sorted(sys.modules.items()):
        if (name == "torch" or name.startswith("torch.")) and isinstance(module, ModuleType):
            found.update({f"{name}.{key}": value for key, value in vars(module).items() if _is_code(value)})
    for owner in CLASSES:
        attributes = {key: id(value) for key, value in vars(owner).items() if key not in COUNTERS}
        found.update({f"{owner.__qualname__}.{key}": value for key, value in attributes.items()})
    found.update({f"dispatcher {name}": torch._C._dispatch_dump_table(name) for name in OPERATORS})
    found.update(_flags())
    return found


def _is_code(value: Any) -> bool:
    return issubclass(type(value), (FunctionType, BuiltinFunctionType, MethodType, type))


def _flags() -> dict[str, Any]:
    module_hooks = nn.modules.module
    optimizer = sys.modules["torch.optim.optimizer"]
    return {
        "is_available": torch.cuda.is_available(),
        "device_count": torch.cuda.device_count(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "autocast": (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
        "autocast dtype": torch.get_autocast_dtype("cuda"),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "random numbers": torch.get_rng_state().tolist(),
        "module hooks": [
            len(module_hooks._global_forward_pre_hooks),
            len(module_hooks._global_forward_hooks),
            len(module_hooks._global_backward_hooks),
        ],
        "optimizer hooks": [
            len(optimizer._global_optimizer_pre_hooks),
            len(optimizer._global_optimizer_post_hooks),
        ],
        "foreach types": list(optimizer._foreach_supported_types),
        "cudnn": torch.backends.cudnn.enabled,
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ],
        "sys.path": list(sys.path),
        "logging": torch._subclasses.fake_tensor.log.level,
    }


class Attention(nn.Module):
    """Touches substitutes, autocast, dropout and normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        split = self.project(x).view(2, 4, 2, 8).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(split, split, split)
        return self.dropout(self.norm(mixed.transpose(1, 2).reshape(2, 4, 16)).softmax(-1))


MODEL = Attention()


def train() -> None:
    analyze(MODEL, torch.zeros(2, 4, 16), training=Training(amp="fp16", clip_grad_norm=1.0))


def infer() -> None:
    analyze(MODEL, torch.zeros(2, 4, 16), training=Inference(amp="bf16"))


def on_device() -> None:
    analyze(lambda: (Attention(), torch.zeros(2, 4, 16)), build_on="device")


def raise_in_forward() -> None:
    class Broken(Attention):
        def forward(self, x: Any) -> Any:
            super().forward(x)
            raise KeyError("broken")

    analyze(lambda: (Broken(), torch.zeros(2, 4, 16)), training=Training(amp="bf16"))


def raise_in_backward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise KeyError("broken")

    def step() -> None:
        Broken.apply(Attention().cuda()(torch.zeros(2, 4, 16, device="cuda"))).sum().backward()

    record(step)


def raise_in_factory() -> None:
    def factory() -> Any:
        raise ImportError("broken")

    analyze(factory)


def interrupt() -> None:
    def step() -> None:
        raise KeyboardInterrupt

    record(step)


def need_data() -> None:
    def step() -> None:
        assert torch.randn(8192, device="cuda").nonzero().shape[0] == 8192  # it takes all

    record(step)


RUNS = (train, infer, on_device, raise_in_forward, raise_in_backward, raise_in_factory, interrupt, need_data)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_pytorch_is_as_it_was(run: Callable[[], None]) -> None:
    _quietly(run)  # what is imported or cached on first use is there from now on
    before = state()
    _quietly(run)
    after = state()
    assert {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)} == {}


def _quietly(run: Callable[[], None]) -> None:
    try:
        run()
    except (GraphmemError, KeyboardInterrupt):
        assert run not in (train, infer, on_device, need_data)
    else:
        assert run in (train, infer, on_device, need_data)


def set_grad_mode() -> None:
    torch.set_grad_enabled(False)


def set_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)


def set_default_device() -> None:
    torch.set_default_device("cuda")


def set_backends() -> None:
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)


def enter_autocast() -> None:
    torch.autocast("cuda", torch.float16).__enter__()


def enter_inference_mode() -> None:
    torch.inference_mode().__enter__()


def seed() -> None:
    torch.manual_seed(0)


SETTINGS = (
    set_grad_mode, set_default_dtype, set_default_device, set_backends, enter_autocast, enter_inference_mode, seed,
)  # fmt: skip


@pytest.mark.parametrize("change", SETTINGS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_what_the_step_sets_for_itself_ends_with_it(change: Callable[[], None], fails: bool) -> None:
    """Scripts set global switches and leave them on: in their own process that harms nobody."""

    def step() -> None:
        change()
        torch.zeros(2, 2, device="cuda").mm(torch.zeros(2, 2, device="cuda"))
        if fails:
            raise KeyError("broken")

    before = _flags()
    try:
        with pytest.raises(CaptureError) if fails else contextlib.nullcontext():
            record(step)
        after = _flags()
    finally:
        _reset(before)
    assert [key for key in before if before[key] != after[key]] == []


def _reset(flags: dict[str, Any]) -> None:
    """Undo what a failing test left."""
    torch.set_grad_enabled(flags["grad mode"])
    torch.set_default_dtype(flags["default dtype"])
    torch.set_default_device(None)
    torch.set_autocast_enabled("cuda", False)
    torch.backends.cudnn.enabled = flags["cudnn"]
    torch.backends.cuda.enable_flash_sdp(flags["attention"][0])


def test_pytorch_works_afterwards() -> None:
    train()
    layer = nn.Linear(3, 2)
    layer(torch.ones(4, 3)).sum().backward()
    assert type(torch.tensor([1.0])) is torch.Tensor
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[4.0] * 3] * 2
    with FakeTensorMode() as mode:
        assert mode.from_tensor(torch.ones(2)).device.type == "cpu"
        assert not (torch.empty(3) + 1).is_cuda


def test_the_users_module_is_untouched() -> None:
    model = Attention()
    model.eval()
    parameters = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    inputs = torch.ones(2, 4, 16)
    analyze(model, inputs, training=Training(dtype="bf16"))
    assert not model.training
    assert inputs.tolist() == torch.ones(2, 4, 16).tolist()
    for name, parameter in model.named_parameters():
        identity, value = parameters[name]
        assert id(parameter) == identity
        assert type(parameter) is nn.Parameter
        assert parameter.grad is None
        assert torch.equal(parameter, value)


def test_the_users_gradients_are_kept() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    gradient = model.weight.grad
    analyze(model, torch.zeros(4, 3))
    assert model.weight.grad is gradient
    assert gradient is not None
    assert gradient.tolist() == [[4.0] * 3] * 2


def test_hooks_of_the_users_module_are_not_left_on_the_original() -> None:
    model = Attention()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    analyze(model, torch.zeros(2, 4, 16), training=Training(checkpoint_activations=False))
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_no_fake_tensor_outlives_the_capture() -> None:
    train()
    gc.collect()
    before = _fake_tensors()
    train()
    gc.collect()
    assert _fake_tensors() <= before


def _fake_tensors() -> int:
    return sum(type(thing) is FakeTensor for thing in gc.get_objects())


def test_captures_do_not_nest() -> None:
    """A capture inside a capture would mix two pretences; it is refused, and all is restored."""
    import_compiler()  # modules imported for the first time are no change
    before = state()
    with pytest.raises(CaptureError, match="an analysis is running on this thread already"):
        record(train)
    after = state()
    assert {key for key in before | after if before.get(key) != after.get(key)} == set()


@pytest.mark.parametrize("custom", [False, True], ids=["factory", "custom step"])
def test_a_real_module_that_a_function_brings_along_is_untouched(custom: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    before = model.state_dict(keep_vars=True)
    values = {name: value.tolist() for name, value in before.items()}

    def factory() -> Any:
        return model, torch.zeros(4, 3)

    def step() -> None:
        model.to("cuda").train()(torch.zeros(4, 3, device="cuda")).sum().backward()

    analyze(step if custom else factory)
    assert all(value is before[name] for name, value in model.state_dict(keep_vars=True).items())
    assert {name: value.tolist() for name, value in before.items()} == values
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(torch.ones(4, 3)).shape == (4, 2)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_borrowed_parameters_are_given_back(fails: bool) -> None:
    """Parameters with hooks are fake themselves meanwhile, and so is what an optimizer in a hook keeps of them."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}
    kinds: list[type] = []

    def step_now(parameter: Any) -> None:
        kinds.append(type(parameter))
        optimizers[parameter].step()
        parameter.added = True
        if fails:
            raise ValueError("of the user")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
        parameter.tag = "mine"
    weight, gradient = model[0].weight, torch.ones(2, 3)
    weight.grad = gradient
    values = {name: parameter.tolist() for name, parameter in model.named_parameters()}
    with pytest.raises(CaptureError, match="of the user") if fails else contextlib.nullcontext():
        analyze(model, torch.zeros(4, 3))
    assert set(kinds) == {FakeTensor}
    assert model[0].weight is weight
    assert weight.grad is gradient
    assert {name: parameter.tolist() for name, parameter in model.named_parameters()} == values
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.device.type == "cpu"
        assert vars(parameter) == {"tag": "mine"}
        assert not optimizers[parameter].state
    if not fails:
        kinds.clear()
        model(torch.ones(4, 3)).sum().backward()  # the hooks are still called, with real ones
        assert set(kinds) == {nn.Parameter}
        assert weight.tolist() != values["0.weight"]


def test_an_optimizer_made_before_steps_a_module_that_is_moved() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.to("cuda", torch.bfloat16)
        for _ in range(2):
            model(torch.zeros(4, 300, device="cuda", dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(300, 200)
        return model, torch.optim.Adam(model.parameters())

    before = made()
    outside, inside = analyze(lambda: step(*before)), analyze(lambda: step(*made()))
    assert (outside.allocated, outside.reserved) == (inside.allocated, inside.reserved)
    assert not before[1].state
    assert type(before[1].param_groups[0]["params"][0]) is nn.Parameter
    assert before[0].weight.dtype is torch.float32


def test_a_borrowed_parameter_lives_no_longer() -> None:
    def step() -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(()))]).cuda()
        del model
        torch.zeros(3, device="cuda")

    first = next(iter(births(record(step))))
    assert first.freed is not None


def test_what_model_libraries_leave_behind_goes(tmp_path: Path) -> None:
    """transformers adds a method to ``nn.Module`` while it builds a model, and would stay offline for good."""
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    analyze(f"hf:{tmp_path / 'config.json'}", batch=1, seq_len=8)
    from huggingface_hub import constants

    assert not hasattr(nn.Module, "smart_apply")
    assert "HF_HUB_OFFLINE" not in os.environ
    assert not constants.HF_HUB_OFFLINE
    if hasattr(constants, "is_offline_mode"):
        assert not constants.is_offline_mode()


def test_the_limit_of_recursion_is_put_back() -> None:
    limit = sys.getrecursionlimit()
    record(lambda: sys.setrecursionlimit(limit + 1000))
    assert sys.getrecursionlimit() == limit
