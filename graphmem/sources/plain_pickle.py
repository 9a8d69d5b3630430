"""Read pickles of plain data, and only those: a pickle is a program, and this machine lacks the dangerous instructions.

None, booleans, numbers, text, bytes (from protocol 3 on), lists, tuples and dicts; protocols 2 to 5. Anything that
would import, call or build an object is refused by name. (The C unpickler with ``find_class`` overridden would be
faster, but a few bytes of a hostile file make it reserve tens of gigabytes for its memo.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from graphmem.errors import TraceError

_MARK = object()
#: Keys of dicts. Tuples would do for Python, but one nested deeply, or made of the same two over and over, takes its
#: stack or for ever to hash.
_KEYS = (str, int, float, bool, bytes, type(None))

#: Instructions that import, call or build, with their names in ``pickletools``.
_REFUSED = {
    b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"R": "REDUCE", b"b": "BUILD", b"i": "INST", b"o": "OBJ",
    b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"P": "PERSID",
    b"Q": "BINPERSID",
}  # fmt: skip


def load_plain_pickle(data: bytes) -> object:
    """The value of a pickle. Raises :class:`graphmem.errors.TraceError` for anything but plain data."""
    reader = _Reader(data)
    try:
        return reader.run()
    except TraceError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError, MemoryError) as error:
        raise TraceError(
            f"damaged pickle at byte {reader.position} of {len(data)}: {type(error).__name__}: {error}"
        ) from None


def _key(value: object) -> object:
    if type(value) not in _KEYS:
        raise TypeError(f"a {type(value).__name__} as the key of a dict")
    return value


class _Stop(Exception):
    """The STOP instruction."""


class _Reader:
    """The stack machine of pickle, one method per instruction."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}
        self.table = self.instructions()

    def run(self) -> object:
        data, table = self.data, self.table
        try:
            while True:
                code = data[self.position]
                self.position += 1
                do = table[code]
                if do is None:
                    raise self.refused(code)
                do()
        except _Stop:
            value = self.stack.pop()
            if self.stack or value is _MARK:
                raise ValueError("values left over at the end") from None
            return value

    def instructions(self) -> list[Callable[[], object] | None]:
        """The method of every instruction byte, or ``None``."""
        push = self.stack.append
        named: dict[bytes, Callable[[], object]] = {
            b"\x80": self.proto,
            b"\x95": lambda: self.bytes_of(8),  # FRAME: a hint for buffering
            b".": self.stop,
            b"(": lambda: push(_MARK),
            b"N": lambda: push(None),
            b"\x88": lambda: push(True),
            b"\x89": lambda: push(False),
            b"J": lambda: push(self.number("<i", 4)),
            b"K": lambda: push(self.number("<B", 1)),
            b"M": lambda: push(self.number("<H", 2)),
            b"\x8a": lambda: push(int.from_bytes(self.sized("<B", 1), "little", signed=True)),
            b"\x8b": lambda: push(int.from_bytes(self.sized("<I", 4), "little", signed=True)),
            b"G": lambda: push(struct.unpack(">d", self.bytes_of(8))[0]),
            b"\x8c": self.short_text,
            b"X": lambda: push(str(self.sized("<I", 4), "utf-8", "surrogatepass")),
            b"\x8d": lambda: push(str(self.sized("<Q", 8), "utf-8", "surrogatepass")),
            b"C": lambda: push(self.sized("<B", 1)),
            b"B": lambda: push(self.sized("<I", 4)),
            b"]": lambda: push([]),
            b"}": lambda: push({}),
            b")": lambda: push(()),
            b"\x85": lambda: self.tuple_of(1),
            b"\x86": lambda: self.tuple_of(2),
            b"\x87": lambda: self.tuple_of(3),
            b"t": lambda: push(tuple(self.since_mark())),
            b"a": self.append,
            b"e": self.appends,
            b"s": self.set_item,
            b"u": self.set_items,
            b"h": self.get_short,
            b"j": self.get_long,
            b"q": lambda: self.remember(self.number("<B", 1)),
            b"r": lambda: self.remember(self.number("<I", 4)),
            b"\x94": lambda: self.remember(len(self.memo)),
        }
        table: list[Callable[[], object] | None] = [None] * 256
        for code, do in named.items():
            table[code[0]] = do
        return table

    # The three most frequent instructions, written out: they are most of the time of a large snapshot.

    def get_short(self) -> None:
        self.stack.append(self.memo[self.data[self.position]])
        self.position += 1

    def get_long(self) -> None:
        position = self.position
        self.position = position + 4  # a file that ends here is noticed at the next instruction
        self.stack.append(self.memo[int.from_bytes(self.data[position : position + 4], "little")])

    def short_text(self) -> None:
        start = self.position + 1
        self.position = end = start + self.data[start - 1]
        self.stack.append(str(self.data[start:end], "utf-8", "surrogatepass"))

    def proto(self) -> None:
        if not 2 <= self.number("<B", 1) <= 5:
            raise ValueError("unknown pickle protocol")

    def stop(self) -> None:
        raise _Stop

    def bytes_of(self, count: int) -> bytes:
        found = self.data[self.position : self.position + count]
        if len(found) != count:
            raise ValueError("the file ends in the middle of a value")
        self.position += count
        return found

    def number(self, layout: str, count: int) -> int:
        found: int = struct.unpack(layout, self.bytes_of(count))[0]
        return found

    def sized(self, layout: str, count: int) -> bytes:
        return self.bytes_of(self.number(layout, count))

    def remember(self, index: int) -> None:
        value = self.stack[-1]
        if value is _MARK:
            raise ValueError("a mark is no value")
        self.memo[index] = value

    def since_mark(self) -> list[object]:
        for position in range(len(self.stack) - 1, -1, -1):
            if self.stack[position] is _MARK:
                values = self.stack[position + 1 :]
                del self.stack[position:]
                return values
        raise ValueError("no mark on the stack")

    def tuple_of(self, count: int) -> None:
        values = tuple(self.pop() for _ in range(count))
        self.stack.append(values[::-1])

    def pop(self) -> object:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark is no value")
        return value

    def append(self) -> None:
        value = self.pop()
        self.a_list().append(value)

    def appends(self) -> None:
        values = self.since_mark()
        self.a_list().extend(values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.a_dict()[_key(key)] = value

    def set_items(self) -> None:
        values = self.since_mark()
        self.a_dict().update(zip(map(_key, values[::2]), values[1::2], strict=True))

    def a_list(self) -> list[object]:
        if not isinstance(self.stack[-1], list):
            raise TypeError("appends to something that is not a list")
        return self.stack[-1]

    def a_dict(self) -> dict[object, object]:
        if not isinstance(self.stack[-1], dict):
            raise TypeError("sets an item of something that is not a dict")
        return self.stack[-1]

    def refused(self, code: int) -> TraceError:
        name = _REFUSED.get(bytes([code]))
        if name is None:
            return TraceError(f"no pickle of plain data: unknown instruction {code:#04x} at byte {self.position - 1}")
        wanted = ""
        if name == "GLOBAL":
            wanted = " ".join(str(line, "utf-8", "replace") for line in self.data[self.position :].split(b"\n", 2)[:2])
        elif name == "STACK_GLOBAL":
            wanted = " ".join(part for part in self.stack[-2:] if isinstance(part, str))
        asked = f"{name} {wanted[:100]}".strip()
        return TraceError(
            f"the pickle asks for more than plain data ({asked}, byte {self.position - 1}); it is not read, because "
            "such a file can run any program"
        )
