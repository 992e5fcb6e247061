"""The forward pass computes what the reference implementation computed: whole, layer by layer from its
own recorded inputs, token by token, and greedily."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forward_world import DEVICE
from safetensors.torch import load_file
from torch import Tensor

from phalanx.kernels.reference.quant import (
    decode_compressed,
    decode_window,
    encode_compressed,
    encode_window,
)
from phalanx.worker_svc.model.attention import attention
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.golden import GoldenModel, load
from phalanx.worker_svc.model.sublayers import run_layer

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"
MANIFEST: dict[str, Any] = json.loads((TINY / "manifest.json").read_text())
TOLERANCES: dict[str, Any] = MANIFEST["tolerances"]
LAYER_PROMPTS = MANIFEST["intermediate_prompts"]


@pytest.fixture(scope="module")
def vectors() -> dict[str, Tensor]:
    return load_file(TINY / "expected.safetensors")


@pytest.fixture(scope="module")
def golden() -> GoldenModel:
    torch.set_num_threads(1)
    return load(str(TINY), str(DEVICE))


def difference(got: Tensor, expected: Tensor) -> float:
    """Relative distance over all rows; rows' infinities must agree."""
    got, expected = got.double().cpu(), expected.double()
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(got), finite)
    distance = torch.linalg.vector_norm((got - expected)[finite])
    return float(distance / torch.linalg.vector_norm(expected[finite]))


def assert_close(got: Tensor, expected: Tensor, limits: dict[str, float]) -> None:
    agree = (got.cpu().argmax(-1) == expected.argmax(-1)).double().mean()
    assert difference(got, expected) <= limits["rel_l2"]
    assert agree >= limits["argmax"]


@pytest.mark.parametrize("prompt", MANIFEST["prompts"])
def test_logits(golden: GoldenModel, vectors: dict[str, Tensor], prompt: str) -> None:
    got = torch.from_numpy(golden.logits(vectors[f"prompt.{prompt}.ids"].tolist()))
    limits = TOLERANCES["tiers"]["reference"][prompt]
    assert_close(got, vectors[f"prefill.{prompt}.logits"], limits)


@pytest.mark.parametrize("prompt", MANIFEST["decode"])
def test_logits_token_by_token(
    golden: GoldenModel, vectors: dict[str, Tensor], prompt: str
) -> None:
    ids = vectors[f"prompt.{prompt}.ids"].tolist()
    first = MANIFEST["decode"][prompt]["first_position"]
    rows = [step(golden, 0, ids[: first + 1])]
    rows += [step(golden, at, ids[at : at + 1]) for at in range(first + 1, len(ids))]
    limits = TOLERANCES["decode"][prompt]
    assert_close(torch.cat(rows), vectors[f"decode.{prompt}.logits"], limits)


def step(golden: GoldenModel, start: int, ids: list[int]) -> Tensor:
    """Logits of the last of these rows, which are kept."""
    rows = SequenceRows(0, start, ids, golden.blocks, logits=True)
    pending = golden.model.forward(StepBatch.of([rows]))
    pending.commit([len(ids)])
    return pending.logits


# A step counts where the reference's best two tokens lie further apart than this. Nothing between is smooth: one bit
# decides which entries and experts a row gets, and that what later rows see. In the reference's own arithmetic one bf16
# step in one dimension of every token's embedding moves this distance by up to 0.61, and all logits by 0.05 to 0.07 of
# their norm; adding in another order, as a GPU does, is as much.
SURE = 0.61


@pytest.mark.parametrize("prompt", MANIFEST["greedy"])
def test_greedy_tokens(golden: GoldenModel, vectors: dict[str, Tensor], prompt: str) -> None:
    """After each of the reference's tokens, the next one is the reference's, wherever that is sure."""
    ids = vectors[f"prompt.{prompt}.ids"].tolist()
    expected = vectors[f"greedy.{prompt}.tokens"].tolist()
    rows = [step(golden, 0, ids)]
    rows += [step(golden, len(ids) + i, [token]) for i, token in enumerate(expected[:-1])]
    got = torch.cat(rows).cpu()
    sure = vectors[f"greedy.{prompt}.margin"] > SURE
    assert sure.sum() >= 8
    assert torch.equal(got.argmax(1)[sure], torch.tensor(expected)[sure])
    limit = max(limits["rel_l2"] for limits in TOLERANCES["decode"].values())
    assert difference(got, vectors[f"greedy.{prompt}.logits"]) <= limit


# --- layer by layer ---------------------------------------------------------------------------------

Noted = dict[tuple[str, int], Tensor]


