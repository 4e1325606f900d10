"""What the files of a pool tell: nothing about used masks, nothing to other users, nothing on another host."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pool_tools import fill, manifest, products, take_checked

from sordino.client import ledger, poolfile, vault
from sordino.client.pool import CheckVector, MaskPool
from sordino.client.poolfile import BatchKeys, ChunkKeys, DataFile, Layout
from sordino.client.vault import Vault
from sordino.shared.errors import PoolError, PoolForeignError, PoolSealedError
from sordino.shared.prg import derive


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., MaskPool]:
    def open_(name: str = "pool", passphrase: str | None = None) -> MaskPool:
        return MaskPool.open_or_create(tmp_path / name, manifest(), passphrase=passphrase, state_dir=tmp_path / "state")

    return open_


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a guess is not what is tested here, but for :func:`test_a_guess_is_expensive`."""
    monkeypatch.setattr(vault, "_SCRYPT", {"n": 2, "r": 1, "p": 1})


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every key that is derived while the test runs, with the chain keys they come from."""
    seen: list[bytes] = []

    def record(key: bytes, purpose: bytes) -> bytes:
        out = derive(key, purpose)
        seen.extend((key, out))
        return out

    monkeypatch.setattr(poolfile, "derive", record)
    return seen


def _every_byte(*roots: Path) -> bytes:
    return b"\0".join(f.read_bytes() for root in roots for f in sorted(root.rglob("*")) if f.is_file())


def _forms(key: bytes) -> Iterator[bytes]:
    yield key
    yield key.hex().encode()
    yield key[::-1]


# -- a stolen pool ---------------------------------------------------------------------------------------------------


def test_used_masks_do_not_follow_from_a_stolen_pool(
    opened: Callable[..., MaskPool], tmp_path: Path, keys: list[bytes]
) -> None:
    with opened() as pool:
        fill(pool, 256)
        backup = tmp_path / "wiretap.data"  # the thief even has the data file from before
        shutil.copy(next(pool.path.glob("*.data")), backup)
        name = next(pool.path.glob("*.keys")).stem
        fresh = BatchKeys.load(pool.path, name, pool._store._vault)
        used: list[bytes] = []
        state = fresh
        for _ in range(2):
            used += [state.chain, derive(state.chain, b"pool/chunk")]
            chunk, state = state.ratchet()
            used += [chunk.mask, chunk.data]
        keys.clear()
        for group in pool.groups:
            take_checked(pool, group.name, 100)  # chunk 0 is used up, chunk 1 half used and in memory

        stolen = _every_byte(pool.path, tmp_path / "state")
        for key in used:
            assert key in [*keys, fresh.chain]  # they are the keys that were in use
            assert not any(form in stolen for form in _forms(key))
        # What does follow from it: the chunks from 2 on, and no record of the chunks before opens under their keys.
        left = BatchKeys.load(pool.path, name, pool._store._vault)
        assert left.used == 2
        later: list[ChunkKeys] = []
        while left.used < left.chunks:
            assert left.chain not in used
            chunk, left = left.ratchet()
            later.append(chunk)
        layout = Layout.of(pool.groups)
        shutil.copy(backup, tmp_path / f"{name}.data")
        file = DataFile.open(tmp_path, name, layout)
        for index in range(4):
            for candidate in later:
                opens = index >= 2 and candidate is later[index - 2]
                if opens:
                    wr = file.read(index, 0, candidate)
                    assert np.array_equal(wr, products(pool.groups[0], candidate.masks(0, pool.groups[0])))
                else:
                    with pytest.raises(PoolError, match="damaged"):
                        file.read(index, 0, candidate)


def test_used_records_are_gone_from_the_data_file(opened: Callable[..., MaskPool]) -> None:
    with opened() as pool:
        fill(pool, 128)
        data, stride = next(pool.path.glob("*.data")), pool._store.layout.stride
        assert any(data.read_bytes()[:stride])
        for group in pool.groups:
            pool.take(group.name, 64)
        raw = data.read_bytes()
        assert not any(raw[:stride])
        assert any(raw[stride:])


def test_used_records_are_zeroed_where_holes_cannot_be_punched(
    opened: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poolfile, "fallocate", lambda *args: False)
    test_used_records_are_gone_from_the_data_file(opened)


def test_old_key_files_are_overwritten(opened: Callable[..., MaskPool], tmp_path: Path) -> None:
    with opened() as pool:
        fill(pool, 128)
        file = next(pool.path.glob("*.keys"))
        os.link(file, tmp_path / "undeleted")  # as if the blocks of the deleted file were read from the disk
        assert b"chain" in (tmp_path / "undeleted").read_bytes()
        pool.take("g0", 1)
        assert not any((tmp_path / "undeleted").read_bytes())
        assert file.exists()


def test_destroy_erases(opened: Callable[..., MaskPool], tmp_path: Path, keys: list[bytes]) -> None:
    pool = opened()
    pool.store_check(_vectors(pool))
    fill(pool, 128)
    pool.take("g0", 1)
    for n, file in enumerate([*pool.path.glob("*.keys"), pool.path / "check.bin"]):
        os.link(file, tmp_path / f"undeleted{n}")
    pool.destroy()
    for file in tmp_path.glob("undeleted*"):
        assert not any(file.read_bytes())
    assert not pool.path.exists()
    rest = _every_byte(tmp_path / "state")
    assert not any(key in rest for key in keys)


# -- other users -----------------------------------------------------------------------------------------------------


def test_modes(opened: Callable[..., MaskPool], tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with opened() as pool:
            pool.store_check(_vectors(pool))
            fill(pool, 128)
            pool.take("g0", 1)
            with pool.new_batch(64):
                files = [f for root in (pool.path, tmp_path / "state") for f in root.iterdir()]
                assert {f.suffix for f in files} >= {".json", ".keys", ".data", ".bin", ".part"}
                for file in files:
                    assert file.stat().st_mode & 0o777 == 0o600, file.name
            for folder in (pool.path, tmp_path / "state"):
                assert folder.stat().st_mode & 0o777 == 0o700
        pool.path.chmod(0o755)
        with opened():
            assert pool.path.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)


def test_links_are_not_followed(opened: Callable[..., MaskPool], tmp_path: Path) -> None:
    with opened() as pool:
        fill(pool, 64)
        file = next(pool.path.glob("*.keys"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PoolError):
        opened()


# -- sealed ----------------------------------------------------------------------------------------------------------


def _vectors(pool: MaskPool) -> dict[str, CheckVector]:
    return {
        g.name: CheckVector(
            v=np.full((1, g.out_features), 0x5EC2E7A1, np.uint32), c=np.full((1, g.in_features), 0x5EC2E7A2, np.uint32)
        )
        for g in pool.groups
    }


def test_a_sealed_pool_shows_no_key(opened: Callable[..., MaskPool], tmp_path: Path, keys: list[bytes]) -> None:
    with opened(passphrase="a phrase") as pool:
        pool.store_check(_vectors(pool))
        fill(pool, 128)
        before = next(pool.path.glob("*.keys")).read_bytes()
        pool.take("g0", 1)
        raw = _every_byte(pool.path, tmp_path / "state")
        assert b"\xa1\xe7\xc2\x5e" not in raw
        assert b"chain" not in raw
        assert keys
        for key in keys:
            assert not any(form in raw for form in _forms(key))
        start = len(b"sordino sealed 1\n")
        after = next(pool.path.glob("*.keys")).read_bytes()
        assert before[start : start + 12] != after[start : start + 12]  # a fresh nonce at every write
    with opened(passphrase="a phrase") as again:
        take_checked(again, "g0", 64)
        assert again.check("g0") is not None


def test_passphrases(opened: Callable[..., MaskPool]) -> None:
    opened("sealed", passphrase="caf\u00e9").close()
    opened("plain").close()
    opened("sealed", passphrase="cafe\u0301").close()  # the same, typed on another system
    for name, passphrase, text in (
        ("sealed", "wrong", "wrong passphrase"),
        ("sealed", None, "give its passphrase"),
        ("sealed", "", "empty"),
        ("plain", "any", "not sealed"),
        ("new", "", "empty"),
    ):
        with pytest.raises(PoolSealedError, match=text):
            opened(name, passphrase=passphrase)


def test_sealed_files_cannot_be_changed_or_swapped(opened: Callable[..., MaskPool]) -> None:
    with opened(passphrase="p") as pool:
        fill(pool, 64)
        fill(pool, 64)
        a, b = sorted(pool.path.glob("*.keys"))
    first, second = a.read_bytes(), b.read_bytes()
    for changed in (second, first[:-1] + bytes([first[-1] ^ 1]), b"", first[:20], first.replace(b"sealed", b"plain ")):
        a.write_bytes(changed)
        with pytest.raises(PoolError):
            opened(passphrase="p")
    a.write_bytes(first)
    opened(passphrase="p").close()


def test_a_guess_is_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    n, r, p = (vault._SCRYPT[name] for name in ("n", "r", "p"))
    assert n * r * p >= 2**15 * 8
    assert 128 * n * r >= 32 << 20  # bytes of memory a guess
    Vault.from_passphrase("0" * 32, "x", bytes(16))  # within the library's limits


# -- texts -----------------------------------------------------------------------------------------------------------


def test_texts_show_no_secret(opened: Callable[..., MaskPool], keys: list[bytes]) -> None:
    with opened() as pool:
        pool.store_check(_vectors(pool))
        with pool.new_batch(64) as writer:
            texts = [repr(writer)]
        fill(pool, 128)
        r, wr = pool.take("g0", 1)
        state = BatchKeys.load(pool.path, next(pool.path.glob("*.keys")).stem, pool._store._vault)
        chunk, _ = state.ratchet()
        texts += [repr(pool), repr(pool.check("g0")), repr(state), repr(chunk), repr(pool._chunks), repr(pool._cursors)]
        texts += [repr(pool._store), repr(pool._store._vault)]
        os.truncate(next(pool.path.glob("*.data")), 0)
        with pytest.raises(PoolError) as info:
            pool.take("g1", 1)
        texts.append(str(info.value))
    text = " ".join(texts)
    for key in keys:
        assert key.hex() not in text
        assert repr(key)[2:-1] not in text
    for secret in (0x5EC2E7A1, *r.ravel().tolist(), *wr.ravel().tolist()):
        assert str(secret) not in text


# -- other hosts -----------------------------------------------------------------------------------------------------


def _entry(state: Path) -> Path:
    return next(state.glob("*.json"))


def _other_machine(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "machine_id", lambda: "another")


def _other_user(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state / "host").write_bytes(os.urandom(32))


def _no_record(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _entry(state).unlink()


def _no_state(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(state)


def _record_copied(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a backup is restored: the same bytes, mode and times, in a file that is not the one that was written."""
    saved = state.parent / "saved"
    shutil.copy2(_entry(state), saved)
    entry = _entry(state)
    entry.unlink()
    shutil.copy2(saved, entry)


