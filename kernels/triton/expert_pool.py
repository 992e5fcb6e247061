"""The routed experts of one layer on one GPU, repacked at load so that unpacking is cheap.

A matrix [o, i] of e2m1 codes becomes tiles of 64 rows by 128 columns, one tile after the other along
a row of tiles: a K step of a kernel reads whole lines of memory. In a tile a row is 32 words of 16
bits and one word of 32 bits with its four scales. Word c holds the codes of the columns c, 32 + c,
64 + c and 96 + c, so that each of the four shares one scale across all words, and a matrix product
over 32 neighbouring columns unpacks the same place of each word. Two words side by side in a
register are unpacked by one instruction: the bits of a code lie so that a shift and a mask bring
its sign to the sign of a bf16 and its exponent and mantissa to the lowest exponent bits and the
highest mantissa bit. Read as bf16 that is the value times 2^-126, the subnormal code 0.5 included;
one product with a power of two removes the factor and applies the scale.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

ROWS: Final = 64  # of a tile
COLUMNS: Final = 128  # of a tile: four scales
GROUP: Final = 32  # columns of one scale

# Where the sign and the three lower bits of each of a word's four codes go.
_SIGNS: Final = (15, 14, 9, 12)
_LOWER: Final = ((8, 7, 6), (13, 11, 10), (2, 1, 0), (5, 4, 3))

# A scale byte b (2^(b - 127)) is kept as b + 126: the exponent field of the bf16 2^(b - 127 + 126).
_BIAS: Final = 126
_LARGEST: Final = 128  # the largest b for which that field is a number


@dataclass
class ExpertPool:
    """Slots of packed experts. A slot that was never filled multiplies by unspecified numbers.

    Exact for every scale byte of a matrix up to 128 (scale 2, weights up to 12). Where a larger one
    occurs, the bytes of the whole matrix are lowered together and the product is raised by the same
    power of two, exact as well; scales less than 2^-128 times the largest are then raised to that.
    """

    up: Tensor  # int16 [slots, 2 (gate, up), inter / 64, hidden / 128, 64, 32]
    up_scales: Tensor  # int32 [slots, 2, inter / 64, hidden / 128, 64]
    down: Tensor  # int16 [slots, hidden / 64, inter / 128, 64, 32]
    down_scales: Tensor  # int32 [slots, hidden / 64, inter / 128, 64]
    raised: Tensor  # float32 [slots, 3 (gate, up, down)], powers of two
    hidden: int
    inter: int

    @classmethod
    def empty(
        cls, num_slots: int, hidden: int, inter: int, device: torch.device | str
    ) -> "ExpertPool":
        """Room for experts with matrices [inter, hidden] twice and [hidden, inter].

        Raises:
            ValueError: A dimension is no multiple of 32.
        """
        if hidden % GROUP or inter % GROUP:
            raise ValueError(f"experts of {hidden} x {inter}: both must be multiples of {GROUP}")
        up, down = _tiles(inter, hidden), _tiles(hidden, inter)

        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((num_slots, *shape), dtype=dtype, device=device)

        return cls(
            up=room(2, *up, ROWS, GROUP, dtype=torch.int16),
            up_scales=room(2, *up, ROWS, dtype=torch.int32),
            down=room(*down, ROWS, GROUP, dtype=torch.int16),
            down_scales=room(*down, ROWS, dtype=torch.int32),
            raised=room(3, dtype=torch.float32),
            hidden=hidden,
            inter=inter,
        )

    @staticmethod
    def num_bytes(num_slots: int, hidden: int, inter: int) -> int:
        """What `empty` allocates: as stored, where both dimensions are multiples of 128."""
        (a, b), (c, d) = _tiles(inter, hidden), _tiles(hidden, inter)
        per_tile = ROWS * (COLUMNS // 2 + COLUMNS // GROUP)
        return num_slots * ((2 * a * b + c * d) * per_tile + 3 * 4)

    @property
    def is_cuda(self) -> bool:
        return self.up.is_cuda

    @property
    def num_slots(self) -> int:
        return self.up.shape[0]

    def put(
        self, slot: int, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, w2: Tensor, s2: Tensor
    ) -> None:
        """Fill a slot. Runs where the pool is, ordered with other work on the current stream.

        Args:
            w1, w3: gate and up, int8 or uint8 [inter, hidden / 2] as stored (model.md B, "FP4").
            w2: down, int8 or uint8 [hidden, inter / 2].
            s1, s3, s2: ue8m0 as uint8, [inter, hidden / 32] twice and [hidden, inter / 32].
        """
        for index, (weight, scale) in enumerate(((w1, s1), (w3, s3), (w2, s2))):
            words, scales, raised = pack(weight.to(self.up.device), scale.to(self.up.device))
            if index < 2:
                self.up[slot, index], self.up_scales[slot, index] = words, scales
            else:
                self.down[slot], self.down_scales[slot] = words, scales
            self.raised[slot, index] = raised

    def holds(self, slot: int, part: int, codes: Tensor, scales: Tensor) -> bool:
        """Whether gate, up or down (part 0, 1 or 2) of a slot is, bit for bit, what `put` makes of these."""
        words, packed, raised = pack(codes, scales)
        held = (
            (self.up[slot, part], self.up_scales[slot, part])
            if part < 2
            else (self.down[slot], self.down_scales[slot])
        )
        same = torch.equal(held[0], words) and torch.equal(held[1], packed)
        return same and torch.equal(self.raised[slot, part], raised)

    def flip_bit(self, slot: int) -> None:
        """Make one bit of a slot wrong: for faults on purpose."""
        self.down[slot].view(-1)[0] ^= 1

    def widen(self, num_slots: int) -> None:
        """More slots, at least as many as there are; the old ones keep their contents.

        The tensors move: no CUDA graph captured before may be replayed after.
        """
        if num_slots < self.num_slots:
            raise ValueError(f"{num_slots} slots are fewer than {self.num_slots}")
        wide = self.empty(num_slots, self.hidden, self.inter, self.up.device)
        for name in ("up", "up_scales", "down", "down_scales", "raised"):
            old, new = getattr(self, name), getattr(wide, name)
            new[: len(old)] = old
            setattr(self, name, new)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // ROWS), -(-columns // COLUMNS)


def pack(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One matrix as tiles.

    Args:
        weight: int8 or uint8 [o, i / 2], as stored.
        scale: uint8 [o, i / 32], ue8m0.

    Returns:
        Words int16 [o / 64, i / 128, 64, 32], scales int32 [o / 64, i / 128, 64], and the power of
        two by which the product is to be raised, float32 []. The last tiles are filled with zeros.
    """
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    down, across = _tiles(rows, columns)
    fill = down * ROWS - rows, across * COLUMNS - columns
    codes = torch.nn.functional.pad(weight.view(torch.uint8), (0, fill[1] // 2, 0, fill[0])).int()
    codes = torch.stack((codes & 15, codes >> 4), dim=-1)  # the low nibble is the even column
    codes = codes.view(down, ROWS, across, COLUMNS // GROUP, GROUP).transpose(1, 2)
    words = torch.zeros_like(codes[..., 0, :])
    for place, (sign, lower) in enumerate(zip(_SIGNS, _LOWER, strict=True)):
        code = codes[..., place, :]
        words |= (code >> 3) << sign
        for bit, target in zip((2, 1, 0), lower, strict=True):
            words |= (code >> bit & 1) << target
    scales = scale.view(torch.uint8).int()
    excess = (scales.amax() - _LARGEST).clamp(min=0)
    scales = (scales - excess).clamp_(min=0) + _BIAS
    scales = torch.nn.functional.pad(scales, (0, fill[1] // GROUP, 0, fill[0]), value=_BIAS)
    scales = scales.view(down, ROWS, across, COLUMNS // GROUP).transpose(1, 2).contiguous()
    packed = scales.to(torch.uint8).view(torch.int32).squeeze(-1)
    return words.to(torch.int16), packed, torch.exp2(excess.float())
