"""Seams of a texture: both sides of a cut show the same colour, and free texels go on from the nearest chart."""

import numpy as np
from jaxtyping import Float, UInt8
from scipy.ndimage import distance_transform_edt
from scipy.sparse import csr_matrix, diags_array
from scipy.sparse.linalg import cg

from f3rm_ext.mesh.texture.atlas import Atlas, Texels, samples_along
from f3rm_ext.mesh.texture.visibility import bilinear_corners

_KEEP = 0.05
"""Weight of keeping a texel as it is against making both sides equal."""


def level_seams(atlas: Atlas, texels: Texels, colors: Float[np.ndarray, "texels 3"]) -> None:
    """Changes colours of texels along cuts, in place and as little as possible, so that bilinear lookups from both
    sides agree.

    Least squares over samples along the cuts, one per texel: |A x − B x|² + w |x − x₀|², where A and B look up the two
    sides.
    """
    first, second = _seam_samples(atlas)
    if not len(first):
        return
    number = np.full(atlas.size_px**2, -1, np.int64)
    number[texels.places] = np.arange(len(texels))
    sides = [bilinear_corners(side, atlas.size_px, atlas.size_px) for side in (first, second)]
    index = np.concatenate([number[sides[0][0]], number[sides[1][0]]], axis=1)
    share = np.concatenate([sides[0][1], -sides[1][1]], axis=1)
    whole = (index >= 0).all(axis=1)
    index, share = index[whole], share[whole]
    involved, column = np.unique(index, return_inverse=True)
    rows = np.repeat(np.arange(len(index)), 8)
    # A row of `difference` is the colour on one side of a cut less that on the other. The least change of all colours
    # that closes the gaps solves normal equations, in which _KEEP says what a change costs beside a gap.
    difference = csr_matrix((share.ravel(), (rows, column.ravel())), shape=(len(index), len(involved)))
    keep = diags_array(np.full(len(involved), _KEEP, np.float32))
    system = (difference.T @ difference + keep).tocsr()
    scaling = diags_array(1 / system.diagonal())  # halves the number of iterations
    for channel in range(3):
        right = -(difference.T @ (difference @ colors[involved, channel]))
        change, _ = cg(system, right, rtol=1e-3, maxiter=100, M=scaling)
        colors[involved, channel] += change
    colors[involved] = np.clip(colors[involved], 0, 255)


def fill_outward(
    texels: Texels, colors: Float[np.ndarray, "texels 3"], size_px: int
) -> UInt8[np.ndarray, "size_px size_px 3"]:
    """Returns the texture; free texels have the colour of the nearest texel of a chart.

    Viewers filter and shrink textures, so that free texels of another colour would show along the cuts.
    """
    texture, free = np.zeros((size_px, size_px, 3), np.uint8), np.ones((size_px, size_px), bool)
    texture.reshape(-1, 3)[texels.places] = np.rint(colors).astype(np.uint8)
    free.reshape(-1)[texels.places] = False
    row, column = distance_transform_edt(free, return_distances=False, return_indices=True)  # type: ignore[misc]
    return texture[row, column]


def _seam_samples(atlas: Atlas) -> tuple[Float[np.ndarray, "n 2"], Float[np.ndarray, "n 2"]]:
    """Places in the texture, about a texel apart, on one side of the cuts and on the other."""
    # Cuts are edges that two triangles of different charts share.
    edges = np.asarray(atlas.mesh.faces)[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
    source = atlas.source[edges]
    swap = source[:, 0] > source[:, 1]
    edges[swap] = edges[swap][:, ::-1]
    source = np.sort(source, axis=1)
    order = np.lexsort((source[:, 1], source[:, 0]))
    edges, source = edges[order], source[order]
    same = (source[1:] == source[:-1]).all(axis=1) & (edges[1:] != edges[:-1]).any(axis=1)
    here = np.flatnonzero(same)
    begin, end = np.stack([edges[here], edges[here + 1]], axis=1).transpose(2, 0, 1)  # vertices on both sides
    pixels = atlas.pixels
    edge, share = samples_along(np.linalg.norm(pixels[begin] - pixels[end], axis=2).max(axis=1, initial=0))
    first, second = (pixels[begin[edge, k]] * (1 - share) + pixels[end[edge, k]] * share for k in range(2))
    return first, second
