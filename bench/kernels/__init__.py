"""Kernels against the limits of the GPU they run on: `phalanx bench kernels`."""
