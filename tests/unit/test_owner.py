"""Who may save in a folder: one run at a time, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from domino_lm.checkpoint import owner
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.owner import STALE_S, Applicant, Claim, Process, Refresher, TakenError, newest_record
from domino_lm.checkpoint.save_load import save_checkpoint
from domino_lm.config.settings import ConfigError
from tests.damage import put_folder, put_link_to_itself, put_pipe
from tests.full_disk import files_of_at_most
from tests.unit.test_checkpoint import MESH, STATE, Run

ELSEWHERE = Process(host="elsewhere", boot_id="another", pid_namespace="pid:[1]", pid=1, started="1")


def write_record(folder: Path, process: Process, age_s: float = 0.0, number: int = 1) -> Path:
    """The record of another run."""
    path = folder / f".domino_owner.{number}"
    path.write_text(json.dumps({"run_id": "0123456789", **asdict(process)}))
    touched_s = time.time() - age_s
    os.utime(path, (touched_s, touched_s))
    return path


def taken(folder: Path) -> Claim:
    """A claim that is there at once."""
    claim = Applicant(folder, "mine").attempt()
    assert isinstance(claim, Claim), claim
    return claim


def records(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".domino_owner*"))


def ended_process() -> Process:
    """One that ran on this host a moment ago."""
    with subprocess.Popen(["sleep", "60"]) as child:
        found = replace(Process.own(), pid=child.pid, started=owner.start_of(child.pid) or "")
        assert not found.is_gone
        child.kill()
    return found


def test_a_free_folder_is_taken_and_given_back(tmp_path: Path) -> None:
    claim = taken(tmp_path)
    record = newest_record(tmp_path)
    assert record is not None
    assert record.process == Process.own()
    assert str(record) == f"run mine, process {os.getpid()} on {os.uname().nodename}"
    claim.require()
    claim.give_back()
    assert records(tmp_path) == []


@pytest.mark.parametrize("age_s", [0, 30])
def test_a_fresh_record_is_waited_for_and_refuses_once_it_is_refreshed(tmp_path: Path, age_s: float) -> None:
    path = write_record(tmp_path, ELSEWHERE, age_s)
    applicant = Applicant(tmp_path, "mine")
    for _ in range(2):
        said = applicant.attempt()
        assert isinstance(said, str)
        assert "is held by run 01234567, process 1 on elsewhere" in said
        assert f"waiting {STALE_S - age_s:.0f} s" in said
    os.utime(path)
    with pytest.raises(ConfigError, match=r"belongs to run 01234567, process 1 on elsewhere, which is running"):
        applicant.attempt()
    assert records(tmp_path) == [".domino_owner.1"]


def test_a_record_without_refreshing_for_a_minute_is_taken(tmp_path: Path) -> None:
    write_record(tmp_path, ELSEWHERE, STALE_S + 1)
    taken(tmp_path)
    assert records(tmp_path) == [".domino_owner.2"]


def test_a_record_that_stands_still_while_it_is_looked_at_is_taken_whatever_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path, ELSEWHERE, -3600)
    applicant, now_s = Applicant(tmp_path, "mine"), time.monotonic()
    assert isinstance(applicant.attempt(), str)
    monkeypatch.setattr(owner.time, "monotonic", lambda: now_s + STALE_S / 2)
    assert isinstance(applicant.attempt(), str)
    monkeypatch.setattr(owner.time, "monotonic", lambda: now_s + STALE_S + 1)
    assert isinstance(applicant.attempt(), Claim)


def test_what_a_killed_run_of_this_host_left_is_taken_at_once(tmp_path: Path) -> None:
    write_record(tmp_path, ended_process())
    taken(tmp_path).require()


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    write_record(tmp_path, replace(Process.own(), started="1"))
    taken(tmp_path).require()


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"boot_id": ""}], ids=str)
def test_of_another_boot_or_container_nothing_is_known(tmp_path: Path, change: dict[str, str]) -> None:
    write_record(tmp_path, replace(ended_process(), **change))
    assert isinstance(Applicant(tmp_path, "mine").attempt(), str)


def test_a_process_that_is_not_yet_reaped_is_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    found = replace(Process.own(), pid=child.pid, started=owner.start_of(child.pid) or "")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert found.is_gone
    child.wait()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"run_id": 5, "pid": "x"}', b"[" * 100_000], ids=lambda c: str(c[:9])
)
def test_a_record_that_says_nothing_is_waited_for(tmp_path: Path, content: bytes) -> None:
    path = write_record(tmp_path, ELSEWHERE)
    path.write_bytes(content)
    said = Applicant(tmp_path, "mine").attempt()
    assert isinstance(said, str)
    assert "a run that does not say its name" in said
    os.utime(path, (1, 1))
    taken(tmp_path).require()


@pytest.mark.parametrize("damage", [put_folder, put_pipe, put_link_to_itself], ids=lambda damage: damage.__name__)
def test_what_is_no_file_in_its_place_neither_hangs_nor_holds_for_ever(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = write_record(tmp_path, ELSEWHERE)
    damage(path)
    assert isinstance(Applicant(tmp_path, "mine").attempt(), str)
    os.utime(path, (1, 1), follow_symlinks=False)
    taken(tmp_path).require()


def test_a_record_that_is_given_back_meanwhile_is_waited_for_no_longer(tmp_path: Path) -> None:
    path, applicant = write_record(tmp_path, ELSEWHERE), Applicant(tmp_path, "mine")
    assert isinstance(applicant.attempt(), str)
    path.unlink()
    assert isinstance(applicant.attempt(), Claim)


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_starts_at_once_one_takes_the_folder(tmp_path: Path, stale: bool) -> None:
    """Each in a process of its own, all at the same moment."""
    if stale:
        write_record(tmp_path, ELSEWHERE, 2 * STALE_S, number=7)
    go, result = os.pipe(), os.pipe()
    children = []
    for _ in range(12):
        if (child := os.fork()) == 0:
            os.close(go[1])
            os.read(go[0], 1)  # until the parent closes its end
            found = Applicant(tmp_path, "one").attempt()
            os.write(result[1], b"1" if isinstance(found, Claim) and found.successor() is None else b"0")
            time.sleep(30)  # its process is not gone yet
            os._exit(0)
        children.append(child)
    try:
        os.close(go[1])
        answers = b"".join(os.read(result[0], 1) for _ in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert answers.count(b"1") == 1, answers
    assert len(records(tmp_path)) == 1


def test_a_run_that_stood_still_may_save_no_more(tmp_path: Path) -> None:
    run, claim = Run(), taken(tmp_path)

    def save(iteration: int) -> Path:
        return save_checkpoint(tmp_path, iteration, run.stack, run.optimizer, STATE, MESH, may_save=claim.require)

    save(20)
    write_record(tmp_path, ELSEWHERE, number=2)
    with pytest.raises(TakenError, match="has been taken by run 01234567, process 1 on elsewhere"):
        save(40)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000020"]
    claim.give_back()
    assert ".domino_owner.2" in records(tmp_path)


def test_a_folder_that_is_taken_during_a_save_does_not_get_the_checkpoint(tmp_path: Path) -> None:
    asked: list[int] = []

    def may_save() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise TakenError("taken")

    run = Run()
    with pytest.raises(TakenError):
        save_checkpoint(tmp_path, 20, run.stack, run.optimizer, STATE, MESH, may_save=may_save)
    assert os.listdir(tmp_path) == []
    assert issubclass(TakenError, CheckpointError)


def test_a_record_that_somebody_removed_is_written_again(tmp_path: Path) -> None:
    claim = taken(tmp_path)
    (tmp_path / ".domino_owner.1").unlink()
    claim.require()
    assert newest_record(tmp_path) is not None


def test_a_claim_is_kept_fresh_and_its_loss_is_told_once(tmp_path: Path) -> None:
    claim, lost, told = taken(tmp_path), [], threading.Event()
    path = tmp_path / ".domino_owner.1"
    os.utime(path, (1, 1))
    with Refresher(claim, lambda error: (lost.append(str(error)), told.set()), every_s=0.01):  # type: ignore[func-returns-value]
        until_s = time.monotonic() + 10
        while path.stat().st_mtime < 2:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        write_record(tmp_path, ELSEWHERE, number=2)
        assert told.wait(10)
    assert len(lost) == 1
    assert "while this run did not refresh its record for 60 s" in lost[0]


def test_a_full_disk_refuses_the_start_and_leaves_no_empty_record(tmp_path: Path) -> None:
    with files_of_at_most(10), pytest.raises(ConfigError, match="cannot be written: File too large"):
        Applicant(tmp_path, "mine").attempt()
    assert records(tmp_path) == []
