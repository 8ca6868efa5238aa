"""The table of reports against other trainers names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "README.md").read_text().partition("## Reports against trainers of this kind")[2]


def test_every_test_that_the_table_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TABLE)
    assert len(named) > 40
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (TESTS / file).read_text()] == []


def test_every_row_of_the_table_names_a_test() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert [row for row in rows if "::test_" not in row] == []
