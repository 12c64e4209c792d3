"""What a peer needs to train with its neighbours: the address book, its own certificate in it, and
neighbours that can be reached and know this peer."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from fleetlearn_protocol.errors import FleetError

from fleetlearn_device.doctor.finding import Finding, Findings
from fleetlearn_device.driver.addresses import connect_first, find_places
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.peers.book import BookError, PeerEntry, PeerGraph, read_book
from fleetlearn_device.peers.certificate import own_certificate, tls_contexts
from fleetlearn_device.peers.connections import why_not
from fleetlearn_device.storage.device_key import read_device_key
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.identity import read_name

SECONDS = 5.0
"""For a connection to a neighbour."""
REFUSED_WITHIN = 1.0
"""Seconds in which a neighbour that does not know this peer says so: in TLS 1.3 that comes after
the handshake."""


def check_peers(book: str, folder: Path) -> Findings:
    """Check the address book against the state directory, and look whether the neighbours are
    there. Their training is not disturbed."""
    do = "mend the address book, on all peers: docs/start/peers.md"
    try:
        found = read_book(book)
        graph = PeerGraph(found)
    except BookError as error:
        yield Finding("book", "bad", str(error), do)
        return
    text = f"{book}: {found.topology.kind} of {len(found.peer)} peers, mode {found.mode}"
    yield Finding("book", "good", text)
    identity = folder / "identity.json"
    card = f"`fleetlearn-device peer-card --state {folder}` makes a key and prints the card"
    try:
        name = read_name(identity) if identity.exists() else None
        private = read_device_key(folder)
        if name is None or private is None:
            yield Finding("card", "bad", f"{folder} has no key of a peer", card)
            return
        certificate = own_certificate(folder, name, private)
    except (StateError, FleetError) as error:
        yield Finding("card", "bad", getattr(error, "text", str(error)), card)
        return
    if name not in found.names or found.entry(name).der != certificate:
        what = "is not in the book" if name not in found.names else "has another card in the book"
        yield Finding("card", "bad", f"{name} {what}", f"{card}; {do}")
        return
    yield Finding("card", "good", f"{name} is in the book with this device's key")
    entries = [found.entry(each) for each in graph.neighbours(name)]
    try:
        dialling, _ = tls_contexts(folder, [entry.der for entry in entries])
    except ValueError as error:
        yield Finding("book", "bad", str(error), do)
        return
    yield from asyncio.run(_neighbours(dialling, entries))


async def _neighbours(tls: ssl.SSLContext, entries: list[PeerEntry]) -> Findings:
    found = await asyncio.gather(*(_neighbour(tls, entry) for entry in entries))
    return iter(found)


async def _neighbour(tls: ssl.SSLContext, entry: PeerEntry) -> Finding:
    """Return whether TLS with a neighbour comes about. No WebSocket is opened: it would take the
    place of the connection that the two may have."""
    if entry.place is None:
        text = f"{entry.name} has no address in the book; it is found with --discover alone"
        return Finding("neighbour", "unknown", text)
    host, port = entry.place
    try:
        raw, place = await connect_first(
            await find_places(host, port, SECONDS), SECONDS, entry.name
        )
        async with timeout(SECONDS):
            reader, writer = await asyncio.open_connection(
                sock=raw, ssl=tls, server_hostname=entry.name
            )
        try:
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            if shown != entry.der:
                raise ssl.SSLCertVerificationError("another peer's certificate")
            async with timeout(REFUSED_WITHIN):
                await reader.read(1)
            raise ConnectionResetError("it closed the connection")
        except TimeoutError:  # it waits for the WebSocket: all is well
            return Finding("neighbour", "good", f"{entry.name} answers at {place}")
        finally:
            writer.close()
    except OSError as error:  # an SSLError and a TimeoutError, too
        do = "start it, or mend what this says"
        text = f"{entry.name}: {why_not(error, entry.name, entry.place)}"
        return Finding("neighbour", "warning", text, do)
