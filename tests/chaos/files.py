"""Damage to the files of a checkpoint, injected against a process that only loads."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from domino_lm.checkpoint.manifest import MANIFEST_FILE
from tests.chaos.campaign import Fault
from tests.chaos.rig import Loaded, Rig
from tests.damage import cut, make_older, put_folder, put_link_to_itself, put_pipe, remove, reseal

TRACKER = "latest_checkpointed_iteration.txt"
OLDER, NEWER = 8, 10
Damage = Callable[[Path, random.Random], None]


def files_of(path: Path) -> list[Path]:
    """Every file of a checkpoint."""
    return sorted(path.iterdir())


def one_file(rig: Rig, rng: random.Random, damage: Damage, name: str = "*") -> None:
    """One file of the newest checkpoint is damaged: it is named, and the one before it is loaded, as it was."""
    folder = rig.copy([OLDER, NEWER])
    file = rng.choice(sorted((folder / f"iter_{NEWER:07d}").glob(name)))
    before = file.read_bytes()
    damage(file, rng)
    if file.is_file() and not file.is_symlink() and file.read_bytes() == before:
        require(rig, rig.load(folder), NEWER, None)
    else:
        require(rig, rig.load(folder), OLDER, file.name)
        by_number = rig.load(folder, f"--ckpt-step {NEWER}")
        assert file.name in by_number.refused, by_number
        require_one_line(by_number.refused)


def only_one(rig: Rig, rng: random.Random, damage: Damage) -> None:
    """The only checkpoint is damaged: the run is refused in one line that names the file."""
    folder = rig.copy([NEWER])
    file = rng.choice(files_of(folder / f"iter_{NEWER:07d}"))
    damage(file, rng)
    found = rig.load(folder)
    assert file.name in found.refused, found
    require_one_line(found.refused)


def require(rig: Rig, found: Loaded, iteration: int, named: str | None) -> None:
    """Raise AssertionError unless the state of ``iteration`` was loaded, with one warning that has ``named`` in it, or none."""
    assert found.iteration == iteration, found
    assert found.digest == rig.state_at(iteration), f"another state than that of iteration {iteration} was loaded: {found}"
    assert len(found.said) == (named is not None), found.said
    for line in found.said:
        assert str(named) in line, line
        require_one_line(line)


def require_one_line(text: str) -> None:
    """Raise AssertionError if a message is more than a line, or passes torch's advice on."""
    assert text, "nothing was said"
    assert "\n" not in text, text
    assert "weights_only" not in text, text


