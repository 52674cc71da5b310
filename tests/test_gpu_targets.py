"""What is refused before the plug-in is needed."""

import pytest

from disco_jax.gpu_targets import target_devices


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
