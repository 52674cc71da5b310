"""python train.py --config configs/vit_l14_262k.py --workdir runs/vit_l14_262k \
    --config.data.train='datacomp/{00000..12895}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-L/14 at batch 262,144 on one host of 8 GPUs. Planned for A100-40GB on 2026-12-01: 32.7 of 36.3 GiB.
"""

from ml_collections import ConfigDict

from configs import vit_l14_90k


def get_config() -> ConfigDict:
    """DataComp's recipe "xlarge" at a larger batch."""
    config = vit_l14_90k.get_config()
    config.batch_size = 262_144
    config.total_steps = 12_800_000_000 // config.batch_size
    config.optimizer.warmup_steps = 3_400  # as many samples
    config.eval.every_steps = 1_000
    return config
