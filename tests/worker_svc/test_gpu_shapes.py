"""A model that the kernels are not made for is refused with its numbers, not met by a failed assertion."""

import dataclasses

import pytest
from forward_world import TINY

from phalanx.worker_svc.gpu_shapes import unsuited
from phalanx.worker_svc.model.config import ModelConfig


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"head_dim": 512, "index_head_dim": 128, "qk_rope_head_dim": 64}, ""),
        ({"hc_mult": 3}, "hc_mult is 3 and must be 4"),
        ({"head_dim": 96}, "head_dim is 96 and must be a power of two from 64 on"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"index_head_dim": 32}, "index_head_dim is 32 and must be 64 or 128"),
        ({"qk_rope_head_dim": 48}, "qk_rope_head_dim is 48"),
    ],
)
def test_what_the_kernels_can_run(changes: dict[str, int], said: str) -> None:
    why = unsuited(dataclasses.replace(ModelConfig.load(TINY), **changes))  # type: ignore[arg-type]
    assert said in why and bool(why) == bool(said)
    assert not why or "worker.kernels" in why
