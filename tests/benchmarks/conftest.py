"""The scoreboard's modules lie in benchmarks/, outside the package."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def board():
    """The scoreboard, computed once."""
    from score import scoreboard

    return scoreboard()
