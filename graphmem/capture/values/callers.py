"""The caller of an operator or a replaced function, read from the interpreter's frames.

The same operator is called by the user's line, by the autograd engine, by PyTorch's reducer, by a model library that
asks a question. Where an analysis must tell them apart, nothing but the stack does, and it is asked only here: every
function names the one caller that it looks for, and why.

Paths end in ``/`` on every system. What a library calls its files and functions is checked against the versions that
the tests run with; a caller that is not recognised is an ordinary one.
"""

from __future__ import annotations

import dis
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from inspect import CO_OPTIMIZED
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from graphmem.base.imports import library_folder
from graphmem.capture.torch_internals import current_autograd_node
from graphmem.torch_names import private

_PACKAGE = str(Path(__file__).parents[2])
_CAPTURE = os.path.join(_PACKAGE, "capture")


# --- the user's line --------------------------------------------------------------------------------------------------

_TORCH = os.path.dirname(torch.__file__)
_HIDDEN = (
    _TORCH + os.sep,
    _PACKAGE + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    "<frozen",
)
#: Begins the names of files that torch.fx writes and that are none (``_EvalCacheLoader``, torch/fx/graph_module.py).
_WRITTEN = "<eval_with_key>"
#: graphmem's own loop: what is called from here, and not from the user's code, has no line of the user's.
_OWN_LOOP = tuple(os.path.join(_CAPTURE, *name) for name in (("loop", "step.py"), ("session", "session.py")))
#: A file's name for people by the identity of a code object, which is kept with it: the hash of one is of all its code.
_shown: dict[int, tuple[CodeType, str | None]] = {}


def user_line(skipped: int = 1) -> str:
    """``file:line`` of the innermost frame that is the user's or a model library's; "" if none. For every operator that
    is recorded: where in the program it is called. ``skipped``: the next frames, which are known to be graphmem's."""
    frame: FrameType | None = sys._getframe(1 + skipped)
    while frame is not None:
        code = frame.f_code
        known = _shown.get(id(code))
        if known is None:
            is_loop = code.co_filename.startswith(_OWN_LOOP)
            known = _shown[id(code)] = code, None if is_loop else _shorten(code.co_filename)
        shown = known[1]
        if shown is None:
            return ""
        if shown:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_place() -> tuple[str, str, int]:
    """The same for a value that is read: ``file:line``, and the file and the line for who looks into the source."""
    for frame, shown in _user_frames(sys._getframe(1)):
        return f"{shown}:{frame.f_lineno}", frame.f_code.co_filename, frame.f_lineno
    return "", "", 0


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _user_frames(innermost: FrameType) -> Iterator[tuple[FrameType, str]]:
    """The frames of the user's lines and of libraries', with their files' names for people."""
    for frame in _frames(innermost):
        file = frame.f_code.co_filename
        shown = "" if file.startswith(_OWN_LOOP) else _shorten(file)
        if shown:
            yield frame, shown


class Where(NamedTuple):
    """A line that runs: of the user's, or of a model library's."""

    file: str
    line: int
    function: str


#: Callers beyond which nobody asks what becomes of a number that is returned.
_MOST_CALLERS = 8


def user_frames() -> tuple[Where, ...]:
    """The lines that run, from the innermost outwards: where a number is read, and who called that function."""
    return tuple(_where(frame) for frame, _ in islice(_user_frames(sys._getframe(1)), _MOST_CALLERS))


#: Files between a method of a tensor and the line that calls it.
_OF_METHODS = (_PACKAGE + os.sep, *(os.path.join(_TORCH, name) for name in ("_subclasses", "utils", "_tensor.py")))


def reading_frames() -> tuple[Where, ...]:
    """The same, where PyTorch's own functions may be the ones that read, for their callers: ``GradScaler.state_dict``
    returns a count of steps."""
    user = [frame for frame, _ in islice(_user_frames(sys._getframe(1)), _MOST_CALLERS)]
    own = takewhile(lambda frame: frame not in user[:1], _frames(sys._getframe(1)))
    reading = [frame for frame in own if not frame.f_code.co_filename.startswith((*_OF_METHODS, "<"))]
    return tuple(map(_where, [*reading, *user]))


def _where(frame: FrameType) -> Where:
    return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def is_subscript() -> bool:
    """Whether the user's line takes an item (``x[i]``), so that C++ reads ``i``, a tensor of one number, to select a
    row: ``applySlicing``, torch/csrc/autograd/python_variable_indexing.h. Whichever it is, the result is as large."""
    for frame, _ in _user_frames(sys._getframe(1)):
        return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "BINARY_SUBSCR"
    return False


