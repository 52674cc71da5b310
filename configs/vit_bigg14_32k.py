"""python train.py --config configs/vit_bigg14_32k.py --workdir /shared/runs/vit_bigg14_32k \
    --config.data.train='datacomp/{00000..12895}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-bigG/14 at batch 32,768 on 8 hosts of 8 GPUs, parameters and optimizer divided over all. Planned for A100-40GB on
2026-12-01: 21.3 of 36.3 GiB.
"""

from ml_collections import ConfigDict

from configs import vit_h14_32k


def get_config() -> ConfigDict:
    """As ViT-H/14."""
    config = vit_h14_32k.get_config()
    config.microbatch = 256
    config.model.name = "ViT-bigG-14"
    config.model.remat = "full"
    config.optimizer.beta2 = 0.95
    return config
