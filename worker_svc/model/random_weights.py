"""Random weights that behave: varied tokens, every branch used, little noise between variants.

Plain Gaussian weights make a chaotic network whose output is one noise amplified. These keep the
proportions of trained ones (model.md F): layer outputs small beside the stream; embeddings with
a common direction and clusters; a router that prefers experts by cluster; experts that share half
of their weights; index projections that follow the attention's. The output matrix gives every token
a few likely successors, which the draft's Markov matrices know too, so that some drafts pass.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.tensors import tensor_specs

Floats = npt.NDArray[np.float32]

_CLUSTERS: Final = 8
_EMBED_RMS: Final = 0.12
# Shares of an embedding's energy; the rest is the token's own direction.
_COMMON: Final = 0.15
_CLUSTER: Final = 0.15
# How strongly a token pulls each of its successors.
_SUCCESSORS: Final = (1.0, 0.7, 0.5)
_HEAD_NOISE: Final = 0.1  # share of an output row's energy that is its own
_HEAD_GAIN: Final = 3.0
_MARKOV_GAIN: Final = 8.0
_ENGRAM_RMS: Final = 0.08

# Row gains of linears: standard deviation times sqrt(inputs).
_GAINS: Final = {
    "wq_a": 1.6,
    "wq_b": 2.5,
    "wkv": 1.8,
    "wo_a": 1.6,
    "wo_b": 0.08,
    "w1": 1.5,
    "w3": 1.5,
    "w2": 0.06,
    "wgate": 40.0,  # its input is as small as attn_norm makes it
    "main_proj": 1.0,
    "proj": 1.0,
}
_DRAFT_GAINS: Final = _GAINS | {"wq_b": 4.0, "wo_b": 0.4, "w2": 0.08}
_NORMS: Final = {
    "attn_norm": 0.025,
    "ffn_norm": 0.5,
    "q_norm": 0.97,
    "kv_norm": 0.4,
    "k_norm": 0.5,
    "compressor.norm": 0.6,
}


def _f32(values: npt.ArrayLike) -> Floats:
    return np.asarray(values, np.float32)


def _rng(seed: int, name: str) -> np.random.Generator:
    """A stream of its own for every name: adding a tensor changes no other."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


