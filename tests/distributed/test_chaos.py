"""The short form of the campaign of faults, and that it counts what is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos import files, folders, kills
from tests.chaos.__main__ import FAULTS, main
from tests.chaos.campaign import Campaign, Fault, attempt, state_of_sources, table, write_between
from tests.chaos.rig import Rig, forked
from tests.chaos.soak import LIMITS, compare, soak, soak_table

KILLED = [
    pytest.param(partial(kills.killed, moment=kills.IN_A_SAVE), id="in a save"),
    pytest.param(partial(kills.killed, moment=kills.IN_A_STEP), id="in a step"),
    pytest.param(partial(kills.killed, moment=kills.IN_A_STEP, ranks=2), id="torchrun", marks=pytest.mark.long),
]


QUICK = (
    "one flipped bit in any file of a checkpoint",
    "a pointer to the latest that says nothing sensible",
    "a value of a wrong type in state.json, of before manifests",
    "a hostile pickle as the index",
    "a full disk at a save",
)


def in_tier(fault: Fault) -> object:
    """A fault as a case: some run always, the others with `make test-all`."""
    return pytest.param(fault, id=fault.title.replace(" ", "-"), marks=[] if fault.title in QUICK else pytest.mark.long)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """As the campaign has it: all that touches torch or threads is done in forked processes."""
    rig = Rig(tmp_path_factory.mktemp("chaos"), state_of_sources())
    yield rig
    rig.clear()


@pytest.mark.slow
@pytest.mark.parametrize("inject", KILLED)
def test_a_program_that_is_killed_ends_as_if_nothing_had_been(rig: Rig, inject: kills.Victims) -> None:
    rig.new_folder("killed")
    inject(rig, random.Random(1))  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("fault", [in_tier(fault) for fault in [*files.FAULTS, *folders.FAULTS] if "job" not in fault.title])
def test_damage_and_full_disks_are_survived(rig: Rig, fault: Fault) -> None:
    assert attempt(fault, rig, number=1000)["lost"] == ""


def test_the_campaign_is_large_enough() -> None:
    assert sum(fault.tries for fault in FAULTS) >= 200
    assert sum(fault.tries for fault in FAULTS if fault.kills) >= 60
    assert len({fault.title for fault in FAULTS}) == len(FAULTS)


def test_a_part_of_the_campaign_runs_from_the_command_line(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "pointer to", "--tries", "1", "--soak-iterations", "0", "--folder", str(rig.folder), "--no-page"]
    assert main(words) == 0
    assert "| a pointer to the latest that says nothing sensible | 1 | 1 | 0 |" in capsys.readouterr().out


def fails(rig: Rig, rng: random.Random) -> None:
    raise AssertionError("gone")


def passes(rig: Rig, rng: random.Random) -> None:
    assert rng.random() < 2


def test_what_is_lost_is_counted_and_its_folder_stays(tmp_path: Path) -> None:
    faults = [Fault("one", 2, fails), Fault("two", 3, passes, kills=True)]
    campaign = Campaign.open(tmp_path / "results.json", "state")
    campaign.run(faults, Rig(tmp_path), lambda line: None)
    assert campaign.lost() == 2
    assert table(faults, campaign.results).splitlines()[2:] == [
        "| one | 2 | 0 | 2 |",
        "| two | 3 | 3 | 0 |",
        "| all, 3 of which killed a program that trains | 5 | 3 | 2 |",
    ]
    assert sorted(path.name for path in (tmp_path / "tries").iterdir()) == ["one-0", "one-1"]


def test_a_campaign_goes_on_where_it_was_and_begins_anew_for_other_sources(tmp_path: Path) -> None:
    made: list[int] = []
    faults = [Fault("one", 3, lambda rig, rng: made.append(1))]
    file, rig = tmp_path / "results.json", Rig(tmp_path)
    Campaign.open(file, "state").run([Fault("one", 2, faults[0].inject)], rig, lambda line: None)
    Campaign.open(file, "state").run(faults, rig, lambda line: None)
    assert len(made) == 3
    Campaign.open(file, "other").run(faults, rig, lambda line: None)
    assert len(made) == 6
    assert json.loads(file.read_text())["sources"] == "other"


def test_a_table_replaces_the_one_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- faults -->\nold\n<!-- end of faults -->\nafter\n")
    for text in ("new", "newer\nstill"):
        write_between(page, "faults", text)
    assert page.read_text() == "before\n<!-- faults -->\nnewer\nstill\n<!-- end of faults -->\nafter\n"


def hang() -> None:
    import time

    time.sleep(60)


def test_what_hangs_dies_or_raises_in_a_process_of_its_own_is_lost() -> None:
    import os

    with pytest.raises(AssertionError, match=r"hung: no answer in 0\.2 s"):
        forked([hang], limit_s=0.2)
    with pytest.raises(AssertionError, match="died without a word"):
        forked([lambda: os._exit(3)])
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        forked([lambda: 1 // 0])
    assert forked([lambda: 1, lambda: 2]) == [1, 2]


def test_growth_is_a_fault_and_the_table_shows_the_worse_rank() -> None:
    quiet = [dict.fromkeys(LIMITS, 100.0)] * 40
    grown = [dict.fromkeys(LIMITS, 100.0 + (number >= 30)) for number in range(40)]
    assert compare(quiet) == dict.fromkeys(LIMITS, (100.0, 100.0))
    text = soak_table({"iterations": 40, "ranks": [compare(quiet), compare(grown)], "faults": []})
    assert "| open files | 100 | 101 | the same |" in text


@pytest.mark.long
def test_a_short_soak_leaves_handles_and_threads_as_they_were(tmp_path: Path) -> None:
    found = soak(tmp_path, 80)
    assert [fault for fault in found["faults"] if "files" in fault or "threads" in fault] == []
    assert found["iterations"] == 80
