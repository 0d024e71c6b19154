from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.numerics import digest as digest_module
from consistency.numerics.digest import (
    TensorDigest,
    _rows_on_cpu,
    _rows_on_device,
    as_bytes,
    block_digests,
    combine,
    differing_blocks,
    digest,
)
from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES, ROW_BYTES
from tests.numerics.digest_by_definition import ROWS, by_definition

DTYPES = (
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int64,
)
SHAPES = ((), (1,), (3,), (7, 1), (5, 3), (1, 1, 1), (2, 0, 3), (33, 17))


pytestmark = pytest.mark.usefixtures("numerics_path", "one_thread")


def random_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def from_bytes(data: bytes, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(0, 100, size=shape)
    return torch.from_numpy(np.asarray(values)).to(dtype)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


# --- the formula ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_follows_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape)
    assert block_digests(tensor) == by_definition(raw_bytes(tensor))


@given(st.binary(max_size=100))
@settings(deadline=None, max_examples=200)
def test_any_bytes_follow_the_formula(data: bytes) -> None:
    assert block_digests(from_bytes(data)) == by_definition(data)


@pytest.mark.parametrize(
    "count",
    [ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 8, 2 * BLOCK_BYTES + 13],
)
def test_several_blocks_follow_the_formula(count: int) -> None:
    for data in (random_bytes(count), b"\xff" * count):  # the largest words wrap, and do not overflow
        assert block_digests(from_bytes(data)) == by_definition(data)


def test_the_digest_of_a_format_never_changes() -> None:
    # captures made years apart are compared by this value
    tensor = torch.arange(200_000, dtype=torch.float32).reshape(400, 500)
    assert digest(tensor) == TensorDigest(
        value="9eb27c9ead52edbe8cb5b84f96d0ac2a",
        blocks=(14473923876961069148, 3335470104963787496, 12116273387841252956, 6958295311227645463),
    )


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("count", [5, 8, ROW_BYTES - 4, ROW_BYTES, 3 * ROW_BYTES + 21, 2 * BLOCK_BYTES + ROW_BYTES])
def test_the_path_of_other_devices_gives_the_same(count: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "GPU_CHUNK_ROWS", 8)
    raw = from_bytes(random_bytes(count + offset))[offset:]
    assert np.array_equal(_rows_on_device(raw), _rows_on_cpu(raw.numpy()))


def test_the_tensor_itself_is_left_alone() -> None:
    tensor = from_bytes(random_bytes(4096), torch.float32)
    before = raw_bytes(tensor)
    digest(tensor)
    assert raw_bytes(tensor) == before


# --- memory layout --------------------------------------------------------------------------------------------------


def test_a_view_has_the_digest_of_its_copy() -> None:
    tensor = tensor_of(torch.bfloat16, (32, 16))
    views = (tensor.T, tensor[::2, ::3], tensor[:1].expand(5, 16), tensor[:, 1], tensor[5:6, 1], tensor[0, 0].expand(7))
    for view in views:
        assert digest(view) == digest(view.clone(memory_format=torch.contiguous_format))
        assert digest(torch.nn.Parameter(view)) == digest(view)
    assert digest(tensor.T) != digest(tensor.reshape(16, 32))


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("count", [24, 4099, 2 * BLOCK_BYTES + 5])
def test_a_storage_offset_changes_nothing(offset: int, count: int) -> None:
    data = random_bytes(count)
    view = from_bytes(b"\xa5" * offset + data)[offset:]
    assert view.storage_offset() == offset
    assert digest(view) == digest(from_bytes(data))


def test_a_buffer_that_is_not_aligned_changes_nothing() -> None:
    # a tensor of a memory-mapped safetensors file starts anywhere, with a storage offset of 0
    data = random_bytes(4096)
    buffer = bytearray(b"\0" * 3 + data)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8, offset=3)
    assert tensor.data_ptr() % 8
    assert digest(tensor) == digest(from_bytes(data))


def test_conjugated_and_negated_views_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    assert digest(tensor.conj()) == digest(torch.tensor([1 - 2j, 3 + 4j], dtype=torch.complex64))
    assert digest(tensor.conj().imag) == digest(torch.tensor([-2.0, 4.0]))


def test_bytes_are_a_view_of_a_contiguous_tensor() -> None:
    tensor = tensor_of(torch.float32, (7, 1))
    assert as_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert as_bytes(tensor).numel() == 28


def test_more_elements_than_fit_an_int_are_hashed() -> None:
    # memory that was only ever zero takes no room; the last element is behind 2**31 others
    tensor = torch.from_numpy(np.zeros(2**31 + 5, np.int8))  # torch.zeros writes them
    tensor[-1] = 1
    blocks = block_digests(tensor)
    assert len(blocks) == 2**31 // BLOCK_BYTES + 1
    assert blocks[:-1] == (0,) * (len(blocks) - 1)
    assert blocks[-1:] == by_definition(b"\0\0\0\0\1")


# --- what must change it --------------------------------------------------------------------------------------------


