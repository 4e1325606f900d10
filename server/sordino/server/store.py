"""The matrices of one server bundle, memory-mapped, checked, on their device."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open

from sordino.server.kernel import MAX_IN_FEATURES, RingMatrix, choose_kernel
from sordino.shared.errors import BundleError, RangeError
from sordino.shared.manifest import CLIENT_DIR, SERVER_DIR, GroupSpec, ModelManifest, sha256_file
from sordino.shared.rlwe import PARAMS

# Elements: what a check needs beside the mapped weights stays small.
_CHECKED_AT_ONCE = 1 << 17


def share(size: int, number: int, count: int) -> slice:
    """One of ``count`` contiguous parts of ``range(size)``, as equal as can be, the larger ones first."""
    small, more = divmod(size, count)
    first = number * small + min(number, more)
    return slice(first, first + small + (number < more))


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


class MatrixStore:
    """Loads a bundle made by ``sordino split``.

    Args:
        bundle: the folder with manifest.json, client/ and server/.
        layers: load the groups of these alone, as a stage of a pipeline; all without.
        shard: which of how many equal parts of each matrix's rows is this process's to multiply with.
        device: "cpu", "cuda", "cuda:1", ...
        verify: hash every file first (one read of the bundle).

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
        self.manifest = ModelManifest.load(bundle)
        self.held = held_groups(self.manifest, layers)
        self.device = torch.device(device)
        self.shard = shard
        if verify:
            self._verify()
        self.kernel = choose_kernel(self.device)
        self.whole = self._load()
        self.matrices = self.whole if shard == (0, 1) else {i: self.part(i, *shard) for i in self.whole}

    @property
    def is_whole(self) -> bool:
        return len(self.held) == len(self.manifest.groups)

    def part(self, index: int, number: int, count: int) -> RingMatrix:
        """Some rows of a matrix, of each of its planes, on the store's device."""
        whole = self.whole[index]
        planes = whole.weights.view(whole.planes, whole.out_features, whole.in_features)
        rows = planes[:, share(whole.out_features, number, count)]
        return RingMatrix(rows.reshape(-1, whole.in_features).to(self.device), whole.planes, self.kernel)

    def digest(self, number: int, count: int) -> bytes:
        """SHA-256 over these parts of all groups held."""
        digest = hashlib.sha256()
        for index in self.held:
            digest.update(self.part(index, number, count).weights.cpu().numpy().data)
        return digest.digest()

    def client_file(self, name: str) -> Path | None:
        """The path of a file of the client bundle, or None when the manifest does not list it."""
        return self.bundle / CLIENT_DIR / name if name in self.manifest.client_files else None

    def _verify(self) -> None:
        for folder, files in ((CLIENT_DIR, self.manifest.client_files), (SERVER_DIR, self.manifest.server_files)):
            for name, spec in files.items():
                path = self.bundle / folder / name
                if not path.is_file():
                    raise BundleError(f"{folder}/{name} is missing from the bundle")
                if sha256_file(path) != spec:
                    raise BundleError(f"{folder}/{name} was changed after the split: its SHA-256 is not the manifest's")

    def _load(self) -> dict[int, RingMatrix]:
        tensors: dict[str, torch.Tensor] = {}
        # Of a part the rest stays in the mapped file, of which only what is used is read.
        place = str(self.device) if self.shard == (0, 1) else "cpu"
        wanted = {self.manifest.groups[index].name for index in self.held}
        for name in self.manifest.server_files:
            if name.endswith(".safetensors"):
                with safe_open(self.bundle / SERVER_DIR / name, framework="pt", device=place) as file:
                    for key in wanted.intersection(file.keys()):
                        tensors[key] = file.get_tensor(key)
        matrices = {}
        for index in self.held:
            group = self.manifest.groups[index]
            weights = tensors.get(group.name)
            shape = (group.planes * group.out_features, group.in_features)
            if weights is None or weights.dtype != torch.int8 or tuple(weights.shape) != shape:
                raise BundleError(f"group {group.name!r}: the bundle has no int8 matrix of shape {shape}")
            if group.in_features > MAX_IN_FEATURES:
                raise BundleError(f"group {group.name!r}: rows longer than {MAX_IN_FEATURES} are not supported")
            self._check_bounds(group, weights)
            matrices[index] = RingMatrix(weights, group.planes, self.kernel)
        return matrices

    def _check_bounds(self, group: GroupSpec, weights: torch.Tensor) -> None:
        """The figures that decode rightly and never wrap are recomputed from the real matrix, block by block."""
        name, planes, half = group.name, group.planes, group.out_features
        rows = share(half, *self.shard)
        step = max(1, _CHECKED_AT_ONCE // weights.shape[1])
        for start in range(rows.start, rows.stop, step):
            parts = [
                weights[k * half + start : k * half + min(start + step, rows.stop)].to(torch.float64)
                for k in range(planes)
            ]
            if planes == 1 and float(parts[0].min()) < -127:
                raise RangeError(f"group {name!r}: a weight of -128; int8 weights are symmetric")
            for part in parts:
                PARAMS.check_norm(name, float(part.square().sum(dim=1).max().sqrt()))
            whole = parts[0] if planes == 1 else parts[0] + 256 * parts[1]
            if int(whole.abs().sum(dim=1).max()) > group.l1_max:
                raise BundleError(f"group {name!r}: a row's L1 norm is over the manifest's l1_max")
