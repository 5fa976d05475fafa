"""Gaussians on triangles: where they lie, that they are flat, and that they follow the mesh."""

from dataclasses import replace

import pytest
import torch

from f3rm_ext.mesh.bound.gaussians import (
    BoundGaussians,
    bind,
    frame_quats,
    refined_mesh,
    rotate_in_plane,
    triangle_frames,
)
from f3rm_ext.mesh.bound.layout import INITIAL_SIZES, barycentric_weights
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.splat.gaussians import Gaussians, quats_to_rotations, rgb_to_sh, sh_to_rgb

COUNTS = (1, 3, 4, 6)


def make_bound(per_triangle: int, faces: int = 12) -> BoundGaussians:
    """A soup of triangles with Gaussians of all sizes and turns."""
    dice = torch.Generator().manual_seed(per_triangle)
    vertices = torch.randn(20, 3, generator=dice)
    corners = torch.stack([torch.randperm(20, generator=dice)[:3] for _ in range(faces)])
    colors = torch.rand(faces, 3, 3, generator=dice)
    bound = bind(vertices, corners, colors, per_triangle, sh_degree=1, alpha=0.9, thickness=1e-6)
    return replace(
        bound,
        scales=bound.scales + 0.4 * torch.randn(bound.scales.shape, generator=dice),
        turns=torch.randn(bound.turns.shape, generator=dice),
    )


def covariances(gaussians: Gaussians) -> torch.Tensor:
    half = quats_to_rotations(gaussians.quats) * gaussians.sizes()[:, None]
    return half @ half.transpose(1, 2)


@pytest.mark.parametrize("count", COUNTS)
def test_the_gaussians_of_a_layout_stay_apart_and_inside(count: int) -> None:
    weights, radius = barycentric_weights(count), INITIAL_SIZES[count]
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(count))
    torch.testing.assert_close(weights.mean(dim=0), torch.full((3,), 1 / 3))
    # A corner's weight is the distance from the side opposite, in units of the height.
    assert float(weights.min()) * 3**0.5 / 2 >= 0.7 * radius
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]])
    apart = torch.cdist(weights @ corners, weights @ corners) + 10 * torch.eye(count)
    assert count == 1 or float(apart.min()) > 1.2 * radius


@pytest.mark.parametrize("count", COUNTS)
def test_gaussians_lie_flat_on_their_triangles(count: int) -> None:
    bound = make_bound(count)
    found = bound.gaussians()
    assert len(found) == len(bound) == 12 * count and bound.per_triangle == count
    normals = triangle_frames(bound.vertices[bound.faces])[:, :, 2].repeat_interleave(count, dim=0)
    torch.testing.assert_close((found.normals() * normals).sum(dim=1), torch.ones(len(bound)))
    torch.testing.assert_close(found.sizes()[:, 2], torch.full((len(bound),), 1e-6))
    away = found.means - bound.vertices[bound.faces[:, 0]].repeat_interleave(count, dim=0)
    torch.testing.assert_close((away * normals).sum(dim=1), torch.zeros(len(bound)), atol=1e-6, rtol=0)
    assert found.features_rest is bound.features_rest


def test_the_turn_is_about_the_normal_counter_clockwise() -> None:
    vertices = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    bound = bind(vertices, torch.tensor([[0, 1, 2]]), None, 1, 0, 0.5, 1e-6)
    # v0 − v1 is the x axis; the corners run clockwise seen from above, so the normal points down.
    for turn, axis in (((1.0, 0.0), (1, 0, 0)), ((0.0, 2.0), (0, -1, 0)), ((-3.0, 0.0), (-1, 0, 0))):
        first = quats_to_rotations(replace(bound, turns=torch.tensor([turn])).gaussians().quats)[0, :, 0]
        torch.testing.assert_close(first, torch.tensor(axis, dtype=torch.float32))
    torch.testing.assert_close(sh_to_rgb(bound.features_dc), torch.full((1, 3), 0.5))


