from __future__ import annotations

import pytest
import torch

from consistency.extras.diagnosis.reproduce import cut
from consistency.extras.diagnosis.reproduce.cut import cut_moved, cut_product


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "MOST_BYTES", 4096)


def size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def test_what_fits_is_left_as_it_is() -> None:
    expected = torch.arange(64.0).reshape(8, 8)
    found, window = cut_moved({"expected": expected, "actual": expected + 1}, (3, 3))
    assert found["expected"].shape == (8, 8)
    assert "whole" in window


@pytest.mark.parametrize("worst", [(0, 0), (50, 50), (99, 99)])
def test_run_of_elements_holds_the_worst_one(worst: tuple[int, int]) -> None:
    expected = torch.arange(10_000.0).reshape(100, 100)
    actual = expected.clone()
    actual[worst] += 1
    found, window = cut_moved({"expected": expected, "actual": actual}, worst)
    assert size(found) <= 4096
    assert int((found["expected"] != found["actual"]).sum()) == 1
    first = int(window.split()[1])
    assert torch.equal(found["expected"], expected.reshape(-1)[first : first + len(found["expected"])])


def test_without_a_worst_element_the_first_difference_is_the_middle() -> None:
    expected = torch.zeros(10_000)
    actual = expected.clone()
    actual[7777] = float("nan")
    found, _ = cut_moved({"expected": expected, "actual": actual}, None)
    assert found["actual"].isnan().any()


@pytest.mark.parametrize("worst", [(0, 0), (63, 127), (31, 5), None])
@pytest.mark.parametrize("with_base", [True, False])
def test_cut_product_is_the_product_of_the_cut_factors(worst: tuple[int, int] | None, with_base: bool) -> None:
    left, right = torch.randn(64, 4, dtype=torch.float64), torch.randn(4, 128, dtype=torch.float64)
    tensors = {"left": left, "right": right, "actual": left @ right}
    if with_base:
        tensors["base"] = torch.randn(64, 128, dtype=torch.float64)
        tensors["actual"] = tensors["actual"] + tensors["base"]
    marked = worst or (0, 0)
    tensors["actual"][marked] = 1e6
    found, window = cut_product(tensors, worst)
    assert size(found) <= 4096
    assert "rows" in window
    exact = found["left"] @ found["right"] + (found["base"] if with_base else 0)
    wrong = (found["actual"] - exact).abs() > 1e-9
    assert int(wrong.sum()) == 1
    assert float(found["actual"].max()) == 1e6


def test_factors_alone_larger_than_the_room_are_cut_to_one_element() -> None:
    tensors = {"left": torch.zeros(2, 4000), "right": torch.zeros(4000, 2), "actual": torch.zeros(2, 2)}
    found, _ = cut_product(tensors, (1, 1))
    assert found["actual"].shape == (1, 1)
