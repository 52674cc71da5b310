"""Which parameters the optimizer decays."""

import jax
from jaxtyping import PyTree

# By name, not by ndim: under `blocks`, gains and biases have a leading layer axis and are matrices too.
DECAYED = frozenset({"kernel", "embedding"})
NOT_DECAYED = frozenset({"scale", "bias", "logit_scale", "logit_bias", "class_embedding", "position_embedding"})


def decay_mask(params: PyTree) -> PyTree:
    """Tell for each parameter whether weight decay applies: a tree like `params` with a bool for each array.

    Kernels of matrix products, of the patches and of the projections, and the token embedding are decayed, as in
    OpenAI's recipe; gains, biases, the logit scale and bias, class and position embeddings are not.

    Raises ValueError at a parameter whose name is in neither list.
    """

    def decays(path: jax.tree_util.KeyPath, _: object) -> bool:
        names = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        if names[-1] not in DECAYED | NOT_DECAYED:
            raise ValueError(
                f"no decay rule for parameter {'.'.join(names)}: add its name to a list in models/decay.py"
            )
        return names[-1] in DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)
