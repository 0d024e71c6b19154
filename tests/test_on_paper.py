"""The page of what a run takes on paper: its tables are those of today's code, and a count is that of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.generated_parts import replaced
from benchmarks.on_paper.__main__ import PAGE, parts
from benchmarks.on_paper.counts import of_reference
from benchmarks.on_paper.runs import CHANGES, changed, run_of
from benchmarks.on_paper.sizes import Sizes, sizes_of
from benchmarks.shapes import SHAPES


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Sizes:
    return sizes_of("tinyllama", tmp_path_factory.mktemp("shapes"))


def test_the_page_is_current() -> None:
    text = page = PAGE.read_text(encoding="utf-8")
    for name, part in parts().items():
        text = replaced(text, name, part)
    assert page == text, "run: python -m benchmarks.on_paper --write"


def test_a_forward_pass_is_counted_as_torch_counts_it(tmp_path: Path) -> None:
    """Of the base alone, which is built without memory: the adapter is left out of the count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = sizes_of("two-blocks", tmp_path)
    sequences, tokens = sizes.setting.sequences, sizes.setting.tokens
    config = AutoConfig.for_model(**SHAPES["two-blocks"].config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        ids = torch.zeros((sequences, tokens), dtype=torch.int64)
        mask = torch.zeros((sequences, 1, tokens, tokens))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    of_adapter = 2 * sizes.setting.positions * sizes.factors * sizes.shape.blocks
    counted = sizes.forward(sequences) - of_adapter
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-4)


def test_a_run_has_every_stage_and_two_waves(sizes: Sizes) -> None:
    run = run_of(sizes)
    assert len(run.gpu_threads) == 2
    assert {work.waves for work in run.works if work.on_gpu} == {2}
    assert {work.stage for work in run.works} == set(sizes.case.stages)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_makes_a_run_no_longer(name: str, sizes: Sizes) -> None:
    run = run_of(sizes)
    assert changed(run, CHANGES[name]).total() <= run.total()


def test_the_reference_is_counted_once(sizes: Sizes) -> None:
    """Workers of GPUs read it: none of theirs is in float64, but what operators compute."""
    run = run_of(sizes)
    assert sum(bool(work.float64) for work in of_reference(sizes)) == 3
    assert not any(work.float64 or work.noisy_passes for work in run.works if work.on_gpu)


def test_headers_alone_are_read(tmp_path: Path) -> None:
    sizes_of("llama-70b", tmp_path)
    taken = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file())
    assert taken < 10 * 2**20