def _record_changed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = _entry(state)
    body = entry.read_bytes()
    with entry.open("r+b") as file:
        file.write(body.replace(b'"marks": {', b'"marks": {"00000001-' + b"a" * 32 + b'": [0, 9], '))


def _record_emptied(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(_entry(state), 0)


@pytest.mark.parametrize(
    "change",
    [_other_machine, _other_user, _no_record, _no_state, _record_copied, _record_changed, _record_emptied],
)
def test_foreign(
    change: Callable[..., None], opened: Callable[..., MaskPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = opened()
    fill(pool, 192)
    take_checked(pool, "g0", 64)
    change(tmp_path / "state", monkeypatch)
    with pytest.raises(PoolForeignError, match="make a new pool"):
        opened()
    with pytest.raises(PoolForeignError):  # also for a process that has it open, once it must reserve
        pool.take("g0", 1)


def test_pool_and_ledger_restored_together(opened: Callable[..., MaskPool], tmp_path: Path) -> None:
    """A home put back from a backup: the one way to make both forget, short of a whole disk."""
    with opened() as pool:
        fill(pool, 256)
    for name in ("pool", "state"):
        shutil.copytree(tmp_path / name, tmp_path / f"backup-{name}")
    with opened() as pool:
        take_checked(pool, "g0", 1)
    for name in ("pool", "state"):
        shutil.rmtree(tmp_path / name)
        shutil.copytree(tmp_path / f"backup-{name}", tmp_path / name)
    with pytest.raises(PoolForeignError, match="restored"):
        opened()


@pytest.mark.parametrize("untold", ["_generation", "_birth"])  # overlay file systems tell no generation
def test_a_restored_ledger_is_noticed_though_its_inode_number_comes_back(
    untold: str, opened: Callable[..., MaskPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, untold, lambda _: [])
    opened().close()
    entry = _entry(tmp_path / "state")
    if "-" not in ledger.file_identity(entry):
        pytest.skip("this file system tells one of both at most")
    inode, content = entry.stat().st_ino, entry.read_bytes()
    entry.unlink()
    for attempt in range(300):
        again = tmp_path / "state" / f"attempt{attempt}"
        again.write_bytes(content)
        if again.stat().st_ino == inode:
            again.replace(entry)
            break
    else:
        pytest.skip("this file system gives no inode number twice")
    with pytest.raises(PoolForeignError, match="restored"):
        opened()


def test_a_file_system_that_cannot_tell_a_restored_ledger_is_named(
    opened: Callable[..., MaskPool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened().close()
    assert not caplog.text
    for told in ("_generation", "_birth"):
        monkeypatch.setattr(ledger, told, lambda _: [])
    opened("other").close()
    assert "delete the mask pool after restoring" in caplog.text


def test_another_state_dir_is_another_host(opened: Callable[..., MaskPool], tmp_path: Path) -> None:
    opened().close()
    with pytest.raises(PoolForeignError):
        MaskPool.open(tmp_path / "pool", manifest(), state_dir=tmp_path / "elsewhere")


def test_the_default_ledger_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home-state"))
    MaskPool.create(tmp_path / "pool", manifest()).close()
    assert list((tmp_path / "home-state" / "sordino" / "ledger").glob("*.json"))


def test_the_ledger_names_batches_and_counts_only(opened: Callable[..., MaskPool], tmp_path: Path) -> None:
    with opened() as pool:
        fill(pool, 128)
        pool.take("g0", 1)
        body = json.loads(_entry(tmp_path / "state").read_bytes().split(b"\n")[0])
    assert list(body["marks"].values()) == [[1, 2]]
    assert set(body) == {"format", "pool", "file", "marks"}
