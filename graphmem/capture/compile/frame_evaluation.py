"""Who evaluates Python's frames: the interpreter itself, or the function that Dynamo puts in its place.

CPython calls a Python function without leaving its loop only while nothing stands in the interpreter's place
(``tstate->interp->eval_frame``, Python/ceval.c of 3.11 and later). Then a call hands its arguments over to the callee,
which can drop them; otherwise the caller's stack holds them until the call returns, and temporaries live longer.

Dynamo counts who uses its function and takes it away at zero, but a frame that failed to compile stays counted
(``dynamo__custom_eval_frame``, torch/csrc/dynamo/eval_frame_cpp.cpp of 2.13: "we intentionally DO NOT re-enable custom
behavior"), so the function stays for as long as the process lives. That is part of a run in which something fails, and
of none that follow: an analysis begins without it, and leaves the function as it found it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch
from torch.distributions import Distribution

from graphmem.capture.patches import Patches, constant
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"


class FrameEvaluation:
    """Sets who evaluates frames: Dynamo while it listens, and for good after a failure; else the interpreter."""

    def __init__(self, read: Callable[[], int], write: Callable[[int], None], own: int, dynamo: int) -> None:
        self._read = read
        self._write = write
        self._own = own
        self._dynamo = dynamo
        self.failed = False

    def idle(self) -> None:
        """Dynamo does not listen."""
        if not self.failed and self._read() == self._dynamo:
            self._write(self._own)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Begin with the interpreter, and end with the function found now."""
        found = self._read()
        self.idle()
        try:
            yield
        finally:
            if self._read() in (self._dynamo, self._own):
                self._write(found)


def frame_evaluation() -> FrameEvaluation | None:
    """None where the interpreter does not show who evaluates its frames: other Pythons than CPython."""
    # torch._dynamo.eval_frame has the name too, but for 2.5 and 2.6
    eval_frame = private("torch._C._dynamo.eval_frame", _LOST)

    api = ctypes.pythonapi
    try:
        interpreter, get, set_ = (
            api.PyInterpreterState_Get,
            api._PyInterpreterState_GetEvalFrameFunc,
            api._PyInterpreterState_SetEvalFrameFunc,
        )
        own = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p).value
    except AttributeError:
        return None
    interpreter.restype = get.restype = ctypes.c_void_p
    get.argtypes, set_.argtypes, set_.restype = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_void_p], None
    state = interpreter()
    found = get(state)
    prior = eval_frame.set_eval_frame(False)  # run what is compiled, compile nothing: Dynamo's function is in place
    dynamo = get(state)
    eval_frame.set_eval_frame(prior)
    set_(state, found)
    return FrameEvaluation(lambda: get(state), lambda function: set_(state, function), own or 0, dynamo)


def patched_by_dynamo() -> None:
    """Change PyTorch as Dynamo does before it first compiles, and leave the validation as it is.

    ``torch.distributions`` looks whether its parameters and samples are in range, until something is compiled: Dynamo's
    first context turns that off, once and for the whole process (``patcher.patch`` of 2.13,
    torch/_dynamo/eval_frame.py). It is part of a run that compiles, of every one, and of none that follow.
    """
    with Patches() as patches:
        patches.set(Distribution, "set_default_validate_args", staticmethod(constant(None)))
        private("torch._dynamo.eval_frame.TorchPatcher", _LOST).patch()


def without_validation(patches: Patches) -> None:
    """From now on distributions are not checked unless the program wants it: those made, not those that are there."""
    checked = False

    def set_default_validate_args(value: bool) -> None:
        nonlocal checked
        checked = value

    def initialize(
        original: Callable[..., None],
        self: Distribution,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 - as PyTorch's own
        event_shape: torch.Size = torch.Size(),  # noqa: B008
        validate_args: bool | None = None,
    ) -> None:
        original(self, batch_shape, event_shape, checked if validate_args is None else validate_args)

    patches.set(Distribution, "set_default_validate_args", staticmethod(set_default_validate_args))
    patches.around(Distribution, {"__init__": initialize})
