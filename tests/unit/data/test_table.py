"""The table of faults names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (HERE / "README.md").read_text())
    assert len(named) > 80
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (HERE / file).read_text()]
    assert missing == []


def test_every_row_of_the_table_names_a_test() -> None:
    rows = [line for line in (HERE / "README.md").read_text().splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert [row for row in rows if "::test_" not in row] == []
