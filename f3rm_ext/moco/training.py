"""The training: one optimiser step, checkpoints, and how to resume from them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from f3rm_ext.engine.ranks import Ranks, sum_over_ranks, world_size
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.moco import losses
from f3rm_ext.moco.encoder import DIM, Encoder, cosine_momentum, predictor, update_momentum, update_statistics
from f3rm_ext.moco.optimizers import make_optimizer
from f3rm_ext.moco.options import Plan, differences
from f3rm_ext.moco.processes import sync_batch_norms
from f3rm_ext.moco.queue import KeyQueue, restore_queue
from f3rm_ext.moco.views import Batch, derive_seed


@dataclass(frozen=True)
class StepResult:
    """Metrics of one optimiser step, as tensors, so that the caller decides when to wait for the device."""

    loss: Tensor
    """Mean over the accumulated batches."""
    accuracy: Tensor
    """Share of queries whose own key is the most similar, 0 to 1."""
    query: Tensor
    key: Tensor

    def scalars(self) -> dict[str, float]:
        return {
            "loss": float(self.loss),
            "pretext_accuracy": float(self.accuracy),
            "output_spread": float(losses.output_spread(self.query)),
            "alignment": float(losses.alignment(self.query, self.key)),
            "uniformity": float(losses.uniformity(self.key)),
        }


class Training:
    """Networks, queue and optimiser of a training.

    In v2 the key encoder normalises by running statistics, which follow the query encoder's like its parameters
    (EMAN, arXiv 2101.08482). Batch statistics would betray which key is the positive one; the original shuffles
    batches over GPUs for that reason. The other keys of the batch serve as negatives beside those of the queue: old
    keys alone are told apart by outputs that drift with time and are the same for all images. The negatives of v3 come
    from the same batch.

    Args:
        fingerprint: Fingerprint of the tiles, which tells whether image ids are still valid after a resume.
        alone: Ignore the other processes of a run; for plans.

    Raises:
        ConfigError: AMP is requested on a GPU without bfloat16.
    """

    def __init__(self, plan: Plan, fingerprint: str, device: torch.device, *, alone: bool = False) -> None:
        config = plan.config
        self.plan, self.fingerprint, self.device = plan, fingerprint, device
        # Older GPUs emulate bfloat16, which is slower than single precision.
        if config.use_amp and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            raise ConfigError("--use-amp needs bfloat16, which this GPU lacks: use --no-use-amp.")
        torch.manual_seed(derive_seed(config.seed, "weights"))
        self.query, self.key = (
            Encoder(config.architecture, config.algorithm, config.image_size, config.use_grad_checkpointing)
            for _ in range(2)
        )
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.predictor = predictor(config.architecture) if config.algorithm == "v3" else None
        self._ranks = Ranks() if world_size() > 1 and not alone else None
        for network in (self.query, self.key, *([] if self.predictor is None else [self.predictor])):
            if device.type != "cpu":  # fake tensors of a plan cannot be moved
                network.to(device)
            if self._ranks is not None:
                sync_batch_norms(network)
        self.queue = None
        if config.algorithm == "v2":
            self.key.eval()
            self.queue = KeyQueue(plan.pair.queue_size, DIM[config.algorithm]).to(device)
        self.optimizer = make_optimizer(
            plan.optimizer, self._trained_parameters(), plan.learning_rate, plan.weight_decay
        )
        self.step = 0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step: a linear warm-up, then half a cosine down to 0."""
        warmup = self.plan.warmup_steps
        if self.step < warmup:
            return self.plan.learning_rate * (self.step + 1) / warmup
        progress = (self.step - warmup) / max(1, self.plan.steps - warmup)
        return self.plan.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))

    @property
    def momentum(self) -> float:
        """Momentum of the key encoder in the next step."""
        start = self.plan.momentum
        return start if self.predictor is None else cosine_momentum(start, self.step / self.plan.steps)

    @property
    def first_batch(self) -> int:
        """Index of the first batch of the next step."""
        return self.step * self.plan.accumulation

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Takes one optimiser step.

        The key encoder is updated once, before the keys are computed. Keys are written to the queue after the last
        of the accumulated batches, so all of them meet the same negatives.
        """
        accumulation = self.plan.accumulation
        processes = 1 if self._ranks is None else self._ranks.size
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        update_momentum(self.key, self.query, self.momentum)
        if self.queue is not None:  # the first steps average evenly, so that the initial statistics do not linger
            update_statistics(self.key, self.query, min(self.momentum, self.step / (self.step + 1)))
        self.optimizer.zero_grad(set_to_none=True)
        written: list[tuple[Tensor, Tensor]] = []
        total = accuracy = torch.zeros((), device=self.device)
        query = key = total
        for _ in range(accumulation):
            one, two, numbers = (part.to(self.device, non_blocking=True) for part in next(batches))
            if self.plan.config.use_amp:  # reduced precision is fast in this layout
                one, two = (view.contiguous(memory_format=torch.channels_last) for view in (one, two))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=bool(self.plan.config.use_amp)):
                loss, hits, query, key = self._loss(one, two, numbers)
            (loss / (accumulation * processes)).backward()
            written.append((self._gather(key), self._gather(numbers)))
            total, accuracy = total + loss.detach() / accumulation, accuracy + hits / accumulation
        if self._ranks is not None:
            self._ranks.sum_gradients(self._trained_parameters())
        self.optimizer.step()
        if self.queue is not None:
            for keys, numbers in written:
                self.queue.enqueue(keys, numbers)
        self.step += 1
        if self._ranks is not None:
            means = torch.stack([total, accuracy]) / processes
            sum_over_ranks(means)
            total, accuracy = means.unbind()
        return StepResult(total, accuracy, query.detach(), key)

    def _loss(self, one: Tensor, two: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        temperature = self.plan.temperature
        if self.queue is not None:
            query = self.query(one)
            with torch.no_grad():
                key = self.key(two)
            negatives, ids = self.queue.negatives()
            if not self.plan.config.mask_same_image:
                ids = torch.full_like(ids, -1)  # matches no image
            if self.plan.config.batch_negatives:
                negatives = torch.cat([negatives, self._gather(key.float())])
                ids = torch.cat([ids, self._gather(numbers)])
            logits = losses.info_nce_logits(query, key, negatives, temperature, numbers, ids)
            return losses.info_nce(logits), losses.pretext_accuracy(logits.detach()), query, key
        assert self.predictor is not None
        outputs = (self.predictor(self.query(view)).float() for view in (one, two))
        query_1, query_2 = (torch.nn.functional.normalize(output, dim=1) for output in outputs)
        with torch.no_grad():
            key_1, key_2 = self.key(one), self.key(two)
        key_1, key_2 = self._gather(key_1), self._gather(key_2)
        first = 0 if self._ranks is None else self._ranks.rank * len(one)
        loss = losses.symmetric_loss(query_1, query_2, key_1, key_2, temperature, first)
        hits = losses.pretext_accuracy(losses.batch_logits(query_1.detach(), key_2, temperature, first))
        return loss, hits, query_1, key_2[first : first + len(one)]

    def _gather(self, rows: Tensor) -> Tensor:
        """Returns the rows of all processes, without gradient."""
        if self._ranks is None:
            return rows.detach()
        return torch.cat(self._ranks.gather_rows(rows.detach(), [len(rows)] * self._ranks.size))

    def _trained_parameters(self) -> list[torch.nn.Parameter]:
        return [*self.query.parameters(), *(self.predictor.parameters() if self.predictor else ())]

    def require_same(self) -> None:
        if self._ranks is not None:
            self._ranks.require_same(self.query.named_parameters(), f"after step {self.step}")

    def largest_over_ranks(self, number: int) -> int:
        return number if self._ranks is None else max(value for (value,) in self._ranks.share([number]))

    def state(self) -> dict[str, Any]:
        """Returns a checkpoint's tensors and plain values. The order and the views follow from seed and step."""
        return {
            "step": self.step,
            "plan": self.plan.record(),
            "fingerprint": self.fingerprint,
            "query": self.query.state_dict(),
            "key": self.key.state_dict(),
            "predictor": self.predictor.state_dict() if self.predictor else {},
            "queue": self.queue.state_dict() if self.queue is not None else {},
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Resumes from a checkpoint's state.

        A queue of another length keeps its newest keys. With other pictures the queue starts empty.

        Returns:
            Messages about differences from the saved run; none means the same trajectory.

        Raises:
            CheckpointError: The checkpoint has another architecture, algorithm or optimiser, or is that of a finished
                run with other options or pictures.
        """
        # Checkpoints of earlier versions, which had one optimiser and one process, do not tell.
        before, now = {"optimizer": "sgd", "processes": 1, **state["plan"]}, self.plan.record()
        for name in ("algorithm", "architecture", "optimizer"):
            if before[name] != now[name]:
                raise CheckpointError(
                    f"The checkpoint was trained with {name} {before[name]}, not {now[name]}: use --{name} "
                    f"{before[name]} or another --output."
                )
        self.query.load_state_dict(state["query"])
        self.key.load_state_dict(state["key"])
        if self.predictor is not None:
            self.predictor.load_state_dict(state["predictor"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.plan.weight_decay
        messages = []
        batches = ("batch_size", "gradient_accumulation_steps", "processes")
        same_batches = all(before[name] == now[name] for name in (*batches, "images", "epochs"))
        self.step = state["step"]
        if not same_batches:  # the same share of the training is complete, in other steps
            pictures = state["step"] * math.prod(before[name] for name in batches)
            self.step = min(self.plan.steps, pictures // self.plan.pair.effective_batch)
        changed = differences(before, now)
        if state["fingerprint"] != self.fingerprint:
            changed = [*changed, "pictures"]
        if changed and self.step >= self.plan.steps:
            raise CheckpointError(
                f"The training is complete, so these changes have no effect: {', '.join(changed)}. Restore the "
                "options, raise --epochs, or use another --output."
            )
        if changed:
            messages.append(f"Changed since the checkpoint: {', '.join(changed)}; the trajectory will differ.")
        if self.queue is not None and state["fingerprint"] != self.fingerprint:
            messages.append("The pictures differ from those of the checkpoint: the queue starts empty.")
        elif self.queue is not None:
            size = self.queue.size
            if len(state["queue"]["keys"]) != size:
                messages.append(f"The queue now has {size} keys; the newest keys of the checkpoint are kept.")
            self.queue = restore_queue(state["queue"], size).to(self.device)
        return messages
