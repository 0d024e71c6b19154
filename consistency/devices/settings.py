"""Torch's numerical settings, by the names of `--set`: their pinned values, and the values they take.

`consistency.worker.determinism` reads and writes them. No torch here: options are checked before a worker starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from consistency.errors import UsageError, did_you_mean

AS_FOUND = "as found"
"""Pinned value of a setting that no run changes unasked; a change of it during a run is undone and reported."""

CUBLAS_WORKSPACE_CONFIG = ":4096:8"
"""One of the two values that make cuBLAS reproducible (cuBLAS documentation, "Results reproducibility")."""

DEFAULT_LIBRARY = "default"
"""Value that lets torch choose a library; it may report the chosen one instead."""

UNREADABLE = "unreadable"
"""Start of the value of a setting that torch refuses to tell, or does not have."""

_BOOLEAN = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
_UNSET = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpec:
    """One setting."""

    name: str
    pinned: bool | str | None
    """Its value in the profile `pinned`; None is an environment variable that is not set."""
    values: tuple[str, ...] = ()
    """The values that it takes; empty for true and false, or where there is a pattern."""
    pattern: str = ""
    """Instead of `values`: a regular expression of the whole value."""
    wanted: str = "true or false"
    """The values that the pattern allows, in words."""
    variable: str | None = None
    """The environment variable behind the setting, None where torch has it; the value `none` leaves it unset."""

    def parse(self, given: object, *, where: str) -> bool | str | None:
        """Return a value of this setting's type from what a user wrote.

        Raises
        ------
        UsageError
            The setting takes no such value.
        """
        text = str(given).strip().lower()
        if self.variable is not None and text == _UNSET:
            return None
        if self.pattern:
            if re.fullmatch(self.pattern, text):
                return text
        elif self.values:
            if text in self.values:
                return text
        elif text in _BOOLEAN:
            return _BOOLEAN[text]
        wanted = f"one of {', '.join(self.values)}" if self.values else self.wanted
        raise UsageError(f"{self.name} takes no such value", where=where, got=given, wanted=wanted)


def _setting(name: str, pinned: bool | str | None, *values: str, **more: str) -> SettingSpec:
    return SettingSpec(name=name, pinned=pinned, values=values, **more)


_PRECISIONS = ("none", "ieee", "tf32", "bf16")
_OF_CUDA = ("ieee", "tf32")

SETTINGS: dict[str, SettingSpec] = {
    spec.name: spec
    for spec in (
        _setting("float32_matmul_precision", "highest", "highest", "high", "medium"),
        _setting("matmul_allow_tf32", False),
        _setting("cudnn_allow_tf32", False),
        # torch's newer switches. A kind of operation without a value has that of its backend, or else the first one:
        # pinned kinds have their own, so the switches above them reach nothing and are only put back
        _setting("fp32_precision", AS_FOUND, *_PRECISIONS),
        _setting("cuda_fp32_precision", AS_FOUND, "none", *_OF_CUDA),
        _setting("cuda_matmul_fp32_precision", "ieee", *_OF_CUDA),
        _setting("cudnn_conv_fp32_precision", "ieee", *_OF_CUDA),
        _setting("cudnn_rnn_fp32_precision", "ieee", *_OF_CUDA),
        _setting("mkldnn_matmul_fp32_precision", "ieee", *_PRECISIONS),
        _setting("mkldnn_conv_fp32_precision", "ieee", *_PRECISIONS),
        _setting("mkldnn_rnn_fp32_precision", "ieee", *_PRECISIONS),
        # torch does not read this variable: NVIDIA's libraries do, when their first handle is created
        _setting(
            "nvidia_tf32_override", None, pattern="[01]", wanted="0, 1 or none", variable="NVIDIA_TF32_OVERRIDE"
        ),
        _setting("fp16_reduced_precision_reduction", False),
        _setting("bf16_reduced_precision_reduction", False),
        _setting("fp16_accumulation", False),
        _setting("fp16_bf16_reduction_math_sdp", False),
        _setting("blas_library", AS_FOUND, DEFAULT_LIBRARY, "cublas", "cublaslt", "ck"),
        _setting("linalg_library", AS_FOUND, DEFAULT_LIBRARY, "cusolver", "magma"),
        _setting("rocm_fa_library", AS_FOUND, DEFAULT_LIBRARY, "aotriton", "ck"),
        _setting("cudnn_enabled", True),
        _setting("cudnn_deterministic", True),
        _setting("cudnn_benchmark", False),
        _setting("deterministic_algorithms", "warn", "off", "warn", "error"),
        _setting(
            "cublas_workspace_config", CUBLAS_WORKSPACE_CONFIG, pattern=r"(:\d+:\d+)+", wanted=":4096:8, :16:8 or none",
            variable="CUBLAS_WORKSPACE_CONFIG",
        ),
        _setting("sdpa_math", True),
        _setting("sdpa_flash", False),
        _setting("sdpa_mem_efficient", False),
        _setting("sdpa_cudnn", False),
    )
}  # fmt: skip

THREADS = "threads"
"""Name of the number of threads, which is recorded beside the settings; `--threads` sets it."""

_MATMUL: dict[str, dict[str, bool | str]] = {
    name: {
        "float32_matmul_precision": name, "matmul_allow_tf32": name != "highest",
        "cuda_matmul_fp32_precision": "ieee" if name == "highest" else "tf32", "mkldnn_matmul_fp32_precision": onednn,
    }
    for name, onednn in (("highest", "ieee"), ("high", "tf32"), ("medium", "bf16"))
}  # fmt: skip

_CUDNN: dict[str, dict[str, bool | str]] = {
    name: {
        "cudnn_allow_tf32": name == "tf32",
        "cudnn_conv_fp32_precision": name,
        "cudnn_rnn_fp32_precision": name,
    }
    for name in _OF_CUDA
}

HOST_SETTINGS = frozenset({THREADS})
"""Settings that decide the bits of what the host's processor computes, and of nothing else."""

