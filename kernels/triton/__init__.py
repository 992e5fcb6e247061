"""The operations of `kernels.reference` as Triton kernels, for NVIDIA GPUs from Hopper on.

Every function has the name, the arguments and the meaning of its reference, takes tensors on one
GPU, and accepts bf16 or float32 where the reference speaks of "bf16 values". Nothing is tuned while
the engine runs: launch settings come from `configs`.
"""