def flip(file: Path, rng: random.Random) -> None:
    """One bit somewhere."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def zeros(file: Path, rng: random.Random) -> None:
    """A run of zeros, of any length."""
    content = bytearray(file.read_bytes())
    begin = rng.randrange(len(content))
    length = rng.randint(1, len(content) - begin)
    content[begin : begin + length] = bytes(length)
    file.write_bytes(content)


def noise(file: Path, rng: random.Random) -> None:
    """Other bytes of the same number."""
    file.write_bytes(rng.randbytes(file.stat().st_size))


def longer(file: Path, rng: random.Random) -> None:
    """More behind its end."""
    with file.open("ab") as opened:
        opened.write(rng.randbytes(rng.randint(1, 5000)))


def shorter(file: Path, rng: random.Random) -> None:
    """A part of it is gone."""
    os.truncate(file, rng.randrange(file.stat().st_size))


def of_another(file: Path, rng: random.Random) -> None:
    """The file of the checkpoint before."""
    shutil.copy(file.parent.parent / f"iter_{OLDER:07d}" / file.name, file)


def of_another_name(file: Path, rng: random.Random) -> None:
    """Another file of the same checkpoint."""
    shutil.copy(rng.choice([other for other in files_of(file.parent) if other != file]), file)


def swapped_halves(file: Path, rng: random.Random) -> None:
    """Blocks in another order."""
    content = file.read_bytes()
    middle = rng.randint(1, len(content) - 1)
    file.write_bytes(content[middle:] + content[:middle])


def plain(damage: Callable[[Path], None]) -> Damage:
    """A damage that leaves nothing to chance."""
    return lambda file, rng: damage(file)


WRONG_TRACKERS = [
    "",
    "9" * 400,
    "9" * 5000,
    "-10",
    "ten",
    "release",
    "10\0",
    "1e1",
    "٣",
    "../iter_0000010",
    "99",
    "0x0a",
    "10 8",
    "\ufeff10",
]


def wrong_tracker(rig: Rig, rng: random.Random) -> None:
    """The pointer says nothing sensible: the newest whole checkpoint is taken."""
    folder = rig.copy([OLDER, NEWER])
    (folder / TRACKER).write_text(rng.choice(WRONG_TRACKERS))
    require(rig, rig.load(folder), NEWER, TRACKER)


def no_tracker(rig: Rig, rng: random.Random) -> None:
    """The pointer is no file: nobody waits for it."""
    folder = rig.copy([OLDER, NEWER])
    rng.choice([put_folder, put_pipe, put_link_to_itself, remove])(folder / TRACKER)
    require(rig, rig.load(folder), NEWER, TRACKER)


def whole_checkpoint(rig: Rig, rng: random.Random) -> None:
    """The folder of the newest is gone, empty, a file, a pipe, a link to itself, or that of another iteration under its name."""
    folder = rig.copy([OLDER, NEWER])
    path = folder / f"iter_{NEWER:07d}"
    shutil.rmtree(path)
    kind = rng.randrange(6)
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        path.write_text("a file")
    elif kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.symlink_to(path.name)
    elif kind == 5:
        shutil.copytree(folder / f"iter_{OLDER:07d}", path)
    require(rig, rig.load(folder), OLDER, path.name)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values stand in a record."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def wrong_value(rig: Rig, rng: random.Random, sealed: bool) -> None:
    """A value of ``state.json`` is of another type, whether or not the manifest knows of it: refused, or of no consequence."""
    folder = rig.copy([OLDER, NEWER])
    path = folder / f"iter_{NEWER:07d}"
    record = json.loads((path / "state.json").read_text())
    place = rng.choice([place for place in places(record) if place])
    wrong = rng.choice([None, -1, 10**400, "7", "", [], {}, [{}], {"a": []}, True, 1.5, float("nan"), float("inf"), [[[]]]])
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = wrong
    (path / "state.json").write_text(json.dumps(record))
    (reseal if sealed else make_older)(path) if record.get("manifest") is True or sealed else reseal(path)
    found = rig.load(folder)
    if found.refused:
        require_one_line(found.refused)
    elif found.iteration == OLDER:
        require(rig, found, OLDER, "state.json")
    else:
        assert found.iteration == NEWER, found
        assert found.digest == rig.state_at(NEWER), f"{place} = {wrong!r} changed what was loaded"


def changed_number(rig: Rig, rng: random.Random) -> None:
    """A number of ``state.json`` is another one: the manifest tells."""
    folder = rig.copy([OLDER, NEWER])
    file = folder / f"iter_{NEWER:07d}" / "state.json"
    record = json.loads(file.read_text())
    name = rng.choice(["iteration", "optimizer_steps", "consumed_samples"])
    inner = record if name in record else record["state"]
    inner[name] = rng.choice([-40, 8, OLDER, inner[name] + 1, inner[name] * 2, 2**40])
    file.write_text(json.dumps(record, indent=1))
    require(rig, rig.load(folder), OLDER, file.name)


class Hostile:
    """What plain pickle calls when it reads it."""

    def __init__(self, trap: Path, way: int) -> None:
        command = f"mkdir {trap}"
        self.call = [
            (os.system, (command,)),
            (eval, (f"__import__('os').system({command!r})",)),
            (exec, (f"import os; os.system({command!r})",)),
            (os.mkdir, (str(trap),)),
            (getattr, (os, "system")),
        ][way]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call  # type: ignore[return-value]


def hostile(rig: Rig, rng: random.Random, name: str) -> None:
    """A pickle that runs what it names, in a place where pickles are: nothing is run, and the checkpoint before is taken."""
    folder = rig.copy([OLDER, NEWER])
    path, trap = folder / f"iter_{NEWER:07d}", rig.work / "trap"
    file = next(path.glob(name))
    content = pickle.dumps(Hostile(trap, rng.randrange(5)), protocol=rng.randint(0, 4))
    file.write_bytes(content.ljust(file.stat().st_size, b"\0") if name.endswith("distcp") else content)
    if rng.random() < 0.7:
        reseal(path)
    found = rig.load(folder)
    assert not trap.exists(), "it was run"
    require(rig, found, OLDER, file.name)


def hostile_size(rig: Rig, rng: random.Random) -> None:
    """The index asks for tensors of absurd sizes or places: refused before memory is asked for."""
    folder = rig.copy([OLDER, NEWER])
    path = folder / f"iter_{NEWER:07d}"
    index = pickle.loads((path / ".metadata").read_bytes())
    key = rng.choice(sorted(index.state_dict_metadata))
    place = rng.choice(list(index.storage_data.values()))
    kind, huge = rng.randrange(4), rng.choice([2**31, 2**62, 10**30, -1])
    if kind == 0:
        place.offset = huge
    elif kind == 1:
        place.length = huge
    elif kind == 2:
        import torch

        index.state_dict_metadata[key].size = torch.Size([min(abs(huge), 2**62)] * 3)
    else:
        place.relative_path = rng.choice(["../secret", "/etc/passwd", "none.distcp", ".", ""])
    (path / ".metadata").write_bytes(pickle.dumps(index))
    reseal(path)
    found = rig.load(folder)
    if found.refused:
        require_one_line(found.refused)
    else:
        require(rig, found, OLDER, path.name)


def old_and_foreign(rig: Rig, rng: random.Random) -> None:
    """A checkpoint of before manifests loads, with one line that it cannot be verified; a manifest that went missing is damage."""
    folder = rig.copy([OLDER, NEWER])
    path = folder / f"iter_{NEWER:07d}"
    if rng.random() < 0.5:
        make_older(path)
        require(rig, rig.load(folder), NEWER, "has no manifest")
    else:
        (path / MANIFEST_FILE).unlink()
        require(rig, rig.load(folder), OLDER, MANIFEST_FILE)


FAULTS = [
    Fault("one flipped bit in the tensors", 20, partial(one_file, damage=flip, name="*.distcp")),
    Fault("one flipped bit in any file of a checkpoint", 30, partial(one_file, damage=flip)),
    Fault("a run of zeros in any file", 20, partial(one_file, damage=zeros)),
    Fault("other bytes in place of a file", 8, partial(one_file, damage=noise)),
    Fault("a file cut short", 10, partial(one_file, damage=shorter)),
    Fault("a file longer than it was", 6, partial(one_file, damage=longer)),
    Fault("a file of another iteration", 10, partial(one_file, damage=of_another)),
    Fault("a file of the same checkpoint under another's name", 8, partial(one_file, damage=of_another_name)),
    Fault("parts of a file in another order", 6, partial(one_file, damage=swapped_halves)),
    Fault("a file that is missing", 6, partial(one_file, damage=plain(remove))),
    Fault("a folder in place of a file", 4, partial(one_file, damage=plain(put_folder))),
    Fault("a pipe that nobody writes to in place of a file", 4, partial(one_file, damage=plain(put_pipe))),
    Fault("a link to itself in place of a file", 4, partial(one_file, damage=plain(put_link_to_itself))),
    Fault("a damaged file in the only checkpoint", 8, partial(only_one, damage=flip)),
    Fault("the only checkpoint cut short", 4, partial(only_one, damage=plain(cut))),
    Fault("a pointer to the latest that says nothing sensible", 14, wrong_tracker),
    Fault("no file in place of the pointer", 6, no_tracker),
    Fault("no checkpoint, or another's, in place of the newest", 8, whole_checkpoint),
    Fault("a changed number in state.json", 10, changed_number),
    Fault("a value of a wrong type in state.json, under a manifest that fits", 20, partial(wrong_value, sealed=True)),
    Fault("a value of a wrong type in state.json, of before manifests", 20, partial(wrong_value, sealed=False)),
    Fault("a hostile pickle as the index", 8, partial(hostile, name=".metadata")),
    Fault("a hostile pickle as tensors", 6, partial(hostile, name="*.distcp")),
    Fault("an index with absurd sizes, places and names", 12, hostile_size),
    Fault("a checkpoint without a manifest", 4, old_and_foreign),
]
