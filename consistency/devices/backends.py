"""The device backends: one entry for each type of device that torch knows by name, and a default for all others.

What an entry says is in `consistency.devices.backend`; a plug-in has entries of its own. No torch here.
"""

from __future__ import annotations

from consistency import plugins
from consistency.devices.backend import OWN_CHOICE, Backend, Variant, attention_variant
from consistency.devices.settings import CUBLAS_WORKSPACE_CONFIG

# Other kernels for the same operation in CUDA; ROCm has the same switches, with its own libraries behind them.
_CUDA_VARIANTS = (
    Variant(
        name="tf32",
        settings={"matmul_allow_tf32": True, "cudnn_allow_tf32": True, "float32_matmul_precision": "high"},
    ),
    attention_variant("math"),
    attention_variant("flash"),
    attention_variant("mem_efficient"),
    attention_variant("cudnn"),
    attention_variant(OWN_CHOICE),
    Variant(name="cublaslt", settings={"blas_library": "cublaslt"}),
    Variant(name="magma", settings={"linalg_library": "magma"}),
    Variant(
        name="reduced_sums",
        settings={"fp16_reduced_precision_reduction": True, "bf16_reduced_precision_reduction": True},
    ),
    Variant(name="no_cudnn", settings={"cudnn_enabled": False}),
)

CPU = "cpu"

# ATen, MKL and oneDNN each choose kernels by instruction set from a variable of their own, so a variant sets all three:
# with ATEN_CPU_CAPABILITY alone a float32 matmul, and so a merge, stays bitwise the same.
_CPU_VARIANTS = (
    Variant(
        name="baseline",
        environment={"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
        architecture="baseline",
        needs=frozenset({"sse4_1"}),
    ),
    Variant(
        name="avx2",
        environment={"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        architecture="AVX2",
        needs=frozenset({"avx2", "fma"}),  # ATen's AVX2 kernels use FMA3 too
    ),
    # The native choice on a processor with AVX-512 as ATen defines it: the name only requires that it is there.
    Variant(
        name="avx512",
        architecture="AVX-512",
        needs=frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}),
    ),
)

