"""Which item a row of a comparison belongs to."""

from __future__ import annotations

import pytest

from consistency.case import standard
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.comparison.result import Comparison
from consistency.devices.discovery import select
from consistency.extras.serving.generation import worker as stage
from consistency.extras.serving.generation.spec import GENERATION, WAYS
from consistency.launch.plan import WorkerPlan
from consistency.pytest_plugin.item_names import EVERYTHING_ELSE, Place, RowFinder, places
from tests.report.made_comparisons import comparison, tensor

DELTA, WEIGHT = (Place(stage=standard.MERGED, layer="layers.0", tensor=name) for name in ("delta", "weight"))
REST = Place(stage=standard.MERGED, layer="", tensor=EVERYTHING_ELSE)


def of(place: Place, found: Comparison) -> list[str]:
    plan = WorkerPlan(info=select(("cpu",))[0], load_path=LoadPath.ISOLATED)
    return [row[0].tensor for row in RowFinder(found, [DELTA, WEIGHT, REST]).rows(place, plan)]


@pytest.mark.parametrize(
    ("layer", "name", "place"),
    [("layers.0", "weight", WEIGHT), ("layers.0", "bias", DELTA), ("layers.1", "bias", REST)],
    ids=["own", "first-of-its-layer", "rest"],
)
def test_every_tensor_belongs_to_an_item(layer: str, name: str, place: Place) -> None:
    """Of its layer, where that has any: `-k` of the layer then selects it."""
    found = comparison([tensor([["cpu"]], stage="merged", layer=layer, tensor=name)])
    assert {one: of(one, found) for one in (DELTA, WEIGHT, REST)} == {
        one: [name] if one == place else [] for one in (DELTA, WEIGHT, REST)
    }


def test_generation_has_an_item_for_each_layer_and_way_and_text() -> None:
    """Named without torch, which its stage imports."""
    assert tuple(stage.WAYS) == WAYS
    case = Case(name="llama", base=str(builtin_folder("llama") / "base"), adapter=None, stages=(GENERATION,))
    found = [place.name for place in places(case)]
    assert {"model.layers.1.mlp.cache", "model.layers.0.alone", "prompt 3.text"} < set(found)
    assert found[-1] == EVERYTHING_ELSE
