"""The entries of PyTorch's operator database, and the calls that are made of each.

The database's own generators give the inputs, at their own sizes (``small``) and at larger ones, since a kernel takes
other paths then and a buffer that is forgotten does not show beside inputs of five by five: with other values of the
four constants that most shapes are made of (``large``), and with every dimension of every tensor longer by one factor
(``stretched``), where the operator takes that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda.jiterator import _JittedFunction
from torch.testing._internal.common_methods_invocations import op_db

from tests.recorded.op_db.samples import Encoder, Json, NotJson, bytes_of, stretched, tensors_of

# Importing the database forbids everybody to set cuDNN's switches, which a capture keeps and puts back.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

#: The constants S, M, L and XS of the generators; the first of the larger ones that a generator takes is used.
_CONSTANTS = {"small": ((5, 10, 20, 3),), "large": ((40, 80, 160, 6), (17, 34, 68, 5))}
#: How many calls of an entry are recorded, by size: in float32, and in each other type.
_CALLS = {"small": (2, 1), "large": (3, 1), "stretched": (3, 2)}
DTYPES = (torch.float32, torch.bfloat16, torch.int64)

_MOST_SAMPLES = 200
_MOST_BYTES = 256 << 20
#: Stretched arguments are as large as fits this.
_STRETCHED_BYTES = 8 << 20
_SECONDS = 20


@dataclass(frozen=True)
class Call:
    """One call of an entry: ``samples`` are the forms of its arguments to try, the first that runs being the call.

    A sample is two documents: the list of positional arguments and the dictionary of the others.
    """

    name: str
    entry: str
    samples: tuple[Json, ...]


@functools.cache
def entries() -> dict[str, Any]:
    """Every entry by name; of several with one name the first."""
    found: dict[str, Any] = {}
    for entry in op_db:
        found.setdefault(entry.full_name, entry)
        if isinstance(entry.op, _JittedFunction):
            entry.op.is_cuda_available = True  # it asked when the database was imported, outside any capture
    return found


def calls(name: str) -> Iterator[Call | tuple[str, str]]:
    """The calls of an entry; a name and a reason where there are none."""
    entry = entries()[name]
    supported, differentiable = entry.supported_dtypes("cuda"), entry.supported_backward_dtypes("cuda")
    chosen = [dtype for dtype in DTYPES if dtype in supported]
    if not chosen:
        yield name, "none of the types tried"
    for dtype in chosen:
        grad = entry.supports_autograd and dtype in differentiable
        short = str(dtype).removeprefix("torch.")
        documents: dict[str, list[Json]] = {}
        seen: list[Json] = []
        for size in _CONSTANTS:
            try:
                documents[size] = _documents(entry, dtype, grad, size)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
                yield f"{name}/{short}/{size}", f"no inputs: {reason}"
        for size, (of_floats, of_others) in _CALLS.items():
            count = of_floats if dtype is torch.float32 else of_others
            if size == "stretched":
                forms = _stretched(_chosen(documents.get("small", ()), 2 * count))[:count]
            else:
                new = [document for document in documents.get(size, ()) if document not in seen]
                forms = [(document,) for document in _chosen(new, count)]
                seen += [document for (document,) in forms]
            for number, samples in enumerate(forms):
                yield Call(f"{name}/{short}/{size}/{number}", name, samples)


def _stretched(documents: Iterable[Json]) -> list[tuple[Json, ...]]:
    """Forms of each document with longer dimensions, the longest first."""
    found = []
    for document in documents:
        factors = [1 << power for power in range(20, 0, -1)]
        fitting = [f for f in factors if bytes_of(stretched(document, f)) <= _STRETCHED_BYTES]
        if bytes_of(document) and all("stride" not in t and "storage" not in t for t in tensors_of(document)):
            found.append(tuple(stretched(document, factor) for factor in fitting[::3]))
    return found


def _documents(entry: Any, dtype: torch.dtype, grad: bool, size: str) -> list[Json]:
    *larger, last = _CONSTANTS[size]
    for constants in larger:
        with contextlib.suppress(Exception), _constants(*constants), time_limit(_SECONDS):
            return _generate(entry, dtype, grad)
    with _constants(*last), time_limit(_SECONDS):
        return _generate(entry, dtype, grad)


def _generate(entry: Any, dtype: torch.dtype, grad: bool) -> list[Json]:
    torch.manual_seed(0)
    documents, refused = [], None
    for sample in itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=grad), _MOST_SAMPLES):
        try:
            encoder = Encoder()
            document = [encoder.encode([sample.input, *sample.args]), encoder.encode(dict(sample.kwargs))]
        except NotJson as error:
            refused = error
            continue
        if bytes_of(document) <= _MOST_BYTES:
            documents.append(document)
    if not documents:
        raise refused or ValueError("no samples")
    return documents


def _chosen(documents: Iterable[Json], count: int) -> list[Json]:
    """The largest, then the largest of each other form of call, as many as are wanted."""
    ordered = sorted(documents, key=bytes_of, reverse=True)
    by_form: dict[str, list[Json]] = {}
    for document in ordered:
        by_form.setdefault(_form(document), []).append(document)
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*by_form.values()))
    found: list[Json] = []
    for document in rounds:
        if document is not None and document not in found:
            found.append(document)
        if len(found) == count:
            break
    return found


def _form(document: Json) -> str:
    """Equal for calls that differ in sizes and numbers alone."""
    if isinstance(document, dict):
        if "tensor" in document:
            return f"T{len(document['shape'])}{'s' * ('stride' in document)}"
        return "{" + ",".join(f"{key}:{_form(value)}" for key, value in document.items()) + "}"
    if isinstance(document, list):
        return "[" + ",".join(dict.fromkeys(_form(part) for part in document)) + "]"
    return repr(document) if isinstance(document, (bool, str)) else type(document).__name__


@contextlib.contextmanager
def _constants(*values: int) -> Iterator[None]:
    """The generators' constants have these values."""
    wanted = dict(zip(("S", "M", "L", "XS"), values, strict=True))
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.testing._internal.")]
    before = [(m, name, vars(m)[name]) for m in modules for name in wanted if isinstance(vars(m).get(name), int)]
    for module, name, _ in before:
        setattr(module, name, wanted[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """What runs longer raises TimeoutError."""

    def expired(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
