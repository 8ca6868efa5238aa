"""Damage to the files of a checkpoint, and manifests that know of it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from domino_lm.checkpoint.manifest import MANIFEST_FILE, Manifest, write_hashed


def reseal(path: Path) -> None:
    """Make the manifest say that the files in ``path`` are as they were written."""
    manifest = Manifest.read(path)
    assert manifest is not None
    files = {name: write_hashed(path / name, (path / name).read_bytes()) for name in sorted(os.listdir(path)) if name != MANIFEST_FILE}
    (path / MANIFEST_FILE).write_bytes(replace(manifest, files=files).content())


def make_older(path: Path) -> None:
    """As a version wrote it that knew no manifests."""
    record = json.loads((path / "state.json").read_text())
    del record["manifest"]
    (path / "state.json").write_text(json.dumps(record))
    (path / MANIFEST_FILE).unlink()


def flip_bit(file: Path, at: int | None = None) -> None:
    """Change one bit, by default in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    file.write_bytes(content)


def fill_with_zeros(file: Path) -> None:
    """The right size, and nothing in it."""
    file.write_bytes(bytes(file.stat().st_size))


def cut(file: Path) -> None:
    """Half of it is gone."""
    os.truncate(file, file.stat().st_size // 2)


def remove(file: Path) -> None:
    """Nothing is left."""
    file.unlink()


def put_folder(file: Path) -> None:
    """A folder of its name."""
    file.unlink()
    file.mkdir()


def put_pipe(file: Path) -> None:
    """A pipe that nobody writes to."""
    file.unlink()
    os.mkfifo(file)


def put_link_to_itself(file: Path) -> None:
    """A link without an end."""
    file.unlink()
    file.symlink_to(file.name)


def swap_with_sibling(file: Path) -> None:
    """The same file of an older checkpoint."""
    sibling = min(file.parent.parent.glob("iter_*")) / file.name
    shutil.copy(sibling, file)


DAMAGES = (flip_bit, fill_with_zeros, cut, remove, put_folder, put_pipe, put_link_to_itself, swap_with_sibling)
