"""Lightning's strategies for several devices, with checkpoints that any number of devices resumes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map


class ReplicatedModel(DDPStrategy):
    """All weights on every device. Weights that a step does not use, as gates before the first memory, are allowed."""

    def __init__(self) -> None:
        super().__init__(find_unused_parameters=True, broadcast_buffers=False)

    def determine_ddp_device_ids(self) -> None:
        # With ids, torch would move the parts of a batch that stay on the host.
        return None


class ShardedModel(ModelParallelStrategy):
    """Weights, gradients and optimizer states shared out (FSDP2).

    Checkpoints are those of one device: all ranks gather them, and keep their own shard when they load them.
    """

    def __init__(self, size: int) -> None:
        super().__init__(data_parallel_size=size, tensor_parallel_size=1, save_distributed_checkpoint=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def _determine_device_ids(self) -> Any:
        return None if self.root_device.type == "cpu" else super()._determine_device_ids()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return whole(optimizer.state_dict())

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        shards = {name: _shard(value, own[name]) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(shards, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        Strategy.load_optimizer_state_dict(self, checkpoint)
        for optimizer in self.optimizers:
            for part in getattr(optimizer, "parts", [optimizer]):
                for parameter, state in part.state.items():
                    # Counters of steps have no dimensions.
                    own = {name: _shard(value, parameter) if value.dim() else value for name, value in state.items()}
                    state.update(own)


def shard(
    model: torch.nn.Module, mesh: Any, layers: Sequence[torch.nn.Module] = (), stay_gathered: bool = False
) -> None:
    """Share out the weights of a model over the ranks of a device mesh. The weights of each of `layers` are gathered
    while it is called, and again for its backward pass; the other weights are gathered for a step. Gradients are shared
    out layer by layer.

    stay_gathered: once gathered, layers stay so until `release`.
    """
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not stay_gathered)
        if stay_gathered:
            layer.set_reshard_after_backward(False)  # type: ignore[operator]
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def release(layers: Sequence[torch.nn.Module]) -> None:
    """Free the gathered weights of layers that stay gathered; their shards are the weights again."""
    for layer in layers:
        layer.reshard()  # type: ignore[operator]


def whole(tree: Any) -> Any:
    """The tree with whole tensors on the CPU instead of shards. Every rank must call it."""
    return tree_map(lambda leaf: leaf.full_tensor().cpu() if isinstance(leaf, DTensor) else leaf, tree)


def _shard(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor, distributed as `like`."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
