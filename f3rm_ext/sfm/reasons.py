"""Why photos have no pose: one sentence for each."""

from collections.abc import Mapping, Sequence

from f3rm_ext.capture.images import name_some

FEW_FEATURES = 100
"""Fewer features than this hardly ever give a pose."""


def explain(
    num_features: Mapping[str, int],
    num_matches: Mapping[tuple[str, str], int],
    groups: Sequence[set[str]],
    blurred: Sequence[str] = (),
) -> dict[str, str]:
    """Returns why each photo outside the first group has no pose.

    Args:
        groups: photos that fit together, the largest group first; the capture holds only the first.
        blurred: photos that are blurred.

    >>> explain({"a": 900, "b": 900, "c": 20}, {("a", "b"): 400}, [{"a", "b"}])
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
            reasons[name] = f"too few points in common: at best {matches} matches, with {other}"
        else:
            matches, other = best[name]
            reasons[name] = f"matches only photos without a pose: {matches} matches with {other}"
    return reasons
