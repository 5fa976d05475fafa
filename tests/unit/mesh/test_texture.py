"""Textures of a box and of walls whose colours are known everywhere."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trimesh
from PIL import Image
from trimesh.visual.material import PBRMaterial
from trimesh.visual.texture import TextureVisuals

from f3rm_ext.errors import MeshError
from f3rm_ext.mesh.camera import Camera
from f3rm_ext.mesh.mesh_files import read_mesh, read_provenance, require_replaceable, vertex_colors, write_mesh
from f3rm_ext.mesh.options import TextureOptions
from f3rm_ext.mesh.texture import blending, seams, visibility
from f3rm_ext.mesh.texture.atlas import Atlas, pieces, texture_texels, unwrap
from f3rm_ext.mesh.texture.baking import bake_texture, bake_vertices, choose_size, distant_background
from f3rm_ext.mesh.texture.blending import find_gains
from f3rm_ext.mesh.texture.photos import Photo, Photos
from f3rm_ext.mesh.texture.rendering import MeshRenderer, SurfaceColors, get_texture, score_photo
from f3rm_ext.mesh.texture.visibility import PhotoLookup, Places, bilinear, bilinear_corners
from f3rm_ext.utils.open3d_library import RayCaster

pytestmark = pytest.mark.usefixtures("open3d")
SIDE_PX = 96
Colors = Callable[[np.ndarray], np.ndarray]


def smooth(points: np.ndarray) -> np.ndarray:
    """The true colours: they change slowly over the surface."""
    return 128 + 90 * np.sin(2.0 * points + np.array([0.0, 1.0, 2.0]))


def camera_at(center: np.ndarray, target: np.ndarray | None = None, focal: float = 100.0) -> Camera:
    ahead = (np.zeros(3) if target is None else target) - center
    ahead = ahead / np.linalg.norm(ahead)
    side = np.cross(ahead, [0.1, 0.2, 1.0])
    side /= np.linalg.norm(side)
    rotation = np.stack([side, np.cross(ahead, side), ahead])
    return Camera(rotation, np.asarray(center, float), np.full(2, focal), np.full(2, SIDE_PX / 2), SIDE_PX, SIDE_PX)


def photograph(mesh: trimesh.Trimesh, camera: Camera, colors: Colors = smooth) -> Photo:
    """An exact photo; what is not on the mesh is white."""
    origin, directions = camera.pixel_rays()
    depth = RayCaster(mesh.vertices, mesh.faces).cast(origin, directions)["t_hit"]
    hit = np.isfinite(depth)
    picture = np.full((SIDE_PX, SIDE_PX, 3), 255.0)
    picture[hit] = colors(origin + directions[hit] * depth[hit][:, None])
    return Photo(np.rint(np.clip(picture, 0, 255)).astype(np.uint8), None)


def around(mesh: trimesh.Trimesh, colors: Colors = smooth, gains: np.ndarray | None = None) -> Photos:
    """Twenty photos from all around."""
    index = np.arange(20) + 0.5
    polar, turn = np.arccos(1 - index / 10), np.pi * (1 + 5**0.5) * index
    places = 2.5 * np.stack([np.cos(turn) * np.sin(polar), np.sin(turn) * np.sin(polar), np.cos(polar)], axis=1)
    cameras = [camera_at(place) for place in places]
    taken = [photograph(mesh, camera, colors) for camera in cameras]
    if gains is not None:
        taken = [Photo((photo.colors * gain).astype(np.uint8), None) for photo, gain in zip(taken, gains, strict=True)]
    return Photos(cameras, lambda number: taken[number])


@pytest.fixture(scope="module")
def box() -> trimesh.Trimesh:
    return trimesh.creation.box((1.0, 1.0, 1.0)).subdivide().subdivide()


def errors_on(
    mesh: trimesh.Trimesh, colors: Colors = smooth, where: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """Differences of a texture from the true colours at places all over the mesh, or only where a mask of them says."""
    texture = get_texture(mesh)
    points, faces = trimesh.sample.sample_surface(mesh, 4000, seed=0)[:2]
    atlas = Atlas(mesh, np.arange(len(mesh.vertices)), len(texture), 0)
    weights = trimesh.triangles.points_to_barycentric(mesh.triangles[faces], points)
    at = (atlas.pixels[mesh.faces[faces]] * weights[..., None]).sum(axis=1)
    errors = np.abs(bilinear(texture.astype(np.float32), at) - colors(points))
    return errors if where is None else errors[where(points)]


def test_a_box_has_its_true_colours_and_no_seams(box: trimesh.Trimesh) -> None:
    steps: list[tuple[str, int, int]] = []
    made = bake_texture(box, around(box), TextureOptions(texture_size=128), lambda *step: steps.append(step))
    stages = {stage: count for stage, *count in steps}
    assert stages["Photos"] == stages["Exposure"] == [20, 20] and made.unseen == 0
    texture, error = get_texture(made.mesh), errors_on(made.mesh)
    assert texture is not None and texture.shape == (128, 128, 3)
    # Small photos see the corners of the box only at its rim, where its colours mix with the white behind it.
    assert error.mean() < 2 and np.quantile(error, 0.97) < 10
    np.testing.assert_allclose(made.gains, 1, atol=0.01)
    camera = camera_at(np.array([2.0, 1.2, 0.9]))
    score = score_photo(MeshRenderer(made.mesh).render(camera), photograph(box, camera))
    assert score.psnr_covered > 30 and 0.1 < score.coverage < 0.9


def test_pieces_have_all_faces_once_and_lie_together(box: trimesh.Trimesh) -> None:
    parts = pieces(box, 30)
    assert sorted(np.concatenate(parts)) == list(range(len(box.faces))) and len(parts) == 8
    assert all(len(part) == 24 and np.ptp(box.triangles_center[part], axis=0).prod() < 0.3 for part in parts)
    assert [list(part) for part in pieces(box, len(box.faces))] == [list(range(len(box.faces)))]


def test_a_mesh_of_many_pieces_is_textured_as_one(box: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("f3rm_ext.mesh.texture.atlas.PIECE_FACES", 30)
    made = bake_texture(box, around(box), TextureOptions(texture_size=256))
    assert made.unseen == 0 and errors_on(made.mesh).mean() < 2
    np.testing.assert_array_equal(np.sort(made.mesh.area_faces), np.sort(box.area_faces))
    atlas = Atlas(made.mesh, np.arange(len(made.mesh.vertices)), 256, 0)
    inside = atlas.pixels[made.mesh.faces].mean(axis=1)
    assert len(np.unique(np.floor(inside), axis=0)) == len(box.faces)  # no two triangles share their texels


def test_vertices_take_the_same_colours(box: trimesh.Trimesh) -> None:
    made = bake_vertices(box, around(box), TextureOptions())
    colors = vertex_colors(made.mesh)
    assert colors is not None and made.unseen == 0
    error = np.abs(colors - smooth(np.asarray(made.mesh.vertices))).max(axis=1)
    assert np.median(error) < 3 and np.quantile(error, 0.8) < 20


def test_what_is_hidden_keeps_its_own_colour() -> None:
    wall = trimesh.creation.box((0.02, 2.0, 2.0))
    plate = trimesh.creation.box((0.02, 0.6, 0.6)).apply_translation([0.7, 0, 0])
    both = trimesh.util.concatenate([wall, plate])

    def colors(points: np.ndarray) -> np.ndarray:
        return np.where(points[:, :1] > 0.5, [[220.0, 30, 30]], [[30.0, 30, 220]])

    cameras = [camera_at(np.array([2.5, y, 0.3]), np.array([0.0, 0, 0])) for y in (-1.5, 0.0, 1.5)]
    taken = [photograph(both, camera, colors) for camera in cameras]
    made = bake_texture(both, Photos(cameras, lambda index: taken[index]), TextureOptions(texture_size=128))
    assert 0 < made.unseen < made.places

    def front(points: np.ndarray) -> np.ndarray:
        return (points[:, 0] > 0) & (points[:, 0] < 0.5) & (np.abs(points[:, 1:]) < 0.9).all(axis=1)

    # The plate stands before the wall in every photo and stains it in none.
    error = errors_on(made.mesh, colors, front)
    assert len(error) > 700 and error.max() < 40


def test_exposures_are_balanced(box: trimesh.Trimesh) -> None:
    gains = np.random.default_rng(0).uniform(0.7, 1.05, (20, 3))
    photos = around(box, gains=gains)
    made = bake_texture(box, photos, TextureOptions(texture_size=64))
    product = made.gains * gains
    assert (product.std(axis=0) / product.mean(axis=0)).max() < 0.015
    off = bake_texture(box, photos, TextureOptions(texture_size=64, balance_exposure=False))
    assert (off.gains == 1).all()


def test_large_photos_are_compared_at_a_fraction_of_their_size() -> None:
    width, height = 2 * blending._COMPARED_PX + 3, blending._COMPARED_PX
    camera = camera_at(np.array([1.4, 0.6, 0.9]))._replace(width=width, height=height, middle=np.array([900.0, 500.0]))
    colors, valid = np.zeros((height, width, 3), np.uint8), np.ones((height, width), bool)
    colors[10, 20:24] = 100, 60, 20
    valid[13, 31] = False
    small, photo = blending._shrink(camera, Photo(colors, valid))
    points = np.random.default_rng(0).normal(size=(50, 3))
    np.testing.assert_allclose(2 * small.project(points)[0], camera.project(points)[0])
    assert photo.valid is not None and photo.colors.shape[:2] == photo.valid.shape == (small.height, small.width)
    assert photo.colors[5, 10:12].tolist() == [[50, 30, 10]] * 2
    assert np.argwhere(~photo.valid).tolist() == [[6, 15]]
    assert blending._shrink(small, photo) == (small, photo)


def test_gains_ignore_reflections_and_lonely_photos() -> None:
    rng = np.random.default_rng(1)
    truth, places = np.array([0.8, 1.0, 1.25, 1.0]), rng.uniform(60, 150, (500, 3))
    colors = places / truth[:, None, None]
    weights = (rng.random((4, 500)) < 0.7).astype(float)
    weights[3] = 0
    colors[0, :60] = 230
    found = find_gains(colors, weights)
    ratios = found[:3] / truth[:3, None]
    np.testing.assert_allclose(ratios / ratios[0], 1, atol=0.01)
    assert (found[3] == 1).all()


def test_both_sides_of_a_cut_agree(box: trimesh.Trimesh) -> None:
    atlas = unwrap(box, 64, 4)
    texels = texture_texels(atlas)
    noisy = np.random.default_rng(0).uniform(60, 190, (len(texels), 3)).astype(np.float32)
    sides = seams._seam_samples(atlas)
    assert len(sides[0]) > 100

    def gap(colors: np.ndarray) -> float:
        texture = np.full((64 * 64, 3), np.nan, np.float32)
        texture[texels.places] = colors
        first, second = (bilinear(texture.reshape(64, 64, 3), side) for side in sides)
        return float(np.abs(first - second).mean())

    before, levelled = gap(noisy), noisy.copy()
    # No lookup on a chart reads a free texel, which is NaN here.
    assert np.isfinite(before)
    seams.level_seams(atlas, texels, levelled)
    assert gap(levelled) < 0.35 * before
    filled = seams.fill_outward(texels, levelled, 64)
    assert filled.min() > 0
    np.testing.assert_array_equal(filled.reshape(-1, 3)[texels.places], np.rint(levelled).astype(np.uint8))


def test_lookups_on_slivers_read_texels_of_charts() -> None:
    corners = np.random.default_rng(0).normal(size=(60, 3, 3))
    corners[:, 2] = corners[:, 1] + 0.01 * corners[:, 2]  # a hundred times as long as wide
    slivers = trimesh.Trimesh(corners.reshape(-1, 3), np.arange(180).reshape(-1, 3), process=False)
    atlas = unwrap(slivers, 1024, 4)
    read = np.zeros(1024**2, bool)
    read[texture_texels(atlas).places] = True
    triangles, share = atlas.pixels[atlas.mesh.faces], np.random.default_rng(1).dirichlet(np.ones(3), 1000)
    at = np.einsum("nc,fcd->fnd", share, triangles)
    assert np.linalg.norm(triangles[:, 0] - triangles[:, 1], axis=1).max() > 20
    assert read[bilinear_corners(at.reshape(-1, 2), 1024, 1024)[0]].all()


def test_masked_pixels_colour_nothing(box: trimesh.Trimesh) -> None:
    photos = around(box)
    spoiled = []
    for index in range(20):
        colors, valid = photos.read(index).colors.copy(), np.ones((SIDE_PX, SIDE_PX), bool)
        valid[:, 42:52] = False
        colors[~valid] = [255, 0, 255]
        spoiled.append(Photo(colors, valid))
    made = bake_texture(box, Photos(photos.cameras, lambda index: spoiled[index]), TextureOptions(texture_size=64))
    texture = get_texture(made.mesh)
    # The mask is magenta, and no true colour has so little green.
    assert texture is not None and texture[..., 1].min() > 30


@pytest.mark.parametrize("center", [(1.2, 0, 0), (3.0, 0, 0), (1.5, 0.4, 1.0), (0.7, -1.2, 0)])
@pytest.mark.parametrize("area", [1e-4, 2e-5, 1e-2])
def test_the_weight_is_the_squared_number_of_pixels_times_the_cosine(
    center: tuple[float, float, float], area: float
) -> None:
    wall = trimesh.creation.box((0.02, 4.0, 4.0))
    point, ahead = np.array([0.01, 0, 0]), np.array([1.0, 0, 0])
    camera = camera_at(np.array(center), point)._replace(focal=np.array([70.0, 120.0]))
    corners, _ = camera.project(point + 1e-4 * np.array([[0, 0, 0], [0, 1, 0], [0, 0, 1]]))
    pixels = area * abs(float(np.linalg.det(corners[1:] - corners[0]))) / 1e-8
    away = camera.center - point
    cosine = float(away @ ahead / np.linalg.norm(away))
    lookup = PhotoLookup(camera, photograph(wall, camera), RayCaster(wall.vertices, wall.faces))
    (weight,) = lookup.look_up(Places(point[None], ahead[None], np.array([area]))).weights
    assert weight == pytest.approx(cosine * min(pixels, 1.0) ** 2, rel=2e-3)


def weigh_by_definition(camera: Camera, places: Places, trust: np.ndarray, caster: RayCaster) -> np.ndarray:
    """Weights of texels that cover at most one pixel, 0 where the photo says nothing, written for readability."""
    pixel, depth = camera.project(places.points)
    inside = (depth > 0) & (pixel >= 0.5).all(axis=1) & (pixel <= np.array([camera.width, camera.height]) - 0.5).all(1)
    away = places.points - camera.center
    cosine = np.abs((away * places.normals).sum(axis=1)) / np.linalg.norm(away, axis=1)
    covered = places.areas * cosine * camera.focal.prod() / depth**2
    column, row = np.where(inside[:, None], pixel, 0).astype(int).T
    weights = trust[row, column] * cosine * np.clip(covered, 1e-6, 1) ** 2
    hidden = caster.occluded(camera.center, away, far=0.998)
    return np.where(inside & (cosine > 0.1) & ~hidden, weights, 0)


def test_the_kernel_weighs_places_as_the_definition_does(box: trimesh.Trimesh) -> None:
    camera, caster = camera_at(np.array([1.4, 0.6, 0.9]), focal=250.0), RayCaster(box.vertices, box.faces)
    valid = np.random.default_rng(0).random((camera.height, camera.width)) > 0.02
    points, faces = (np.asarray(part) for part in trimesh.sample.sample_surface(box, 20_000, seed=0))
    points[:2000] = 2 * camera.center - points[:2000]  # behind the camera
    pixel_areas = camera.project(points)[1] ** 2 / camera.focal.prod()
    areas = np.random.default_rng(1).uniform(0, pixel_areas)
    places = Places(*(part.astype(np.float32) for part in (points, box.face_normals[faces], areas)))
    wanted = weigh_by_definition(camera, places, visibility._trust(camera, valid, caster), caster)
    seen = PhotoLookup(camera, Photo(photograph(box, camera).colors, valid), caster).look_up(places)
    assert 500 < len(seen.indices) < 2000
    np.testing.assert_array_equal(seen.indices, np.flatnonzero(wanted))
    np.testing.assert_allclose(seen.weights, wanted[seen.indices], rtol=1e-4)
    np.testing.assert_allclose(seen.pixels, camera.project(points[seen.indices])[0], rtol=1e-5)


def test_a_mask_that_leaves_nothing_out_changes_nothing(box: trimesh.Trimesh) -> None:
    camera, caster = camera_at(np.array([1.4, 0.6, 0.9])), RayCaster(box.vertices, box.faces)
    kept = np.ones((camera.height, camera.width), bool)
    np.testing.assert_array_equal(visibility._trust(camera, kept, caster), visibility._trust(camera, None, caster))


def test_texels_of_many_pixels_take_their_mean() -> None:
    wall = trimesh.creation.box((0.02, 4.0, 4.0))
    camera = camera_at(np.array([2.01, 0, 0]))
    stripes = np.zeros((SIDE_PX, SIDE_PX, 3), np.uint8)
    stripes[:, np.arange(SIDE_PX) // 2 % 2 == 1] = 200  # two pixels wide
    origin, directions = camera.rays(np.array([[49.0, 49.0]]))  # the middle of a dark one
    point = origin + 2 * directions[0]
    lookup = PhotoLookup(camera, Photo(stripes, None), RayCaster(wall.vertices, wall.faces))
    for pixels, wanted in ((0.1, 0), (1, 0), (4, 0), (16, 100), (1000, 100)):
        place = Places(point[None], np.array([[1.0, 0, 0]]), np.array([pixels * (2 / 100) ** 2]))
        np.testing.assert_allclose(lookup.look_up(place).colors, wanted, atol=0.5, err_msg=f"{pixels} pixels")


def test_photos_of_three_pixels_have_colours() -> None:
    wall = trimesh.creation.box((0.02, 4.0, 4.0))
    camera = camera_at(np.array([2.01, 0, 0]))._replace(width=9, height=3, middle=np.array([4.5, 1.5]))
    photo, area = Photo(np.full((3, 9, 3), 77, np.uint8), None), 16 * (2 / 100) ** 2
    place = Places(np.array([[0.01, 0, 0]]), np.array([[1.0, 0, 0]]), np.array([area]))
    lookup = PhotoLookup(camera, photo, RayCaster(wall.vertices, wall.faces))
    np.testing.assert_allclose(lookup.look_up(place).colors, 77)


def test_what_cannot_be_textured_is_refused(box: trimesh.Trimesh) -> None:
    photos = around(box)
    soup = trimesh.Trimesh(np.random.default_rng(0).random((3000, 3)), np.arange(3000).reshape(-1, 3), process=False)
    with pytest.raises(MeshError, match=r"\d+ charts"):
        unwrap(soup, 64, 4)
    photos.cameras = photos.cameras[:1]
    away = box.copy().apply_translation([0, 0, 500])
    for bake in (bake_texture, bake_vertices):
        with pytest.raises(MeshError, match="photo"):
            bake(away, photos, TextureOptions(texture_size=64))
    with pytest.raises(MeshError, match="photo"):
        choose_size(away, photos)
    flat = trimesh.Trimesh(np.zeros((3, 3)), [[0, 1, 2]], process=False)
    with pytest.raises(MeshError, match="no area"):
        bake_texture(flat, photos, TextureOptions(texture_size=64))
    with pytest.raises(MeshError, match="texture"):
        MeshRenderer(box)


def test_a_mesh_that_is_no_surface_is_textured_too(box: trimesh.Trimesh) -> None:
    fin = [[0.5, 0.5, -0.5], [0.5, 0.5, 0.5], [0.9, 0.9, 0.0]]  # a third triangle at an edge
    broken = trimesh.Trimesh(
        np.concatenate([box.vertices, fin, box.vertices[box.faces[0]]]),
        np.concatenate([box.faces, np.arange(6).reshape(2, 3) + len(box.vertices), box.faces[:1]]),  # doubled faces
        process=False,
    )
    made = bake_texture(broken, around(broken), TextureOptions(texture_size=128))
    assert made.unseen < 0.1 * made.places and len(made.mesh.faces) == len(broken.faces)
    assert errors_on(made.mesh).mean() < 4


def doubled_areas_px(atlas: Atlas) -> np.ndarray:
    a, b, c = (atlas.pixels[atlas.mesh.faces[:, corner]] for corner in range(3))
    return np.abs(np.linalg.det(np.stack([b - a, c - a], axis=1)))


def test_tiny_triangles_have_their_place_too(box: trimesh.Trimesh) -> None:
    atlas = unwrap(box.copy().apply_scale(1e-5), 128, 4)
    assert atlas.charts == unwrap(box, 128, 4).charts and (doubled_areas_px(atlas) > 1).all()


def test_the_size_fits_the_photos(box: trimesh.Trimesh) -> None:
    photos = around(box)
    finer = Photos([camera._replace(focal=4 * camera.focal) for camera in photos.cameras], photos.read)
    assert choose_size(box, photos) == 256 and choose_size(box, finer) == 512


def test_a_distant_background_does_not_fill_the_texture(box: trimesh.Trimesh) -> None:
    photos, hall = around(box), trimesh.creation.box((200.0, 200.0, 200.0)).subdivide().subdivide()
    photos = Photos([camera._replace(focal=2.2 * camera.focal) for camera in photos.cameras], photos.read)
    assert distant_background(box, photos) is None
    both = trimesh.util.concatenate([box, hall])
    space = distant_background(both, photos)
    assert space is not None and 2.5 < space.radius < 6
    atlas = unwrap(both, 512, 2, space=space)
    pixels = doubled_areas_px(atlas)
    near = np.abs(atlas.mesh.triangles_center).max(axis=1) < 1
    # By area alone, the box would have 6 of 240,006 parts.
    assert pixels[near].sum() > 0.002 * pixels.sum() and (pixels[~near] > 0.5).all()


def test_a_texture_of_free_size_is_doubled_until_the_charts_fit() -> None:
    soup = trimesh.Trimesh(np.random.default_rng(0).random((300, 3)), np.arange(300).reshape(-1, 3), process=False)
    for size_px, padding_px, grow, wanted in ((64, 1, True, 128), (64, 4, True, 256), (128, 1, False, 128)):
        atlas = unwrap(soup, size_px, padding_px, grow)
        assert atlas.size_px == wanted and atlas.pixels.min() >= 0 and 0.7 * wanted < atlas.pixels.max() <= wanted


def test_a_texture_repeats_beyond_its_edges() -> None:
    corners = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.0]])
    square = trimesh.Trimesh(corners, [[0, 1, 2], [0, 2, 3]], process=False)
    stripes = Image.fromarray(np.repeat(np.array([[[250, 0, 0], [0, 250, 0]]], np.uint8), 2, axis=0).repeat(16, axis=1))
    square.visual = TextureVisuals(uv=3 * corners[:, :2] - 1, material=PBRMaterial(baseColorTexture=stripes))
    middles = (np.arange(6) + 0.5) / 6
    places = np.stack([middles, np.full(6, 0.1)], axis=1)
    # In the first triangle a place (x, y) is x − y of the second corner and y of the third.
    colors = SurfaceColors(square)(np.zeros(6, int), places @ np.array([[1, 0], [-1, 1.0]]))
    np.testing.assert_allclose(colors[:, 0], [250, 0, 250, 0, 250, 0], atol=1)


@pytest.mark.parametrize("suffix", [".glb", ".obj"])
def test_files_keep_the_texture(box: trimesh.Trimesh, tmp_path: Path, suffix: str) -> None:
    import open3d as o3d

    made = bake_texture(box, around(box), TextureOptions(texture_size=64)).mesh
    path = tmp_path / f"box{suffix}"
    write_mesh(path, made, {"made_by": "f3rm-ext export texture"}, "y" if suffix == ".glb" else "z")
    expected = {"box.glb"} if suffix == ".glb" else {"box.obj", "box.mtl", "box.png"}
    assert {file.name for file in tmp_path.iterdir()} == expected
    assert read_provenance(path)["made_by"] == "f3rm-ext export texture"
    if suffix == ".obj":
        assert "Kd 1 1 1" in path.with_suffix(".mtl").read_text().splitlines(), "or the texture is darkened"
    back = read_mesh(path)
    kept, written = get_texture(back), get_texture(made)
    assert kept is not None and written is not None
    np.testing.assert_array_equal(kept, written)
    assert errors_on(back).mean() < 4
    model = o3d.io.read_triangle_model(str(path))  # type: ignore[arg-type]
    opened = [np.asarray(material.albedo_img) for material in model.materials if material.albedo_img is not None]
    assert [image.shape[:2] for image in opened] == [(64, 64)]
    if suffix == ".obj":
        assert np.asarray(Image.open(tmp_path / "box.png")).shape == (64, 64, 3)


def test_the_picture_of_an_obj_has_its_name_and_is_a_png(tmp_path: Path) -> None:
    """Whatever the material was called and the picture's format was in the file that the mesh comes from."""
    (tmp_path / "photos.jpeg").write_text("another picture")
    uv, faces = np.array([[0.0, 0], [1, 0], [0, 1]]), [[0, 1, 2]]
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 90)).save(stream, "JPEG")
    material = PBRMaterial(name="photos", baseColorTexture=Image.open(stream))
    mesh = trimesh.Trimesh(np.eye(3), faces, visual=TextureVisuals(uv=uv, material=material), process=False)
    write_mesh(tmp_path / "a part.obj", mesh, {"made_by": "f3rm-ext export part"})
    assert {path.name for path in tmp_path.iterdir()} == {"a part.obj", "a part.mtl", "a_part.png", "photos.jpeg"}
    assert (tmp_path / "photos.jpeg").read_text() == "another picture"
    require_replaceable(tmp_path / "a part.obj", textured=True)
    back = get_texture(read_mesh(tmp_path / "a part.obj"))
    assert back is not None and np.abs(back - np.array([200.0, 30, 90])).max() < 5
