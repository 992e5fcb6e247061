"""Which models the kernels of a GPU are made for: those of DeepSeek-V4.1's kind, in any size."""

from phalanx.worker_svc.model.config import ModelConfig


def unsuited(config: ModelConfig) -> str:
    """Why the kernels cannot run this model, with its numbers and what to do; empty if they can."""
    wanted = {
        "hc_mult": (config.hc_mult, config.hc_mult == 4, "4"),
        "head_dim": (config.head_dim, _doubled(config.head_dim, 64), "a power of two from 64 on"),
        "qk_rope_head_dim": (
            config.qk_rope_head_dim,
            _doubled(config.qk_rope_head_dim, 2),
            "a power of two",
        ),
        "index_head_dim": (
            config.index_head_dim,
            config.index_head_dim in (64, 128),
            "64 or 128",
        ),
    }
    found = [
        f"{name} is {is_} and must be {must}" for name, (is_, ok, must) in wanted.items() if not ok
    ]
    if not found:
        return ""
    return (
        f"the GPU's kernels are not made for this model: {'; '.join(found)}. Set worker.kernels to"
        " 'reference', which is slow, or use --device cpu"
    )


def _doubled(number: int, least: int) -> bool:
    return number >= least and number & (number - 1) == 0
