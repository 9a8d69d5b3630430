"""``graphmem gpus``: the cards graphmem knows, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import click

from graphmem.base.figures import Communicator
from graphmem.cli.options import form_options
from graphmem.cli.output import check_output, publish
from graphmem.devices import DEFAULT_DEVICE, Device, Loads, all_devices, device_named
from graphmem.reports import Format
from graphmem.reports.document import Column, Document, Facts, Table, Text, section
from graphmem.units import format_bytes

SCHEMA = "graphmem.gpus/1"


@click.command("gpus")
@click.argument("name", required=False)
@form_options
def gpus_command(name: str | None, form: Format, output: str | None) -> None:
    """List the known cards, or show one (NAME) with the source of each figure."""
    check_output(output)
    devices = all_devices() if name is None else (device_named(name),)
    document = _list(devices) if name is None else _card(devices[0])
    publish(document, form, output)


def _list(devices: Sequence[Device]) -> Document:
    """A row a card."""
    columns = (
        Column("name", wraps=False), *(Column(title, "figure") for title in ("memory", "context", "capability", "SMs"))
    )  # fmt: skip
    notes = (
        "memory: what the driver reports; context: what a PyTorch process holds outside its allocator; ~ not measured.",
        f"'graphmem gpus NAME' shows the sources. Without --gpu, {DEFAULT_DEVICE} is assumed.",
    )
    sections = (section("", Table(columns, list(map(_row, devices)))), section("", Text(notes)))
    figures = Table(
        (Column("name"), Column("memory", "bytes"), Column("context", "bytes"), Column("capability"), Column("SMs")),
        [(d.name, d.capacity_bytes, d.context_bytes, _capability(d), d.sm_count) for d in devices],
    )
    return Document("gpus", "The cards that graphmem knows", sections, _data(devices), figures)


def _card(device: Device) -> Document:
    """One card, each figure with its source."""
    return Document("gpus", device.name, (section("", Facts(tuple(_facts(device)))),), _data((device,)))


def _data(devices: Sequence[Device]) -> Callable[[], dict[str, object]]:
    return lambda: {"schema": SCHEMA, "default": DEFAULT_DEVICE, "gpus": [asdict(device) for device in devices]}


def _row(device: Device) -> tuple[str, ...]:
    return (
        device.name,
        format_bytes(device.capacity_bytes) + ("~" if device.capacity_assumed else " "),
        format_bytes(device.context_bytes) + (" " if device.context_measured else "~"),
        _capability(device),
        str(device.sm_count or "-"),
    )


def _facts(device: Device) -> Iterator[tuple[str, str]]:
    yield "name", device.name
    yield "also called", ", ".join(device.aliases) or "-"
    yield "vendor", device.vendor
    yield "memory", f"{format_bytes(device.capacity_bytes)} ({device.capacity_bytes:,} B)"
    yield "  source", device.capacity_source
    yield "context", f"{format_bytes(device.context_bytes)}{'' if device.context_measured else ' (not measured)'}"
    for figure in device.outside(_EVERYTHING):
        least, most = format_bytes(figure.least_bytes), format_bytes(figure.most_bytes)
        yield f"  {figure.name}", f"{format_bytes(figure.bytes)} ({least} to {most}); {figure.source}"
    yield "driver's share", "not known" if device.driver_bytes is None else format_bytes(device.driver_bytes)
    yield "capability", _capability(device)
    threads = f"{device.sm_count} SMs of {device.max_threads_per_sm} threads" if device.sm_count else "not known"
    yield "size", threads
    yield "shared with host", "yes" if device.unified_memory else "no"


#: The libraries that a convolutional network in two processes loads.
_EVERYTHING = Loads(cudnn=True, communicators=(Communicator(2),))


def _capability(device: Device) -> str:
    return ".".join(str(part) for part in device.compute_capability) if device.compute_capability else "-"
