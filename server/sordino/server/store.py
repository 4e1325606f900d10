"""The matrices of one server bundle, memory-mapped, checked, on their device."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from sordino.server.kernel import MAX_IN_FEATURES, RingMatrix, choose_kernel
from sordino.shared.errors import BundleError, RangeError
from sordino.shared.manifest import CLIENT_DIR, SERVER_DIR, ModelManifest, sha256_file
from sordino.shared.rlwe import PARAMS

# Elements: what a check needs beside the mapped weights stays small.
_CHECKED_AT_ONCE = 1 << 17


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
        device: "cpu", "cuda", "cuda:1", ...
        verify: hash every file first (one read of the bundle).

    Raises:
        BundleError: a file is missing, was changed, or holds other tensors than the manifest says.
        RangeError: a matrix breaks the noise bound of §4.2.
    """

    def __init__(
        self, bundle: Path, device: str = "cpu", *, layers: tuple[int, int] | None = None, verify: bool = True
    ) -> None:
        self.bundle = bundle
        self.manifest = ModelManifest.load(bundle)
        self.held = held_groups(self.manifest, layers)
        self.device = torch.device(device)
        if verify:
            self._verify()
        self.kernel = choose_kernel(self.device)
        self.matrices = self._load()

    @property
    def is_whole(self) -> bool:
        return len(self.held) == len(self.manifest.groups)

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
        wanted = {self.manifest.groups[index].name for index in self.held}
        for name in self.manifest.server_files:
            if name.endswith(".safetensors"):
                with safe_open(self.bundle / SERVER_DIR / name, framework="pt", device=str(self.device)) as file:
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
            self._check_bounds(group.name, group.planes, group.l1_max, weights)
            matrices[index] = RingMatrix(weights, group.planes, self.kernel)
        return matrices

    def _check_bounds(self, name: str, planes: int, l1_stated: int, weights: torch.Tensor) -> None:
        """The figures that decode rightly and never wrap are recomputed from the real matrix, block by block."""
        if weights.numel() and int(weights.min()) < -127 and planes == 1:
            raise RangeError(f"group {name!r}: a weight of -128; int8 weights are symmetric")
        half = weights.shape[0] // planes
        step = max(1, _CHECKED_AT_ONCE // weights.shape[1])
        for start in range(0, half, step):
            parts = [
                weights[k * half + start : k * half + min(start + step, half)].to(torch.float64) for k in range(planes)
            ]
            for part in parts:
                PARAMS.check_norm(name, float(part.square().sum(dim=1).max().sqrt()))
            whole = parts[0] if planes == 1 else parts[0] + 256 * parts[1]
            if int(whole.abs().sum(dim=1).max()) > l1_stated:
                raise BundleError(f"group {name!r}: a row's L1 norm is over the manifest's l1_max")
