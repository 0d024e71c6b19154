"""What one worker recorded, as values: who it was, and one record per tensor. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from consistency.capture.merge_effect import MergeEffect
from consistency.capture.names import CAST_ON_THE_WAY, SUM_OVER_RANKS, TOLERANCE, UNSUPPORTED
from consistency.capture.soak import Soak
from consistency.devices.spec import DeviceIdentity
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import RoundingError, Rule
from consistency.numerics.words import Word

RecordStatus = Literal["equal", "within", "outside", "missing", "unexpected", "skipped", "blocked", "measured"]
Effect = Literal["", "layers", "no-layer", "zero-scaling", "zero-weights", "zero-delta", "some-tokens"]
WorkerStatus = Literal["ok", "lost", "failed"]
Name = Annotated[str, msgspec.Meta(max_length=2**12)]
"""Of a layer or a tensor: a report repeats it hundreds of times."""


class TensorKey(msgspec.Struct, frozen=True, gc=False):  # as for `Measure`
    """Which tensor a record is of; given by position."""

    stage: Name
    layer: Name
    tensor: Name
    """`stage`, `layer`, `tensor`: `adapter`, `model.layers.0.self_attn.q_proj`, `lora_A`."""


class TensorRecord(
    TensorKey,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    gc=False,
    forbid_unknown_fields=True,
):
    """What one worker recorded of one tensor."""

    shape: tuple[int, ...] = ()
    dtype: str = ""
    """`shape`, `dtype`: as on the device."""
    rule: Annotated[str, msgspec.Meta(pattern=rf"\A({'|'.join(Rule)})\Z")]
    """A `consistency.numerics.rules.Rule`."""
    status: RecordStatus
    """The worker's own judgement; `measured` where only a comparison with other workers can decide."""
    digest: str | None = None
    blocks: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})*\Z")] = ""
    """`digest`, `blocks`: of the tensor on the device; block digests as 16 hexadecimal digits each, one after the
    other. None of a computed tensor within tolerance: nearly every block of those differs from device to device."""
    reference: str | None = None
    """`file`, `float64`, or None where the other workers are the reference."""
    reference_digest: str | None = None
    reference_blob: str | None = None
    """`reference_digest`, `reference_blob`: of the tensor that it was compared with."""
    rounding: RoundingError | None = None
    """The error that rounding makes in this dtype, for the `relative` rule."""
    measure: Measure | None = None
    """None where the bits are equal."""
    word: Word | None = None
    evidence: dict[str, Any] = {}
    """Data behind the diagnosis."""
    reason: str | None = None
    """Why a tensor was skipped or blocked."""
    blob: str | None = None
    """The stored tensor, where there is one."""
    repeats: tuple[str, ...] = ()
    """Digests of the same tensor in later runs on the same device."""
    ingredients: dict[str, str] = {}
    """Stored tensors that a computed one was made from, by the name that a reproducer gives them."""
    order: int = 0
    """Place in the model's own order, for "the first layer that differs"."""
    limit_ratio: Real | None = None
    """Measured value over the limit, for the `limit` rule."""
    load_path: str = ""
    """The alternative load path; empty on the worker's own."""
    tolerance: str = ""
    """The user tolerance that judged it, as the command line takes it."""
    cast: str = ""
    """The dtype that this load path alone casts the file's values through."""
    name_in_file: str = ""
    """Name in the base's files, where the model uses another."""
    buffer: bool = False
    """The tensor is a buffer outside the state dict, so it may be computed on the device."""
    unsupported: bool = False
    """The device has no such dtype or kernel: skipping it is no failure."""
    effect: Effect = ""
    """What is certain of the adapter's effect, empty where nothing is. Of its settings: `layers` if its layers' deltas
    are all that it changes, `some-tokens` if it acts on chosen tokens alone, else why it changes nothing; of a delta:
    `zero-delta` if it is zero."""
    merging: MergeEffect | None = None
    """What merging does to the outputs: a fact of the case and not of a device, which has no row in a report."""
    not_finite: int = 0
    """Elements that are NaN or infinite in the file; looked for by the worker that makes the reference."""
    nondeterministic: tuple[str, ...] = ()
    """Operations without a deterministic version that had run in its stage before it was recorded: its bits may be
    others each time, on the same device too. `sum over ranks` is one between hosts: a group shares its bits. Empty for
    bytes that were moved."""

    @property
    def promised_digest(self) -> str | None:
        """Return the digest if equal devices, and repeats on one, are expected to agree in it."""
        return None if self.nondeterministic else self.digest

    @property
    def digest_in_group(self) -> str | None:
        """Return the digest if equal devices of one group, which share each sum over ranks, are expected to agree."""
        return self.digest if self.nondeterministic in ((), (SUM_OVER_RANKS,)) else None

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.stage, self.layer, self.tensor)


