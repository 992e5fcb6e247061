"""What does not fit a GPU is refused before anything is loaded, with the numbers and what would fit."""

import pytest
import torch
from forward_world import TINY

from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.footprint import all_slots, gpu_bytes, slot_bytes
from phalanx.worker_svc.model.shards import CheckpointError


@pytest.mark.parametrize("experts", [0, 3])
def test_it_says_how_many_experts_would_fit(experts: int) -> None:
    config = ModelConfig.load(TINY)
    layers = len(all_slots(config))
    bare = gpu_bytes(config, [1] * layers) - layers * slot_bytes(config)
    limit = bare + experts * layers * slot_bytes(config) + 1
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(TINY, memory_limit_bytes=limit, device=torch.device("cuda"))
    advice = f"{experts} experts a layer would fit" if experts else "not even one expert"
    assert advice in str(raised.value) and "of GPU memory with 8 experts" in str(raised.value)
