"""Planning: what a training step takes on GPUs that are not there."""
