"""Which photos to compare: all, neighbours in time, or the most similar."""

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from f3rm_ext import threads
from f3rm_ext.sfm.database import FeatureDatabase, Pair, colmap, explained

Matching = Literal["exhaustive", "sequential", "vocabulary"]
MOST_EXHAUSTIVE = 200
"""Photos up to which all pairs are compared: 19,900 pairs."""
OVERLAP = 10
SIMILAR = 40
"""Most similar photos that each photo is compared with."""
_WORDS, _DESCRIPTORS_FOR_WORDS = 2048, 200_000


def choose_matching(num_photos: int, is_video: bool) -> Matching:
    """Returns how to choose pairs.

    >>> choose_matching(150, is_video=True), choose_matching(200, False), choose_matching(201, False)
    ('sequential', 'exhaustive', 'vocabulary')
    """
    if is_video:
        return "sequential"
    return "exhaustive" if num_photos <= MOST_EXHAUSTIVE else "vocabulary"


def exhaustive_pairs(names: Sequence[str]) -> list[Pair]:
    """Returns all pairs."""
    return list(itertools.combinations(names, 2))


def sequential_pairs(names: Sequence[str], overlap: int = OVERLAP) -> list[Pair]:
    """Returns pairs at most ``overlap`` apart, and pairs 16, 32, 64 … apart, which close loops.

    >>> len(sequential_pairs([str(i) for i in range(20)], overlap=3))
    58
    """
    number = len(names)
    gaps = [*range(1, overlap + 1), *(16 << k for k in range(number.bit_length()) if overlap < 16 << k < number)]
    return [(names[i], names[i + gap]) for i in range(number) for gap in gaps if i + gap < number]


def similar_pairs(database: FeatureDatabase, names: Sequence[str], similar: int = SIMILAR) -> list[Pair]:
    """Returns pairs of each photo and its most similar ones.

    COLMAP's index compares them by visual words, made from the photos' own features: nothing has to be downloaded.

    Args:
        database: has the features of all photos.
        names: the photos.
        similar: number of photos to compare each with.
    """
    pycolmap = colmap()
    random = np.random.default_rng(0)
    with database.opened() as opened, tempfile.TemporaryDirectory() as folder, explained("finding similar photos"):
        ids = {image.name: image.image_id for image in opened.read_all_images()}
        share = max(1, _DESCRIPTORS_FOR_WORDS // len(names))
        rows = []
        for name in names:
            data = opened.read_descriptors(ids[name]).data
            rows.append(data[np.sort(random.permutation(len(data))[:share])])
        sample = np.concatenate(rows)
        index = pycolmap.VisualIndex.create(128, 64)
        build = pycolmap.VisualIndex.BuildOptions(
            num_visual_words=min(_WORDS, max(1, len(sample) // 8)), num_threads=threads.usable_cores()
        )
        descriptors = pycolmap.FeatureDescriptorsFloat(pycolmap.FeatureExtractorType.SIFT, sample.astype(np.float32))
        index.build(build, descriptors)
        index.write(Path(folder, "words.bin"))
        options = pycolmap.VocabTreePairingOptions(
            vocab_tree_path=Path(folder, "words.bin"), num_images=similar, num_threads=threads.usable_cores()
        )
        generator = pycolmap.VocabTreePairGenerator(options, opened, [ids[name] for name in names])
        names_of = {number: name for name, number in ids.items()}
        pairs = {tuple(sorted(pair)) for pair in generator.all_pairs() if pair[0] != pair[1]}
    return [(names_of[a], names_of[b]) for a, b in sorted(pairs)]
