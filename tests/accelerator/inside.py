"""What the double does, seen from a process that has it: run by `test_double.py`, once, with the double plugged in.

Its settings are four devices of the architectures A, A, B and C with 1 MiB of memory each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.accelerator.software_accelerator import _native, answers, copies
    from tests.accelerator.software_accelerator.settings import CopyFault, DeviceFailure, DeviceWait, Settings
else:
    from software_accelerator import _native, answers, copies
    from software_accelerator.settings import CopyFault, DeviceFailure, DeviceWait, Settings

MEMORY_BYTES = 2**20
KIB = 256  # elements of float32

npu: Any = torch.get_device_module("npu")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    copies.clear()
    npu.empty_cache()
    yield
    copies.clear()
    _native.set_answer(None)
    _native.set_fill(-1)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def crossings() -> list[tuple[str, str, str | None]]:
    return [(c.source, c.target, c.fault) for c in copies.log]


# ---- devices


def test_torch_finds_the_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == npu.device_count() == 4
    torch.accelerator.set_device_index(2)
    assert torch.empty(1, device="npu").device == torch.device("npu:2")
    torch.accelerator.set_device_index(0)
    with pytest.raises(RuntimeError, match="invalid device ordinal 4"):
        torch.empty(1, device="npu:4")


def test_devices_say_what_they_are() -> None:
    found = [npu.get_device_properties(i) for i in range(4)]
    assert npu.simulated is True
    assert len({p.uuid for p in found}) == 4
    assert [p.architecture for p in found] == ["A", "A", "B", "C"]
    assert all("oftware" in p.name for p in found)
    assert {p.total_memory for p in found} == {MEMORY_BYTES}


@pytest.mark.parametrize(
    "operate",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: torch.addmm(a, a, b),
        lambda a, b: torch.bmm(a[None], b[None]),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.nn.functional.layer_norm(a, (8,), b[0]),
    ],
    ids=["add", "mm", "addmm", "bmm", "cat", "layer_norm"],
)
@pytest.mark.parametrize("other", ["npu:1", "cpu"])
def test_tensors_of_two_devices_do_not_mix(operate: Any, other: str) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        operate(torch.ones(8, 8, device="npu:0"), torch.ones(8, 8, device=other))
    assert (torch.ones(8, 8, device="npu:1") * torch.tensor(2.0)).sum().item() == 128  # a number of the host may


# ---- numbers


def products(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    a, b = numbers(2, 24, 96).to(dtype).to(device), numbers(2, 96, 24, seed=1).to(dtype).to(device)
    c = numbers(24, 24, seed=2).to(dtype).to(device)
    linear = torch.nn.functional.linear(a, b[0].T.contiguous(), c[0])
    written = torch.empty(24, 24, dtype=dtype, device=device)
    torch.mm(a[0], b[0], out=written)
    return [
        a[0] @ b[0], torch.addmm(c, a[0], b[0], beta=0.5, alpha=2.0), torch.bmm(a, b), torch.baddbmm(c, a, b), linear,
        written, c.clone().addmm_(a[0], b[0]), a.sum(), a.sum(dim=(0, 2), keepdim=True), a.sum(-1),
        torch.nn.functional.scaled_dot_product_attention(a, a, a),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_architectures_round_differently_and_devices_of_one_do_not(dtype: torch.dtype) -> None:
    found = {name: [t.cpu() for t in products(name, dtype)] for name in ("cpu", "npu:0", "npu:1", "npu:2", "npu:3")}
    exact = [t.double() for t in products("cpu", torch.float64)]
    assert all(torch.equal(a, b) for a, b in zip(found["npu:0"], found["npu:1"], strict=True))
    kinds = ["cpu", "npu:0", "npu:2", "npu:3"]
    for number, reference in enumerate(exact):
        kept = [found[kind][number] for kind in kinds]
        assert {t.shape for t in kept} == {reference.shape}
        assert {t.dtype for t in kept} == {dtype}
        if dtype is torch.float32 and reference.numel() > 1:  # one number may round alike by luck
            assert not any(torch.equal(kept[i], kept[j]) for i in range(4) for j in range(i)), number
        # 96 additions and as many roundings of values up to 60
        allowed = 96 * 60 * torch.finfo(dtype).eps
        assert all((t.double() - reference).abs().max() <= allowed for t in kept), number


def test_an_answer_does_not_depend_on_where_its_operands_lie() -> None:
    a, b = numbers(64, 96).to("npu:0"), numbers(96, 64, seed=1).to("npu:0")
    padded = torch.zeros(64 * 96 + 3, device="npu:0")
    padded[3:] = a.reshape(-1)
    assert torch.equal((a @ b).cpu(), (padded[3:].reshape(64, 96) @ b).cpu())
    assert torch.equal((a @ b).cpu(), (a.T.contiguous().T @ b).cpu())


def test_whole_numbers_are_added_exactly() -> None:
    big = torch.randint(-(2**62), 2**62, (7, 1001), generator=torch.Generator().manual_seed(0))
    assert torch.equal(big.to("npu:2").sum(1).cpu(), big.sum(1))
    assert torch.equal((big.to("npu:2")[:, :5] @ big.to("npu:2")[:5]).cpu(), big[:, :5] @ big[:5])


def test_what_is_multiplied_by_zero_is_not_read() -> None:
    a = torch.ones(4, 4, device="npu:0")
    assert torch.addmm(torch.full((4,), float("nan"), device="npu:0"), a, a, beta=0).eq(4).all().item()


def test_convolution_and_backward() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 4, 3)
    x = numbers(2, 3, 8, 8)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    expected = layer.weight.grad.clone()
    there = torch.nn.Conv2d(3, 4, 3).to("npu:1")
    there.load_state_dict(layer.state_dict())
    there(x.to("npu:1")).sum().backward()
    assert there.weight.grad is not None
    assert there.weight.grad.device == torch.device("npu:1")
    torch.testing.assert_close(there.weight.grad.cpu(), expected)


# ---- copies


def test_copies_arrive_and_are_told() -> None:
    x = numbers(KIB)
    there = x.to("npu:0").to("npu:3")
    assert torch.equal(there.cpu(), x)
    assert crossings() == [("cpu", "npu:0", None), ("npu:0", "npu:3", None), ("npu:3", "cpu", None)]
    assert {c.size for c in copies.log} == {1024}
    there.clone().add_(1)
    assert len(copies.log) == 3  # what stays on a device is no copy between two


@pytest.mark.parametrize("how", ["to", "copy_", "strided", "casting"])
@pytest.mark.parametrize("does", ["drop", "zero", "corrupt", "delay"])
def test_faults(does: Any, how: str) -> None:
    x = numbers(32, 32)
    source = x.to("npu:0")
    copies.plant(CopyFault(source="npu:0", target="npu:1", does=does))
    _native.set_fill(203)
    poison = torch.full((32, 32), -7.0).to("npu:1")
    dtype = torch.bfloat16 if how == "casting" else torch.float32
    if how == "to":
        found, before = source.to("npu:1"), torch.full((4096,), 203, dtype=torch.uint8).view(torch.float32)
    elif how == "strided":
        found, before = poison.T.copy_(source), torch.full((1024,), -7.0)
    else:
        found, before = poison.to(dtype).copy_(source), torch.full((1024,), -7.0, dtype=dtype)
    host, wanted = found.cpu().reshape(-1), x.to(dtype).reshape(-1)
    if does in ("drop", "delay"):
        assert torch.equal(host.view(torch.uint8), before.contiguous().view(torch.uint8))
    if does == "zero":
        assert host.eq(0).all()
    if does == "corrupt":
        assert host.ne(wanted).sum() == 1
        assert (host.view(torch.uint8) ^ wanted.view(torch.uint8)).unique().tolist() == [0, 1]
    torch.accelerator.synchronize("npu:1")
    assert torch.equal(found.cpu().reshape(-1), wanted) == (does == "delay")
    assert torch.equal(source.to("npu:2").to("npu:1").cpu(), x)  # another load path is whole


def test_a_fault_hits_its_pair_and_its_sizes_alone() -> None:
    copies.plant(CopyFault(source="npu:0", target="npu:1", does="zero", at_least_bytes=1024, below_bytes=4096))
    for elements, hit in ((KIB - 1, False), (KIB, True), (4 * KIB - 1, True), (4 * KIB, False)):
        x = numbers(elements).to("npu:0")
        assert x.to("npu:1").eq(0).all().item() == hit
        assert not x.to("npu:2").eq(0).all().item()
        assert not x.to("npu:1").to("npu:0").eq(0).any().item() or hit
    copies.clear()
    copies.plant(CopyFault(source="*", target="cpu", does="zero"))
    assert torch.ones(3, device="npu:2").cpu().eq(0).all()


def test_a_fault_beside_work() -> None:
    copies.plant(CopyFault(source="npu:0", target="npu:1", does="zero", only_under_load=True))
    x, side = numbers(KIB).to("npu:0"), torch.Stream("npu:0")
    torch.accelerator.synchronize("npu:0")

    def hit() -> bool:
        return bool(x.to("npu:1").eq(0).all().item())

    def work() -> torch.Event:
        with side:
            torch.ones(64, 64, device="npu:0") @ torch.ones(64, 64, device="npu:0")
            return side.record_event()

    assert not hit()
    x.add_(0)
    assert not hit()  # on its own stream a copy comes after the work
    work()
    assert hit()
    side.synchronize()
    assert not hit()
    event = work()
    assert hit()
    torch.accelerator.current_stream("npu:0").wait_event(event)
    assert not hit()
    work()
    torch.accelerator.synchronize("npu:0")
    assert not hit()
    work()
    assert not numbers(KIB).to("npu:2").to("npu:1").eq(0).all().item()  # the work is on neither of its devices
    torch.accelerator.synchronize("npu:0")


# ---- memory


@pytest.mark.parametrize("byte", [0xFF, 203])
def test_memory_is_poisoned_fresh_or_used(byte: int) -> None:
    _native.set_fill(byte)
    for _ in range(2):
        raw = torch.empty(1000, dtype=torch.uint8, device="npu:1").cpu()
        assert raw.unique().tolist() == [byte]
    assert torch.zeros(8, device="npu:1").eq(0).all()


def test_memory_without_poison_keeps_what_lay_there() -> None:
    torch.full((KIB,), 5.0).to("npu:1")
    assert torch.empty(KIB, device="npu:1").eq(5).all()
    npu.empty_cache()
    assert torch.empty(KIB, device="npu:1").eq(0).all()


def test_peaks() -> None:
    npu.reset_peak_memory_stats(1)
    npu.reset_peak_memory_stats(2)
    before = npu.memory_allocated(1)
    kept = torch.empty(KIB, device="npu:1")
    torch.empty(100 * KIB, device="npu:1")
    assert npu.memory_allocated(1) - before == kept.nbytes
    assert npu.max_memory_allocated(1) - before == 101 * 1024
    assert npu.memory_reserved(1) == npu.max_memory_reserved(1) == before + 101 * 1024
    assert npu.mem_get_info(1) == (MEMORY_BYTES - npu.memory_reserved(1), MEMORY_BYTES)
    assert npu.memory_allocated(2) == npu.max_memory_allocated(2) == 0
    assert torch.accelerator.max_memory_allocated(1) == npu.max_memory_allocated(1)
    npu.empty_cache()
    assert npu.memory_reserved(1) == npu.memory_allocated(1)
    assert npu.max_memory_allocated(1) - before == 101 * 1024
    npu.reset_peak_memory_stats(1)
    assert npu.max_memory_allocated(1) == npu.memory_allocated(1)


def test_out_of_memory() -> None:
    half = torch.empty(MEMORY_BYTES // 2, dtype=torch.uint8, device="npu:0")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(MEMORY_BYTES // 2 + 1, dtype=torch.uint8, device="npu:0")
    torch.empty(MEMORY_BYTES // 2, dtype=torch.uint8, device="npu:1")
    del half
    torch.empty(MEMORY_BYTES // 2 + 1, dtype=torch.uint8, device="npu:0")  # what lay in the cache is given back first


def test_memory_is_not_the_processs_own() -> None:
    def shared_bytes() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:"))

    before = shared_bytes()
    there = numbers(3 * 64 * KIB).to("npu:0")
    assert shared_bytes() - before == there.nbytes
    del there
    npu.empty_cache()
    assert shared_bytes() == before


def test_pinned_memory_is_the_hosts() -> None:
    pinned = numbers(8).pin_memory()
    assert pinned.is_pinned()
    assert pinned.device.type == "cpu"
    assert not numbers(8).is_pinned()
    assert torch.equal(pinned.to("npu:0", non_blocking=True).cpu(), pinned)


def test_copies_of_the_stage_transfer_take_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from consistency.stages.transfer import copying, delivery, payload

    pinned, copy = [], copying.copy

    def noted(source: torch.Tensor, destination: torch.Tensor) -> None:
        pinned.append({one.is_pinned() for one in (source, destination) if one.device.type == "cpu"})
        copy(source, destination)

    monkeypatch.setattr(copying, "copy", noted)
    monkeypatch.setattr(delivery, "under_load", lambda _: nullcontext())  # these devices have no room for it
    host, card = (delivery.Place(name=name, device=torch.device(name)) for name in ("cpu", "npu:0"))
    sender = delivery.Sender(tell=lambda *_: None, broken=set())
    for path in ((host, card), (card, host)):
        found = [*sender.together(path, [payload.contiguous(f"{path} {n}", 4096) for n in range(2)], pinned=True)]
        assert [one.wrong for one in found] == [False, False]
    assert pinned == [{True}] * 4


def test_libraries_count_its_memory() -> None:
    from accelerate.utils import get_max_memory

    npu.empty_cache()
    found = get_max_memory()
    assert list(found) == [0, 1, 2, 3, "cpu"]
    assert all(0 < found[i] <= MEMORY_BYTES for i in range(4))
    assert get_max_memory({"cpu": 5}) == {"cpu": 5}


def test_tensors_travel_through_files(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    x = numbers(8, 8)
    save_file({"x": x.to("npu:2")}, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors", device="npu:1")["x"]
    assert found.device == torch.device("npu:1")
    assert torch.equal(found.cpu(), x)
    torch.save(x.to("npu:2"), tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu"), x)


def test_a_load_takes_a_part_of_the_memory_and_gives_it_back() -> None:
    from consistency.extras.operations.soak.load import busy

    npu.empty_cache()
    before = npu.memory_allocated(1)
    with busy(torch.device("npu", 1)) as found:
        assert 0 < npu.memory_allocated(1) - before <= MEMORY_BYTES // 32
    told = found.summary()
    assert (told.size, told.error) == ("32 × 32 float32", None)
    assert told.products >= 4
    assert npu.memory_allocated(1) == before


# ---- what a device answers


def failing(**settings: Any) -> None:
    failure = DeviceFailure(**{"device": "npu:1", "says": "CUDA error: it is broken", **settings})
    answers.install(Settings(visible=(0, 1, 2, 3), failures=(failure,)))


def test_a_call_fails_once_and_on_its_device_alone() -> None:
    a, b = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
    failing(from_call=2)
    b.add_(1)
    with pytest.raises(torch.AcceleratorError, match=r"^CUDA error: it is broken"):
        b.add_(1)
    b.add_(1)
    a.add_(1)
    assert a.tolist() == [2, 2]
    assert b.tolist() == [3, 3]


def test_after_a_sticky_failure_every_call_fails() -> None:
    a, b = torch.ones(2, device="npu:0"), torch.ones(2, device="npu:1")
    failing(sticky=True)
    for call in (lambda: b + 1, b.tolist, lambda: b.to("npu:0"), lambda: npu.synchronize(1), lambda: b @ b):
        with pytest.raises(torch.AcceleratorError, match="it is broken"):
            call()
    assert (a + 1).tolist() == [2, 2]


@pytest.mark.parametrize("name", ["OutOfMemoryError", "RuntimeError"])
def test_a_failure_is_of_the_class_that_torch_has_for_it(name: str) -> None:
    failing(raises=name)
    with pytest.raises(RuntimeError, match="it is broken") as caught:
        torch.ones(2, device="npu:1")
    assert type(caught.value).__name__ == name


def test_a_failure_comes_at_its_time_also_in_autograds_thread() -> None:
    x = torch.ones(2, device="npu:1", requires_grad=True)
    loss = (x * x).sum()
    failing(during="inside.py:at_that_time", from_call=2)

    def at_that_time() -> None:
        loss.backward()

    assert (x * x).tolist() == [1, 1]
    with pytest.raises(torch.AcceleratorError, match="it is broken"):
        at_that_time()


@pytest.mark.parametrize("reads", [False, True])
def test_a_wait_is_waited_for_once(reads: bool) -> None:
    answers.install(Settings(visible=(0, 1, 2, 3), waits=(DeviceWait(device="npu:1", seconds=0.01, reads=reads),)))
    torch.ones(2, device="npu:0")
    assert answers.left() == 1
    assert torch.ones(2, device="npu:1").tolist() == [1, 1]
    assert answers.left() == 0
