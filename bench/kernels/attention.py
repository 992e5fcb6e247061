"""Attention over cache records at the model's shapes, decode and prefill, against plain torch.

A row reads 128 window records and 512 entries, and multiplies 64 heads with 640 vectors of 512
dimensions twice. The alternative gathers and dequantizes what a row sees and multiplies with cuBLAS.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from phalanx.bench.kernels.harness import Ceilings, Figure, rotating, time_us
from phalanx.kernels.triton.attention import block_attention, sparse_attention

HEADS: Final = 64
DIM: Final = 512
WINDOW: Final = 128
TOPK: Final = 512
RING: Final = 134
ENTRIES: Final = 64  # of a block
CONTEXT: Final = 8192  # entries that a row chooses from
BLOCK: Final = 5  # rows of a draft block

DECODE_ROWS: Final = (1, 16, 64, 256)
PREFILL_ROWS: Final = 4096
_DECODE_GOAL: Final = 0.6
_PREFILL_GOAL: Final = 0.6
_ALTERNATIVE_ROWS: Final = 512  # whose dequantized vectors torch holds at a time
_WINDOW_RECORD: Final = DIM + DIM // 32
_ENTRY_RECORD: Final = DIM // 2 + DIM // 16


@dataclass(frozen=True)
class Step:
    """Rows of a step: sequences of one row each, or one sequence of many."""

    queries: Tensor
    records: Tensor
    ring: Tensor
    slots: Tensor
    positions: Tensor
    within: Tensor
    window_from: Tensor
    sink: Tensor
    compressed: Tensor
    table: Tensor
    seqs: Tensor
    chosen: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def draw(cls, num_rows: int, num_seqs: int) -> "Step":
        g = torch.Generator("cuda").manual_seed(num_rows)
        per_seq = num_rows // num_seqs
        row = torch.arange(num_rows, device="cuda")
        within = row % per_seq
        blocks = CONTEXT // ENTRIES
        order = torch.randperm(num_seqs * blocks, generator=g, device="cuda")
        some = torch.rand((num_rows, CONTEXT), generator=g, device="cuda")
        return cls(
            queries=torch.randn((num_rows, HEADS, DIM), generator=g, device="cuda").bfloat16(),
            records=_window_records(g, num_rows),
            ring=_window_records(g, num_seqs, RING),
            slots=row // per_seq,
            positions=within + 2 * CONTEXT,
            within=within,
            window_from=torch.zeros_like(row),
            sink=torch.zeros(HEADS, device="cuda"),
            compressed=_entry_records(g, 1 + num_seqs * blocks),
            table=1 + order.view(num_seqs, blocks),
            seqs=row // per_seq,
            chosen=some.topk(TOPK).indices.sort().values,
            cos=torch.ones((num_rows, 64), device="cuda"),
            sin=torch.zeros((num_rows, 64), device="cuda"),
        )

    @property
    def floor_bytes(self) -> float:
        """Records, queries and results once each; a prompt's rows share what they see."""
        rows, seqs = len(self.queries), len(self.table)
        window = min(rows * WINDOW, rows + seqs * WINDOW)
        entries = min(rows * TOPK, seqs * CONTEXT)
        return window * _WINDOW_RECORD + entries * _ENTRY_RECORD + 2 * 2 * rows * HEADS * DIM

    def attend(self) -> Tensor:
        return sparse_attention(
            self.queries, self.records, self.ring, self.slots, self.positions, self.within,
            self.window_from, WINDOW, self.sink, DIM**-0.5, self.compressed,
            (self.table, self.seqs), self.chosen, self.cos, self.sin, torch.bfloat16,
        )  # fmt: skip

    def attend_block(self) -> Tensor:
        return block_attention(
            self.queries, self.records, self.ring, self.slots, self.positions, self.within,
            BLOCK, WINDOW, self.sink, DIM**-0.5, self.cos, self.sin, torch.bfloat16,
        )  # fmt: skip

    def attend_torch(self) -> None:
        """The same, but for the rotation."""
        num_rows = len(self.queries)
        for start in range(0, num_rows, _ALTERNATIVE_ROWS):
            part = slice(start, start + _ALTERNATIVE_ROWS)
            back = torch.arange(WINDOW - 1, -1, -1, device="cuda")
            at = self.positions[part, None] - back
            row = torch.arange(num_rows, device="cuda")[part, None] - back
            near = (back <= self.within[part, None])[..., None]
            ring = self.ring[self.slots[part, None], at % RING]
            window = torch.where(near, self.records[row.clamp(min=0)], ring)
            chosen = self.chosen[part]
            block = self.table[self.seqs[part]].gather(1, chosen // ENTRIES)
            entries = self.compressed[block, chosen % ENTRIES]
            vectors = torch.cat((_decode_window(window), _decode_entries(entries)), dim=1)
            queries = self.queries[part]
            scores = torch.bmm(queries, vectors.transpose(1, 2)).float() * DIM**-0.5
            sink = self.sink[:, None].expand(len(queries), HEADS, 1)
            shares = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)
            torch.bmm(shares[..., :-1].bfloat16(), vectors)


