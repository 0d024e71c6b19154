from __future__ import annotations

import pytest

from consistency.case.budget.speed import half_factor, measure_speed

AVX512 = {"avx512bw", "avx512vl", "avx512dq"}


def test_every_speed_of_this_host_is_known() -> None:
    found = measure_speed(frozenset())
    assert min(found.float64_flop, found.float32_flop, found.read_bytes) > 0
    assert found.cores >= 1
    assert found.half_flop is None, "no flag shows fast kernels of a half type"


@pytest.mark.parametrize(
    ("flags", "factor"), [({"avx2"}, None), (AVX512, 1.0), ({*AVX512, "avx512_bf16"}, 2.0), ({"amx_bf16"}, 12.0)]
)
def test_flags_tell_whether_half_types_are_fast(flags: set[str], factor: float | None) -> None:
    assert half_factor(frozenset(flags)) == factor
