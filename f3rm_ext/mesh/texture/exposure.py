"""Differences of exposure and white balance between photos, found on places that several of them see."""

import numpy as np
from jaxtyping import Float

_DARKEST, _BRIGHTEST = 8.0, 247.0
"""Colours beyond are clipped and say nothing about a gain."""
_PRIOR = 1e-2
"""Weight, as a share of a photo's own, that draws the gain of a photo to 1."""
_SCALE = 0.1
"""Difference of logarithms above which two photos show a reflection or a wrong surface rather than a gain."""
_ROUNDS = 5


def find_gains(
    colors: Float[np.ndarray, "photos samples 3"], weights: Float[np.ndarray, "photos samples"]
) -> Float[np.ndarray, "photos 3"]:
    """Returns the factor on each photo's colours, per channel, after which photos agree where they see the same place.

    Least squares on logarithms, log color = log place − log gain, reweighted so that reflections count little
    (Geman-McClure). Gains are 1 in geometric mean.

    Args:
        colors: what each photo says about each sample, 0 to 255.
        weights: of its colours; 0 where a photo does not see a sample.
    """
    gains = np.ones((len(colors), 3))
    for channel in range(3):
        values = colors[..., channel].astype(np.float64)
        use = (weights > 0) & (values > _DARKEST) & (values < _BRIGHTEST)
        use &= use.sum(axis=0) >= 2
        if use.any():
            gains[:, channel] = np.exp(_log_gains(np.log(np.where(use, values, 1.0)), weights * use))
    return gains


def _log_gains(logs: np.ndarray, use: np.ndarray) -> np.ndarray:
    """Solves for the gains after the colours of the places have been eliminated from the normal equations."""
    gain = np.zeros(len(logs))
    weights = use
    for _ in range(_ROUNDS):
        share = weights / np.maximum(weights.sum(axis=0), 1e-12)
        mean = (share * logs).sum(axis=0)
        matrix = np.diag(weights.sum(axis=1)) - weights @ share.T
        right = -(weights * (logs - mean)).sum(axis=1)
        own = weights.sum(axis=1)
        # A photo that shares no place with others keeps its gain of 1.
        matrix += np.diag(_PRIOR * own + 1e-9)
        gain = np.linalg.solve(matrix, right)
        gain -= (own * gain).sum() / max(own.sum(), 1e-12) * (own > 0)
        places = (share * (logs + gain[:, None])).sum(axis=0)
        residual = logs + gain[:, None] - places
        weights = use / np.square(1 + np.square(residual / _SCALE))
    return gain
