"""Faults that `tests/mutants.py` plants can still be planted, and the tests that have to notice them exist."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants import MUTANTS, ROOT, TESTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_fault_is_planted_once_and_leaves_python(mutant: Mutant) -> None:
    path = ROOT / "domino_lm" / mutant.file
    compile(mutant.planted(path.read_text()), str(path), "exec")
    assert mutant.old != mutant.new


def test_every_fault_has_a_name_of_its_own_and_tests_that_exist() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert {mutant.folder for mutant in MUTANTS} <= TESTS.keys()
    missing = [name for names in TESTS.values() for name in names.split() if not (ROOT / "tests" / name).exists()]
    assert missing == []
