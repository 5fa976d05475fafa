"""Directions, queries made of them, and vectors from files."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import Embeddings, Query, add_mutual_negatives, load_embeddings, pack_embeddings

FULL, CODES = 12, 4
Save = Callable[..., Path]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(count: int = 1, dim: int = 3, seed: int = 0) -> Embeddings:
    return Embeddings.from_full(random(count, dim, seed=seed), [f"v{seed}.{i}" for i in range(count)])


@pytest.fixture
def basis() -> torch.Tensor:
    rows, _ = torch.linalg.qr(random(FULL, CODES, seed=5))
    return rows.T.contiguous()


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(array: np.ndarray, name: str = "v.npy") -> Path:
        np.save(tmp_path / name, array)
        return tmp_path / name

    return write


# --- directions ------------------------------------------------------------------------------------------------------


def test_full_vectors_become_unit_vectors() -> None:
    given = random(3, FULL) * torch.tensor([[0.01], [1.0], [50.0]])
    made = Embeddings.from_full(given.half(), ["a", "b", "c"])
    assert made.values.dtype == torch.float32 and made.sources == ("a", "b", "c") and len(made) == 3
    torch.testing.assert_close(made.values.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(made.values, given / given.norm(dim=1, keepdim=True), atol=2e-3, rtol=0)


def test_codes_of_a_unit_vector_are_shorter_by_what_they_leave_out(basis: torch.Tensor) -> None:
    given = random(2, FULL)
    made = Embeddings.from_full(given, ["a", "b"], basis)
    unit = given.double() / given.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(made.values.double(), unit @ basis.double().T, atol=1e-6, rtol=0)
    assert (made.values.norm(dim=1) < 0.999).all()
    inside = Embeddings.from_full(3 * basis[1:2], ["in the span"], basis)
    torch.testing.assert_close(inside.values, torch.eye(CODES)[1:2], atol=1e-6, rtol=0)


def test_codes_with_their_residual_have_the_norm_of_the_full_vector(basis: torch.Tensor) -> None:
    full = random(2, FULL).double()
    codes = full @ basis.double().T
    residual = (full - codes @ basis.double()).norm(dim=1)
    made = Embeddings.from_codes(codes.float(), ["a", "b"], residual.float())
    expected = Embeddings.from_full(full.float(), ["a", "b"], basis)
    torch.testing.assert_close(made.values, expected.values, atol=1e-6, rtol=0)
    torch.testing.assert_close(Embeddings.from_codes(codes.float(), ["a", "b"]).values.norm(dim=1), torch.ones(2))
    alone = Embeddings.from_codes(torch.zeros(1, 3), ["a"], torch.ones(1))
    assert not alone.values.any(), "a residual alone is a direction that no code has"


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "'b' is zero"), (1e-9, "'b' is zero"), (math.nan, "not finite"), (math.inf, "not finite")],
)
def test_vectors_without_direction_are_refused(value: float, words: str) -> None:
    given = torch.tensor([[1.0, 0.0], [value, 0.0]])
    for make in (Embeddings.from_full, Embeddings.from_codes):
        with pytest.raises(ConfigError, match=words):
            make(given, ["a", "b"])


def test_none_and_several() -> None:
    nothing = Embeddings.empty(3)
    assert len(nothing) == 0 and nothing.values.shape == (0, 3)
    joined = Embeddings.join([vectors(2), nothing, vectors(1, seed=1)])
    assert joined.sources == ("v0.0", "v0.1", "v1.0")
    torch.testing.assert_close(joined.values, torch.cat([vectors(2).values, vectors(1, seed=1).values]))


# --- queries ---------------------------------------------------------------------------------------------------------


def test_a_query_with_negatives_is_a_relevancy_and_without_a_cosine() -> None:
    query = Query("cup", "clip", vectors(2), Embeddings.empty(3))
    assert not query.is_relevancy and query.lowest == -1.0
    assert query.describe() == {
        "name": "cup",
        "feature": "clip",
        "positives": ["v0.0", "v0.1"],
        "negatives": [],
        "score": "cosine",
        "temperature": None,
    }
    query = Query("cup", "clip", vectors(), vectors(1, seed=1), temperature=0.2)
    assert query.is_relevancy and query.lowest == 0.0
    said = query.describe()
    assert (said["score"], said["negatives"], said["temperature"]) == ("relevancy", ["v1.0"], 0.2)


def test_queries_that_ask_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="'cup'"):
        Query("cup", "clip", Embeddings.empty(3), vectors())
    with pytest.raises(ConfigError, match="temperature is 0"):
        Query("cup", "clip", vectors(), vectors(), temperature=0.0)


def test_queries_told_from_each_other() -> None:
    first = Query("a", "clip", vectors(2), vectors(1, seed=9), 0.3)
    second = Query("b", "clip", vectors(1, seed=1), Embeddings.empty(3))
    other = Query("c", "dino", vectors(1, 5), Embeddings.empty(5))
    told = add_mutual_negatives([first, second, other])
    assert [query.negatives.sources for query in told] == [("v9.0", "v1.0"), ("v0.0", "v0.1"), ()]
    assert [query.positives for query in told] == [first.positives, second.positives, other.positives]
    assert (told[0].name, told[0].head, told[0].temperature) == ("a", "clip", 0.3)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_vector_of_the_full_space(save: Save, basis: torch.Tensor) -> None:
    given = random(FULL).numpy()
    loaded = load_embeddings(save(given), FULL, None)
    torch.testing.assert_close(loaded.values[0], torch.from_numpy(given / np.linalg.norm(given)))
    assert loaded.sources == ("v.npy",)
    in_codes = load_embeddings(save(given), CODES, basis)
    torch.testing.assert_close(in_codes.values, loaded.values @ basis.T)
    codes = load_embeddings(save(np.array([0.0, 0.0, 5.0, 0.0])), CODES, basis)
    torch.testing.assert_close(codes.values, torch.eye(CODES)[2:3])
    rows = load_embeddings(save(np.array([[1, 0, 0], [0, 2, 0]])), 3, None)
    assert rows.sources == ("v.npy[0]", "v.npy[1]")
    torch.testing.assert_close(rows.values, torch.eye(3)[:2])


def test_other_dimensions_are_refused(save: Save, basis: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"7 .*3"):
        load_embeddings(save(np.ones(7)), 3, None)
    with pytest.raises(ConfigError, match=r"7 .*12 .*4"):
        load_embeddings(save(np.ones((2, 7))), CODES, basis)


@pytest.mark.parametrize(
    "array",
    [
        *(np.ones((2, 2, 3)), np.float64(3.0), np.array(["a", "b"]), np.ones(3, bool), np.ones(3, complex)),
        *(np.ones((0, 3)), np.array([np.nan, 1, 0]), np.array([np.inf, 1, 0]), np.array([1e300, 1, 0]), np.zeros(3)),
    ],
    ids=["3 axes", "scalar", "text", "bool", "complex", "no rows", "nan", "inf", "too large", "zero"],
)
def test_what_is_no_vector_is_refused(save: Save, array: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"v\.npy.*(no vector|finite|zero)"):
        load_embeddings(save(array), 3, None)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("not an array")
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", a=np.ones(3))
    for name in ("text.npy", "empty.npy", "objects.npy", "archive.npz", "missing.npy", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_embeddings(tmp_path / name, 3, None)


def test_saved_vectors_come_back_and_codes_with_what_they_leave_out(save: Save, basis: torch.Tensor) -> None:
    full = vectors(2, FULL)
    torch.testing.assert_close(load_embeddings(save(pack_embeddings(full)), FULL, None).values, full.values)
    codes = Embeddings.from_full(full.values, full.sources, basis)
    assert (codes.values.norm(dim=1) < 0.95).all()
    torch.testing.assert_close(load_embeddings(save(pack_embeddings(codes)), CODES, basis).values, codes.values)
