"""Prompt ensembles."""

import pytest
import torch

from f3rm_ext.features.extractors.prompts import TEMPLATES, encode_ensemble


def encode(sentences):
    """Unit vectors on the circle, by the sentence's length."""
    angle = torch.tensor([0.1 * len(sentence) for sentence in sentences])
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def test_one_template_is_the_embedding_itself() -> None:
    torch.testing.assert_close(encode_ensemble(encode, ["ab", "abc"], TEMPLATES["none"]), encode(["ab", "abc"]))


def test_each_prompt_is_the_mean_direction_over_its_own_sentences() -> None:
    found = encode_ensemble(encode, ["a", "abcd"], ("{}", "{}{}"))
    # Lengths 1 and 2 have the mean direction 0.15; 4 and 8 have 0.6.
    expected = torch.tensor([0.15, 0.6])
    torch.testing.assert_close(found, torch.stack([expected.cos(), expected.sin()], dim=-1))


def test_no_prompts_give_no_rows() -> None:
    assert encode_ensemble(encode, [], TEMPLATES["simple"]).shape == (0, 2)


def test_braces_in_a_prompt_are_text() -> None:
    seen: list[str] = []

    def record(sentences):
        seen.extend(sentences)
        return encode(sentences)

    encode_ensemble(record, ["a {0} b"], ("the {}.",))
    assert seen == ["the a {0} b."]


@pytest.mark.parametrize(("name", "count"), [("none", 1), ("photo", 1), ("simple", 7), ("imagenet", 80)])
def test_template_sets(name: str, count: int) -> None:
    assert len(TEMPLATES[name]) == count
    assert all(template.count("{}") == 1 for template in TEMPLATES[name])