def is_library(filename: str) -> bool:
    """Whether a file is an installed library's."""
    return bool(library_folder(filename))


def raised_at(error: BaseException) -> str:
    """``file:line`` of the deepest line in an error's traceback that is the user's or a model library's; "" if none."""
    shown = ((_shorten(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__))
    places = [f"{file}:{line}" for file, line in shown if file]
    return places[-1] if places else ""


def written_place(filename: str, line: int) -> str:
    """``file:line`` of a frame that a tracer wrote down; "" where it is neither the user's nor a model library's."""
    shown = _shorten(filename)
    return f"{shown}:{line}" if shown else ""


def place_of(frame: FrameType) -> str:
    """``file:line`` of a frame that Dynamo handed over, which could not be compiled."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _shorten(filename: str) -> str:
    """The file's name for people: relative to ``site-packages``, or wherever else packages are installed, or to the
    working directory; "" if it is hidden. Code that torch.fx writes is numbered by how much of it a process has, which
    says nothing."""
    if filename.startswith(_HIDDEN):
        return ""
    if filename.startswith(_WRITTEN):
        return _WRITTEN
    if folder := library_folder(filename):
        return filename.removeprefix(folder + os.sep)
    relative = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if relative.startswith("..") else relative


#: Where operators are answered, in Python in place of C++.
_OPERATORS = tuple(os.path.join(_CAPTURE, name) + os.sep for name in ("record", "operators"))


def clear_frames_below(raised: TracebackType | None) -> bool:
    """Empty the frames of a traceback that a card does not have, where they stand for C++: from the first that works on
    an operator downwards, and above it those of replaced functions. Whether all of them could be emptied."""
    below, done = False, True
    while raised is not None:
        file = raised.tb_frame.f_code.co_filename
        below = below or file.startswith(_OPERATORS)
        if below or file.startswith(_CAPTURE):
            try:
                raised.tb_frame.clear()
            except RuntimeError:  # it is running: the session's own, or one that handles the error now
                done = done and not below
        raised = raised.tb_next
    return done


def function_in_torch_cuda(raised: TracebackType | None) -> str:
    """The last Python function of ``torch.cuda`` in a traceback. For errors of C functions that a build without CUDA
    has not: their message names the C function, and the user called a Python one."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(raised))
    names = [code.co_name for code in codes if "torch/cuda/" in code.co_filename.replace("\\", "/")]
    return f"torch.cuda.{names[-1]}" if names else "torch.cuda"


# --- the caller of an operator ----------------------------------------------------------------------------------------

#: Frames between an operator and the recorder's question who called it: the recorder's, the replacements' of functions,
#: and PyTorch's wrappers around a mode's ``__torch_dispatch__``.
_BETWEEN = (os.path.join(_CAPTURE, "record") + os.sep, os.path.join(_CAPTURE, "patches.py"))
_WRAPPERS = ("_python_dispatch.py", "eval_frame.py", "_compile.py")
_ENGINE: object = getattr(
    private(
        "torch.autograd.graph._engine_run_backward",
        "additions that the engine makes in place of gradients are counted as operators",
        None,
    ),
    "__code__",
    None,
)
_between: dict[CodeType, bool] = {}


def _caller() -> FrameType | None:
    """The frame that called the operator, or the replaced function, in which this module was asked."""
    frame: FrameType | None = sys._getframe(3)  # below it: this function, the question, and who asks it
    while frame is not None:
        code = frame.f_code
        is_between = _between.get(code)
        if is_between is None:
            file = code.co_filename
            is_between = _between[code] = file.startswith(_BETWEEN) or file.endswith(_WRAPPERS)
        if not is_between:
            return frame
        frame = frame.f_back
    return None


def called_by_engine() -> bool:
    """Whether the operator that is answered now comes straight from the autograd engine, with no Python function in
    between. The engine adds up gradients and runs formulas with the operators that a user's hook would use too."""
    caller = _caller()
    return caller is not None and caller.f_code is _ENGINE


#: Files that make host tensors for the reducer: PyTorch's, and the comparison of parameters that stands for C++'s.
_REDUCER = (
    os.path.join("torch", "nn", "parallel", "distributed.py"),
    os.path.join(_CAPTURE, "distributed", "data_parallel.py"),
)


def called_for_reducer() -> bool:
    """Whether DistributedDataParallel makes the host tensor that is asked for now: its indices and flags, which C++
    reads and writes directly (``torch/csrc/distributed/c10d/reducer.cpp``, in the engine's callbacks too)."""
    caller = _caller()
    return caller is not None and (caller.f_code.co_filename.endswith(_REDUCER) or caller.f_code is _ENGINE)


# --- questions of libraries -------------------------------------------------------------------------------------------


class LibraryCaller:
    """Functions of a library's file (all, if none is named). Called: whether one of them is on the stack."""

    def __init__(self, file: str, *functions: str) -> None:
        self._file, self._functions = file, functions

    def __call__(self) -> bool:
        return any(map(self.runs, _frames(sys._getframe(1))))

    def runs(self, frame: FrameType) -> bool:
        """Whether a frame is of one of the functions."""
        code = frame.f_code
        is_named = not self._functions or code.co_name in self._functions
        return is_named and code.co_filename.replace("\\", "/").endswith(self._file)


_GENERATION = "transformers/generation/utils.py"
_STOPPING, _DRAFTING = "transformers/generation/stopping_criteria.py", "transformers/generation/candidate_generator.py"

#: The loop of transformers' ``generate`` for greedy decoding and sampling.
called_to_sample = LibraryCaller(_GENERATION, "_sample")
#: Assisted decoding looks which drafted tokens are right.
called_to_check_draft = LibraryCaller(_GENERATION, "_assisted_decoding", "_speculative_sampling")
#: hqq looks if the error of a quantisation still falls: it goes on while it does, 20 times at the most.
called_to_fit_quantizer = LibraryCaller("hqq/core/optimize.py")
#: ``torch.distributions`` looks if its parameters and samples are in range, as they are in a program that works.
called_to_validate_distribution = LibraryCaller("torch/distributions/distribution.py", "__init__", "_validate_sample")
#: ``SyncBatchNorm`` leaves out the statistics of processes whose input is empty: they are all like the one analysed.
called_to_drop_empty_inputs = LibraryCaller("torch/nn/modules/_functions.py", "forward")
#: Data loaders draw seeds, and the order of their rows; what data sets draw is in their batches.
called_for_batches = LibraryCaller("torch/utils/data/dataloader.py")
_looks_for_end, _drafts = LibraryCaller(_STOPPING), LibraryCaller(_DRAFTING)
_asks_confidence, _keeps_probabilities = (
    LibraryCaller(_STOPPING, "__call__"),
    LibraryCaller(_DRAFTING, "_generate_candidates"),
)
_loops = LibraryCaller(
    _GENERATION, "_sample", "_beam_search", "_assisted_decoding", "_contrastive_search", "_dola_decoding"
)
_generates = LibraryCaller(_GENERATION, "generate")


def called_to_stop_generation() -> bool:
    """Whether transformers looks which sequences have ended: data, and generation would be cut off by a guess."""
    return _looks_for_end() or _drafts() or called_to_check_draft()


def called_to_ask_confidence(is_probability: bool) -> bool:
    """Whether transformers looks how sure a model is of the token that it drafts (``ConfidenceCriteria``), or keeps
    these probabilities to learn from them (where scikit-learn is installed)."""
    return _asks_confidence() or (is_probability and _keeps_probabilities())


def called_to_look_up_draft() -> bool:
    """Whether transformers, which drafts from the text itself, asks if a token is forbidden there
    (``PromptLookupCandidateGenerator``)."""
    codes = (frame.f_code for frame in _frames(sys._getframe(1)))
    names = (code.co_name for code in codes if "/transformers/" in code.co_filename.replace("\\", "/"))
    return next(names, "") == "get_candidates"


def called_in_generation_loop() -> bool:
    """Whether a loop of transformers' ``generate`` reads a value to decide whether it goes on: an assumed value could
    keep it going for ever. A model that drafts runs in a ``generate`` of its own, in the loop around it."""
    for frame in _frames(sys._getframe(1)):
        if _loops.runs(frame) or _generates.runs(frame):
            return not _generates.runs(frame)
    return False


def called_to_generate() -> bool:
    """Whether a model runs for a function that is called ``generate``, as transformers' and most others': a report
    separates generation from evaluation."""
    return any(frame.f_code.co_name == "generate" for frame in _frames(sys._getframe(2)))


# --- what is active around a call -------------------------------------------------------------------------------------


def node_name() -> str:
    """Class name of the autograd node whose formula runs now; "" outside one. Formulas are no operators: the node is
    the only sign of which one calls."""
    node: object = current_autograd_node()
    return "" if node is None else type(node).__name__


_transform: Callable[[], object] = private(
    "torch._C._functorch.peek_interpreter_stack", "transforms of torch.func are taken for plain code", lambda: None
)


#: The level of forward derivatives where PyTorch does not show the present one: none is computed.
_NO_LEVEL: int = private(
    "torch.autograd.forward_ad._current_level", "formulas of forward derivatives copy tensors to their own device", -1
)


def is_forward_derivative() -> bool:
    """Whether derivatives are computed in forward mode now (``torch.func.jvp``, ``hessian``)."""
    return bool(getattr(torch.autograd.forward_ad, "_current_level", _NO_LEVEL) >= 0)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is active; its tensors are like subclasses on a card too."""
    return _transform() is not None


def package_that_asks(frames_between: int = 0) -> str:
    """The top-level package of the code that reads an attribute, asked by the property that answers: PyTorch's own code
    has to recognise fake tensors, and no library may."""
    return str(sys._getframe(2 + frames_between).f_globals.get("__name__", "")).partition(".")[0]


def namespace_that_imports() -> dict[str, object] | None:
    """The globals of the code whose import asks a finder now; None where somebody only asks whether a module is there
    (``importlib.util.find_spec``)."""
    frame: FrameType | None = sys._getframe(2)
    imports = False
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("importlib", "graphmem.capture.")):
        imports = imports or frame.f_code.co_name == "_find_and_load"
        frame = frame.f_back
    return frame.f_globals if imports and frame is not None else None


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame, which must not hold on to their values: until Python 3.13 the frame of a function keeps
    the copy that it gives, and a batch would live on in it until somebody asks again."""
    names = frame.f_locals
    found = dict(names)
    if frame.f_code.co_flags & CO_OPTIMIZED and type(names) is dict:
        names.clear()
    return found


def lists_by_name() -> list[list[object]]:
    """Lists in variables of the function whose loop asks for its next item, and lists in the short ones of them: a
    loop that is put forward may have collected its tokens there."""
    found = [value for value in variables(sys._getframe(2)).values() if type(value) is list]
    inner = (item for outer in found if len(outer) <= 256 for item in outer if type(item) is list)
    return [*found, *inner]


def ends_lightnings_epoch() -> bool:
    """Whether Lightning asks a loader for a batch; its next one is the last of the epoch then, for it counts them and
    validates, saves and logs after as many as the loader has: those that were asked for (``loops/fetchers.py``,
    ``_DataFetcher.__next__``), and those that were trained on (``loops/training_epoch_loop.py``,
    ``_TrainingEpochLoop._should_check_val_fx``)."""
    frames = list(_frames(sys._getframe(1)))
    fetcher: Any = _self_in(frames, "__next__", "/loops/fetchers.py")
    if fetcher is None or fetcher.length is None:
        return False
    skipped = max(0, fetcher.length - 1 - fetcher.fetched)
    fetcher.fetched += skipped
    epoch: Any = _self_in(frames, "advance", "/loops/training_epoch_loop.py")
    if epoch is not None and skipped:
        epoch.batch_progress.increment_by(skipped)
    return True


def _self_in(frames: Sequence[FrameType], method: str, file: str) -> object | None:
    """The object whose method runs, of a file with this ending."""
    for frame in frames:
        code = frame.f_code
        if code.co_name == method and code.co_filename.replace(os.sep, "/").endswith(file):
            return variables(frame).get("self")
    return None


def named_arguments() -> dict[str, object]:
    """The keyword arguments of the module whose hook asks: hooks for all modules are given positions alone
    (``Module._call_impl``)."""
    for frame in _frames(sys._getframe(1)):
        if frame.f_globals.get("__name__") == "torch.nn.modules.module":
            named = variables(frame).get("kwargs")
            return named if isinstance(named, dict) else {}
    return {}


#: Modules whose functions stand for PyTorch's own, between the code that calls and what it calls.
_STANDING_IN = {
    "graphmem.capture.patches",
    "graphmem.capture.device.factories",
    "graphmem.capture.device.fake_tensors",
}


#: Where PyTorch's operators are written in Python, and what stands in for them.
_OPERATORS_IN_PYTHON = (
    "torch._subclasses.", "torch._refs", "torch._prims", "torch._decomp", "torch._meta_registrations",
    "torch._inductor.", "torch._dynamo.", "torch._functorch.", "torch._higher_order_ops.", "torch._library.",
    "torch._ops", "torch.fx.", "torch.utils._device", "graphmem.",
)  # fmt: skip


def called_by_operator() -> bool:
    """Whether the code that asks for a tensor on ``meta``, or reads a device that may be that, is an operator's: to
    operators ``meta`` is where the card's tensors are, to programs and modules it is a device without memory."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _STANDING_IN:
        frame = frame.f_back
    return frame is None or str(frame.f_globals.get("__name__")).startswith(_OPERATORS_IN_PYTHON)
