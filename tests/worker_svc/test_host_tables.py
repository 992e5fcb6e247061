"""Rows that the host picks are the table's, however many threads pick them."""

import pytest
import torch

from phalanx.worker_svc.model.host_tables import PickedRows


@pytest.mark.parametrize("count", [1, 255, 256, 1537, 5000])
@pytest.mark.parametrize("inference", [False, True])
def test_picked_rows_are_those_of_the_table(count: int, inference: bool) -> None:
    codes = torch.randint(0, 256, (997, 64), dtype=torch.uint8)
    scales = torch.randint(0, 256, (997, 2), dtype=torch.uint8)
    with torch.inference_mode(inference):
        rows = PickedRows(codes.view(torch.float8_e4m3fn), scales, count, pinned=False)
        for _ in range(2):
            ids = torch.randint(0, 997, (count,))
            rows.pick(ids)
            assert torch.equal(rows.codes, codes[ids]) and torch.equal(rows.scales, scales[ids])
