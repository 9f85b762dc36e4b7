"""Array operations with a pure-JAX reference and GPU kernels."""
