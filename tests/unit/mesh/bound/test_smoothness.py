"""Neighbouring triangles, also on meshes that are no manifolds, and the consistency of their normals."""

import torch
import trimesh

from f3rm_ext.mesh.bound.smoothness import VertexEdges, normal_inconsistency, roughness, triangle_pairs


def roof(angle: float) -> torch.Tensor:
    """Two triangles that meet at the y axis, bent from the plane by an angle."""
    bent = torch.tensor([torch.cos(torch.tensor(angle)), 0.0, torch.sin(torch.tensor(angle))])
    return torch.stack(
        [torch.tensor([0.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]), torch.tensor([-1.0, 0.0, 0.0]), bent]
    )


def test_a_closed_mesh_pairs_each_edge_once() -> None:
    ball = trimesh.creation.icosphere(subdivisions=1)
    first, second, signs = triangle_pairs(torch.from_numpy(ball.faces.copy()))
    found = {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert found == {frozenset(pair) for pair in ball.face_adjacency.tolist()} and len(first) == len(found)
    assert bool((signs == 1).all())


def test_the_loss_is_one_minus_the_cosine_of_the_bend() -> None:
    for faces in ([[0, 1, 2], [1, 0, 3]], [[0, 1, 2], [0, 1, 3]]):  # the second is wound the other way
        indices = torch.tensor(faces)
        for angle in (0.0, 0.5, 1.5):
            loss = normal_inconsistency(roof(angle), indices, triangle_pairs(indices))
            torch.testing.assert_close(loss, 1 - torch.cos(torch.tensor(angle)), atol=1e-6, rtol=1e-5)


def test_three_triangles_at_an_edge_and_one_alone() -> None:
    three = torch.tensor([[0, 1, 2], [1, 0, 3], [0, 1, 4]])
    first, second, signs = triangle_pairs(three)
    assert (first.tolist(), second.tolist(), signs.tolist()) == ([0, 1], [1, 2], [1.0, 1.0])
    alone = torch.tensor([[0, 1, 2]])
    vertices = roof(0.1).requires_grad_()
    loss = normal_inconsistency(vertices, alone, triangle_pairs(alone))
    loss.backward()
    assert float(loss.detach()) == 0 and vertices.grad is not None and not vertices.grad.any()


def test_kernels_equal_the_definition_in_value_and_gradient() -> None:
    """Single precision is the kernels', double that of the definition in torch."""
    ball = trimesh.creation.icosphere(subdivisions=2)
    faces = torch.from_numpy(ball.faces.copy())
    faces[::3] = faces[::3].flip(1)  # wound the other way
    vertices = torch.tensor(ball.vertices) + 0.05 * torch.randn(
        ball.vertices.shape, generator=torch.Generator().manual_seed(0)
    )

    def loss(dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = vertices.to(dtype).requires_grad_()
        value = normal_inconsistency(leaf, faces, triangle_pairs(faces))
        return [value.detach(), *torch.autograd.grad(3 * value, leaf)]

    for single, double in zip(loss(torch.float32), loss(torch.float64), strict=True):
        torch.testing.assert_close(single.double(), double, atol=1e-6, rtol=1e-4)


def test_roughness_is_the_distance_from_the_mean_of_the_neighbours() -> None:
    """A pyramid over a square: its tip, the corners, and a vertex without triangles."""
    vertices = torch.tensor([[1.0, 1, 0], [-1, 1, 0], [-1, -1, 0], [1, -1, 0], [0, 0, 2], [9, 9, 9]])
    faces = torch.tensor([[0, 1, 4], [1, 2, 4], [2, 3, 4], [3, 0, 4]])
    edges = VertexEdges.of(faces, len(vertices))
    assert len(edges.ends) == 8 and edges.counts.tolist() == [3, 3, 3, 3, 4, 0]
    corner = torch.tensor([1.0, 1, -2 / 3]).norm()  # its neighbours: (-1, 1, 0), (1, -1, 0) and the tip
    leaf = vertices.requires_grad_()
    found = roughness(leaf, edges)
    torch.testing.assert_close(found.detach(), (2 + 4 * corner) / 6)
    found.backward()
    assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()) and not leaf.grad[5].any()
    assert float(leaf.grad[4, 2]) > 0
