"""PCA codes: features reduced to K dimensions in which text and exemplar queries still work.

The PCA is uncentred: the rows of the basis B (K x D, orthonormal) span the K strongest directions of the second-moment
matrix of all patches of the training images. Without centring, inner products are kept: with codes c = B f and residual
norm r = |f - Bᵀ c|, a query q has q·f ≈ (B q)·c, and |f|² = |c|² + r². A query therefore needs K dimensions only.
"""

import io
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from f3rm_ext.errors import ExtractorError, FeatureStoreError
from f3rm_ext.features.display import fixed_signs
from f3rm_ext.features.store.feature_store import FeatureStore
from f3rm_ext.utils.atomic_files import hash_bytes, remove_temporaries, write_atomic

_COMMIT_EVERY = 32


@dataclass(frozen=True)
class CodeBasis:
    """The K directions that codes are coordinates in."""

    rows: Float32[Tensor, "code feat"]
    """Orthonormal, strongest first; the largest entry of each row is positive."""
    energy: tuple[float, ...]
    """Share of the features' energy (mean squared norm) along each of all D directions, descending."""
    digest: str

    @property
    def explained(self) -> float:
        """Share of the energy that the K codes keep, 0 to 1."""
        return float(sum(self.energy[: len(self.rows)]))


def second_moment(maps: Iterable[Float[Tensor, "rows cols feat"]], dim: int, device: torch.device) -> np.ndarray:
    """Returns the sum of f fᵀ over all patches, (D, D), given the features of one image after the other.

    Products are formed in float32 for each image (products of fp16 features are exact there) and summed in float64.
    """
    moment = np.zeros((dim, dim))
    for features in maps:
        values = features.reshape(-1, dim).to(device, torch.float32)
        moment += (values.T @ values).cpu().double().numpy()
    return moment


def principal_rows(moment: np.ndarray, codes: int) -> tuple[Float32[Tensor, "code feat"], tuple[float, ...]]:
    """Returns the strongest directions of a second-moment matrix, and the share of energy along all its directions.

    >>> rows, energy = principal_rows(np.diag([1.0, 3.0]), codes=1)
    >>> rows.tolist(), energy
    ([[0.0, 1.0]], (0.75, 0.25))
    """
    values, vectors = np.linalg.eigh(moment)
    energy = np.clip(values[::-1], 0.0, None)
    energy = energy / max(float(energy.sum()), np.finfo(np.float64).tiny)
    rows = fixed_signs(torch.from_numpy(np.ascontiguousarray(vectors.T[::-1][:codes])))
    return rows.float(), tuple(float(e) for e in energy)


def project_query(
    basis: Float[Tensor, "code feat"], query: Float[Tensor, "*batch feat"]
) -> Float[Tensor, "*batch code"]:
    """Projects queries from the full feature space to code space: B q."""
    return query.to(basis.dtype) @ basis.T


def code_cosine(
    query_code: Float[Tensor, "*#batch code"],
    query_norm: Float[Tensor, "*#batch"],
    code: Float[Tensor, "*#batch code"],
    residual_norm: Float[Tensor, "*#batch"] | None = None,
) -> Float[Tensor, "..."]:
    """Returns the cosine of query and feature in the full space, from codes: (B q)·c / (|q| √(|c|² + r²)).

    It is exact except for the inner product of what the codes leave out of query and feature.

    >>> basis, query, feature = torch.eye(3)[:2], torch.tensor([0.6, 0.0, 0.8]), torch.tensor([3.0, 4.0, 0.0])
    >>> round(float(code_cosine(project_query(basis, query), query.norm(), basis @ feature)), 3)
    0.36

    Args:
        code: c; shapes broadcast.
        residual_norm: r. Without it the feature is taken to lie in the span of the basis.
    """
    square = code.float().square().sum(-1)
    if residual_norm is not None:
        square = square + residual_norm.float().square()
    dot = (query_code.float() * code.float()).sum(-1)
    return dot / (query_norm.float() * square.sqrt()).clamp_min(1e-12)


def encode(
    basis: Float[Tensor, "code feat"], values: Float[Tensor, "rows cols feat"]
) -> Float[Tensor, "rows cols channels"]:
    """Returns the codes of a feature map, with the residual norm as last channel."""
    values = values.to(basis.dtype)
    codes = values @ basis.T
    residual = (values - codes @ basis).norm(dim=-1, keepdim=True)
    return torch.cat([codes, residual], dim=-1)


