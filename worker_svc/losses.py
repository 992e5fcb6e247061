"""What is left of a node's room when ranks fall: the lines of the memory plan that say so. Pure."""

from phalanx.worker_svc.model.layout import BLOCK_TOKENS


def loss_lines(
    ranks: int, experts: int, held: int, spare: int, room: int, num_blocks: int, num_seqs: int
) -> list[tuple[str, str]]:
    """For people, of a rank like all others.

    Args:
        experts: of a layer, routed.
        held: of them, the slots of this rank, spare ones included.
        spare: slots that are empty until experts move.
        room: slots of a layer that it has memory for, those that are held included.
        num_blocks: KV blocks of a rank, without the null block.
        num_seqs: sequences that a rank runs at a time.
    """
    room = min(max(room, held), experts)
    least = -(-experts // room)
    kept = f", {spare} of them spare" if spare else ""
    at_least = f"{least}, of {-(-experts // least)} slots each" if least > 1 else "1"
    return [
        ("expert slots of a layer", f"{held} for {experts} experts{kept}, room for {room}"),
        ("one rank lost", _left(ranks - 1, experts, room, num_blocks, num_seqs)),
        ("ranks at least", at_least),
    ]


def _left(ranks: int, experts: int, room: int, num_blocks: int, num_seqs: int) -> str:
    if not ranks:
        return "nothing: it is the only one"
    slots = -(-experts // ranks)
    if slots > room:
        return f"the node waits for it: {ranks} have room for {ranks * room} of {experts} experts"
    blocks, seqs = ranks * num_blocks, ranks * num_seqs
    return f"{blocks} KV blocks ({blocks * BLOCK_TOKENS} tokens), {seqs} sequences, {slots} slots a rank"
