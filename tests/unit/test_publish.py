"""A checkpoint appears under its name as a whole or not at all, and the tracker moves last."""

from __future__ import annotations

from pathlib import Path

import pytest

from domino_lm.checkpoint.folder import TRACKER_FILE
from domino_lm.checkpoint.publish import publish


def saves(folder: Path) -> tuple[Path, Path]:
    """An unfinished save and the name that it is to have; the tracker names an older one."""
    unfinished, final = folder / "iter_0000002.tmp-ab", folder / "iter_0000002"
    unfinished.mkdir()
    (unfinished / "state.json").write_text("new")
    (folder / TRACKER_FILE).write_text("1")
    return unfinished, final


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("exists", [False, True])
def test_a_save_gets_its_name_and_the_tracker_names_it(tmp_path: Path, exists: bool) -> None:
    unfinished, final = saves(tmp_path)
    if exists:
        final.mkdir()
        (final / "old.json").write_text("old")
    publish(unfinished, final, "2")
    assert files(tmp_path) == {"iter_0000002/state.json": "new", TRACKER_FILE: "2"}


@pytest.mark.parametrize("exists", [False, True])
def test_a_renaming_that_fails_leaves_the_old_checkpoint_and_the_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    unfinished, final = saves(tmp_path)
    if exists:
        final.mkdir()
        (final / "old.json").write_text("old")
    before, rename = files(tmp_path), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == unfinished:
            raise OSError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        publish(unfinished, final, "2")
    assert files(tmp_path) == before
