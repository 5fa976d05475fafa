"""The state of every random generator of a process, in types that ``torch.load(weights_only=True)`` reads; seeds."""

import hashlib
import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Returns the state of the generators of Python, numpy and torch (CPU, and the GPU if `device` is one)."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {
            # Tensors of uint32, numpy's type, exist only since PyTorch 2.3.
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device, rank: int = 0) -> None:
    """Restores the generators to a state from :func:`capture`.

    A state captured on another kind of device restores the generators that both have.

    Args:
        state: captured by the process of rank 0.
        rank: of this process. Ranks other than 0 seed their generators from the state and their rank; otherwise all
            processes would draw the same numbers.
    """
    if rank:
        name = state["torch"].cpu().numpy().tobytes() + rank.to_bytes(4, "big")
        seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1
        seed_all(seed)
        return
    torch.set_rng_state(state["torch"].cpu())
    saved = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": saved["key"].cpu().numpy().astype(np.uint32), "pos": saved["pos"]},
            "has_gauss": saved["has_gauss"],
            "gauss": saved["gauss"],
        }
    )
    saved = state["python"]
    random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, numpy, which takes 32 bits of it, and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def step_seed(seed: int, step: int) -> int:
    """Returns the seed of a generator for one step. Generators of the CPU ignore all of it but 32 bits."""
    return 1_000_003 * seed + step
