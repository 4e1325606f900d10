"""What a process reads of a bundle, and what it refuses: its own share of each matrix, and no other's."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sordino.server.kernel import RingMatrix
from sordino.server.slices import SLICES_NAME, check_slices, share, slice_digests, write_slices
from sordino.server.store import MatrixStore
from sordino.shared.errors import BundleError, RangeError
from sordino.shared.manifest import MANIFEST_NAME, SERVER_DIR, GroupSpec, MemberSpec, ModelManifest, sha256_file

WEIGHTS = f"{SERVER_DIR}/weights.safetensors"


@pytest.fixture(params=[8, 12])
def bundle(request: pytest.FixtureRequest, bundles: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(bundles("llama", weight_bits=request.param), tmp_path / "bundle"))


def flip(bundle: Path, name: str, row: int) -> None:
    """One bit, in the middle of a row of the stored matrix."""
    raw = bytearray((bundle / WEIGHTS).read_bytes())
    data = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data])[name]
    raw[data + header["data_offsets"][0] + row * header["shape"][1] + header["shape"][1] // 2] ^= 1
    (bundle / WEIGHTS).write_bytes(raw)


def reseal(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest's server files, as their hashes are now; with its fingerprint, as a provider could."""
    manifest = ModelManifest.load(bundle)
    files = {name: sha256_file(bundle / SERVER_DIR / name) for name in manifest.server_files}
    change(files)
    (bundle / MANIFEST_NAME).write_bytes(dataclasses.replace(manifest, server_files=files).to_json())


def rows_of(group: GroupSpec, rank: int, ranks: int) -> set[int]:
    """Of the stored matrix, all planes."""
    rows = share(group.out_features, rank, ranks)
    return {plane * group.out_features + row for plane in range(group.planes) for row in range(rows.start, rows.stop)}


def same(one: RingMatrix, other: RingMatrix) -> bool:
    return torch.equal(one.weights, other.weights)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_flipped_bit_is_refused_by_the_rank_that_holds_it(bundle: Path, tmp_path: Path, ranks: int) -> None:
    right = {rank: MatrixStore(bundle, shard=(rank, ranks), verify=False) for rank in range(ranks)}
    damaged = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    index = len(right[0].manifest.groups) // 2
    group = right[0].manifest.groups[index]
    row = group.planes * group.out_features - 2  # of the last plane
    flip(damaged, group.name, row)
    refused = []
    for rank in range(ranks):
        if row in rows_of(group, rank, ranks):
            with pytest.raises(BundleError, match=re.escape(f"{group.name!r} was changed after the split")):
                MatrixStore(damaged, shard=(rank, ranks), verify=False)
            refused.append(rank)
            continue
        store = MatrixStore(damaged, shard=(rank, ranks))
        assert all(same(store.matrices[i], right[rank].matrices[i]) for i in store.held)
        assert same(store.whole[index - 1], right[rank].whole[index - 1])
        # Block products read other rows, too: they get none that was changed.
        for _ in range(2):
            with pytest.raises(BundleError, match="was changed after the split"):
                store.whole[index]
    assert refused == [ranks - 1]


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_rank_hashes_its_share_alone(bundle: Path, ranks: int) -> None:
    manifest = ModelManifest.load(bundle)
    overhead = manifest.server_files[SLICES_NAME].size
    total = 0
    for rank in range(ranks):
        store = MatrixStore(bundle, shard=(rank, ranks), verify=False)
        size = sum(len(rows_of(group, rank, ranks)) * group.in_features for group in manifest.groups)
        assert store.hashed_bytes == size + overhead
        assert sum(matrix.weights.nbytes for matrix in store.matrices.values()) == size
        total += size
    assert total == sum(group.planes * group.out_features * group.in_features for group in manifest.groups)
    whole = MatrixStore(bundle, shard=(0, ranks))
    files = sum(spec.size for spec in manifest.client_files.values())
    assert whole.hashed_bytes == MatrixStore(bundle, shard=(0, ranks), verify=False).hashed_bytes + files


