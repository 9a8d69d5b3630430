"""Prices of cards: machines that can be rented, one a line of a CSV file, or cards by their names in a TOML file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from graphmem.base.documents import read_lines, shown
from graphmem.base.tables import toml_in
from graphmem.devices import device_named
from graphmem.errors import UsageError

#: Cards of a machine whose price is given for one.
COUNTS = (1, 2, 4, 8)
_COLUMNS, _NAME = ("gpu", "count", "price"), "name"
_DEAREST, _MOST_CARDS, _LONGEST_LINE, _MOST_LINES = 1e6, 1024, 1000, 10_000


@dataclass(frozen=True)
class Rental:
    """A machine: so many cards of a kind, by the full name, and its price an hour. ``name``: whose it is."""

    gpu: str
    count: int
    price: float
    name: str = ""


def rentals_in(path: Path) -> tuple[Rental, ...]:
    """The machines of a file, the cheapest first. Raises :class:`UsageError` naming what is wrong in it."""
    return tuple(sorted(_read(path), key=lambda rental: (rental.price, rental.gpu, rental.count)))


def price_of(rentals: Sequence[Rental], gpu: str, cards: int) -> float | None:
    """The price an hour of so many cards: the least share of a machine that has them; None where none does."""
    shares = (one.price / (one.count // cards) for one in rentals if one.gpu == gpu and one.count >= cards)
    return min(shares, default=None)


def card_prices(path: Path) -> dict[str, float]:
    """The price of one card of each kind, by its full name and in the file's order: of the cheapest machine, divided.
    Raises as :func:`rentals_in`."""
    found: dict[str, float] = {}
    for rental in _read(path):
        found[rental.gpu] = min(found.get(rental.gpu, _DEAREST), rental.price / rental.count)
    return found


def _read(path: Path) -> list[Rental]:
    found = list(_lines(path) if path.suffix.lower() == ".csv" else _cards(path))
    if not found:
        raise UsageError(f"{path} has no prices")
    return found


def _cards(path: Path) -> Iterator[Rental]:
    for name, price in toml_in(path).items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < _DEAREST:
            raise UsageError(f"{path}: the price of {name} is a number above 0, not {price!r}")
        card = device_named(name).name
        yield from (Rental(card, count, count * float(price)) for count in COUNTS)


def _lines(path: Path) -> Iterator[Rental]:
    """The rows of a CSV file with columns gpu, count, price and perhaps name; what begins with # is a comment."""
    try:
        lines = enumerate(islice(read_lines(path, _LONGEST_LINE), _MOST_LINES), 1)
        rows = [(number, next(csv.reader([line]))) for number, line in lines if line.strip() and line[0] != "#"]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV file: {error}") from None
    header = [name.strip().lower() for name in rows[0][1]] if rows else []
    if sorted(header) not in (sorted(_COLUMNS), sorted((*_COLUMNS, _NAME))):
        raise UsageError(f"{path}: its columns are {shown(','.join(header))}; accepted: gpu,count,price or with name")
    for number, row in rows[1:]:
        try:
            if len(row) != len(header):
                raise ValueError(row)
            values = dict(zip(header, (value.strip() for value in row), strict=True))
            count, price = int(values["count"]), float(values["price"])
            if not (1 <= count <= _MOST_CARDS and 0 < price < _DEAREST):
                raise ValueError(row)
        except ValueError:
            raise UsageError(
                f"{path}, line {number}: {shown(','.join(row))}; accepted: a card, how many of it (1 to "
                f"{_MOST_CARDS}), dollars an hour (above 0)"
            ) from None
        try:
            yield Rental(device_named(values["gpu"]).name, count, price, values.get(_NAME, ""))
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
