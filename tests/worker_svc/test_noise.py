"""The control run of all tests that compare: one unit in the last place of one number, and tokens change."""

import pytest
import torch
from engine_world import EngineWorld, Request
from forward_world import weights_of

from phalanx.protocol import faults
from phalanx.protocol.fault_table import Fault, FaultRow
from phalanx.protocol.messages import Sampling
from phalanx.worker_svc.model.noise import nudge


def streams() -> list[Request]:
    vocab = weights_of("tiny-a").config.vocab_size
    with EngineWorld("tiny-a") as world, torch.inference_mode():
        return [
            world.finish(
                Request(
                    [(7 * seed + at) % (vocab - 3) + 3 for at in range(9)],
                    Sampling(seed=seed, temperature=0.8, logprobs=2),
                    10,
                )
            )
            for seed in range(3)
        ]


def test_one_number_off_by_one_ulp_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    right = streams()
    row = FaultRow(memoryview(bytearray(8192)))
    row.write([Fault(0, "ulp")])
    monkeypatch.setattr(faults, "active", faults.Faults(row))
    wrong = streams()
    monkeypatch.undo()
    assert [r.outputs for r in streams()] == [r.outputs for r in right]
    assert [r.outputs for r in wrong] != [r.outputs for r in right]
    for one, other in zip(wrong, right, strict=True):
        assert one.logprobs[0] != other.logprobs[0]


def test_it_is_one_ulp_of_one_number() -> None:
    h = torch.tensor([[1.0, 2.0], [-0.5, 3.0]])
    assert nudge(h).tolist() == [[1.0078125, 2.0], [-0.50390625, 3.0]]
    assert h.tolist() == [[1.0, 2.0], [-0.5, 3.0]]
