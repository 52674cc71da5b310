"""CLIP training in JAX and Flax with the DisCo-CLIP loss."""