@given(data=st.binary(min_size=1, max_size=40), place=st.integers(0, 319))
@settings(deadline=None, max_examples=300)
def test_any_flipped_bit_changes_it(data: bytes, place: int) -> None:
    place %= 8 * len(data)
    flipped = bytearray(data)
    flipped[place // 8] ^= 1 << place % 8
    assert digest(from_bytes(data)).value != digest(from_bytes(bytes(flipped))).value


@pytest.mark.parametrize("place", [0, 7, 8, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 8, 2 * BLOCK_BYTES + 12])
def test_a_flipped_bit_is_located_in_its_block(place: int) -> None:
    data = bytearray(random_bytes(2 * BLOCK_BYTES + 13))
    before = digest(from_bytes(bytes(data)))
    for bit in range(8):
        data[place] ^= 1 << bit
        after = digest(from_bytes(bytes(data)))
        data[place] ^= 1 << bit
        assert differing_blocks(after.blocks, before.blocks) == [place // BLOCK_BYTES]


@given(seed=st.integers(0, 2**32 - 1), i=st.integers(0, 63), j=st.integers(0, 63))
@settings(deadline=None, max_examples=150)
def test_two_swapped_words_of_32_bits_change_it(seed: int, i: int, j: int) -> None:
    data = np.frombuffer(random_bytes(256, seed), np.uint32).copy()
    swapped = data.copy()
    swapped[[i, j]] = swapped[[j, i]]
    same = digest(torch.from_numpy(data.view(np.int32))) == digest(torch.from_numpy(swapped.view(np.int32)))
    assert same == bool((data == swapped).all())


@given(i=st.integers(0, 63), j=st.integers(0, 63), bit=st.integers(0, 31))
@settings(deadline=None, max_examples=200)
def test_the_same_bit_flipped_in_two_words_changes_it(i: int, j: int, bit: int) -> None:
    # an exclusive or of all words is blind to this, and 64-bit words under odd weights are where the bit is the top one
    data = np.frombuffer(random_bytes(256), np.uint32).copy()
    flipped = data.copy()
    flipped[i] ^= np.uint32(1 << bit)
    flipped[j] ^= np.uint32(1 << bit)
    same = digest(torch.from_numpy(data.view(np.int32))) == digest(torch.from_numpy(flipped.view(np.int32)))
    assert same == (i == j)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_every_pair_of_flipped_top_bits_changes_it(dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, (12,)) + 1
    values = {digest(tensor).value}
    for i in range(12):
        for j in range(i):
            other = tensor.clone()
            raw = other.view(torch.uint8).view(12, -1)
            raw[i, -1] ^= 0x80
            raw[j, -1] ^= 0x80
            values.add(digest(other).value)
    assert len(values) == 1 + 12 * 11 // 2


def test_two_swapped_rows_change_it_also_across_blocks() -> None:
    tensor = torch.from_numpy(np.random.default_rng(0).standard_normal((6, BLOCK_BYTES // 8), dtype=np.float32))
    for i, j in ((0, 1), (0, 5), (2, 4)):
        swapped = tensor.clone()
        swapped[[i, j]] = swapped[[j, i]]
        assert digest(swapped).value != digest(tensor).value
        assert differing_blocks(digest(swapped).blocks, digest(tensor).blocks) == sorted({i // 2, j // 2})


def test_two_swapped_rows_of_a_block_and_two_swapped_blocks_change_it() -> None:
    data = random_bytes(2 * BLOCK_BYTES)
    parts = [data[i : i + ROW_BYTES] for i in range(0, BLOCK_BYTES, ROW_BYTES)]
    values = {digest(from_bytes(data[:BLOCK_BYTES])).value}
    for i in range(1, ROWS):
        values.add(digest(from_bytes(b"".join([parts[i], *parts[1:i], parts[0], *parts[i + 1 :]]))).value)
    assert len(values) == ROWS
    other = from_bytes(data[BLOCK_BYTES:] + data[:BLOCK_BYTES])
    assert digest(other).blocks == digest(from_bytes(data)).blocks[::-1]
    assert digest(other).value != digest(from_bytes(data)).value


def test_appended_zeros_change_it() -> None:
    values = {digest(torch.zeros(n, dtype=torch.uint8)).value for n in range(40)}
    assert len(values) == 40


def test_shape_and_dtype_are_part_of_it() -> None:
    tensor = tensor_of(torch.float32, (4, 6))
    forms = [tensor, tensor.reshape(6, 4), tensor.flatten(), tensor[None], tensor.view(torch.int32)]
    assert len({digest(form).value for form in forms}) == len(forms)
    assert len({digest(form).blocks for form in forms}) == 1


def test_empty_tensors_have_no_block_and_differ_by_shape_and_dtype() -> None:
    forms = [torch.empty(0), torch.empty(2, 0), torch.empty(0, 2), torch.empty(0, dtype=torch.int8)]
    assert {digest(form).blocks for form in forms} == {()}
    assert len({digest(form).value for form in forms}) == len(forms)


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_a_block_that_only_one_side_has_differs() -> None:
    assert differing_blocks((1, 2, 3), (1, 2, 3)) == []
    assert differing_blocks((1, 9, 3), (1, 2, 3)) == [1]
    assert differing_blocks((1, 2), (1, 2, 3)) == [2]
    assert differing_blocks((7, 2, 3, 4), (1, 2)) == [0, 2, 3]
    assert differing_blocks((), ()) == []


def test_the_blocks_alone_give_the_value_again() -> None:
    found = digest(tensor_of(torch.bfloat16, (5, 3)))
    assert combine("bfloat16", (5, 3), found.blocks) == found
    assert combine("float16", (5, 3), found.blocks).value != found.value
    assert len(found.value) == 32
    assert int(found.value, 16) > 0
