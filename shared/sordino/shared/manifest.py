"""The model manifest: what a provider publishes and a client checks before it trusts a byte.

A bundle folder holds ``manifest.json``, ``client/`` (everything a client downloads) and ``server/`` (the integer
matrices that stay with the provider). The manifest is the one description of both.

Units: ``x_max`` and ``l1_max`` are integers of the quantised domain; sizes are bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from sordino.shared.errors import BundleError
from sordino.shared.ring import P, activation_bound

FORMAT_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"
CLIENT_DIR: Final = "client"
SERVER_DIR: Final = "server"
MAX_MANIFEST_BYTES: Final = 16 << 20
MAX_FEATURES: Final = 1 << 20
MAX_GROUPS: Final = 1 << 16
WeightBits = Literal[8, 12]

# \Z, not $: a dollar also matches before a final newline.
_NAME = re.compile(r"^[A-Za-z0-9_.+\-]{1,300}\Z")
_FILE = re.compile(r"^(?!.*\.\.)[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,200}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """One linear module of a group: its path in the ``transformers`` model and its number of outputs."""

    name: str
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Linear modules that read the same input: one mask, one message, one matrix.

    The matrix W has shape ``[out_features, in_features]``; rows are the members' rows in order. With
    ``weight_bits == 12`` the stored matrix has two int8 planes, ``[2 * out_features, in_features]``: first the low
    bytes, then the high ones, W = low + 256 * high.

    Attributes:
        l1_max: max over rows i of the sum over j of |W_ij|.
        l2_max: max over rows of either plane of the Euclidean norm, rounded up: it bounds the noise of §4.2.
    """

    name: str
    layer: int
    in_features: int
    members: tuple[MemberSpec, ...]
    weight_bits: WeightBits
    l1_max: int
    l2_max: int

    @property
    def out_features(self) -> int:
        return sum(member.out_features for member in self.members)

    @property
    def planes(self) -> int:
        return 1 if self.weight_bits == 8 else 2

    @property
    def x_max(self) -> int:
        """Largest activation magnitude for which no product can wrap; see :func:`ring.activation_bound`."""
        return activation_bound(self.in_features, self.weight_bits, self.l1_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpec:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest:
    """Checked on construction: an instance that exists is consistent (its files may still be damaged on disk)."""

    model_name: str
    model_type: str
    weight_bits: WeightBits
    groups: tuple[GroupSpec, ...]
    client_files: Mapping[str, FileSpec]
    server_files: Mapping[str, FileSpec]
    modulus: int = P
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _check(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the canonical JSON of everything else; names one split of one model."""
        return hashlib.sha256(self._canonical()).hexdigest()

    @property
    def by_name(self) -> dict[str, GroupSpec]:
        return {group.name: group for group in self.groups}

    def _canonical(self) -> bytes:
        return json.dumps(_plain(self), sort_keys=True, separators=(",", ":")).encode()

    def to_json(self) -> bytes:
        body = _plain(self)
        # Derived, for the reader of the file; ignored and recomputed on load.
        for group, spec in zip(body["groups"], self.groups, strict=True):
            group["x_max"] = spec.x_max
        return json.dumps({**body, "fingerprint": self.fingerprint}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> ModelManifest:
        """Parses untrusted bytes.

        Raises:
            BundleError: not JSON, a missing or wrong field, or a fingerprint that does not match the content.
        """
        if len(raw) > MAX_MANIFEST_BYTES:
            raise BundleError(f"manifest is over the limit of {MAX_MANIFEST_BYTES} bytes")
        try:
            body = json.loads(raw)
            stated = body.pop("fingerprint")
            groups = tuple(
                GroupSpec(
                    name=g["name"],
                    layer=g["layer"],
                    in_features=g["in_features"],
                    members=tuple(MemberSpec(name=m["name"], out_features=m["out_features"]) for m in g["members"]),
                    weight_bits=g["weight_bits"],
                    l1_max=g["l1_max"],
                    l2_max=g["l2_max"],
                )
                for g in body.pop("groups")
            )
            files = {
                side: {name: FileSpec(size=f["size"], sha256=f["sha256"]) for name, f in body.pop(side).items()}
                for side in ("client_files", "server_files")
            }
            manifest = cls(
                groups=groups, client_files=files["client_files"], server_files=files["server_files"], **body
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BundleError(f"manifest is malformed ({type(error).__name__})") from error
        if manifest.fingerprint != stated:
            raise BundleError("manifest fingerprint does not match its content: the bundle was changed after the split")
        return manifest

    @classmethod
    def load(cls, bundle: Path) -> ModelManifest:
        path = bundle / MANIFEST_NAME
        if not path.is_file():
            raise BundleError(f"no {MANIFEST_NAME} in {str(bundle)!r}: is it a folder made by `sordino split`?")
        with path.open("rb") as file:
            return cls.from_json(file.read(MAX_MANIFEST_BYTES + 1))


def _plain(manifest: ModelManifest) -> dict[str, Any]:
    return {
        "model_name": manifest.model_name,
        "model_type": manifest.model_type,
        "weight_bits": manifest.weight_bits,
        "modulus": manifest.modulus,
        "format_version": manifest.format_version,
        "groups": [asdict(group) for group in manifest.groups],
        "client_files": {name: asdict(spec) for name, spec in manifest.client_files.items()},
        "server_files": {name: asdict(spec) for name, spec in manifest.server_files.items()},
    }


def _short(value: object) -> str:
    """A hostile value must not fill a log."""
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def _check(manifest: ModelManifest) -> None:
    if type(manifest.format_version) is not int or manifest.format_version != FORMAT_VERSION:
        raise BundleError(
            f"bundle format {_short(manifest.format_version)} is not supported, this release reads {FORMAT_VERSION}"
        )
    if type(manifest.modulus) is not int or manifest.modulus != P:
        raise BundleError(f"modulus {_short(manifest.modulus)} is not supported, this release uses {P}")
    for label, text in (("model_name", manifest.model_name), ("model_type", manifest.model_type)):
        if not isinstance(text, str) or not 0 < len(text) <= 300:
            raise BundleError(f"{label} must be a string of 1 to 300 characters")
    if type(manifest.weight_bits) is not int or manifest.weight_bits not in (8, 12):
        raise BundleError("weight_bits must be 8 or 12")
    if not 0 < len(manifest.groups) <= MAX_GROUPS:
        raise BundleError(f"a bundle has 1 to {MAX_GROUPS} groups, this one has {len(manifest.groups)}")
    members: set[str] = set()
    names: set[str] = set()
    for group in manifest.groups:
        _check_group(group)
        if group.weight_bits != manifest.weight_bits:
            raise BundleError(f"group {group.name!r}: weight_bits differs from the bundle's")
        fresh = {member.name for member in group.members}
        if group.name in names or fresh & members or len(fresh) != len(group.members):
            raise BundleError(f"group {group.name!r}: it, or one of its members, is listed twice")
        names.add(group.name)
        members |= fresh
    for side in (manifest.client_files, manifest.server_files):
        for name, spec in side.items():
            if not isinstance(name, str) or not _FILE.match(name):
                raise BundleError("a file name of the bundle is not a plain file name")
            if (
                type(spec.size) is not int
                or not 0 <= spec.size < 1 << 48
                or not re.fullmatch(r"[0-9a-f]{64}", str(spec.sha256))
            ):
                raise BundleError(f"file {name!r}: size or SHA-256 is malformed")


def _check_group(group: GroupSpec) -> None:
    if not isinstance(group.name, str) or not _NAME.match(group.name):
        raise BundleError("a group's name has characters outside [A-Za-z0-9_.+-] or is too long")
    if type(group.weight_bits) is not int or group.weight_bits not in (8, 12):
        raise BundleError(f"group {group.name!r}: weight_bits must be 8 or 12")
    for label, value, top in (
        ("layer", group.layer, 1 << 16),
        ("in_features", group.in_features, MAX_FEATURES),
        ("l1_max", group.l1_max, (P - 1) // 2),
        ("l2_max", group.l2_max, 1 << 32),
        *(("out_features", member.out_features, MAX_FEATURES) for member in group.members),
    ):
        if type(value) is not int or not (0 if label in ("layer", "l1_max", "l2_max") else 1) <= value <= top:
            raise BundleError(f"group {group.name!r}: {label} is not an integer in range")
    if not group.members or not all(isinstance(m.name, str) and _NAME.match(m.name) for m in group.members):
        raise BundleError(f"group {group.name!r}: a member's name is malformed")
    if group.x_max < 1:
        raise BundleError(f"group {group.name!r}: l1_max {group.l1_max} leaves no room for activations")


def sha256_file(path: Path) -> FileSpec:
    """Size and SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return FileSpec(size=path.stat().st_size, sha256=digest.hexdigest())
