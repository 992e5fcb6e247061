"""What vLLM's scheduler takes for the same course: a script for an interpreter that has vLLM.

`python scheduler_vllm.py CASES` with CASES as JSON: `{"cases": [{"running", "drafts", "churn"}], "steps",
"warm_up", "prompt_tokens", "accepted", "stop_id"}`. Prints one JSON document. It imports nothing of ours,
and no model is run: the answers are made up outside of what is timed.
"""

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 128  # tokens, as ours
MODEL_LEN = 16384
MODEL = {  # a few numbers that ModelConfig asks for
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": MODEL_LEN,
    "torch_dtype": "bfloat16",
}


def scheduler(running: int, drafts: int) -> Scheduler:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=MODEL_LEN,
        )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks = 2 * running * (2 + MODEL_LEN // BLOCK)
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=4,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=max(MODEL_LEN, 16 * running),
            max_model_len=MODEL_LEN,
            enable_chunked_prefill=True,
            async_scheduling=False,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        speculative_config=speculative,
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        block_size=BLOCK,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )


class Course:
    """A full scheduler, and a model that accepts drafts in turn and ends sequences where it should."""

    def __init__(self, asked: dict[str, Any], running: int, drafts: int, churn: float) -> None:
        self._asked, self._drafts, self._churn = asked, drafts, churn * running
        self._leaving, self._submitted = 0.0, 0
        self.scheduler = scheduler(running, drafts)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        for _ in range(running):
            self.scheduler.add_request(self._new())

    def _new(self) -> Request:
        sampling = SamplingParams(
            max_tokens=MODEL_LEN // 2, stop_token_ids=[self._asked["stop_id"]]
        )
        sampling.update_from_generation_config({}, 1)
        number = self._submitted
        self._submitted += 1
        return Request(
            request_id=f"{number:032x}",
            prompt_token_ids=[3 + number % 4000, *range(3, 2 + self._asked["prompt_tokens"])],
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def measure(self) -> dict[str, float]:
        spent: list[int] = []
        busy: list[int] = []
        intake: list[int] = []
        gc.collect()
        gc.freeze()
        gc.disable()  # its engine freezes and collects outside of steps, too
        warm_up = self._asked["warm_up"]
        for at in range(self._asked["steps"] + warm_up):
            began, cpu = time.perf_counter_ns(), time.thread_time_ns()
            plan = self.scheduler.schedule()
            wall_ns, cpu_ns = time.perf_counter_ns() - began, time.thread_time_ns() - cpu
            ids = list(plan.num_scheduled_tokens)
            answer = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: place for place, name in enumerate(ids)},
                sampled_token_ids=self._answer(plan, ids, at),
            )
            drafts = DraftTokenIds(ids, [[7] * self._drafts for _ in ids])
            began, cpu = time.perf_counter_ns(), time.thread_time_ns()
            self.scheduler.update_from_output(plan, answer)
            if self._drafts:
                self.scheduler.update_draft_token_ids(drafts)
            spent.append(wall_ns + time.perf_counter_ns() - began)
            busy.append(cpu_ns + time.thread_time_ns() - cpu)
            if at % 64 == 0:
                gc.collect(1)
            gone = len(ids) - len(self.scheduler.running)
            fresh = [self._new() for _ in range(gone)]
            began = time.perf_counter_ns()
            for request in fresh:
                self.scheduler.add_request(request)
            intake.append(time.perf_counter_ns() - began)
        gc.enable()
        gc.unfreeze()
        figures = {}
        for name, ns in (("", spent), ("cpu_", busy), ("intake_", intake)):
            ordered = sorted(ns[warm_up:])
            for part in (50, 99):
                at = min(len(ordered) - 1, len(ordered) * part // 100)
                figures[f"{name}p{part}_us"] = round(ordered[at] / 1e3, 1)
        return figures

    def _answer(self, plan: Any, ids: list[str], at: int) -> list[list[int]]:
        self._leaving += self._churn if at > self._asked["warm_up"] // 2 else 0.0
        leave = min(int(self._leaving), len(ids))
        self._leaving -= leave
        enders = {(at * 31 + number * 17) % len(ids) for number in range(leave)}
        accepted = self._asked["accepted"]
        answers = []
        for place, name in enumerate(ids):
            given = len(plan.scheduled_spec_decode_tokens.get(name, ()))
            passed = min(accepted[(place + at) % len(accepted)], given)
            tokens = [7 + at % 50] * (1 + passed)
            if place in enders:
                tokens[0] = self._asked["stop_id"]
            answers.append(tokens)
        return answers


def main() -> None:
    asked = json.loads(sys.argv[1])
    init_none_hash(sha256)
    rows = []
    for case in asked["cases"]:
        rows.append({**case, **Course(asked, **case).measure()})
    print(json.dumps({"name": "vllm", "version": vllm.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
