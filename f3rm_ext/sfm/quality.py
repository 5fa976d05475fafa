"""Problems of photos: blur, duplicates, and the reasons why a photo has no pose."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from PIL import Image

from f3rm_ext.capture.images import name_some

FINGERPRINT_PX = 16
BLUR_LIMIT, BLUR_EXCESS = 0.5, 0.12
"""A photo counts as blurred if its blur is above the first, and above the median of all photos by the second."""
SAME_LEVELS = 0.6
"""Two photos count as the same if their fingerprints differ by less than this on average, in levels of 255."""

FEW_FEATURES = 100
"""Number of features below which a photo hardly ever gets a pose."""
_DETAIL = re.compile(r" \(\d+\)|: (?:at best )?\d+ matches,? with .*")
"""Matches the counts and names in a reason of :func:`missing_pose_reasons` that are those of one photo."""


def measure_blur(grey: Float[np.ndarray, "h w"]) -> float:
    """Returns how blurred a picture is, from 0 (sharp) to 1: the blur effect of Crete et al. (2007). Levels are 0 to 1.

    It compares the differences between neighbouring pixels with those of a copy that is blurred once more, so it
    depends little on what the picture shows.
    """
    from skimage.measure import blur_effect

    return float(np.nan_to_num(blur_effect(grey), nan=1.0))


def make_fingerprint(grey: Float[np.ndarray, "h w"]) -> bytes:
    """Returns the grey levels of a tiny copy, by which equal pictures are found."""
    picture = Image.fromarray(np.rint(grey * 255).astype(np.uint8))
    return picture.resize((FINGERPRINT_PX, FINGERPRINT_PX), Image.Resampling.BOX).tobytes()


def find_blurred(blur: Mapping[str, float]) -> list[str]:
    """Returns the names of blurred photos.

    >>> find_blurred({"a": 0.30, "b": 0.32, "c": 0.7})
    ['c']
    """
    if not blur:
        return []
    limit = max(BLUR_LIMIT, float(np.median(list(blur.values()))) + BLUR_EXCESS)
    return [name for name, value in blur.items() if value > limit]


def find_duplicates(fingerprints: Mapping[str, bytes]) -> dict[str, str]:
    """Returns for each photo that shows the same as an earlier one the name of that one.

    >>> find_duplicates({"a": bytes(4), "b": bytes([9, 9, 9, 9]), "c": bytes(4)})
    {'c': 'a'}
    """
    names = list(fingerprints)
    rows = np.array([np.frombuffer(fingerprints[name], np.uint8) for name in names], np.int16)
    duplicates: dict[str, str] = {}
    for i, name in enumerate(names):
        if name not in duplicates:
            same = np.abs(rows[i + 1 :] - rows[i]).mean(axis=1) < SAME_LEVELS
            duplicates |= {names[j]: name for j in same.nonzero()[0] + i + 1 if names[j] not in duplicates}
    return duplicates


def missing_pose_reasons(
    num_features: Mapping[str, int],
    num_matches: Mapping[tuple[str, str], int],
    groups: Sequence[set[str]],
    blurred: Sequence[str] = (),
) -> dict[str, str]:
    """Returns the reason why each photo outside the first group has no pose.

    Args:
        groups: photos that fit together, the largest group first; the capture holds only the first.

    >>> missing_pose_reasons({"a": 900, "b": 900, "c": 20}, {("a", "b"): 400}, [{"a", "b"}])
    {'c': 'too few features (20): nearly without texture, too dark, or masked'}
    """
    best: dict[str, tuple[int, str]] = {}
    kept = groups[0] if groups else set()
    with_kept: dict[str, tuple[int, str]] = {}
    for (a, b), number in num_matches.items():
        for name, other in ((a, b), (b, a)):
            best[name] = max(best.get(name, (0, "")), (number, other))
            if other in kept:
                with_kept[name] = max(with_kept.get(name, (0, "")), (number, other))
    reasons: dict[str, str] = {}
    for name, number in num_features.items():
        if name in kept:
            continue
        group = next((other for other in groups[1:] if name in other), None)
        if number < FEW_FEATURES:
            why = (
                "it is blurred, or has no texture" if name in blurred else "nearly without texture, too dark, or masked"
            )
            reasons[name] = f"too few features ({number}): {why}"
        elif name not in best:
            reasons[name] = "no matches: no other photo shows the same things from a similar place"
        elif group is not None:
            reasons[name] = (
                f"they fit each other ({name_some(sorted(group))}), but overlap too little with the largest group: "
                "add photos between the two"
            )
        elif name in with_kept:
            matches, other = with_kept[name]
            reasons[name] = f"too few matches agree on a pose: at best {matches} matches, with {other}"
        else:
            matches, other = best[name]
            reasons[name] = f"matches only photos without a pose: {matches} matches with {other}"
    return reasons


def reason_kind(reason: str) -> str:
    """Returns a reason of :func:`missing_pose_reasons` without what is of one photo alone.

    >>> reason_kind("too few matches agree on a pose: at best 17 matches, with f.jpg")
    'too few matches agree on a pose'
    """
    return _DETAIL.sub("", reason)


def no_pose_reason(
    reasons: Mapping[str, str], num_matches: Mapping[tuple[str, str], int], duplicates: Mapping[str, str]
) -> str:
    """Returns in parentheses why no photo has a pose; an empty text if there is no common reason.

    >>> no_pose_reason({"a": "with b", "b": "with a", "c": "with b"}, {("a", "b"): 537, ("b", "c"): 22}, {})
    ' (a and b have 537 matches, but no third photo shares enough of them)'
    """
    if len(duplicates) == len(reasons) - 1:
        return " (they all show the same picture)"
    if len(set(reasons.values())) == 1:
        return f" ({next(iter(reasons.values()))})"
    if not num_matches:
        return ""
    a, b = max(num_matches, key=lambda pair: num_matches[pair])
    third = ", but no third photo shares enough of them" if len(reasons) > 2 else ""
    return f" ({a} and {b} have {num_matches[a, b]} matches{third})"