# The settings that torch changes together with one. It refuses to read a switch of TF32 that its newer ones contradict,
# and a precision that its backends of products do not share.
_IMPLIED: dict[tuple[str, object], dict[str, bool | str]] = {
    **{("fp32_precision", name): {"cuda_fp32_precision": name} for name in ("none", *_OF_CUDA)},
    ("fp32_precision", "bf16"): {"cuda_fp32_precision": "none"},  # which CUDA has not
    **{("float32_matmul_precision", name): moved for name, moved in _MATMUL.items()},
    ("matmul_allow_tf32", True): _MATMUL["high"],
    ("matmul_allow_tf32", False): _MATMUL["highest"],
    ("cuda_matmul_fp32_precision", "tf32"): _MATMUL["high"],
    ("cuda_matmul_fp32_precision", "ieee"): _MATMUL["highest"],
    ("cudnn_allow_tf32", True): _CUDNN["tf32"],
    ("cudnn_allow_tf32", False): _CUDNN["ieee"],
    **{("cudnn_conv_fp32_precision", name): moved for name, moved in _CUDNN.items()},
    **{("cudnn_rnn_fp32_precision", name): moved for name, moved in _CUDNN.items()},
}


def with_implied(chosen: Mapping[str, object]) -> dict[str, object]:
    """Return chosen settings with those that torch changes together with them; a chosen value is never replaced."""
    implied: dict[str, object] = {}
    for item in chosen.items():
        implied |= _IMPLIED.get(item, {})
    return {**implied, **chosen}


def parse_setting(name: str, given: object, *, where: str) -> tuple[str, bool | str | None]:
    """Return the name of a setting and its value, of the setting's type.

    Raises
    ------
    UsageError
        There is no such setting, or it takes no such value.
    """
    name = name.strip().lower().replace("-", "_")
    if name == THREADS:
        raise UsageError("threads have an option of their own", where=where, got=given, wanted=f"--threads {given}")
    spec = SETTINGS.get(name)
    if spec is None:
        raise UsageError(
            f"unknown setting: {name}",
            where=where,
            wanted="one of " + ", ".join(SETTINGS),
            hint=did_you_mean(name, SETTINGS),
        )
    return name, spec.parse(given, where=where)
