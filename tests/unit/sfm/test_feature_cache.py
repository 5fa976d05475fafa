"""Features of images that are always cut alike are computed once."""

import torch

from f3rm_ext.features.extractors.vit import VisionTransformer
from f3rm_ext.sfm.diffusion.encoder import FeatureCache, ImageEncoder


def test_each_image_is_encoded_once(small_vit: VisionTransformer) -> None:
    encoder = ImageEncoder(small_vit)
    seen: list[int] = []
    encoder.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    photos = torch.rand(4, 3, 42, 42, generator=torch.Generator().manual_seed(0))
    for dense in (False, True):
        seen.clear()
        cache = FeatureCache(encoder, dense)
        for numbers in ([[0, 1], [1, 2]], [[3, 0], [2, 2]]):
            found = cache.encode(photos[torch.tensor(numbers)], torch.tensor(numbers))
            wanted = encoder(photos[torch.tensor(numbers)])
            torch.testing.assert_close(found.patches, wanted.patches)
            if dense:
                torch.testing.assert_close(found.middle, wanted.middle)
                torch.testing.assert_close(found.last, wanted.last)
        assert seen.count(1) == 4, "one image at a time"
        kept = sum(value.numel() * 4 for part in cache._known.values() for value in vars(part).values())
        assert kept == 4 * FeatureCache.bytes_per_image(encoder.width, 3, dense)