IN_EVIDENCE = {
    "tolerance": TOLERANCE,
    "cast": CAST_ON_THE_WAY,
    "name_in_file": "name_in_file",
    "buffer": "buffer",
    "unsupported": UNSUPPORTED,
}
"""Fields that decide a verdict, and the keys under which a report's evidence states them too."""


class SettingChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that was not as requested when a stage ended."""

    setting: str
    """Its name, as `--set` takes it."""
    asked: Any
    in_force: Any
    """`asked`, `in_force`: what was requested, and what it was."""
    stage: str
    """The stage that ended."""


class StageMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory that a stage used on the host and on the device, and its time.

    Attributes
    ----------
    stage : str
        A stage, or a step of loading before it: `load base`, `load adapter`.
    host_resident_bytes, host_peak_bytes : int
        Resident size of the process at its end, and the largest during it; where the system cannot reset its mark, the
        largest so far.
    device_resident_bytes, device_peak_bytes : int or None
        What tensors hold on the worker's device at its end, and at most during it, by the backend's allocator; None on
        the CPU and where the backend does not tell.
    host_private_bytes : int or None
        The part of the resident size at its end that no other process can share: all but mapped files. None where the
        system does not report it.
    elapsed_s, processor_s : float or None
        Wall time, and processor time of all threads; None in captures of versions that did not record them.
    """

    stage: str
    host_resident_bytes: int
    host_peak_bytes: int
    device_resident_bytes: int | None = None
    device_peak_bytes: int | None = None
    host_private_bytes: int | None = None
    elapsed_s: float | None = None
    processor_s: float | None = None


class WorkerFacts(DeviceIdentity, frozen=True, kw_only=True):
    """What a capture and a report both state of a worker."""

    name: str
    load_path: str
    """`name`, `load_path`: device and load path; one device may have a worker per load path."""
    status: WorkerStatus
    """`ok`, `lost` (killed, hung, out of memory) or `failed` (an error of its own)."""
    reason: str | None = None
    """For a worker that is not `ok`: signal, last event."""
    stack: str | None = None
    """Where it was, by `faulthandler`."""
    environment: dict[str, Any] = {}
    """Versions, threads, kernels in force."""
    asked: dict[str, Any] = {}
    in_force: dict[str, Any] = {}
    """`asked`, `in_force`: determinism settings."""
    stages_done: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    peak_bytes: int | None = None
    """Largest resident size of the worker's process."""
    stage_memory: tuple[StageMemory, ...] = ()
    """In the order of the stages."""
    soak: Soak | None = None
    """None where none was requested, or the worker was lost before it."""
    engine: str | None = None
    """Name and version of the inference engine whose outputs it stands for; None of a device."""


class WorkerInfo(WorkerFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker as its capture describes it."""

    changes: tuple[SettingChange, ...] = ()
    """Settings that were not as requested when a stage ended."""
    inputs_digest: str | None = None
    """Of the fixed inputs of the forward stage."""
    config: dict[str, Any] = {}
    """Of the base, as it was loaded: what may change its results."""
    sources: str = ""
    """Digest of the files of configs, and of the code of a factory."""
    kernel_key: str = ""
    """Workers with the same key run the same program on the same type of device: bitwise equal results are expected."""
    planted: str | None = None
    """The fault that was planted in it on purpose."""
