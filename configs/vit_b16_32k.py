"""python train.py --config configs/vit_b16_32k.py --workdir runs/vit_b16_32k \
    --config.data.train='datacomp/{00000..12895}.tar' --config.data.eval='coco/{00000..00004}.tar'

ViT-B/16 at batch 32,768 on one host of 8 GPUs: 13 billion samples. Planned for A100-40GB on 2026-12-01: 14.0 of
36.3 GiB.
"""

from ml_collections import ConfigDict

from configs import vit_b32_32k


def get_config() -> ConfigDict:
    """OpenAI's recipe, as for ViT-B/32."""
    config = vit_b32_32k.get_config()
    config.microbatch = 256
    config.model.name = "ViT-B-16"
    return config
