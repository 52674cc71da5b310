"""What is known of GPUs and refused before the plug-in is needed."""

import pytest

from disco_jax.gpu_targets import peak_flops, target_devices


@pytest.mark.parametrize(
    "device_kind, tera",
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
    ],
)
def test_peak_flops(device_kind, tera):
    """By the names that NVIDIA's drivers report."""
    assert peak_flops(device_kind) == tera * 10**12


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA H100 PCIe", ""])
def test_peak_flops_of_others(device_kind):
    assert peak_flops(device_kind) is None


@pytest.mark.parametrize(
    "target, hosts, gpus, message",
    [
        ("a100", 1, 8, "GPU 'a100' is unknown: use one of a100-40gb, a100-80gb"),
        ("a100-40gb", 0, 8, "a cluster of 0 hosts with 8 GPUs each has no GPU"),
        ("a100-40gb", 1, -8, "a cluster of 1 hosts with -8 GPUs each has no GPU"),
    ],
)
def test_refusals(target, hosts, gpus, message):
    with pytest.raises(ValueError, match=message):
        target_devices(target, hosts, gpus)
