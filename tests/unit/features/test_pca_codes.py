"""PCA codes: the mathematics, and what is on the disk."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from f3rm_ext.errors import FeatureStoreError
from f3rm_ext.features import pca_codes as codes
from f3rm_ext.features.base import PatchGrid
from f3rm_ext.features.store.feature_store import FeatureStore

DIM, K, CPU = 24, 8, torch.device("cpu")
KEYS = tuple(f"{number:032x}" for number in range(5))


def features(seed: int, rows: int = 6, cols: int = 7, rank: int = DIM) -> np.ndarray:
    """Features with a falling spectrum and a mean that is not zero."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(77).normal(size=(rank, DIM)) * (0.7 ** np.arange(rank))[:, None]
    return (rng.normal(size=(rows, cols, rank)) @ mix + mix[0]).astype(np.float16)


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    store = FeatureStore.open(tmp_path / "store", {"extractor": "x"}, DIM)
    for number, key in enumerate(KEYS):
        values = features(number, rows=4 + number)
        store.put(key, values, PatchGrid.covering(4 + number, 7, 64, 70), (64, 70))
    store.commit()
    return store


def build(store: FeatureStore, train: tuple[str, ...] = KEYS[:3]) -> tuple[codes.CodeBasis, FeatureStore, Path]:
    root = codes.codes_root(store, "set", K)
    made = codes.build_codes(store, root, train, KEYS, K, CPU)
    basis = codes.load_basis(root)
    assert basis is not None
    return basis, made, root


def all_patches(store: FeatureStore, keys: tuple[str, ...]) -> torch.Tensor:
    return torch.cat([torch.from_numpy(np.array(store.load(key).values)).reshape(-1, DIM) for key in keys]).double()


def test_basis_spans_the_strongest_directions_of_the_training_images(store: FeatureStore) -> None:
    basis, _, _ = build(store)
    patches = all_patches(store, KEYS[:3])
    _, singular, vectors = torch.linalg.svd(patches, full_matrices=False)  # not centred
    assert torch.allclose(basis.rows @ basis.rows.T, torch.eye(K), atol=1e-5)
    assert torch.allclose((basis.rows.double() @ vectors[:K].T).abs(), torch.eye(K).double(), atol=1e-3)
    energy = singular.square() / singular.square().sum()
    np.testing.assert_allclose(basis.energy, energy.numpy(), atol=1e-5)
    assert basis.explained == pytest.approx(float(energy[:K].sum()), abs=1e-5)


def test_codes_and_residuals_split_the_norm(store: FeatureStore) -> None:
    basis, made, _ = build(store)
    for key in KEYS:
        full, code = store.load(key), made.load(key)
        f = torch.from_numpy(np.array(full.values)).float()
        c = torch.from_numpy(np.array(code.values)).float()
        assert code.residual_norm is not None and code.grid == full.grid
        r = torch.from_numpy(np.array(code.residual_norm)).float()
        assert c.shape == (*f.shape[:2], K)
        assert torch.allclose((c.square().sum(-1) + r.square()).sqrt(), f.norm(dim=-1), rtol=5e-3)
        assert torch.allclose((f - c @ basis.rows).norm(dim=-1), r, atol=0.02)


def test_cosine_from_codes_is_that_of_the_full_space(store: FeatureStore) -> None:
    basis, made, _ = build(store)
    # Queries taken from the features' own distribution, as an exemplar is.
    queries = torch.from_numpy(features(123).astype(np.float32)).reshape(-1, DIM)[:9]
    f = torch.from_numpy(np.array(store.load(KEYS[4]).values)).float()
    code = made.load(KEYS[4])
    c = torch.from_numpy(np.array(code.values))
    r = torch.from_numpy(np.array(code.residual_norm))
    for query in queries:
        exact = cosine_similarity(f, query.expand_as(f), dim=-1)
        query_code, norm = codes.project_query(basis.rows, query), query.norm()
        estimate = codes.code_cosine(query_code, norm, c, r)
        # What is left out on both sides bounds the error.
        out_query = (query.square().sum() - query_code.square().sum()).clamp_min(0).sqrt() / norm
        out_feature = r.float() / f.norm(dim=-1)
        assert ((estimate - exact).abs() <= out_query * out_feature + 5e-3).all()
        assert (estimate - exact).abs().mean() < 0.02
        # Ignoring the residual overstates the magnitude.
        assert (codes.code_cosine(query_code, norm, c).abs() >= estimate.abs() - 1e-6).all()


