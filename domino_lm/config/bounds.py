"""Types of settings that say which numbers are allowed; `launch.checks` reads them from the schema."""

from dataclasses import dataclass
from math import inf
from typing import Annotated


@dataclass(frozen=True)
class Bounds:
    """A range of numbers, from ``lowest`` to ``below``, which is not in it; ``text`` says so."""

    text: str
    lowest: float = 0
    includes_lowest: bool = True
    below: float = inf

    def hold(self, value: float) -> bool:
        """Whether ``value`` is in the range; nan is in none."""
        return (self.lowest <= value if self.includes_lowest else self.lowest < value) and value < self.below


ABOVE_0 = Bounds("must be above 0", includes_lowest=False)
AT_LEAST_0 = Bounds("must be 0 or more")

PositiveInt = Annotated[int, ABOVE_0]
PositiveFloat = Annotated[float, ABOVE_0]
NonNegativeInt = Annotated[int, AT_LEAST_0]
NonNegativeFloat = Annotated[float, AT_LEAST_0]
Fraction = Annotated[float, Bounds("must be at least 0 and below 1", below=1)]
