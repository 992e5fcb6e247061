"""Torch's settings of a thread."""

import torch


def set_up_thread(threads: int) -> None:
    """Of the calling one, which computes with so many."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
