"""The contents of one worker's part of a capture: facts about the worker, and a record per tensor. No torch here."""

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
"""Name of a layer or a tensor; its length is limited, as a report repeats it hundreds of times."""


class TensorKey(msgspec.Struct, frozen=True, gc=False):  # as for `Measure`
    """The name of a tensor: its stage, its layer, and its name in the layer. These fields are given by position."""

    stage: Name
    layer: Name
    tensor: Name
    """`stage`, `layer`, `tensor`: for example `adapter`, `model.layers.0.self_attn.q_proj`, `lora_A`."""


class TensorRecord(
    TensorKey,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    gc=False,
    forbid_unknown_fields=True,
):
    """The result of one worker for one tensor."""

    shape: tuple[int, ...] = ()
    dtype: str = ""
    """`shape`, `dtype`: shape and dtype of the tensor on the device."""
    rule: Annotated[str, msgspec.Meta(pattern=rf"\A({'|'.join(Rule)})\Z")]
    """Rule that judges the tensor, one of `consistency.numerics.rules.Rule`."""
    status: RecordStatus
    """The worker's own judgement; `measured` where only a comparison with other workers can decide."""
    digest: str | None = None
    blocks: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{16})*\Z")] = ""
    """`digest`, `blocks`: digest of the tensor on the device, and digests of its blocks, 16 hexadecimal digits each,
    one after the other. A computed tensor within tolerance has none of blocks: nearly every block differs from device
    to device."""
    reference: str | None = None
    """The reference: the bytes of the `file`, a result in `float64`, or None for the other workers."""
    reference_digest: str | None = None
    reference_blob: str | None = None
    """`reference_digest`, `reference_blob`: digest of the reference, and name of the file that stores it."""
    rounding: RoundingError | None = None
    """Error that rounding makes in this dtype, for the `relative` and the `block` rule."""
    measure: Measure | None = None
    """Difference from the reference; None where the bits are equal, or nothing was measured."""
    word: Word | None = None
    """Kind of the difference; None where there is none, or it has no name."""
    evidence: dict[str, Any] = {}
    """Data behind the diagnosis."""
    reason: str | None = None
    """Why a tensor was skipped or blocked."""
    blob: str | None = None
    """Name of the file that stores the tensor; None where it is not stored."""
    repeats: tuple[str, ...] = ()
    """Digests of the same tensor in later runs on the same device."""
    ingredients: dict[str, str] = {}
    """Names of the files that store the operands of a computed tensor, by the name that a reproducer gives them."""
    order: int = 0
    """Position in the model's own order, by which a report names the first layer that differs."""
    limit_ratio: Real | None = None
    """Measured value divided by the limit, for the `limit` rule."""
    load_path: str = ""
    """Alternative load path; empty for the worker's own load path."""
    tolerance: str = ""
    """Tolerance of the user that judged the tensor, as the command line takes it; empty for a derived bound."""
    cast: str = ""
    """Dtype that this load path casts the file's values through, while others do not; empty where it does not."""
    name_in_file: str = ""
    """Name in the base's files, where the model has another name for the tensor."""
    buffer: bool = False
    """The tensor is a buffer outside the state dict, so it may be computed on the device."""
    unsupported: bool = False
    """The device has no such dtype or kernel, so that a skipped tensor is no failure."""
    effect: Effect = ""
    """Effect of the adapter, as far as it is certain; empty where it is not. The row of the adapter's settings has
    `layers` if its layers' deltas are all that the adapter changes, `some-tokens` if it acts on chosen tokens alone,
    else the reason why it changes nothing; the row of a delta has `zero-delta` if the delta is zero."""
    merging: MergeEffect | None = None
    """Effect of merging on the outputs: a fact about the case and not about a device, so it is no row of a report."""
    not_finite: int = 0
    """Number of elements that are NaN or infinite in the file, counted by the worker that makes the reference."""
    nondeterministic: tuple[str, ...] = ()
    """Operations without a deterministic version that had run in the stage before the tensor was recorded. After them
    its bits may differ each time, on the same device too. After `sum over ranks`, a sum between hosts, only hosts of
    one group have equal bits. Empty for bytes that were moved."""

    @property
    def promised_digest(self) -> str | None:
        """Return the digest if equal devices and repeats have to agree in it; None where their bits may differ."""
        return None if self.nondeterministic else self.digest

    @property
    def digest_in_group(self) -> str | None:
        """Return the digest if equal devices of one group have to agree in it: they have the same sums over ranks."""
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
    """A setting that had another value than was requested when a stage ended."""

    setting: str
    """Name of the setting, as `--set` takes it."""
    asked: Any
    in_force: Any
    """`asked`, `in_force`: the requested value, and the value at the end of the stage."""
    stage: str
    """The stage that ended."""


class StageMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory that a stage used on the host and on the device, and its time.

    Attributes
    ----------
    stage : str
        A stage, or a step of loading before it: `load base`, `load adapter`.
    host_resident_bytes, host_peak_bytes : int
        Resident size of the process at the end of the stage, and its largest during the stage; where the system cannot
        reset its mark, the largest since the process began.
    device_resident_bytes, device_peak_bytes : int or None
        Bytes of the tensors on the worker's device at the end of the stage, and the most during it, by the backend's
        allocator; None on the CPU and where the backend does not tell.
    host_private_bytes : int or None
        The part of the resident size at the end of the stage that no other process can share: all but mapped files.
        None where the system does not report it.
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
    """The facts about a worker that a capture and a report both have."""

    name: str
    load_path: str
    """`name`, `load_path`: name of the device, and load path; one device may have a worker per load path."""
    status: WorkerStatus
    """`ok`, `lost` (killed, hung, out of memory) or `failed` (an error of its own)."""
    reason: str | None = None
    """Why the worker is not `ok`: its signal, and its last event."""
    stack: str | None = None
    """Stack of the worker when it was lost, written by `faulthandler`."""
    environment: dict[str, Any] = {}
    """Versions, threads, kernels in force."""
    asked: dict[str, Any] = {}
    in_force: dict[str, Any] = {}
    """`asked`, `in_force`: settings for determinism as they were requested, and as they were."""
    stages_done: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    peak_bytes: int | None = None
    """Largest resident size of the worker's process."""
    stage_memory: tuple[StageMemory, ...] = ()
    """Memory of each stage, in the order of the stages."""
    soak: Soak | None = None
    """Repeats after the stages; None where none were requested, or the worker was lost before them."""
    engine: str | None = None
    """Name and version of the inference engine whose outputs the worker stands for; None for a device."""


class WorkerInfo(WorkerFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about a worker in its capture."""

    changes: tuple[SettingChange, ...] = ()
    """Settings that had another value than was requested when a stage ended."""
    inputs_digest: str | None = None
    """Digest of the fixed inputs of the forward stage."""
    config: dict[str, Any] = {}
    """The values of the base's config, as it was loaded, that may change results."""
    sources: str = ""
    """Digest of the config files, and of the code of a factory."""
    kernel_key: str = ""
    """Workers with the same key run the same program on the same type of device: bitwise equal results are expected."""
    planted: str | None = None
    """Fault that was planted in the worker on purpose."""
