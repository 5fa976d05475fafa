"""Gains of photos that show the same places, for exposures and for the balance of textures."""

import numpy as np
from jaxtyping import Float

_ROUNDS = 5


def fit_log_gains(
    logs: Float[np.ndarray, "photos places"],
    weights: Float[np.ndarray, "photos places"],
    outlier: float,
    prior: float = 1e-2,
) -> Float[np.ndarray, " photos"]:
    """Returns what to add to the logarithms of each photo's colours, so that photos agree where they show one place.

    Least squares on log colour = log place − log gain, reweighted so that reflections and wrong places count little
    (Geman-McClure). The weighted mean is 0; a photo that shares no place with others has 0.

    Args:
        logs: logarithm of what each photo shows of each place.
        weights: 0 where it shows nothing of it.
        outlier: residual from which on two photos show a reflection or a wrong place rather than a gain.
        prior: weight that draws the gain of a photo to 1, as a share of the photo's own.
    """
    gain, robust = np.zeros(len(logs)), weights
    for _ in range(_ROUNDS):
        own = robust.sum(axis=1)
        # The places are eliminated from the normal equations. The last term of the diagonal keeps those of photos that
        # share no place solvable.
        share = robust / np.maximum(robust.sum(axis=0), 1e-12)
        mean = (share * logs).sum(axis=0)
        matrix = np.diag((1 + prior) * own + 1e-9) - robust @ share.T
        gain = np.linalg.solve(matrix, -(robust * (logs - mean)).sum(axis=1))
        gain -= (own * gain).sum() / max(own.sum(), 1e-12) * (own > 0)
        residual = logs + gain[:, None] - (share * (logs + gain[:, None])).sum(axis=0)
        robust = weights / np.square(1 + np.square(residual / outlier))
    return gain
