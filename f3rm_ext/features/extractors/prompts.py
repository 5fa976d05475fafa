"""Prompt ensembles: a name put into several sentences, whose embeddings are averaged (Radford et al. 2021, §3.1.4)."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

_SIMPLE = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)


class _Templates(dict[str, tuple[str, ...]]):
    """Adds open_clip's ImageNet templates when they are asked for, so that open_clip is not imported before."""

    def __missing__(self, name: str) -> tuple[str, ...]:
        if name != "imagenet":
            raise KeyError(name)
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        self[name] = tuple(template("{}") for template in OPENAI_IMAGENET_TEMPLATES)
        return self[name]


TEMPLATES = _Templates(none=("{}",), photo=("a photo of a {}.",), simple=_SIMPLE)
"""Sets of sentences by name; ``simple`` are the seven that the CLIP authors found to do most of the work."""


def encode_ensemble(
    encode: Callable[[Sequence[str]], Float[Tensor, "sentences feat"]],
    prompts: Sequence[str],
    templates: Sequence[str],
) -> Float[Tensor, "prompts feat"]:
    """Unit-norm embeddings of prompts, each the mean direction over the sentences it is put into.

    Args:
        encode: Text encoder giving unit-norm embeddings.
        prompts: What the user typed.
        templates: Sentences with one ``{}`` each.
    """
    if not prompts:
        return encode([""])[:0]
    embeddings = encode([template.replace("{}", prompt) for prompt in prompts for template in templates])
    means = torch.stack([group.mean(dim=0) for group in embeddings.split(len(templates))])
    return functional.normalize(means, dim=-1)