def test_cosine_is_exact_for_queries_in_the_span() -> None:
    basis = torch.linalg.qr(torch.randn(DIM, K, generator=torch.Generator().manual_seed(0)))[0].T
    values = torch.randn(5, 6, DIM, generator=torch.Generator().manual_seed(1))
    encoded = codes.encode(basis, values)
    query = basis[2] - 3 * basis[5]
    exact = cosine_similarity(values, query.expand_as(values), dim=-1)
    mine = codes.code_cosine(codes.project_query(basis, query), query.norm(), encoded[..., :K], encoded[..., K])
    assert torch.allclose(mine, exact, atol=1e-5)


def test_zero_features_give_zero_cosine() -> None:
    zero = torch.zeros(3, K)
    assert codes.code_cosine(torch.ones(K), torch.tensor(2.0), zero, torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    rows, energy = codes.principal_rows(np.zeros((DIM, DIM)), K)
    assert rows.isfinite().all() and sum(energy) == 0.0


def test_low_rank_features_are_kept_whole(tmp_path: Path) -> None:
    store = FeatureStore.open(tmp_path, {"extractor": "x"}, DIM)
    store.put(KEYS[0], features(0, rank=5), PatchGrid.covering(6, 7, 60, 70), (60, 70))
    store.commit()
    root = codes.codes_root(store, "set", K)
    made = codes.build_codes(store, root, KEYS[:1], KEYS[:1], K, CPU)
    basis = codes.load_basis(root)
    assert basis is not None and basis.explained > 0.9999
    residual = made.load(KEYS[0]).residual_norm
    assert residual is not None and residual.max() < 0.02 * np.linalg.norm(store.load(KEYS[0]).values, axis=-1).max()


def test_second_build_finds_everything_and_keeps_it(store: FeatureStore) -> None:
    _, _, root = build(store)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.npy")}
    assert len(before) == len(KEYS) + 1
    build(store)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.npy")} == before


def test_missing_and_damaged_codes_are_made_again(store: FeatureStore) -> None:
    _, made, _ = build(store)
    expected = {key: np.array(made.load(key).values) for key in KEYS}
    made.path(KEYS[0]).unlink()
    made.path(KEYS[1]).write_bytes(b"x" * made.path(KEYS[1]).stat().st_size)
    made.path(KEYS[2]).write_bytes(b"short")
    _, again, _ = build(store)
    for key in KEYS:
        np.testing.assert_array_equal(again.load(key).values, expected[key])


@pytest.mark.parametrize("name", ["basis.npy", "spectrum.json"])
def test_damaged_basis_is_refused_when_read_and_redone_when_built(store: FeatureStore, name: str) -> None:
    basis, _, root = build(store)
    data = bytearray((root / name).read_bytes())
    data[len(data) // 4] ^= 64
    (root / name).write_bytes(data[:-2])
    with pytest.raises(FeatureStoreError, match="PCA basis"):
        codes.load_basis(root)
    again, _, _ = build(store)
    assert torch.equal(again.rows, basis.rows) and again.digest == basis.digest


def test_codes_of_another_basis_are_refused(store: FeatureStore) -> None:
    basis, _, root = build(store)
    other = codes.CodeBasis(basis.rows, basis.energy, "0" * 32)
    with pytest.raises(FeatureStoreError, match="another model"):
        codes.open_codes(store, root, other)