@pytest.fixture(scope="module", params=LAYER_PROMPTS)
def forced(
    golden: GoldenModel, vectors: dict[str, Tensor], request: pytest.FixtureRequest
) -> tuple[str, Noted]:
    """What each layer computes from the reference's input of that layer, cut to the real rows."""
    model, prompt = golden.model, request.param
    ids = vectors[f"prompt.{prompt}.ids"].tolist()
    noted: Noted = {}

    def observe(name: str, layer: int, value: Tensor) -> None:
        noted[name, layer] = value.cpu().clone()

    step = model.begin(StepBatch.of([SequenceRows(0, 0, ids, golden.blocks)]), observe)
    missing = step.rows.num_padded - len(ids)

    def recorded(layer: int, name: str) -> Tensor:
        value = vectors[f"inter.{prompt}.layers.{layer}.{name}"].float()
        return torch.cat((value, torch.zeros(missing, *value.shape[1:]))).to(DEVICE)

    h, pre = model.embed(step.rows.token_ids)
    for layer, weights in enumerate(model.layers):
        if layer:
            h, pre = recorded(layer - 1, "h_out"), recorded(layer - 1, "pre_mix_out")
        if weights.engram is not None:
            model.engram.apply(step, weights.engram, layer, h)
            h = recorded(layer, "engram_out")
        run_layer(step, attention, weights, model.experts, layer, h, pre)
    return prompt, noted


def pairs(
    forced: tuple[str, Noted], vectors: dict[str, Tensor], name: str
) -> list[tuple[Tensor, Tensor]]:
    """(ours, the reference's) of all layers that have such a value, cut to the reference's shape."""
    prompt, noted = forced
    found = []
    for (noted_name, layer), value in noted.items():
        expected = vectors.get(f"inter.{prompt}.layers.{layer}.{name}")
        if noted_name == name and expected is not None:
            cut = tuple(slice(0, size) for size in expected.shape)
            found.append((value[cut], expected))
    assert found
    return found


@pytest.mark.parametrize("name", ["engram_ids", "router_experts", "topk", "candidates"])
def test_choices_are_equal(
    forced: tuple[str, Noted], vectors: dict[str, Tensor], name: str
) -> None:
    for got, expected in pairs(forced, vectors, name):
        assert torch.equal(got.long(), expected.long())


@pytest.mark.parametrize("name", ["window_kv", "index_k", "compressed", "index_q", "index_score"])
def test_cache_rows_and_scores_are_equal(
    forced: tuple[str, Noted], vectors: dict[str, Tensor], name: str
) -> None:
    for got, expected in pairs(forced, vectors, name):
        assert torch.equal(got, expected.float())


@pytest.mark.parametrize("name", TOLERANCES["teacher_forced"]["limits"])
def test_layer_outputs(forced: tuple[str, Noted], vectors: dict[str, Tensor], name: str) -> None:
    limits = TOLERANCES["teacher_forced"]["limits"][name]
    distances = [difference(got, expected) for got, expected in pairs(forced, vectors, name)]
    assert max(distances) <= limits["max_over_layers_bf16_rounding_kept"]
    assert np.mean(distances) <= limits["mean_over_layers_bf16_rounding_kept"]


@pytest.mark.parametrize("prompt", LAYER_PROMPTS)
def test_records_hold_the_rounded_rows(vectors: dict[str, Tensor], prompt: str) -> None:
    """From the reference's rows before rounding to its rows after, through our bytes."""
    formats = (
        ("window_kv", encode_window, decode_window),
        ("compressed", encode_compressed, decode_compressed),
    )
    for name, encode, decode in formats:
        names = [
            n for n in vectors if n.startswith(f"inter.{prompt}") and n.endswith(f"{name}_pre")
        ]
        assert names
        for pre in names:
            got = decode(encode(vectors[pre]))
            assert torch.equal(got, vectors[pre.removesuffix("_pre")].float())


# --- drafts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", MANIFEST["draft"])
def test_drafts(golden: GoldenModel, vectors: dict[str, Tensor], context: str) -> None:
    ids = vectors[f"draft.{context}.ids"].tolist()
    anchor = int(vectors[f"draft.{context}.anchor"])
    own = int(step(golden, 0, ids).argmax())
    # Tensor cores add in another way, and two tokens may be nearly as likely.
    assert own == anchor or DEVICE.type == "cuda"
    assert golden.model.drafter is not None
    drafts = golden.model.drafter.propose(
        np.array([0]), np.array([len(ids)]), np.array([anchor]), np.array([0]), greedy
    )
    limits = TOLERANCES["draft"][context]
    assert (
        difference(drafts.base_logits[0], vectors[f"draft.{context}.base_logits"])
        <= limits["base_rel_l2"]
    )
    confidence = (drafts.confidences[0].cpu() - vectors[f"draft.{context}.confidence"]).abs().max()
    assert confidence <= limits["confidence_max_abs"]
    same = (drafts.tokens[0].cpu() == vectors[f"draft.{context}.tokens"]).long().cumprod(0).sum()
    assert same >= limits["min_tokens_same_over_variants"]


def greedy(index: int, logits: Tensor) -> Tensor:
    return logits.argmax(-1)
