"""python train.py --config configs/vit_h14_32k.py --workdir /shared/runs/vit_h14_32k \
    --config.data.train='datacomp/{00000..12895}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-H/14 at batch 32,768 on 8 hosts of 8 GPUs, parameters and optimizer divided over all: 32 billion samples, as LAION
trained it on its 2 billion pairs. Planned for A100-40GB on 2026-12-01: 26.3 of 36.3 GiB.
"""

from ml_collections import ConfigDict

from configs import vit_b32_32k


def get_config() -> ConfigDict:
    """LAION's recipe but for its batch of 79,104."""
    config = vit_b32_32k.get_config()
    config.sharding = "fsdp"
    config.microbatch = 128
    config.total_steps = 32_000_000_000 // config.batch_size
    config.model.name = "ViT-H-14"
    config.optimizer.grad_clip = 1.0
    config.optimizer.warmup_steps = 10_000
    return config