def _window_records(g: torch.Generator, *shape: int) -> Tensor:
    records = torch.randint(
        0, 120, (*shape, _WINDOW_RECORD), generator=g, device="cuda", dtype=torch.uint8
    )
    records[..., :DIM] += 128 * (records[..., :DIM] % 2)  # signs
    records[..., DIM:] = 120
    return records


def _entry_records(g: torch.Generator, num_blocks: int) -> Tensor:
    shape = (num_blocks, ENTRIES, _ENTRY_RECORD)
    records = torch.randint(0, 256, shape, generator=g, device="cuda", dtype=torch.uint8)
    records[..., DIM // 2 :] = 40 + records[..., DIM // 2 :] % 8
    return records


def _decode_window(records: Tensor) -> Tensor:
    values = records[..., :DIM].view(torch.float8_e4m3fn).bfloat16()
    scales = records[..., DIM:].view(torch.float8_e8m0fnu).bfloat16()
    return (values.view(*scales.shape, 32) * scales[..., None]).flatten(-2)


def _decode_entries(records: Tensor) -> Tensor:
    code = records[..., : DIM // 2]
    code = torch.stack((code & 15, code >> 4), dim=-1).flatten(-2)
    # What e2m1 lacks of e4m3 is two bits of exponent and two of mantissa: the values are times 2^-6.
    values = ((code & 8) << 4 | (code & 7) << 2).view(torch.float8_e4m3fn).bfloat16() * 2.0**6
    scales = records[..., DIM // 2 :].view(torch.float8_e4m3fn).bfloat16()
    return (values.view(*scales.shape, 16) * scales[..., None]).flatten(-2)


def figures(limits: Ceilings) -> list[Figure]:
    """Decode, prefill and draft blocks: about 5 s and 6 GB."""
    made = [
        _figure(limits, f"decode {rows} rows", rows, rows, _DECODE_GOAL) for rows in DECODE_ROWS
    ]
    made.append(_figure(limits, f"prefill {PREFILL_ROWS} rows", PREFILL_ROWS, 1, _PREFILL_GOAL))
    return [*made, _block_figure(limits)]


def _figure(limits: Ceilings, name: str, rows: int, seqs: int, goal: float) -> Figure:
    steps = _steps(rows, seqs)
    return Figure(
        kernel="sparse_attention",
        shape=name,
        us=time_us(rotating([step.attend for step in steps])) / len(steps),
        limit=limits.limit(steps[0].floor_bytes, _flops(rows, WINDOW + TOPK)),
        goal=goal,
        alternative="torch",
        alternative_us=time_us(steps[0].attend_torch),
    )


def _block_figure(limits: Ceilings) -> Figure:
    rows = 64 * BLOCK
    step = Step.draw(rows, 64)
    records = (64 * WINDOW + rows) * _WINDOW_RECORD
    return Figure(
        kernel="block_attention",
        shape=f"64 blocks of {BLOCK} rows",
        us=time_us(step.attend_block),
        limit=limits.limit(records + 2 * 2 * rows * HEADS * DIM, _flops(rows, WINDOW + BLOCK)),
    )


def _flops(rows: int, slots: int) -> float:
    return 2.0 * 2 * rows * HEADS * slots * DIM


def _steps(rows: int, seqs: int) -> list[Step]:
    return [Step.draw(rows, seqs) for _ in range(4 if rows <= 64 else 1)]
