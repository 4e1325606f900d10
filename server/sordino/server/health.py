"""Why the server may not be ready, and its look at itself: whether the bundle is whole and the kernel exact."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

import torch

from sordino.server.kernel import known_answer_test
from sordino.server.store import MatrixStore
from sordino.shared.manifest import CLIENT_DIR, SERVER_DIR
from sordino.shared.probes import Readiness

log = logging.getLogger(__name__)

LOADING: Final = "the bundle is being loaded"
DRAINING: Final = "the server is shutting down"
TOKENS: Final = "the token file cannot be read, so nobody new can enter"
RANK: Final = "a rank of this server is gone"
DEAF: Final = "the server listens no more"
KERNEL: Final = "the kernel fails its known-answer test"
STUCK: Final = "the server's look at itself does not end: a device or a file system hangs"
_LOOK_S: Final = 1.0
_KERNEL_S: Final = 30.0
_STUCK_S: Final = 60.0


class SelfCheck:
    """Looks again and again whether the bundle is whole and the kernel exact, in a thread, from enter to exit."""

    def __init__(self, store: MatrixStore, readiness: Readiness) -> None:
        self._store = store
        self._readiness = readiness
        self._bundle: str | None = None
        self._looked = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="self-check", daemon=True)

    def __enter__(self) -> SelfCheck:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_LOOK_S)  # one that hangs keeps nobody from ending

    def notice_hang(self) -> None:
        """To be called every now and then, from another thread."""
        self._readiness.set(STUCK, holds=time.monotonic() > self._looked + _STUCK_S)

    def look_at_bundle(self) -> None:
        name = _changed_file(self._store)
        reason = name and f"{name} of the bundle is gone, or has another size than when it was loaded"
        if reason != self._bundle:
            if reason:
                self._readiness.fail(reason)
            if self._bundle:
                self._readiness.clear(self._bundle)
            self._bundle = reason

    def look_at_kernel(self) -> None:
        try:
            exact = known_answer_test(self._store.kernel, self._store.device)
        except RuntimeError as error:  # of a CUDA device
            log.error("the kernel's known-answer test: %s", error)
            exact = False
        self._readiness.set(KERNEL, holds=not exact)

    def _run(self) -> None:
        torch.set_num_threads(1)
        due = time.monotonic() + _KERNEL_S  # the store has just chosen it
        while not self._ended.wait(_LOOK_S):
            self.look_at_bundle()
            if time.monotonic() > due:
                self.look_at_kernel()
                due = time.monotonic() + _KERNEL_S
            self._looked = time.monotonic()


def _changed_file(store: MatrixStore) -> str | None:
    """Weights are mapped, not copied: beyond the end of a file that was cut there is nothing to compute with."""
    manifest = store.manifest
    for folder, files in ((CLIENT_DIR, manifest.client_files), (SERVER_DIR, manifest.server_files)):
        for name, spec in files.items():
            try:
                size = (store.bundle / folder / name).stat().st_size
            except OSError:
                size = -1
            if size != spec.size:
                return f"{folder}/{name}"
    return None
