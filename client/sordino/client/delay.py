"""A longer way to a server on this machine: a relay of TCP bytes that keeps each back for half a round trip.

It stands for a network's delay and for nothing else: no loss, no limit of bandwidth; TLS passes through it. It is a
process of its own (``python -m sordino.client.delay``), so that it takes no time from the client's interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from sordino.shared.errors import RangeError, SordinoError

_READ_BYTES: Final = 1 << 18
_UNDER_WAY: Final = 1024  # reads that are on their way at most; whoever sends more waits


@contextmanager
def delayed(target: str, round_trip_s: float) -> Iterator[str]:
    """The address by which ``target`` (``grpcs://host:port``) is a round trip of at least so many seconds away.

    Raises:
        RangeError: no such time. SordinoError: the relay does not start.
    """
    if not 0 <= round_trip_s <= 10:
        raise RangeError(f"a round trip takes 0 to 10 s, not {round_trip_s}")
    parts = urlsplit(target)
    command = [sys.executable, "-m", "sordino.client.delay", str(parts.hostname), str(parts.port), str(round_trip_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            port = process.stdout.readline().strip() if process.stdout else b""
            if not port:
                raise SordinoError("the relay that delays did not start")
            yield f"{parts.scheme}://127.0.0.1:{int(port)}"
        finally:
            process.kill()


async def relay(host: str, port: int, round_trip_s: float) -> asyncio.Server:
    """Listens on a free port of this machine; everything goes on to ``host:port`` and back, each way by half late."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:  # there is no server: the client sees a connection that ends
            writer.close()
            return
        ways = ((reader, far_writer), (far_reader, writer))
        await asyncio.gather(*(_carry(*way, round_trip_s / 2) for way in ways))

    return await asyncio.start_server(serve, "127.0.0.1", 0)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """One way, to its end. Bytes keep their distance: those that come while others wait do not wait for them."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_UNDER_WAY)

    async def read() -> None:
        data = b"-"
        while data:
            try:
                data = await reader.read(_READ_BYTES)
            except OSError:  # cut off: an end like any other to who listens
                data = b""
            await under_way.put((loop.time() + delay_s, data))

    reading = asyncio.create_task(read())
    try:
        while (item := await under_way.get())[1]:
            due, data = item
            if (left := due - loop.time()) > 0:
                await asyncio.sleep(left)
            writer.write(data)
            await writer.drain()
        await asyncio.sleep(max(0.0, item[0] - loop.time()))
        writer.write_eof()
    except OSError:  # who should get it has gone
        writer.close()
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


async def _main(host: str, port: int, round_trip_s: float) -> None:
    server = await relay(host, port, round_trip_s)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    # Ends with whoever started it, however that ends.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
