"""How far resumed weights are from the uninterrupted run's is counted, and only rounding is let pass."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.stack

ONE_UP = 1 + 2**-7  # bf16 has 8 significant bits: the number after 1


def counted(tmp_path: Path, one: list[float], other: list[float], slack: float = 1e-7) -> tuple[int, int]:
    from safetensors.torch import save_file

    from dpofit.train.smoke import apart

    files = []
    for name, values in (("one", one), ("other", other)):
        files.append(tmp_path / f"{name}.safetensors")
        save_file({"w": torch.tensor(values, dtype=torch.bfloat16)}, files[-1])
    found = apart(*files, slack)
    assert found["values"] == len(one)
    return found["differ"], found["beyond"]


@pytest.mark.parametrize(
    ("one", "other", "differ", "beyond"),
    [
        ([1.0, 0.0, -3.0], [1.0, 0.0, -3.0], 0, 0),
        ([1.0, 1.0], [1.0, ONE_UP], 1, 0),
        ([1.0], [1 + 2 * 2**-7], 1, 1),
        ([-64.0], [-64.5], 1, 0),
        ([2**-7], [2**-7 + 2**-13], 1, 1),
        ([2**-30], [-(2**-30)], 1, 0),  # a weight near zero: less than the slack
        ([1e-5], [1.1e-5], 1, 1),
        ([float("nan")], [float("nan")], 1, 1),
        ([1.0], [float("inf")], 1, 1),
    ],
)
def test_a_rounding_step_is_told_from_more(
    tmp_path: Path, one: list[float], other: list[float], differ: int, beyond: int
) -> None:
    assert counted(tmp_path, one, other) == (differ, beyond)


def test_runs_of_different_tensors_are_not_compared(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from dpofit.train.smoke import apart

    save_file({"a": torch.ones(1)}, tmp_path / "a")
    save_file({"b": torch.ones(1)}, tmp_path / "b")
    with pytest.raises(ValueError, match="different tensors"):
        apart(tmp_path / "a", tmp_path / "b", 0.0)
