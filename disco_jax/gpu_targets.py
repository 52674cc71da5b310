"""GPUs that are not there: XLA compiles for them on a machine without one, and tells the memory of the program.

Needs the extra `plan` (jax's CUDA plug-in without NVIDIA's libraries).
"""

import importlib.util
from dataclasses import dataclass

import jax
from jax.experimental import topologies

# Of a GPU's memory, what the commands here let the runtime take.
POOL_SHARE = 0.92


@dataclass(frozen=True)
class GPUTarget:
    """A GPU as XLA's public target specifications describe it, but for versions; bytes, and bytes a second.

    peak_flops: of bfloat16 tensor cores a second, without sparsity, by NVIDIA's data sheets.
    """

    description: str
    memory: int
    bandwidth: int
    peak_flops: int
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    capability: tuple[int, int]


TARGETS = {
    "a100-40gb": GPUTarget(
        "NVIDIA A100-SXM4-40GB",
        memory=42331013120,
        bandwidth=1555200000000,
        peak_flops=312 * 10**12,
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        l2_cache=41943040,
        shared_memory_per_core=167936,
        shared_memory_per_block=166912,
        capability=(8, 0),
    ),
    "a100-80gb": GPUTarget(
        "NVIDIA A100-SXM4-80GB",
        memory=85100068864,
        bandwidth=2039040000000,
        peak_flops=312 * 10**12,
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        l2_cache=41943040,
        shared_memory_per_core=167936,
        shared_memory_per_block=166912,
        capability=(8, 0),
    ),
    "h100-80gb": GPUTarget(
        "NVIDIA H100 80GB HBM3",
        memory=84942979072,
        bandwidth=3352320000000,
        peak_flops=989 * 10**12,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        l2_cache=52428800,
        shared_memory_per_core=233472,
        shared_memory_per_block=232448,
        capability=(9, 0),
    ),
    "h200-141gb": GPUTarget(
        "NVIDIA H200",
        memory=151397597184,
        bandwidth=4800000000000,
        peak_flops=989 * 10**12,
        cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        l2_cache=52428800,
        shared_memory_per_core=233472,
        shared_memory_per_block=232448,
        capability=(9, 0),
    ),
    "b200-192gb": GPUTarget(
        "NVIDIA B200",
        memory=191514411008,
        bandwidth=7672320000000,
        peak_flops=2250 * 10**12,
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        l2_cache=132644864,
        shared_memory_per_core=233472,
        shared_memory_per_block=232448,
        capability=(10, 0),
    ),
}


def peak_flops(device_kind: str) -> int | None:
    """Bfloat16 FLOPs a second of a `jax.Device` by its `device_kind`; None where it is none of TARGETS, as a CPU is."""
    return next((gpu.peak_flops for gpu in TARGETS.values() if gpu.description == device_kind), None)


def target_devices(target: str, hosts: int, gpus_per_host: int) -> list[jax.Device]:
    """Devices of a cluster to compile for (`jax.make_mesh` takes them, and `.lower(lowering_platforms=("cuda",))`).

    Call it with JAX_PLATFORMS=cpu in the environment.

    Raises:
        ValueError: a target that is not known, or sizes that are not positive.
        ImportError: the plug-in is not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"GPU {target!r} is unknown: use one of {', '.join(TARGETS)}")
    if hosts < 1 or gpus_per_host < 1:
        raise ValueError(
            f"a cluster of {hosts} hosts with {gpus_per_host} GPUs each has no GPU: use sizes of at least 1"
        )
    if importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise ImportError("compiling for absent GPUs needs jax's CUDA plug-in: pip install 'disco-jax[plan]'")
    return list(
        topologies.get_topology_desc(
            platform="cuda", target_config=_text_proto(TARGETS[target]), topology=f"1x{hosts}x{gpus_per_host}"
        ).devices
    )


def _text_proto(gpu: GPUTarget) -> str:
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{gpu.description}"
"""
