"""Routed experts that stay packed, on any device: what a kernel for them must compute (model.md C.7)."""

import torch
from torch import Tensor

from phalanx.kernels.reference.quant import GROUP, dequant_fp4, q8_roundtrip
from phalanx.kernels.reference.rows import matmul_rows, round_bf16
from phalanx.kernels.reference.swiglu import swiglu


class ExpertPool:
    """The expert slots of one layer, as the checkpoint stores them.

    Attributes:
        num_slots: slots there are.
    """

    def __init__(self, num_slots: int, hidden: int, inter: int, device: torch.device) -> None:
        self._shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
        self._codes = [
            _zeros(num_slots, o, i // 2, device).view(torch.int8) for o, i in self._shapes
        ]
        self._scales = [_zeros(num_slots, o, i // GROUP, device) for o, i in self._shapes]

    @classmethod
    def empty(cls, num_slots: int, hidden: int, inter: int, device: torch.device) -> "ExpertPool":
        """Slots that hold nothing yet."""
        return cls(num_slots, hidden, inter, device)

    @property
    def num_slots(self) -> int:
        return self._codes[0].shape[0]

    @property
    def is_cuda(self) -> bool:
        return self._codes[0].is_cuda

    def put(
        self, slot: int, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, w2: Tensor, s2: Tensor
    ) -> None:
        """Fill a slot: codes int8 [out, in/2] and ue8m0 uint8 [out, in/32] of gate, up and down."""
        for part, (codes, scales) in enumerate(((w1, s1), (w3, s3), (w2, s2))):
            self._codes[part][slot].copy_(codes)
            self._scales[part][slot].copy_(scales)

    def holds(self, slot: int, part: int, codes: Tensor, scales: Tensor) -> bool:
        """Whether gate, up or down (part 0, 1 or 2) of a slot is what `put` makes of these."""
        return torch.equal(self._codes[part][slot], codes.view(torch.int8)) and torch.equal(
            self._scales[part][slot], scales
        )

    def flip_bit(self, slot: int) -> None:
        """Make one bit of a slot wrong: for faults on purpose."""
        self._codes[2][slot].view(-1)[0] ^= 1

    def widen(self, num_slots: int) -> None:
        """Make room for more experts: of all parts, or of none where there is no memory."""

        def wider(stack: Tensor) -> Tensor:
            return torch.cat((stack, stack.new_zeros((num_slots - len(stack), *stack.shape[1:]))))

        codes, scales = list(map(wider, self._codes)), list(map(wider, self._scales))
        self._codes, self._scales = codes, scales

    def matrix(self, part: int, slot: int) -> Tensor:
        """Gate, up or down (0, 1, 2) of a slot: float32 [out, in]."""
        return dequant_fp4(self._codes[part][slot], self._scales[part][slot])


def _zeros(slots: int, out: int, columns: int, device: torch.device) -> Tensor:
    return torch.zeros((slots, out, columns), dtype=torch.uint8, device=device)


def run_experts(
    pool: ExpertPool, slot_ids: Tensor, x_rows: Tensor, pair_weights: Tensor, limit: float
) -> Tensor:
    """Run (row, expert) pairs; a pair's result does not depend on the other pairs.

    Args:
        slot_ids: int64 [P]. A pair with any other number than that of a slot is multiplied by nothing;
            its result is zeros.
        x_rows: bf16 [P, D], already through Q8.
        pair_weights: float32 [P], routing weights; they enter before the down projection.
        limit: of the activation's clamp.

    Returns:
        bf16 [P, D].
    """
    out = torch.zeros_like(x_rows)
    for slot in set(slot_ids.tolist()) & set(range(pool.num_slots)):
        (pairs,) = torch.nonzero(slot_ids == slot, as_tuple=True)
        x = x_rows[pairs].float()
        gate, up = (round_bf16(matmul_rows(x, pool.matrix(part, slot))) for part in (0, 1))
        a = q8_roundtrip(swiglu(gate, up, limit, pair_weights[pairs]))
        out[pairs] = matmul_rows(a, pool.matrix(2, slot)).bfloat16()
    return out


def add_picks(shared: Tensor, routed: Tensor) -> Tensor:
    """The sublayer's result: the shared expert first, then the picks in their order, in float32.

    Args:
        shared: bf16 values [R, D].
        routed: bf16 values [R, k, D].

    Returns:
        bf16 values as float32 [R, D].
    """
    total = shared
    for pick in range(routed.shape[1]):
        total = total + routed[:, pick].float()
    return round_bf16(total)
