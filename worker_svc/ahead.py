"""What a worker needs whatever its seat, made before its turn comes: its forks share the pages.

Nothing here may start a thread or touch a GPU: both would be of no use in a fork.
"""

import importlib
from dataclasses import dataclass

from phalanx.kernels.registry import interpreted
from phalanx.protocol.config import NodeConfig
from phalanx.worker_svc.host_weights import HostWeights
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint, load_dense
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.footprint import all_slots, held_bytes
from phalanx.worker_svc.model.invariance import check_invariance
from phalanx.worker_svc.model.model import DenseParts
from phalanx.worker_svc.model.threads import set_up_thread
from phalanx.worker_svc.warm import rehearse

_DENSE_BYTES_MAX = 1 << 30  # of a larger model they are loaded when they are needed
_OF_A_GPU = ("phalanx.worker_svc.model.gpu_weights", "phalanx.kernels.triton.compiling")


@dataclass(frozen=True)
class Ahead:
    """
    Attributes:
        checked: rows are computed alike on this machine.
        dense: the host's copy of the weights without any expert, and what is made of it.
    """

    checked: bool = False
    host: HostWeights | None = None
    dense: tuple[Weights, DenseParts] | None = None


def make_ahead(config: NodeConfig) -> Ahead:
    host = HostWeights.find(config.node, config.model_path)
    if config.device != "cpu":
        for module in _OF_A_GPU:
            importlib.import_module(module)
        return Ahead(host=host)
    set_up_thread(1)  # a pool of more would have to be there in a fork
    if checked := config.worker.threads == 1:
        check_invariance()
    if host is None or interpreted() or not _small(ModelConfig.load(config.model_path)):
        return Ahead(checked, host)
    weights = load_dense(config.model_path, host.shards)
    if checked:  # else each fork starts a pool of threads, for which everything is new
        rehearse(_with_an_expert(config, host))
    return Ahead(checked, host, (weights, DenseParts.of(weights)))


def _with_an_expert(config: NodeConfig, host: HostWeights) -> Weights:
    model = ModelConfig.load(config.model_path)
    slots: list[list[int]] = [[0]] * model.num_hidden_layers + [[]] * model.draft_stages
    return load_checkpoint(config.model_path, slots, held=host.shards)


def _small(model: ModelConfig) -> bool:
    return held_bytes(model, [0] * len(all_slots(model))) <= _DENSE_BYTES_MAX
