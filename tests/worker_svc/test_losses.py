"""The memory plan says what is left when ranks fall."""

from phalanx.worker_svc.losses import loss_lines


def test_what_is_left_after_a_loss() -> None:
    lines = dict(loss_lines(4, 384, 129, 1, 130, 1000, 64))
    assert lines["expert slots of a layer"] == "129 for 384 experts, 1 of them spare, room for 130"
    assert (
        lines["one rank lost"] == "3000 KV blocks (384000 tokens), 192 sequences, 128 slots a rank"
    )
    assert lines["ranks at least"] == "3, of 128 slots each"


def test_no_room_for_a_loss() -> None:
    lines = dict(loss_lines(4, 384, 96, 0, 100, 1000, 64))
    assert lines["expert slots of a layer"] == "96 for 384 experts, room for 100"
    assert lines["one rank lost"] == "the node waits for it: 3 have room for 300 of 384 experts"
    assert lines["ranks at least"] == "4, of 96 slots each"


def test_alone_and_with_room_for_all() -> None:
    assert dict(loss_lines(1, 8, 8, 0, 8, 10, 2))["one rank lost"] == "nothing: it is the only one"
    assert dict(loss_lines(3, 8, 4, 0, 99, 10, 2))["ranks at least"] == "1"