BACKENDS: dict[str, Backend] = {
    backend.type: backend
    for backend in (
        Backend(
            type=CPU,
            has_index=False,
            computes_on_host=True,
            variants=_CPU_VARIANTS,
            # oneDNN reads each of its variables under its earlier name too
            inherited=(
                "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS",
            ),
            recorded=("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        ),
        Backend(
            type="cuda",  # ROCm too: torch gives AMD's devices this name
            visibility="CUDA_VISIBLE_DEVICES",  # with ROCm as `consistency.devices.visibility` says
            also_masked_by=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
            builds=("cuda", "hip"),
            by_nvml=True,
            shows_contexts=True,
            # NVML counts in PCI order; cuBLAS reads its variable when the first handle is created
            environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            # MI200 casts the float16 operands of a backward pass to bfloat16 by default, which keeps three bits less
            # (PyTorch, "Numerical accuracy", on AMD Instinct MI200)
            pinned_environment={
                "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE_CONFIG,
                "ROCBLAS_INTERNAL_FP16_ALT_IMPL": "0",
                "MIOPEN_DEBUG_CONVOLUTION_ATTRIB_FP16_ALT_IMPL": "0",
            },
            # the third to the fifth: cuBLAS, "Floating Point Emulation"; TunableOp takes what is fastest at that moment
            inherited=(
                "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION",
                "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY", "HIPBLASLT_ALLOW_TF32",
                "PYTORCH_TUNABLEOP_ENABLED", "PYTORCH_TUNABLEOP_TUNING", "PYTORCH_TUNABLEOP_FILENAME",
                "PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED", "PYTORCH_TUNABLEOP_ROCBLAS_ENABLED", "CUBLASLT_WORKSPACE_SIZE",
                "DISABLE_ADDMM_CUDA_LT", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT",
                "TORCH_LINALG_PREFER_CUSOLVER", "TORCH_LINALG_PREFER_HIPSOLVER", "MIOPEN_FIND_MODE",
                "MIOPEN_FIND_ENFORCE", "PYTORCH_MIOPEN_SUGGEST_NHWC", "PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM",
                "TORCH_CUDNN_USE_HEURISTIC_MODE_B", "TORCH_CUDNN_V8_API_DISABLED", "TORCH_ROCM_FA_PREFER_CK",
                "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "FLASH_ATTENTION_DETERMINISTIC", "USE_HUB_KERNELS",
                "TRANSFORMERS_SDPA_FORCE_GQA",
            ),
            recorded=(
                "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NVML_BASED_CUDA_CHECK",
                "HSA_OVERRIDE_GFX_VERSION", "HSA_XNACK",
            ),
            variants=_CUDA_VARIANTS,
            alternatives={
                "matmul_allow_tf32": (True, "TF32 in matrix products"),
                "cudnn_allow_tf32": (True, "TF32 in cuDNN"),
                "fp16_reduced_precision_reduction": (True, "float16 sums in reduced precision"),
                "bf16_reduced_precision_reduction": (True, "bfloat16 sums in reduced precision"),
                "cudnn_enabled": (False, "cuDNN off"),
            },
            # NCCL and RCCL, "Environment Variables": each transport off, then one algorithm and one protocol forced
            of_collectives={
                "NCCL_P2P_DISABLE": "1",
                "NCCL_SHM_DISABLE": "1",
                "NCCL_NVLS_ENABLE": "0",
                "NCCL_ALGO": "Ring",
                "NCCL_PROTO": "Simple",
            },
        ),
        Backend(
            type="xpu",
            visibility="ZE_AFFINITY_MASK",
            empty_hides_all=False,
            mask_is_ordered=False,  # Level Zero, Programming Guide, "Affinity Mask"
            builds=("xpu",),
            also_masked_by=("ONEAPI_DEVICE_SELECTOR",),
            recorded=("ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"),
            # oneCCL, "Environment Variables": any algorithm but `topo` goes by way of the host
            of_collectives={"CCL_ALLREDUCE": "ring"},
        ),
        Backend(
            type="npu",
            visibility="ASCEND_RT_VISIBLE_DEVICES",
            # CANN, "Environment Variables": a fixed order of sums, and the orchestration on the host; not HCCL_ALGO,
            # which chooses between servers alone
            of_collectives={"HCCL_DETERMINISTIC": "true", "HCCL_OP_EXPANSION_MODE": "HOST"},
        ),
        Backend(type="mps", builds=("darwin",), synchronizes_one=False),
        Backend(
            type="xla",  # TPUs, and on a CPU as many devices as CPU_NUM_DEVICES has
            package="torch_xla",
            interface="consistency.devices.xla",
            asked_by="PJRT_DEVICE",  # torch_xla would choose by itself
            inherited=("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16"),
            recorded=("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_PERSISTENT_CACHE_PATH"),
            rounds_each_step=True,  # docs/xla.md
            computes_on_host=True,
            variants=(),  # XLA follows none of torch's switches
        ),
    )
}  # fmt: skip
# a plug-in adds types, and never replaces one of these
BACKENDS |= {backend.type: backend for _, backend in plugins.offered("backends") if backend.type not in BACKENDS}


def backend_of(kind: str) -> Backend:
    """Return the entry of a device type; a type without one gets the defaults of `Backend`."""
    return BACKENDS.get(kind) or Backend(type=kind)


def kernel_variables() -> frozenset[str]:
    """Return every variable that chooses kernels or their precision.

    In the profile `pinned` each is removed from a worker's environment unless the worker's own variant sets it.
    """
    names: set[str] = set()
    for backend in BACKENDS.values():
        names.update(backend.inherited)
        for variant in backend.variants:
            names.update(variant.environment)
    return frozenset(names)


def worker_variables(*, pinned: bool = True) -> dict[str, str]:
    """Return the variables that every worker needs, with their values; `pinned` is the profile."""
    variables: dict[str, str] = {}
    for backend in BACKENDS.values():
        variables |= backend.environment
    if pinned:
        for backend in BACKENDS.values():
            variables |= backend.pinned_environment
    return variables


def mask_variables() -> frozenset[str]:
    """Return every variable that shows only a part of the devices."""
    names: set[str] = set()
    for backend in BACKENDS.values():
        names.update(backend.also_masked_by)
        if backend.visibility:
            names.add(backend.visibility)
    return frozenset(names)


def recorded_variables() -> frozenset[str]:
    """Return every variable that is written into a capture: those that choose kernels, devices or libraries."""
    names = {*kernel_variables(), *worker_variables(), *mask_variables()}
    for backend in BACKENDS.values():
        names.update(backend.recorded)
    return frozenset(names)
