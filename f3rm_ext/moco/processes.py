"""Training on several processes: batch statistics over all of them, keys gathered, gradients averaged.

Each process computes its own part of every batch. Two processes so take the step of one with the double batch.
"""

import os
import sys

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce  # with a gradient, which is summed over the processes as well
from torch.nn.modules.batchnorm import _BatchNorm

from f3rm_ext.engine.launch import is_torchrun
from f3rm_ext.engine.ranks import world_size
from f3rm_ext.errors import ConfigError


class CpuSyncBatchNorm(_BatchNorm):
    """Batch norm with the statistics of all processes, for CPUs, where torch's SyncBatchNorm does not run.

    Processes have batches of one size.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts the inputs of BatchNorm1d and BatchNorm2d."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns normalised inputs; in evaluation by the running statistics."""
        if not self.training:
            return super().forward(input)
        values = input.float()
        axes = [axis for axis in range(values.dim()) if axis != 1]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        count = values.numel() // values.shape[1] * world_size()
        mean = all_reduce(values.sum(dim=axes)) / count
        centred = values - mean.view(shape)  # E[x²] − E[x]² would cancel
        variance = all_reduce(centred.square().sum(dim=axes)) / count
        # As in torch, the running variance is the unbiased one, and that of the batch is not.
        self._update_statistics(mean.detach(), variance.detach() * (count / (count - 1)))
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            scale = scale * self.weight
        output = centred * scale.view(shape)
        return (output + self.bias.view(shape) if self.affine else output).to(input.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


def sync_batch_norms(network: nn.Module) -> None:
    """Synchronises all batch norms of a network over the processes. Parameters and buffers stay the same objects.

    On CUDA torch's own are used, which keep no float32 copy of half-precision inputs.
    """
    if next(network.parameters()).device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
        return
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
                continue
            synced = CpuSyncBatchNorm(child.num_features, child.eps, child.momentum, child.affine)
            synced.weight, synced.bias = child.weight, child.bias
            for buffer, value in child.named_buffers():
                setattr(synced, buffer, value)
            setattr(parent, name, synced)


def start_processes(world_size: int, rank: int, dist_url: str) -> None:
    """Replaces this process by torchrun, which starts one process per GPU of this machine, or one on the CPU.

    The arguments are the options of the original MoCo, which counts machines, not processes. Returns if one process
    is enough, or if torchrun has started this one.

    Raises:
        ConfigError: The numbers contradict each other.
    """
    if is_torchrun():
        return
    if not 0 <= rank < world_size:
        raise ConfigError(f"--rank is {rank}, but --world-size {world_size} machines have ranks 0 to {world_size - 1}.")
    host, _, port = dist_url.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--dist-url is {dist_url}: write tcp://HOST:PORT with a free port of the first machine.")
    here = max(1, torch.cuda.device_count())
    if world_size * here == 1:
        return
    words = ["--nnodes", str(world_size), "--node-rank", str(rank), "--nproc-per-node", str(here)]
    words += ["--master-addr", host, "--master-port", port, "--no-python", *sys.argv]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])
