"""Every variable by which torch or transformers chooses kernels is known, or said to choose none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from consistency.devices.backends import kernel_variables, recorded_variables

CHOOSES = re.compile(
    r"TUNABLEOP|CUBLAS|CUDNN|MIOPEN|ROCBLAS|HIPBLAS|TF32|BLAS_PREFER|LINALG_PREFER|FA_PREFER|AOTRITON|SDPA"
    r"|FLASH_ATTENTION|HUB_KERNELS|ADDMM|DOWNCAST|USE_BF16"
)
_READ = re.compile(
    r"(?:environ(?:\.get)?[\[(]|getenv\(|get_env\(|check_env\(|has_env\()\s*[\"']([A-Z][A-Z0-9_]{3,})[\"']"
)

CHOOSES_NOTHING = {
    *("CUDNN_HOME", "CUDNN_LIBRARY", "CUDNN_PATH", "CUBLAS_HOME"),  # where it is built from
    *("PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK", "TORCH_CUDNN_V8_API_DEBUG"),
    "PYTORCH_DEBUG_FLASH_ATTENTION_GCN_ARCH_OVERRIDE",  # of torch's own tests
}
"""With such words in their names."""


@pytest.mark.slow
@pytest.mark.parametrize("package", [torch, transformers], ids=lambda package: package.__name__)
def test_no_choice_is_unknown(package: object) -> None:
    known = kernel_variables() | recorded_variables() | CHOOSES_NOTHING
    unknown, seen = {}, set()
    for path in Path(str(getattr(package, "__file__", ""))).parent.rglob("*"):
        if path.suffix in (".py", ".h", ".cuh"):
            for name in _READ.findall(path.read_text(encoding="utf-8", errors="ignore")):
                if CHOOSES.search(name) and not name.startswith(("TORCHINDUCTOR_", "INDUCTOR_")):  # nothing is compiled
                    seen.add(name)
                    if name not in known:
                        unknown[name] = path.name
    assert seen, "the pattern finds them"
    assert not unknown