def test_gaussians_fill_their_triangles_whatever_their_shapes() -> None:
    equilateral = torch.tensor([[0.0, 0, 0], [2, 0, 0], [1, 3**0.5, 0]])
    needle = torch.tensor([[0.0, 0, 0], [9, 0.1, 1], [5, 0.3, 0]])
    for count in COUNTS:
        made = bind(equilateral, torch.tensor([[0, 1, 2]]), None, count, 0, 0.5, 1e-6)
        torch.testing.assert_close(made.scales.exp(), torch.full((count, 2), 2 * INITIAL_SIZES[count]))
    for corners in (equilateral, needle):
        found = bind(corners, torch.tensor([[0, 1, 2]]), None, 1, 0, 0.5, 1e-6).gaussians()
        # The ellipse that touches the middles of the sides (Steiner's).
        away = corners - corners.mean(dim=0)
        torch.testing.assert_close(covariances(found)[0], away.T @ away / 6, atol=1e-5, rtol=1e-4)
    many = bind(needle, torch.tensor([[0, 1, 2]]), None, 6, 0, 0.5, 1e-6).gaussians()
    one = covariances(bind(needle, torch.tensor([[0, 1, 2]]), None, 1, 0, 0.5, 1e-6).gaussians())
    share = (INITIAL_SIZES[6] / INITIAL_SIZES[1]) ** 2
    torch.testing.assert_close(covariances(many), (share * one).expand(6, 3, 3), atol=1e-5, rtol=1e-4)


def test_free_gaussians_come_last_and_stay_when_the_mesh_moves() -> None:
    bound, free = make_bound(3), make_bound(1, faces=7).gaussians()
    both = bound.join_free(free)
    assert len(both) == 36 + 7 and both.per_triangle == 3
    found = both.gaussians()
    for name, value in found.tensors().items():
        assert torch.equal(value[:36], getattr(bound.gaussians(), name)), name
        assert torch.equal(value[36:], getattr(free, name)), name
    moved = both.deform(both.vertices + 1).gaussians()
    assert torch.equal(moved.means[36:], free.means) and not torch.equal(moved.means[:36], found.means[:36])


def test_colors_are_interpolated_between_the_corners() -> None:
    colors = torch.eye(3)[None]
    bound = bind(torch.randn(3, 3), torch.tensor([[0, 1, 2]]), colors, 6, 0, 0.5, 1e-6)
    torch.testing.assert_close(sh_to_rgb(bound.features_dc), barycentric_weights(6))


