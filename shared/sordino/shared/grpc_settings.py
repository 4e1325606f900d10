"""Settings that gRPC reads when it is first imported: the client, the dealer and the server import this before it.

The event-engine poller adds two thread hops to every message: measured on loopback with TLS, a round trip takes 170 to
250 us with it and 120 us without, and a third less CPU. The names exist in the releases listed. A variable that is set
already, and other releases, are left alone; a program that imported grpc first is slower, but no less right.
"""

from __future__ import annotations

import os
from importlib.metadata import version

_RELEASES = ("1.81", "1.82", "1.83")

if version("grpcio").rpartition(".")[0] in _RELEASES:
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
