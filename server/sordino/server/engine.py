"""What computes: the three kinds of product of a server's groups, in this process.

:class:`sordino.server.parallel.TensorParallel` does the same with other processes; results are the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Protocol

import torch

from sordino.server.blockkernels import Answer, choose_block_kernel
from sordino.server.blocks import BlockProducts, Wanted
from sordino.server.provision import products_of_masks
from sordino.server.store import MatrixStore
from sordino.shared.rlwe import U32

# Multiplications. A product with fewer for a few rows runs on one core: waking others costs more than they save.
_NARROW_PRODUCTS = 16_000_000
# One of more rows, several times as fast, takes half a millisecond up to here: no longer than waking another thread
# and being woken where cores are busy.
_BRIEF_PRODUCTS = 48_000_000


class Engine(Protocol):
    """``places`` is how many calls it can make use of at a time."""

    places: int

    def is_brief(self, group: int, rows: int) -> bool:
        """Whether a product takes no longer than it takes to hand it to another thread."""
        ...

    def product(self, group: int, rows: U32) -> U32:
        """W u mod p for ``rows [R, in_features]``: ``[R, out_features]``."""
        ...

    def masks(self, group: int, sent: Sequence[tuple[bytes, int, U32]]) -> list[tuple[U32, U32]]:
        """See :func:`sordino.server.provision.products_of_masks`."""
        ...

    def blocks(self, wanted: Wanted, sent: Sequence[tuple[bytes, U32]]) -> list[Answer]:
        """See :meth:`sordino.server.blocks.BlockProducts.products`."""
        ...

    def rest(self) -> None:
        """Gives back what :meth:`masks` keeps for its next call."""
        ...

    def all_cores(self) -> AbstractContextManager[None]:
        """For other work that uses all cores."""
        ...


class LocalEngine:
    """The groups of a store.

    Args:
        encoded_bytes: of weights in the form that block products need.
    """

    def __init__(self, store: MatrixStore, encoded_bytes: int) -> None:
        self._store = store
        self._cores = torch.get_num_threads()
        self._on_cpu = store.device.type == "cpu"
        self.places = self._cores if self._on_cpu else 1
        kernel = choose_block_kernel(store.device, parallel=self._cores > 1)
        self._blocks = BlockProducts(encoded_bytes, kernel)
        self._wide = Lock()
        self._floats: tuple[int, torch.Tensor] | None = None

    def is_brief(self, group: int, rows: int) -> bool:
        matrix = self._store.matrices[group]
        products = rows * matrix.in_features * matrix.out_features
        return self._on_cpu and products < (_NARROW_PRODUCTS if rows <= self._store.kernel.few else _BRIEF_PRODUCTS)

    def product(self, group: int, rows: U32) -> U32:
        matrix = self._store.matrices[group]
        if not self.is_brief(group, len(rows)):
            with self.all_cores():
                return matrix.matmul(rows)
        # Where all cores are taken it goes on with one: other streams wait for it.
        if len(rows) > self._store.kernel.few and self._wide.acquire(blocking=False):
            try:
                torch.set_num_threads(self._cores)
                return matrix.matmul(rows)
            finally:
                self._wide.release()
        torch.set_num_threads(1)  # of this thread's products
        return matrix.matmul(rows)

    def masks(self, group: int, sent: Sequence[tuple[bytes, int, U32]]) -> list[tuple[U32, U32]]:
        with self.all_cores():
            if self._floats is None or self._floats[0] != group:
                self._floats = None  # before the next takes its memory
                self._floats = group, self._store.matrices[group].weights.to(torch.float64)
            return products_of_masks(self._floats[1], sent)

    def rest(self) -> None:
        with self._wide:
            self._floats = None

    def blocks(self, wanted: Wanted, sent: Sequence[tuple[bytes, U32]]) -> list[Answer]:
        with self.all_cores():
            return self._blocks.products(self._store.whole[wanted.group], wanted, sent)

    @contextmanager
    def all_cores(self) -> Iterator[None]:
        """One wide product at a time, on all cores; afterwards this thread is back to one."""
        with self._wide:
            torch.set_num_threads(self._cores)
            try:
                yield
            finally:
                torch.set_num_threads(1)