def test_quaternions_of_every_rotation_with_gradients() -> None:
    quats = torch.nn.functional.normalize(torch.randn(200, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    # Half turns, where the real part is 0, are the hard ones.
    quats = torch.cat([quats, torch.eye(4), torch.tensor([[0.0, 0.6, -0.8, 0.0]])])
    rotations = quats_to_rotations(quats).requires_grad_()
    found = frame_quats(rotations)
    torch.testing.assert_close((found * quats).sum(dim=1).abs(), torch.ones(len(quats)))
    found.sum().backward()
    assert rotations.grad is not None and bool(torch.isfinite(rotations.grad).all())
    turns = torch.tensor([[-1.0, 0.0], [-1.0, 1e-8], [0.0, 1.0], [1.0, 0.0]], requires_grad=True)
    rotate_in_plane(torch.eye(4)[:1].expand(4, 4), turns).sum().backward()
    assert turns.grad is not None and bool(torch.isfinite(turns.grad).all())


@pytest.mark.parametrize("name", ["vertices", "scales", "turns"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    bound = make_bound(3, faces=2)
    double = {key: getattr(bound, key).double() for key in ("vertices", "scales", "turns")}
    bound = replace(bound, **double)
    weights = torch.randn(6, 3, 3, generator=torch.Generator().manual_seed(5)).double()

    def total(value: torch.Tensor) -> torch.Tensor:
        found = replace(bound, **{name: value}).gaussians()
        return (covariances(found) * weights).sum() + (found.means * weights[:, 0]).sum()

    assert torch.autograd.gradcheck(total, double[name].clone().requires_grad_(), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_kernels_equal_the_definition_in_value_and_gradients(count: int) -> None:
    """Single precision is the kernels', double that of the definition in torch."""
    bound = make_bound(count, faces=300)
    bound.turns[:4] = torch.tensor([[-1.0, 0.0], [0.0, 2.0], [0.0, -1.0], [3.0, 0.0]])
    dice = torch.Generator().manual_seed(6)
    by_means, by_quats = torch.randn(len(bound), 3, generator=dice), torch.randn(len(bound), 4, generator=dice)

    def places(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [getattr(bound, name).to(dtype).requires_grad_() for name in ("vertices", "turns")]
        found = replace(bound, vertices=leaves[0], turns=leaves[1], scales=bound.scales.to(dtype)).gaussians()
        loss = (found.means * by_means).sum() + (found.quats * by_quats).sum()
        return [found.means.detach(), found.quats.detach(), *torch.autograd.grad(loss, leaves)]

    for single, double in zip(places(torch.float32), places(torch.float64), strict=True):
        torch.testing.assert_close(single.double(), double, atol=1e-4 * float(double.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("count", COUNTS)
def test_a_deformed_mesh_deforms_its_gaussians(count: int) -> None:
    """Under an affine map, which bends no triangle, a flat Gaussian becomes its exact image."""
    bound = make_bound(count)
    matrix = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    shift = torch.tensor([1.0, 2.0, 3.0])
    before, after = bound.gaussians(), bound.deform(bound.vertices @ matrix.T + shift).gaussians()
    torch.testing.assert_close(after.means, before.means @ matrix.T + shift, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(covariances(after), matrix @ covariances(before) @ matrix.T, atol=2e-5, rtol=1e-4)
    same = bound.deform(bound.vertices)
    torch.testing.assert_close(covariances(same.gaussians()), covariances(before), atol=1e-6, rtol=1e-4)


def test_a_rotated_mesh_rotates_its_gaussians_also_by_the_parameters_alone() -> None:
    bound = make_bound(4)
    turn = quats_to_rotations(torch.tensor([0.3, -0.5, 0.2, 0.9]))
    before, after = bound.gaussians(), replace(bound, vertices=bound.vertices @ turn.T).gaussians()
    torch.testing.assert_close(covariances(after), turn @ covariances(before) @ turn.T, atol=1e-5, rtol=1e-4)


def test_what_is_not_moved_stays() -> None:
    bound = make_bound(1)
    vertices = bound.vertices.clone()
    vertices[bound.faces[0]] += 1.0
    moved = bound.deform(vertices).gaussians().means != bound.gaussians().means
    touched = (bound.faces[:, :, None] == bound.faces[0]).any(dim=(1, 2))
    assert torch.equal(moved.any(dim=1), touched)


def test_vertices_have_the_colors_of_the_gaussians_around_them() -> None:
    vertices = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]])
    bound = bind(vertices, torch.tensor([[0, 1, 2], [1, 3, 2]]), None, 1, 0, 0.5, 1e-6)
    bound.features_dc.copy_(rgb_to_sh(torch.tensor([[1.0, 0, 0], [0, 0, 1.0]])))
    mesh = refined_mesh(bound)
    colors = vertex_colors(mesh)
    assert colors is not None and mesh.faces.tolist() == bound.faces.tolist()
    assert colors.tolist() == [[255, 0, 0], [128, 0, 128], [128, 0, 128], [0, 0, 255]]
    bound.opacities[1] = -50.0  # one that is transparent has no say
    colors = vertex_colors(refined_mesh(bound))
    assert colors is not None and colors[:3].tolist() == [[255, 0, 0]] * 3
