"""The matrices of one server bundle, memory-mapped, checked, on their device."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sordino.server.kernel import MAX_IN_FEATURES, RingMatrix, choose_kernel
from sordino.server.slices import SLICES_NAME, check_slices, read_slices, share
from sordino.shared.errors import BundleError, RangeError
from sordino.shared.jit import compiled
from sordino.shared.manifest import CLIENT_DIR, SERVER_DIR, FileSpec, GroupSpec, ModelManifest, sha256_file
from sordino.shared.rlwe import PARAMS

log = logging.getLogger(__name__)


def held_groups(manifest: ModelManifest, layers: tuple[int, int] | None) -> range:
    """The groups of layers ``first`` to ``last``, both included; of the last layer also what comes after it.

    Raises:
        BundleError: there are none.
    """
    if layers is None:
        return range(len(manifest.groups))
    top = max(group.layer for group in manifest.groups)
    found = [index for index, group in enumerate(manifest.groups) if layers[0] <= group.layer <= layers[1]]
    if not found:
        raise BundleError(f"the bundle has no groups of layers {layers[0]} to {layers[1]}: it has layers 0 to {top}")
    return range(found[0], found[-1] + 1)


class _WholeMatrices(Mapping[int, RingMatrix]):
    """Matrices of which a process has a share: the rest is read, and checked, when one is first asked for."""

    def __init__(
        self, mapped: Mapping[int, RingMatrix], manifest: ModelManifest, slices: Mapping[str, Sequence[str]]
    ) -> None:
        self._mapped = mapped
        self._manifest = manifest
        self._slices = slices
        self._checked: set[int] = set()

    def __getitem__(self, index: int) -> RingMatrix:
        if index not in self._checked:
            group = self._manifest.groups[index]
            check_slices(group, self._mapped[index].weights, self._slices[group.name])
            self._checked.add(index)
        return self._mapped[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._mapped)

    def __len__(self) -> int:
        return len(self._mapped)


class MatrixStore:
    """Loads a bundle made by ``sordino split``.

    The slices of this process's shares are hashed, and nothing else of the matrices is read. A bundle without
    ``slices.json``, of an earlier release, is hashed whole.

    Args:
        bundle: the folder with manifest.json, client/ and server/.
        layers: load the groups of these alone, as a stage of a pipeline; all without.
        shard: which of how many equal parts of each matrix's rows is this process's to multiply with.
        device: "cpu", "cuda", "cuda:1", ...
        verify: hash also what is no slice: the files for clients, and those of a bundle without slices.

    Attributes:
        whole: matrices with all rows. Of a share, :class:`BundleError` when the rest turns out to be changed.
        hashed_bytes: of the bundle's files, while it was loaded.
        seconds: what loading took, by part of the work.

    Raises:
        BundleError: a file is missing, was changed, or holds other tensors than the manifest says.
        RangeError: a matrix breaks the noise bound of §4.2.
    """

    def __init__(
        self,
        bundle: Path,
        device: str = "cpu",
        *,
        layers: tuple[int, int] | None = None,
        shard: tuple[int, int] = (0, 1),
        verify: bool = True,
    ) -> None:
        self.bundle = bundle
        self.hashed_bytes = 0
        self.seconds: dict[str, float] = {}
        with self._timed("manifest"):
            self.manifest = ModelManifest.load(bundle)
            self.held = held_groups(self.manifest, layers)
            self._groups = [self.manifest.groups[index] for index in self.held]
            self._check_sizes(SERVER_DIR, self.manifest.server_files)
        self.device = torch.device(device)
        self.shard = shard
        with self._timed("files"):
            self._slices = self._read_slices()
            if verify:
                self._verify()
        with self._timed("kernel"):
            self.kernel = choose_kernel(self.device)
        mapped = self._load()
        self.whole: Mapping[int, RingMatrix] = mapped
        self.matrices: Mapping[int, RingMatrix] = mapped
        if shard != (0, 1):
            if self._slices is not None:
                self.whole = _WholeMatrices(mapped, self.manifest, self._slices)
            self.matrices = {index: self._part(mapped[index], *shard) for index in mapped}
        log.info(
            "%.1f MB of the bundle hashed; %s",
            self.hashed_bytes / 1e6,
            ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items()),
        )

    @property
    def is_whole(self) -> bool:
        return len(self.held) == len(self.manifest.groups)

    def digest(self, number: int, count: int) -> bytes:
        """32 bytes that two processes have in common if each has these parts of the same matrices.

        Slices were checked, so that their bundle's fingerprint names them; without slices this reads all parts.
        """
        if self._slices is not None:
            return hashlib.sha256(f"{self.manifest.fingerprint} {self.held} {number} {count}".encode()).digest()
        digest = hashlib.sha256()
        for index in self.held:
            digest.update(self._part(self.whole[index], number, count).weights.cpu().numpy().data)
        return digest.digest()

    def client_file(self, name: str) -> Path | None:
        """The path of a file of the client bundle, or None when the manifest does not list it."""
        return self.bundle / CLIENT_DIR / name if name in self.manifest.client_files else None

    def _part(self, whole: RingMatrix, number: int, count: int) -> RingMatrix:
        """Some rows of a matrix, of each of its planes, on the store's device."""
        planes = whole.weights.view(whole.planes, whole.out_features, whole.in_features)
        rows = planes[:, share(whole.out_features, number, count)]
        return RingMatrix(rows.reshape(-1, whole.in_features).to(self.device), whole.planes, self.kernel)

    def _check_sizes(self, folder: str, files: Mapping[str, FileSpec]) -> None:
        for name, spec in files.items():
            path = self.bundle / folder / name
            if not path.is_file():
                raise BundleError(f"{folder}/{name} is missing from the bundle")
            if path.stat().st_size != spec.size:
                raise BundleError(f"{folder}/{name} was changed after the split: its size is not the manifest's")

    def _verify(self) -> None:
        self._check_sizes(CLIENT_DIR, self.manifest.client_files)
        for name, spec in self.manifest.client_files.items():
            self._hash(CLIENT_DIR, name, spec)
        if self._slices is None:
            for name, spec in self.manifest.server_files.items():
                self._hash(SERVER_DIR, name, spec)

    def _hash(self, folder: str, name: str, spec: FileSpec) -> None:
        if sha256_file(self.bundle / folder / name) != spec:
            raise BundleError(f"{folder}/{name} was changed after the split: its SHA-256 is not the manifest's")
        self.hashed_bytes += spec.size

    def _read_slices(self) -> dict[str, list[str]] | None:
        spec = self.manifest.server_files.get(SLICES_NAME)
        if spec is None:
            return None
        self._hash(SERVER_DIR, SLICES_NAME, spec)
        return read_slices(self.bundle / SERVER_DIR / SLICES_NAME, self._groups)

    def _map(self) -> dict[str, torch.Tensor]:
        """The tensors of the groups held, of which nothing is read yet."""
        tensors: dict[str, torch.Tensor] = {}
        wanted = {group.name for group in self._groups}
        for name in self.manifest.server_files:
            if name.endswith(".safetensors"):
                try:
                    with safe_open(self.bundle / SERVER_DIR / name, framework="pt") as file:
                        for key in wanted.intersection(file.keys()):
                            tensors[key] = file.get_tensor(key)
                except SafetensorError as error:
                    raise BundleError(f"{SERVER_DIR}/{name} was changed after the split: {error}") from None
        return tensors

    def _load(self) -> dict[int, RingMatrix]:
        with self._timed("map"):
            tensors = self._map()
        matrices = {}
        for index in self.held:
            group = self.manifest.groups[index]
            weights = tensors.get(group.name)
            shape = (group.planes * group.out_features, group.in_features)
            if weights is None or weights.dtype != torch.int8 or tuple(weights.shape) != shape:
                raise BundleError(f"group {group.name!r}: the bundle has no int8 matrix of shape {shape}")
            if group.in_features > MAX_IN_FEATURES:
                raise BundleError(f"group {group.name!r}: rows longer than {MAX_IN_FEATURES} are not supported")
            if self._slices is not None:
                with self._timed("slices"):
                    rows = share(group.out_features, *self.shard)
                    self.hashed_bytes += check_slices(group, weights, self._slices[group.name], rows)
            with self._timed("bounds"):
                self._check_bounds(group, weights)
            if self.shard == (0, 1):  # of a part the rest stays in the mapped file
                with self._timed("move"):
                    weights = weights.to(self.device)
            matrices[index] = RingMatrix(weights, group.planes, self.kernel)
        return matrices

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def _check_bounds(self, group: GroupSpec, weights: torch.Tensor) -> None:
        """The figures that decode rightly and never wrap are recomputed from the share's real rows."""
        rows = share(group.out_features, *self.shard)
        planes = weights.view(group.planes, group.out_features, group.in_features).numpy()
        least, square, l1 = _extremes(planes, rows.start, rows.stop)
        if group.planes == 1 and least < -127:
            raise RangeError(f"group {group.name!r}: a weight of -128; int8 weights are symmetric")
        PARAMS.check_norm(group.name, math.sqrt(square))
        if l1 > group.l1_max:
            raise BundleError(f"group {group.name!r}: a row's L1 norm is over the manifest's l1_max")


@compiled
def _extremes(planes: NDArray[np.int8], first: int, stop: int) -> tuple[np.int64, np.int64, np.int64]:
    """Of these rows of the one or two planes ``[planes, m, n]``, W = low + 256 * high: the least entry of the first
    plane, the largest sum of squares in a plane, and the largest sum of magnitudes in W."""
    least, square, l1 = np.int64(0), np.int64(0), np.int64(0)
    count, _, n = planes.shape
    for i in range(first, stop):
        for k in range(count):
            total = np.int64(0)
            for j in range(n):
                total += np.int64(planes[k, i, j]) * np.int64(planes[k, i, j])
            square = max(square, total)
        total = np.int64(0)
        for j in range(n):
            value = np.int64(planes[0, i, j])
            least = min(least, value)
            if count > 1:
                value += 256 * np.int64(planes[1, i, j])
            total += abs(value)
        l1 = max(l1, total)
    return least, square, l1
