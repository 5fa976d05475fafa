"""Text queries: the text tower of the extractor that a feature was distilled from."""

from collections.abc import Sequence
from typing import cast

import torch

from f3rm_ext.errors import ConfigError, ExtractorError, UserError
from f3rm_ext.features.base import Extractor, TextExtractor
from f3rm_ext.query.embeddings import Embeddings
from f3rm_ext.query.queryable import QueryHead

DEFAULT_NEGATIVES = ("object", "things", "stuff", "texture")
"""What a text is told from unless the user says otherwise (LERF's canonical phrases)."""
ALTERNATIVES = "|"
"""Separates alternatives in what the user types: ``mug | cup``."""


def split_prompts(text: str) -> list[str]:
    """The alternatives in a text that a person typed.

    Raises:
        ConfigError: it is empty.
    """
    prompts = [part.strip() for part in text.split(ALTERNATIVES)]
    if not all(prompts):
        raise ConfigError(
            "The text to look for is empty: write a word or a phrase such as `blue mug`, or alternatives "
            f"`mug {ALTERNATIVES} cup`."
        )
    return prompts


class TextEncoder:
    """Embeds texts into the space of heads; loads each extractor once, when it is first needed.

    Args:
        device: where text towers run.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._extractors: dict[str, Extractor] = {}

    def encode(self, head: QueryHead, prompts: Sequence[str]) -> Embeddings:
        """One direction per prompt.

        Args:
            head: in whose space.
            prompts: what to embed, none of them empty.

        Raises:
            WeightsNotFoundError: the weights are not on this machine; says which and where to put them.
            ExtractorError: the extractor cannot be used here, or understands no text.
            ConfigError: the weights are not those the features were made with, or a text is empty.
        """
        if not all(prompt.strip() for prompt in prompts):
            raise ConfigError("The text to look for is empty: write a word or a phrase such as `blue mug`.")
        if not prompts:
            return Embeddings.empty(head.dim)
        extractor = cast(TextExtractor, self._extractor(head))
        with torch.inference_mode():
            vectors = extractor.encode_text(list(prompts))
        full = head.dim if head.basis is None else head.basis.shape[1]
        if vectors.shape != (len(prompts), full):
            raise ExtractorError(
                f"{head.extractor} gave texts of shape {tuple(vectors.shape)} where the feature {head.name!r} has "
                f"{full} dimensions: report this to who wrote it."
            )
        # Clones: ordinary tensors, whatever the extractor ran in.
        return Embeddings.of_full(vectors.clone(), prompts, head.basis)

    def _extractor(self, head: QueryHead) -> Extractor:
        extractor = self._extractors.get(head.extractor)
        if extractor is None:
            extractor = self._build(head)
            self._extractors[head.extractor] = extractor
        check_same_model(head, extractor)
        return extractor

    def _build(self, head: QueryHead) -> Extractor:
        from f3rm_ext.features.extractors.registry import build_extractor, understands_text

        try:
            if not understands_text(head.extractor):
                raise ExtractorError(f"The feature {head.name!r} ({head.extractor}) understands no text")
            extractor = build_extractor(head.extractor, device=self.device)
        except UserError as error:
            kind = type(error) if isinstance(error, ExtractorError) else ExtractorError
            raise kind(f"{str(error).rstrip('.')}. Queries by example go on working.") from error
        if not isinstance(extractor, TextExtractor):
            raise ExtractorError(
                f"The feature {head.name!r} ({head.extractor}) understands no text: ask by example, or distil a "
                "feature that does, such as clip."
            )
        return extractor


def check_same_model(head: QueryHead, extractor: Extractor) -> None:
    """Raises ConfigError unless an extractor is the one that a feature was made with."""
    here = extractor.identity
    for part in ("model", "weights"):
        if head.identity.get(part, getattr(here, part)) != getattr(here, part):
            raise ConfigError(
                f"The {part} of {head.extractor} on this machine ({getattr(here, part)}) are not those the feature "
                f"{head.name!r} was made with ({head.identity[part]}): queries would be compared with another space; "
                "use the same weights file."
            )