class RandomWeights:
    """Tensors by name (without .weight), each a function of (seed, name, configuration) alone."""

    def __init__(self, config: ModelConfig, seed: int, writable: Sequence[bool]) -> None:
        """`writable[token]`: whether the model may say the token at all."""
        self._config = config
        self._seed = seed
        self._writable = np.asarray(writable)
        self._shapes = {
            name.removesuffix(".weight"): spec.shape for name, spec in tensor_specs(config).items()
        }
        dim = config.hidden_size
        self._common = self._unit_rms("common", (dim,))
        self._centres = self._unit_rms("centres", (_CLUSTERS, dim))
        self._own = self._unit_rms("own", (config.vocab_size, dim))

    def __call__(self, name: str) -> Floats:
        """The tensor in float32, [out, in] for linears."""
        makers: dict[str, Callable[[], Floats]] = {
            "embed": self._embed,
            "head": self._head,
            "markov_head.embed": self._markov_embed,
            "markov_head.head": self._markov_head,
        }
        for suffix, make in makers.items():
            if name == suffix or name.endswith(f".{suffix}") and suffix.startswith("markov"):
                return make()
        return self._layer_tensor(name)

    def _normal(self, name: str, shape: tuple[int, ...]) -> Floats:
        return _rng(self._seed, name).standard_normal(shape, dtype=np.float32)

    def _unit_rms(self, name: str, shape: tuple[int, ...]) -> Floats:
        drawn = self._normal(name, shape)
        return _f32(drawn / np.sqrt(np.mean(drawn**2, axis=-1, keepdims=True)))

    # --- tokens ---

    def _embed(self) -> Floats:
        tokens = np.arange(self._config.vocab_size)
        own = np.sqrt(1 - _COMMON - _CLUSTER) * self._own
        shared = (
            np.sqrt(_COMMON) * self._common + np.sqrt(_CLUSTER) * self._centres[tokens % _CLUSTERS]
        )
        return _f32(_EMBED_RMS * (own + shared))

    def _mixed_successors(self, own: Floats) -> Floats:
        """Row w: what the tokens before w look like, scaled to unit RMS in expectation."""
        says = np.flatnonzero(self._writable)
        rows = np.zeros_like(own)
        for turn, pull in enumerate(_SUCCESSORS):
            order = _rng(self._seed, f"successors.{turn}").permutation(len(says))
            rows[says] += np.float32(pull) * own[says[order]]
        return _f32(rows / np.sqrt(np.sum(np.square(_SUCCESSORS))))

    def _head(self) -> Floats:
        dim = self._config.hidden_size
        noise = self._unit_rms("head", self._own.shape)
        rows = np.sqrt(1 - _HEAD_NOISE) * self._mixed_successors(self._own)
        rows += np.sqrt(_HEAD_NOISE) * noise
        # The stream always holds the common direction, so these tokens are never near the top.
        rows[~self._writable] = -2.0 * self._common
        return _f32(_HEAD_GAIN / np.sqrt(dim) * rows)

    def _markov_embed(self) -> Floats:
        return self._own[:, : self._config.dspark_markov_rank]

    def _markov_head(self) -> Floats:
        rank = self._config.dspark_markov_rank
        rows = self._mixed_successors(self._own)[:, :rank]
        return _f32(_MARKOV_GAIN / np.sqrt(rank) * rows)

    # --- layers ---

    def _layer_tensor(self, name: str) -> Floats:
        shape = self._shapes[name]
        leaf = name.rsplit(".", 1)[-1]
        if ".indexer." in name:
            return self._indexer(name, leaf)
        if ".engram." in name:
            return self._engram(name, leaf, shape)
        if leaf.startswith("hc_"):
            return self._mhc(name, leaf, shape)
        if ".ffn.gate" in name:
            return self._gate(name, leaf, shape)
        if ".experts." in name:
            return self._expert(name, leaf)
        if leaf == "attn_sink":
            return _f32(0.5 + 0.5 * self._normal(name, shape))
        if len(shape) == 1:
            mean = next((gain for suffix, gain in _NORMS.items() if name.endswith(suffix)), 1.0)
            return _f32(mean * (1 + 0.1 * self._normal(name, shape)))
        return self._linear(name, leaf, shape)

    def _linear(self, name: str, leaf: str, shape: tuple[int, ...]) -> Floats:
        gains = _DRAFT_GAINS if name.startswith("mtp.") else _GAINS
        return _f32(gains[leaf] / np.sqrt(shape[-1]) * self._normal(name, shape))

    def _expert(self, name: str, leaf: str) -> Floats:
        """Half of the energy is common to all experts of the layer: a changed pick changes less."""
        layer = name.split(".experts.")[0]
        shape = self._float_shape(name)
        common = self._linear(f"{layer}.all.{leaf}", leaf, shape)
        return _f32(np.sqrt(0.5) * (common + self._linear(name, leaf, shape)))

    def _float_shape(self, name: str) -> tuple[int, ...]:
        rows, packed = self._shapes[name]
        return rows, 2 * packed

    def _gate(self, name: str, leaf: str, shape: tuple[int, ...]) -> Floats:
        if leaf == "bias":
            return _f32(0.1 * self._normal(name, shape))
        if leaf == "bias_vl":
            return _f32(0.5 * self._normal(name, shape))
        # Each expert prefers one cluster of its layer's own order, so that layers differ in load.
        order = _rng(self._seed, f"{name}.order").permutation(_CLUSTERS)
        liked = self._centres[order[np.arange(shape[0]) % _CLUSTERS]]
        rows = np.sqrt(0.5) * liked + np.sqrt(0.5) * self._normal(name, shape)
        return _f32(1.8 / np.sqrt(shape[-1]) * rows)

    def _mhc(self, name: str, leaf: str, shape: tuple[int, ...]) -> Floats:
        drawn = self._normal(name, shape)
        if leaf.endswith("_fn"):
            return _f32(drawn / np.sqrt(shape[-1]))
        if leaf.endswith("_scale"):
            return _f32(0.5 + 0.1 * drawn)
        return drawn

    def _indexer(self, name: str, leaf: str) -> Floats:
        shape = self._shapes[name]
        layer = name.split(".indexer.")[0]
        if leaf == "k_norm":
            return _f32(0.5 * (1 + 0.1 * self._normal(name, shape)))
        if leaf == "wk":
            return _f32(np.eye(shape[0], shape[1]) + 0.02 * self._normal(name, shape))
        if leaf == "weights_proj":
            drawn = self._common + self._normal(name, shape)
            return _f32(drawn / np.sqrt(shape[-1]))
        heads = self._layer_tensor(f"{layer}.wq_b")
        own = 0.5 / np.sqrt(shape[-1]) * self._normal(name, shape)
        return _f32(np.resize(heads, shape) + own)

    def _engram(self, name: str, leaf: str, shape: tuple[int, ...]) -> Floats:
        drawn = self._normal(name, shape)
        if leaf == "embed":
            return _f32(_ENGRAM_RMS * drawn)
        if leaf == "wkv":
            return _f32(1.5 / np.sqrt(shape[-1]) * drawn)
        return _f32(1 + 0.3 * drawn)
