"""Whether the loss, its gradient and the queue of MoCo v2 are those of lightly, over ten steps in float32.

They agree where the queue is a multiple of the batch and nothing is masked: otherwise lightly drops keys at the end of
its bank, and it does not know which image a key is of. Lightly's bank starts with random keys; they are copied.
Needs ``pip install lightly``. python benchmarks/moco_lightly.py
"""

import json
from importlib.metadata import PackageNotFoundError, version

import torch
from lightly.loss import NTXentLoss  # type: ignore[import-not-found]

from f3rm_ext.moco import losses
from f3rm_ext.moco.queue import KeyQueue

DIM, BATCH, SIZE, TEMPERATURE, STEPS = 128, 64, 256, 0.2, 10


def main() -> None:
    """Prints the largest differences as JSON."""
    generator = torch.Generator().manual_seed(0)
    peer, queue = NTXentLoss(TEMPERATURE, memory_bank_size=(SIZE, DIM)), KeyQueue(SIZE, DIM)
    draw = lambda: torch.nn.functional.normalize(torch.randn(BATCH, DIM, generator=generator), dim=1)  # noqa: E731
    for _ in range(SIZE // BATCH):  # fills lightly's bank with keys that both know
        keys = draw()
        peer(draw().requires_grad_(), keys)
        queue.enqueue(keys, torch.zeros(BATCH, dtype=torch.long))
    differences = {"loss": 0.0, "gradient": 0.0}
    for _ in range(STEPS):
        query, key = draw(), draw()
        ours, theirs = (query.clone().requires_grad_() for _ in range(2))
        loss = losses.info_nce(losses.info_nce_logits(ours, key, queue.negatives()[0], TEMPERATURE))
        other = peer(torch.nn.functional.normalize(theirs, dim=1), key)
        loss.backward()
        other.backward()
        queue.enqueue(key, torch.zeros(BATCH, dtype=torch.long))
        assert ours.grad is not None and theirs.grad is not None
        # Lightly normalises within the loss, so its gradient has no part along the query.
        gradient = ours.grad - (ours.grad * query).sum(dim=1, keepdim=True) * query
        differences["loss"] = max(differences["loss"], abs(loss.item() - other.item()) / other.item())
        difference = (gradient - theirs.grad).norm() / theirs.grad.norm()
        differences["gradient"] = max(differences["gradient"], difference.item())
    try:
        differences["lightly"] = version("lightly")  # type: ignore[assignment]
    except PackageNotFoundError:
        pass
    print(json.dumps(differences))


if __name__ == "__main__":
    main()
