import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from golden_clip import abstract_clip, load

from disco_jax.models import decay_mask, preset

BLOCK_KERNELS = {
    f"transformer.blocks.{name}.kernel" for name in ("attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
}
DECAYED = (
    {f"{tower}.{name}" for tower in ("visual", "text") for name in BLOCK_KERNELS | {"projection.kernel"}}
    | {"visual.patch_embedding.kernel", "text.token_embedding.embedding"}
)  # fmt: skip
BLOCK_VECTORS = {"ln_1.scale", "ln_1.bias", "ln_2.scale", "ln_2.bias"} | {
    f"{name}.bias" for name in ("attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
}
NOT_DECAYED = (
    {f"{tower}.transformer.blocks.{name}" for tower in ("visual", "text") for name in BLOCK_VECTORS}
    | {f"{norm}.{name}" for norm in ("visual.ln_pre", "visual.ln_post", "text.ln_final") for name in ("scale", "bias")}
    | {"visual.class_embedding", "visual.position_embedding", "text.position_embedding", "logit_scale"}
)


def flat(tree) -> dict:
    return {
        ".".join(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_every_parameter_is_in_one_list():
    mask = flat(decay_mask(abstract_clip(preset("tiny"))[1]))
    assert {name for name, decays in mask.items() if decays} == DECAYED
    assert {name for name, decays in mask.items() if not decays} == NOT_DECAYED


def test_optax_decays_only_the_masked():
    _, params, _ = load("open_clip_gelu")
    params = jax.tree.map(np.asarray, params)  # eager jax would compile for each shape
    decay = optax.add_decayed_weights(0.2, mask=decay_mask)
    updates, _ = decay.update(jax.tree.map(np.zeros_like, params), decay.init(params), params)
    for (name, update), param in zip(flat(updates).items(), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(update, 0.2 * param if name in DECAYED else 0 * param, rtol=1e-6)


def test_unknown_parameter_is_refused():
    params = nnx.State({"visual": {"register_tokens": nnx.Param(jnp.zeros((4, 8)))}})
    with pytest.raises(ValueError, match=r"visual\.register_tokens"):
        decay_mask(params)