def test_a_stage_hashes_its_layers_alone(bundle: Path) -> None:
    stages = [MatrixStore(bundle, layers=(layer, layer), verify=False) for layer in range(2)]
    overhead = stages[0].manifest.server_files[SLICES_NAME].size
    size = sum(matrix.weights.nbytes for matrix in MatrixStore(bundle).matrices.values())
    assert [stage.hashed_bytes - overhead for stage in stages] == [size // 2, size // 2]
    flip(bundle, stages[0].manifest.groups[0].name, 0)
    MatrixStore(bundle, layers=(1, 1))
    with pytest.raises(BundleError):
        MatrixStore(bundle, layers=(0, 0))


def bundle_of(folder: Path, matrix: torch.Tensor, planes: int, l1_max: int) -> Path:
    """A bundle of one group."""
    (folder / SERVER_DIR).mkdir(parents=True)
    save_file({"one": matrix}, folder / WEIGHTS)
    write_slices(folder / SERVER_DIR, {"one": slice_digests(matrix, planes)})
    bits: Any = 8 if planes == 1 else 12
    group = GroupSpec(
        name="one",
        layer=0,
        in_features=matrix.shape[1],
        members=(MemberSpec(name="one.0", out_features=len(matrix) // planes),),
        weight_bits=bits,
        l1_max=l1_max,
        l2_max=1 << 16,
    )
    manifest = ModelManifest(
        model_name="one",
        model_type="llama",
        weight_bits=bits,
        groups=(group,),
        client_files={},
        server_files={path.name: sha256_file(path) for path in (folder / SERVER_DIR).iterdir()},
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return folder


@pytest.mark.parametrize("planes", [1, 2])
def test_l1_max_is_that_of_the_rows_held(tmp_path: Path, planes: int) -> None:
    matrix = torch.randint(-100, 101, (planes, 40, 300), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    matrix[:, 25, ::2], matrix[:, 25, 1::2] = 110, -110  # a row of the second half
    whole = matrix[0].long() if planes == 1 else matrix[0].long() + 256 * matrix[1].long()
    largest = int(whole.abs().sum(dim=1).max())
    assert largest == 300 * 110 * (1 if planes == 1 else 257)
    stored = matrix.reshape(-1, 300)
    MatrixStore(bundle_of(tmp_path / "right", stored, planes, largest))
    wrong = bundle_of(tmp_path / "wrong", stored, planes, largest - 1)
    MatrixStore(wrong, shard=(0, 2))
    for shard in ((0, 1), (1, 2)):
        with pytest.raises(BundleError, match="over the manifest's l1_max"):
            MatrixStore(wrong, shard=shard)


def test_a_weight_of_minus_128_is_one_of_two_planes(tmp_path: Path) -> None:
    matrix = torch.zeros((4, 30), dtype=torch.int8)
    matrix[1, 7] = -128
    with pytest.raises(RangeError, match="-128"):
        MatrixStore(bundle_of(tmp_path / "one", matrix, 1, 128))
    MatrixStore(bundle_of(tmp_path / "two", matrix, 2, 128))


def resident(path: Path) -> int:
    """Bytes of a mapped file that this process has touched, or that the system mapped beside them."""
    size, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = line.endswith(str(path))
        elif counted and line.startswith("Rss:"):
            size += int(line.split()[1]) << 10
    return size


def test_a_rank_touches_the_pages_of_its_share_alone(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "bundle", torch.ones((4096, 8192), dtype=torch.int8), 1, 8192)
    store = MatrixStore(bundle, shard=(2, 8))
    size = store.matrices[0].weights.nbytes
    assert size == 4 << 20
    # Linux maps pages around those that are asked for: what it keeps together, 2 MiB at most, at either end.
    assert size <= resident(bundle / WEIGHTS) <= size + (5 << 20)
    assert store.whole[0].weights.shape == (4096, 8192)
    assert resident(bundle / WEIGHTS) >= 32 << 20


def test_the_rest_of_a_matrix_is_checked_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MatrixStore(bundle, shard=(0, 2)).whole
    checked: list[str] = []

    def counted(group: GroupSpec, *rest: Any) -> int:
        checked.append(group.name)
        return check_slices(group, *rest)

    monkeypatch.setattr("sordino.server.store.check_slices", counted)
    groups = ModelManifest.load(bundle).groups
    assert len(whole) == len(groups)
    for _ in range(2):
        for index in whole:
            assert whole[index].out_features == groups[index].out_features
    assert checked == [group.name for group in groups]


def test_ranks_of_one_bundle_have_a_digest_in_common(bundle: Path) -> None:
    stores = [MatrixStore(bundle, shard=(rank, 2), verify=False) for rank in range(2)]
    assert stores[0].digest(1, 2) == stores[1].digest(1, 2) != stores[0].digest(0, 2)
    assert MatrixStore(bundle, layers=(0, 0), shard=(1, 2)).digest(1, 2) != stores[0].digest(1, 2)
    renamed = dataclasses.replace(stores[0].manifest, model_name="other")
    (bundle / MANIFEST_NAME).write_bytes(renamed.to_json())
    assert MatrixStore(bundle, shard=(1, 2)).digest(1, 2) != stores[0].digest(1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda listed, name: listed.pop(name),
        lambda listed, name: listed[name].pop(),
        lambda listed, name: listed[name].append(listed[name][0]),
        lambda listed, name: listed[name].reverse(),
        lambda listed, name: listed.update({name: None}),
        lambda listed, name: listed.update({name: "0" * len(listed[name])}),
        lambda listed, name: listed[name].__setitem__(-1, "0" * 64),
        lambda listed, name: listed[name].__setitem__(-1, None),
    ],
)
def test_a_wrong_list_of_slices_is_refused(bundle: Path, change: Callable[[dict[str, Any], str], object]) -> None:
    path = bundle / SERVER_DIR / SLICES_NAME
    listed = json.loads(path.read_text())
    change(listed, ModelManifest.load(bundle).groups[1].name)
    path.write_text(json.dumps(listed))
    with pytest.raises(BundleError, match=SLICES_NAME):
        MatrixStore(bundle)
    reseal(bundle, lambda files: None)
    with pytest.raises(BundleError, match=SLICES_NAME):
        MatrixStore(bundle)


@pytest.mark.parametrize("content", [b"", b"[]", b"1", b"\xff", b"[" * 100_000])
def test_what_is_no_list_of_slices_is_refused(bundle: Path, content: bytes) -> None:
    (bundle / SERVER_DIR / SLICES_NAME).write_bytes(content)
    reseal(bundle, lambda files: None)
    with pytest.raises(BundleError, match=f"{SLICES_NAME} is malformed"):
        MatrixStore(bundle)


def test_a_bundle_without_slices_is_hashed_whole(bundle: Path) -> None:
    """As earlier releases made them: rank 0 hashes all, and compares the shares of the others with its own."""
    matrices = MatrixStore(bundle).matrices
    reseal(bundle, lambda files: files.pop(SLICES_NAME))
    (bundle / SERVER_DIR / SLICES_NAME).unlink()
    store, other = MatrixStore(bundle, shard=(0, 2)), MatrixStore(bundle, shard=(1, 2), verify=False)
    files = {**store.manifest.client_files, **store.manifest.server_files}
    assert store.hashed_bytes == sum(spec.size for spec in files.values())
    assert other.hashed_bytes == 0
    assert all(same(store.whole[index], matrix) for index, matrix in matrices.items())
    digest = store.digest(1, 2)
    assert digest == other.digest(1, 2)
    group = store.manifest.groups[-1]
    flip(bundle, group.name, group.planes * group.out_features - 1)
    with pytest.raises(BundleError, match="SHA-256 is not the manifest's"):
        MatrixStore(bundle, shard=(0, 2))
    assert MatrixStore(bundle, shard=(1, 2), verify=False).digest(1, 2) != digest


@pytest.mark.parametrize("name", [WEIGHTS, f"{SERVER_DIR}/{SLICES_NAME}", "client/config.json"])
def test_a_file_that_is_cut_or_gone_is_refused(bundle: Path, name: str) -> None:
    verify = name.startswith("client")  # those are of no use to a rank that no client talks to
    (bundle / name).write_bytes((bundle / name).read_bytes()[:-1])
    with pytest.raises(BundleError, match=re.escape(name)):
        MatrixStore(bundle, shard=(1, 2), verify=verify)
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"{re.escape(name)} is missing"):
        MatrixStore(bundle, shard=(1, 2), verify=verify)


def test_a_rank_that_no_client_talks_to_needs_no_files_for_clients(bundle: Path) -> None:
    shutil.rmtree(bundle / "client")
    assert MatrixStore(bundle, shard=(1, 2), verify=False).matrices
    with pytest.raises(BundleError, match=r"client/.* is missing"):
        MatrixStore(bundle, shard=(0, 2))


@pytest.mark.parametrize("place", [0, 7, 8, 20])
def test_a_damaged_header_is_refused(bundle: Path, place: int) -> None:
    raw = bytearray((bundle / WEIGHTS).read_bytes())
    raw[place] ^= 0x40
    (bundle / WEIGHTS).write_bytes(raw)
    with pytest.raises(BundleError):
        MatrixStore(bundle)
