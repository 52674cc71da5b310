"""Every test runs on 8 simulated CPU devices; float64 is switched on where a test asks for it."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
