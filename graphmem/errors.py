"""Every error graphmem raises on purpose.

One root, :class:`GraphmemError`, so that a caller can catch them all and the command line can turn each into one line:
the error, its place, and a remedy.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

#: The most characters of a message: names in it come from files, and may be of any length.
LONGEST_MESSAGE = 2000


class GraphmemError(Exception):
    """Root of all errors meant for users. ``str(error)`` is one self-contained message, one printable line."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors with values of their own are sent between processes as they are, without being made anew."""
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[GraphmemError], arguments: tuple[Any, ...], values: dict[str, Any]) -> GraphmemError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(values)
    return error


def one_line(text: str) -> str:
    """``text`` as one printable line: line breaks are spaces, other unprintable characters escaped, and text longer
    than :data:`LONGEST_MESSAGE` loses its middle."""
    joined = " ".join(text.split())
    if len(joined) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2 - 3
        joined = f"{joined[:half]} ... {joined[-half:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def first_line(error: BaseException) -> str:
    """The message of another library's error, without the lines that explain where in that library it was."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:500]


def said(error: BaseException) -> str:
    """Kind and first line of another library's error. Of a failed import it is the innermost cause that helps, and it
    comes first: libraries that import their parts when they are first used say only which one could not be had."""
    cause = error
    while cause.__cause__ is not None and (isinstance(cause, ImportError) or "Failed to import" in str(cause)):
        cause = cause.__cause__
    text = f"{type(cause).__name__}: {first_line(cause) if str(cause).strip() else 'no message'}"
    return text if cause is error else f"{text} (behind {type(error).__name__}: {first_line(error)})"


class UsageError(GraphmemError):
    """An option, name or value that graphmem does not accept; the message lists the accepted ones."""


class NotModelledError(UsageError):
    """An execution provider that graphmem recognises and does not model: no figure of it is one of a run.

    ``known`` are the bytes that hold under every provider (``weights``, ``inputs``, ``outputs``), once looked up.
    """

    def __init__(self, message: str, provider: str, known: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.provider, self.known = provider, dict(known or {})


class SourceError(GraphmemError):
    """The thing to analyse cannot be loaded: missing, truncated, of the wrong kind, or failing on its own."""


@contextlib.contextmanager
def reading(path: object) -> Iterator[None]:
    """Raises :class:`SourceError` where a file is not there, or the system does not let it be read."""
    try:
        yield
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist") from None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from None


class NothingOnDevice(SourceError):
    """A whole program that ended with exit code ``code`` and never used the card."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ShapeError(SourceError):
    """A shape is unbound, inconsistent, or cannot be inferred.

    ``options`` are words of a command line that bind it, ``dropped`` options that stand in the way; without them a
    message is ``reason``. ``is_sure``: the model was seen to answer so.
    """

    def __init__(
        self, reason: str = "", *, options: tuple[str, ...] = (), dropped: tuple[str, ...] = (), is_sure: bool = True
    ) -> None:
        self.reason, self.options, self.dropped = reason, options, dropped
        self.lead = "; this is answered: " if is_sure else "; for example: "
        words = [shlex.join(options)] if options else []
        words += [f"without {' and '.join(dropped)}"] if dropped else []
        super().__init__(f"{reason}{self.lead if words else ''}{', '.join(words)}")


class CaptureError(GraphmemError):
    """The step cannot be run on fake tensors, for example because it needs the data itself."""


class ProgramOutOfMemory(CaptureError):
    """The program was refused memory, as on its card, and does not go on."""


class CannotShortenError(CaptureError):
    """A long generation is not as regular as it seemed, found out too late: every token of it has to be followed."""


class TraceError(GraphmemError):
    """A trace or snapshot breaks the rules of its format."""


class GraphError(GraphmemError):
    """A graph to plan the memory of has a cycle, a size that is none, or names what it does not have; an order of it is
    none."""


class DeviceOutOfMemory(GraphmemError):
    """A simulated allocator could not serve a request within its limit."""

    def __init__(self, message: str, *, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
