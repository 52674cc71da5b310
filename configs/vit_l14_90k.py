"""python train.py --config configs/vit_l14_90k.py --workdir /shared/runs/vit_l14_90k \
    --config.data.train='datacomp/{00000..12895}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-L/14 at batch 90,112 on 4 hosts of 8 GPUs: DataComp's recipe of its largest scale, 12.8 billion samples (Gadre et
al. 2023, arXiv 2304.14108, table 3). Planned for A100-40GB on 2026-12-01: 24.2 of 36.3 GiB.
"""

from ml_collections import ConfigDict

from configs import vit_b32_32k


def get_config() -> ConfigDict:
    """DataComp's recipe "xlarge"."""
    config = vit_b32_32k.get_config()
    config.batch_size = 90_112
    config.microbatch = 128
    config.total_steps = 12_800_000_000 // config.batch_size
    config.model.name = "ViT-L-14"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.beta2 = 0.95
    config.optimizer.warmup_steps = 10_000
    return config