def codes_root(store: FeatureStore, set_key: str, codes: int) -> Path:
    """Returns the folder of a store's codes for a set of training images."""
    return store.root / "codes" / f"{set_key}-k{codes}"


def save_basis(root: Path, rows: Float32[Tensor, "code feat"], energy: tuple[float, ...]) -> CodeBasis:
    """Writes ``basis.npy`` and then ``spectrum.json``, which holds its hash."""
    root.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, rows.numpy().astype(np.float32), allow_pickle=False)
    digest = hash_bytes(buffer.getvalue())
    write_atomic(root / "basis.npy", buffer.getvalue())
    raw = {
        "format": 1,
        "codes": rows.shape[0],
        "dim": rows.shape[1],
        "explained": float(sum(energy[: len(rows)])),
        "basis_blake2b": digest,
        "energy": energy,
    }
    write_atomic(root / "spectrum.json", json.dumps(raw).encode())
    return CodeBasis(rows, energy, digest)


def load_basis(root: Path) -> CodeBasis | None:
    """Reads a basis; returns None if there is none yet. Raises FeatureStoreError if it is damaged."""
    try:
        raw = json.loads((root / "spectrum.json").read_bytes())
        data = (root / "basis.npy").read_bytes()
        shape, energy, digest = (raw["codes"], raw["dim"]), raw["energy"], raw["basis_blake2b"]
        if hash_bytes(data) != digest:
            raise ValueError("its hash is not the recorded one")
        rows = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        if rows.shape != shape or rows.dtype != np.float32 or len(energy) != shape[1]:
            raise ValueError(f"it is not a float32 array of shape {shape}")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise FeatureStoreError(
            f"The PCA basis {root / 'basis.npy'} is damaged ({error}): delete the folder {root}, "
            "or run `f3rm-ext features extract` with the same options to redo it."
        ) from error
    return CodeBasis(torch.from_numpy(rows), tuple(float(e) for e in energy), digest)


def open_codes(store: FeatureStore, root: Path, basis: CodeBasis) -> FeatureStore:
    identity = {**store.manifest.identity, "codes": str(len(basis.rows)), "basis": basis.digest}
    return FeatureStore.open(root, identity, len(basis.rows), residual=True)


def build_codes(
    store: FeatureStore,
    root: Path,
    basis_keys: Sequence[str],
    keys: Sequence[str],
    codes: int,
    device: torch.device,
    on_progress: Callable[[], None] = lambda: None,
) -> FeatureStore:
    """Makes the basis, unless it exists, and the codes that are missing; returns the store of the codes.

    The caller must hold the store's lock.

    A damaged basis or code is made again, because both follow from the full features.

    Args:
        store: Store of the full features, which must hold all keys.
        root: Folder of the codes, see :func:`codes_root`.
        basis_keys: Images that the basis is fitted to (training).
        keys: Images that need codes (training and evaluation).

    Raises:
        ExtractorError: Codes overflow half precision.
    """
    try:
        basis = load_basis(root)
        code_store = open_codes(store, root, basis) if basis is not None else None
    except FeatureStoreError:
        basis = code_store = None
    if basis is None or code_store is None:
        # Codes of the old basis are coordinates in other directions than those of the new one.
        shutil.rmtree(root, ignore_errors=True)
        maps = (torch.from_numpy(np.array(store.load(key).values)) for key in sorted(set(basis_keys)))
        basis = save_basis(root, *principal_rows(second_moment(maps, store.dim, device), codes))
        code_store = open_codes(store, root, basis)
    remove_temporaries(root)
    code_store.recover()
    rows = basis.rows.to(device)
    written = 0
    for key in sorted(set(keys)):
        on_progress()
        if code_store.state(key) == "present" and code_store.damage(key) is None:
            continue
        values = torch.from_numpy(np.array(store.load(key).values)).to(device)
        half = encode(rows, values).to(torch.float16).cpu().numpy()
        if not np.isfinite(half).all():
            raise ExtractorError(
                f"The PCA codes of image {key} overflow half precision: distil the full features (codes 0) instead."
            )
        entry = store.manifest.images[key]
        code_store.put(key, half, entry.grid, (entry.height_px, entry.width_px))
        written += 1
        if written % _COMMIT_EVERY == 0:
            code_store.commit()
    code_store.commit()
    return code_store
