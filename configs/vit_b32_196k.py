"""python train.py --config configs/vit_b32_196k.py --workdir /shared/runs/vit_b32_196k \
    --config.data.train='laion400m/{00000..41407}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-B/32 at batch 196,608 on 8 hosts of 8 GPUs, the largest of the DisCo-CLIP paper; the same command on every host
under Slurm, or with --config.distributed.coordinator=HOST:PORT --config.distributed.num_processes=8
--config.distributed.process_id=0..7 on hosts without a scheduler. The workdir is on a file system that all share.
Planned for A100-40GB on 2026-12-01: 13.7 of 36.3 GiB. It fits on one host of 8 too (19.8 GiB).
"""

from ml_collections import ConfigDict

from configs import vit_b32_32k


def get_config() -> ConfigDict:
    """As at 32,768, with fewer steps over the same data."""
    config = vit_b32_32k.get_config()
    config.batch_size = 196_608
    config.total_steps = 32 * 400_000_000 // config.batch_size
    config.eval.every_steps = 1_000
    config.eval.batch_size = 8_192
    return config
