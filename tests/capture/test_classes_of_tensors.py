"""Classes of tensors that libraries make, and what they replace by ``__torch_function__``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.captures import record  # noqa: E402


class Image(torch.Tensor):
    """As fastai's and torchvision's: it hands everything on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Plain(torch.Tensor):
    """A class and nothing else."""


class Weight(torch.nn.Parameter):
    """A class of parameters."""


class Labelled(Image):
    """As MONAI's: it copies all attributes from tensor to tensor, and makes tensors in a way of its own."""

    def __new__(cls, data: Any, *_: Any) -> Any:
        return torch.as_tensor(data).as_subclass(cls)

    def __init__(self, data: Any, label: str = "") -> None:
        super().__init__()
        self.label = label
        if isinstance(data, Labelled):
            self.__dict__ = copy.deepcopy(data.__dict__)

    def new_empty(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("an operator asked the class")

    def near(self, other: torch.Tensor) -> torch.Tensor:
        self.__dict__.update(other.__dict__)
        return self


def in_capture(function: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    record(lambda: answers.append(function()))
    return answers[0]


def test_a_parameter_is_made_of_another_with_its_attributes() -> None:
    """As accelerate's ``init_on_device`` and vLLM's backend for transformers make it on ``meta``."""

    def moved() -> str:
        parameter = torch.nn.Linear(4, 4).weight
        attributes = vars(parameter) | {"requires_grad": False}
        return str(type(parameter)(parameter.to("meta"), **attributes).device)

    assert in_capture(moved) == "meta"


@pytest.mark.parametrize("kind", [Image, Plain])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("made", [lambda: torch.randn(4, 3, 8, 8), lambda: torch.tensor([1.0, 2.0])])
def test_results_are_of_the_class(kind: Any, device: str, made: Callable[[], Any]) -> None:
    def asked() -> list[bool]:
        tensor = made().as_subclass(kind).to(device)
        assert tensor.device.type == device
        results = [
            tensor, tensor + 1, tensor + torch.ones(1, device=device), tensor[0], tensor.mean(), tensor.relu(),
            torch.cat([tensor, tensor]), torch.zeros_like(tensor), tensor.cpu(), tensor.detach(), tensor.clone(),
            tensor.half(), *tensor.chunk(2), torch.stack([tensor, tensor]),
        ]  # fmt: skip
        return [isinstance(result, kind) for result in results]

    assert all(in_capture(asked))


def test_attributes_are_copied_and_devices_are_not() -> None:
    def asked() -> Any:
        host = Labelled(torch.ones(2, 3), "x")
        card = torch.zeros(2, 3, device="cuda").as_subclass(Labelled).near(host)
        again = Labelled(host)
        again.__dict__ = card.__dict__.copy()
        shown = [dict(one.__dict__) for one in (host, card, again)]
        assert Labelled(card).label == "x"
        return [str(one.device) for one in (host, card, again, card + 1, Labelled(card))], shown

    devices, shown = in_capture(asked)
    assert devices == ["cpu", "cuda:0", "cpu", "cuda:0", "cuda:0"]
    assert shown == [{"label": "x"}] * 3


def test_a_class_goes_with_the_one_above_it() -> None:
    """``__torch_function__`` of PyTorch hands a call on if the class is below that of every argument."""

    def asked() -> Any:
        first, other = (torch.ones(2, device="cuda").as_subclass(kind) for kind in (Labelled, Image))
        return [type(one).__name__ for one in (first - other, other - first)]

    assert in_capture(asked) == ["Labelled", "Labelled"]


def test_operators_see_no_class() -> None:
    """PyTorch's kernels for shapes are Python, and would call the methods of the class; C++ does not."""

    def asked() -> Any:
        images = torch.ones(2, 3, 8, 8, device="cuda").as_subclass(Labelled)
        weight = torch.nn.Parameter(torch.ones(4, 3, 3, 3, device="cuda"))
        out = torch.nn.functional.conv2d(images, weight)
        out.sum().backward()
        return type(out).__name__, tuple(weight.grad.shape)

    assert in_capture(asked) == ("Labelled", (4, 3, 3, 3))


def test_a_class_is_put_off_again() -> None:
    def asked() -> Any:
        return type(torch.randn(2, device="cuda").as_subclass(Image).as_subclass(torch.Tensor))

    assert not issubclass(in_capture(asked), Image)


def test_gradients_pass_through() -> None:
    def asked() -> Any:
        weight = torch.nn.Parameter(torch.randn(3, 3, device="cuda"))
        loss = (torch.randn(2, 3, device="cuda").as_subclass(Image) @ weight).sum()
        loss.backward()
        return isinstance(loss, Image), weight.grad.shape

    assert in_capture(asked) == (True, (3, 3))


_HANDLED: dict[Any, Callable[..., Any]] = {torch.mean: lambda x: float(x.value) / x.rows}
_HANDLED[torch.zeros_like] = lambda x, **_: Diagonal(x.rows, 0)


class Diagonal:
    """PyTorch's own example of a class that is no tensor. Its table was made before the capture."""

    def __init__(self, rows: int, value: float) -> None:
        self.rows, self.value = rows, value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _HANDLED[func](*args, **(kwargs or {})) if func in _HANDLED else NotImplemented


@pytest.mark.parametrize("during", [True, False])
def test_a_factory_is_replaced(during: bool) -> None:
    """``torch.zeros_like`` is another function while a capture lasts; a table finds it by either."""

    def asked() -> Any:
        if during:
            _HANDLED[torch.ones_like] = lambda x, **_: Diagonal(x.rows, 1)
        name = torch.ones_like if during else torch.zeros_like
        return torch.mean(Diagonal(4, 2)), name(Diagonal(4, 2)).value

    assert in_capture(asked) == (0.5, int(during))


def test_what_no_class_replaces_is_a_type_error() -> None:
    def asked() -> str:
        with pytest.raises(TypeError, match="rand_like"):
            torch.rand_like(Diagonal(2, 1))
        return "asked"

    assert in_capture(asked) == "asked"


def test_attention_without_a_kernel_is_pytorchs_error() -> None:
    """Programs catch it, and go on with another backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def asked() -> Any:
        query = torch.randn(1, 2, 16, 8, device="cuda")
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # float32
                return torch.nn.functional.scaled_dot_product_attention(query, query, query)
        except RuntimeError as error:
            return str(error)

    assert in_capture(asked) == "No available kernel. Aborting execution."


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_class_is_called_as_tensors_are(device: str) -> None:
    def asked() -> list[Any]:
        made: Any = Plain
        of_tensor = made(torch.zeros(3, dtype=torch.float64, device=device))
        return [(type(one).__name__, isinstance(one, Plain), one.device.type, one.dtype, tuple(one.shape))
                for one in (of_tensor, of_tensor * 2, made([1.0, 2.0]), made(2, 3), made())]  # fmt: skip

    double, single = torch.float64, torch.float32
    on_device = ("Plain", True, device, double, (3,))
    on_host = [("Plain", True, "cpu", single, shape) for shape in ((2,), (2, 3), (0,))]
    assert in_capture(asked) == [on_device, on_device, *on_host]


def test_a_class_that_was_called_shares_the_storage() -> None:
    def asked() -> bool:
        tensor = torch.zeros(3, device="cuda")
        return bool(Plain(tensor).data_ptr() == tensor.data_ptr())

    assert in_capture(asked)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_keep_their_class(requires_grad: bool) -> None:
    def asked() -> list[Any]:
        module = torch.nn.Linear(3, 3)
        module.weight = Weight(module.weight.data, requires_grad=requires_grad)
        kept = [isinstance(module.weight, Weight), module.weight.requires_grad]
        module.to("cuda")
        module(torch.ones(2, 3, device="cuda")).sum().backward()
        torch.optim.Adam(module.parameters()).step()
        names = [name for name, _ in module.named_parameters()]
        return [*kept, isinstance(module.weight, Weight), module.weight.is_cuda, names]

    assert in_capture(asked) == [True, requires_grad, True, True, ["weight", "bias"]]


def test_a_tensor_around_tensors_around_fake_ones_is_fake() -> None:
    """As a DTensor of torchao's tensors is, which FSDP shards: their modules' parameters stay what they are."""
    from torch.testing._internal.two_tensor import TwoTensor

    from graphmem.capture.device.borrowed import is_fake

    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2)
    assert is_fake(TwoTensor(TwoTensor(fake, fake), TwoTensor(fake, fake)))
    real = torch.zeros(2)
    assert not is_fake(TwoTensor(TwoTensor(real, real), TwoTensor(real, real)))


def test_a_mode_is_handed_what_the_program_gave() -> None:
    """optimum-quanto calibrates under a mode of functions: C++ hands it a replaced function with replaced arguments."""
    seen: list[Any] = []

    class HandsOn(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(one for one in args if isinstance(one, torch.device))
            return func(*args, **(kwargs or {}))

    def places() -> list[str]:
        with HandsOn():
            made = (torch.zeros(2).to(torch.device("cuda")), torch.zeros(2).cuda(), torch.tensor([1.0], device="cuda"))
            return [one.device.type for one in (*made, torch.as_tensor([1], device="cuda"), made[0] + made[1])]

    assert in_capture(places) == ["cuda"] * 5
    assert {one.type for one in seen} == {"cuda"}  # never meta
