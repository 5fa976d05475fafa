"""The room around the table: walls, window, curtains, paintings, shelf, and the things on the floor."""

import numpy as np

from f3rm_ext.synthetic import shapes
from f3rm_ext.synthetic.lighting import Lights
from f3rm_ext.synthetic.materials import Pattern, srgb
from f3rm_ext.synthetic.mesh import Mesh, Real, join_meshes
from f3rm_ext.synthetic.objects import SHADE, Workshop, landscape

HALF = 2.5
"""Half of the room's side, metres: it spans ±HALF in x and y and stands on z = 0."""
HEIGHT = 2.7
"""Height of the ceiling, metres."""
WINDOW = (1.9, 1.45, 1.62)
"""The window in the wall at y = +HALF: its width, its height, and the height of its centre, metres."""
_SKY = 2.6
_SHADE = np.array([1.9, 1.25, 0.7])


def floor(shop: Workshop) -> Mesh:
    """Oak boards."""
    oak = shop.material(
        Pattern.PLANKS, shop.pick(0xC79A66, 0xB98A5A), srgb(0x8A5F38), params=(0.95, 0.14), gloss=0.02, roughness=0.01
    )
    return shapes.rectangle(2 * HALF, 2 * HALF, 0.06).paint(oak)


def ceiling(shop: Workshop) -> Mesh:
    """White plaster."""
    plaster = shop.material(Pattern.PLAIN, srgb(0xF2EFE8), params=(0.08, 0.03))
    return shapes.rectangle(2 * HALF, 2 * HALF, 0.1).place(z=HEIGHT, tilt_deg=180).paint(plaster)


def walls(shop: Workshop) -> Mesh:
    """Wallpaper above a painted dado, with a skirting board and a dado rail."""
    upper = shop.pick(0xE7DCC3, 0xD8DFD3, 0xDCD6E2)
    dado = shop.pick(0x8FA998, 0x86A0B8, 0xBC8F7A)
    paper = shop.material(Pattern.PANEL, upper, dado, params=(0.92, 0.125))
    wood = shop.material(Pattern.PLAIN, srgb(0xF4F1EA))
    parts = []
    for k in range(4):
        wall = shapes.rectangle(2 * HALF, HEIGHT, 0.09).place(y=HALF, z=HEIGHT / 2, tilt_deg=90)
        wall = wall.texture(wall.vertices * [1.0, 0.0, 1.0]).paint(paper)
        skirting = shapes.box(2 * HALF, 0.02, 0.11, 0.1).place(0, HALF - 0.01).paint(wood)
        rail = shapes.box(2 * HALF, 0.025, 0.035, 0.1).place(0, HALF - 0.0125, 0.905).paint(wood)
        parts.append(join_meshes([wall, skirting, rail]).place(turn_deg=90.0 * k))
    return join_meshes(parts)


def window(shop: Workshop) -> Mesh:
    """A bright sky behind white bars."""
    width, height, middle = WINDOW
    sky = shop.material(Pattern.SKY, srgb(0xDCE9F2), srgb(0x8FBBE8), srgb(0xFFFFFF), emission=1.5)
    white = shop.material(Pattern.PLAIN, srgb(0xF7F5F0), gloss=0.02, roughness=0.1)
    pane = shapes.rectangle(width, height, 0.12)
    pane = pane.texture(pane.vertices / [width, height, 1] + [0.5, 0.5, 0])
    pane = pane.place(y=HALF - 0.03, z=middle, tilt_deg=90)
    low = middle - height / 2
    bars = [
        shapes.box(0.05, 0.06, height + 0.1, 0.09).place(x=x, z=low - 0.05)
        for x in np.linspace(-width / 2, width / 2, 4)
    ]
    bars += [shapes.box(width, 0.055, 0.05, 0.09).place(z=z) for z in (low - 0.05, low + 0.62 * height, low + height)]
    sill = shapes.box(width + 0.24, 0.2, 0.04, 0.06).place(y=-0.06, z=low - 0.08)
    return join_meshes([pane.paint(sky), join_meshes([*bars, sill]).place(y=HALF - 0.04).paint(white)])


def curtains(shop: Workshop) -> Mesh:
    """A linen curtain on each side of the window, hanging in folds."""
    color = shop.pick(0xC8553D, 0xD9A441, 0x7A9E9F)
    linen = shop.material(Pattern.FABRIC, color, (0.85 * color[0], 0.85 * color[1], 0.85 * color[2]), params=(0.006,))
    rod_material = shop.material(Pattern.PLAIN, srgb(0x3A3A3A), gloss=0.3, metal=1, roughness=0.1)
    parts = []
    for side in (-1.0, 1.0):
        s, z = np.meshgrid(np.linspace(0, 1, 72), np.linspace(0.06, 2.5, 26), indexing="ij")
        fold = (0.045 + 0.02 * (1 - z / 2.5)) * np.sin(2 * np.pi * 6.5 * s + 0.4 * np.sin(2 * z))
        points = np.stack([side * 1.24 + 0.52 * (s - 0.5), HALF - 0.16 + fold, z], axis=-1)
        sheet = shapes.thick_sheet(points, 0.004)
        parts.append(sheet.texture(sheet.coords * [0.9, 2.4, 0]).paint(linen))
    rod = np.stack([np.linspace(-1.62, 1.62, 12), np.full(12, HALF - 0.16), np.full(12, 2.51)], axis=-1)
    return join_meshes([*parts, shapes.tube(rod, 0.014).paint(rod_material)])


def painting(shop: Workshop, width: Real, height: Real) -> Mesh:
    """A framed landscape to hang in the x-z plane, facing -y."""
    wood = shop.material(Pattern.WOOD, srgb(0x5A3B24), srgb(0x2E1D12), params=(0.02,), gloss=0.03, roughness=0.1)
    rails = [shapes.box(width + 0.1, 0.035, 0.05, 0.05).place(z=z) for z in (-height / 2 - 0.05, height / 2)]
    stiles = [shapes.box(0.05, 0.035, height, 0.05).place(x=s * (width / 2 + 0.025), z=-height / 2) for s in (-1, 1)]
    return join_meshes([landscape(shop, width, height, spacing=0.06), join_meshes([*rails, *stiles]).paint(wood)])


def bookshelf(shop: Workshop) -> Mesh:
    """Shelves full of books, against y = 0 and facing -y, two metres wide."""
    wood = shop.material(Pattern.WOOD, srgb(0xA8794C), srgb(0x7A5230), params=(0.05,))
    width, depth, height, board = 2.0, 0.3, 1.9, 0.03
    shelves = 5
    parts = [
        shapes.box(board, depth, height, 0.08).place(x=s * (width - board) / 2, y=-depth / 2).paint(wood)
        for s in (-1, 1)
    ]
    parts.append(shapes.box(width, 0.015, height, 0.08).place(y=-0.0075).paint(wood))
    gap = (height - board) / shelves
    parts += [
        shapes.box(width, depth, board, 0.06).place(y=-depth / 2, z=k * gap).paint(wood) for k in range(shelves + 1)
    ]
    palette = [0x9B2226, 0x1D3557, 0x588157, 0xE9C46A, 0xF4A261, 0x5E548E, 0xEDE0D4, 0x264653, 0xBC4749, 0x84A59D]
    cloths = []
    for code in palette:
        a = shop.pick(code)
        cloths.append(shop.material(Pattern.FABRIC, a, (0.85 * a[0], 0.85 * a[1], 0.85 * a[2]), params=(0.006,)))
    for k in range(shelves):
        x = -width / 2 + board + 0.01
        while x < width / 2 - board - 0.07:
            if shop.rng.random() < 0.06:
                x += float(shop.rng.uniform(0.06, 0.16))
                continue
            thick = float(shop.rng.uniform(0.022, 0.055))
            tall = float(shop.rng.uniform(0.62, 0.93)) * (gap - board)
            deep = float(shop.rng.uniform(0.17, 0.23))
            book = shapes.box(thick - 0.001, deep, tall, 0.13)
            # The weave shows on the visible spine, so its texture lies in x and z.
            book = book.texture(book.vertices[:, [0, 2, 1]]).place(
                x + thick / 2, -depth + 0.03 + deep / 2, k * gap + board
            )
            parts.append(book.paint(cloths[int(shop.rng.integers(len(cloths)))]))
            x += thick
    return join_meshes(parts)


def stool(shop: Workshop) -> Mesh:
    """A terrazzo seat on three wooden legs."""
    seat = shop.material(Pattern.TERRAZZO, srgb(0xE6D8C8), srgb(0xD1495B), srgb(0x30638E), params=(0.03,), gloss=0.03)
    wood = shop.material(Pattern.PLAIN, srgb(0x8A5A33))
    parts = [shapes.cylinder(0.17, 0.045, spacing=0.02, bevel=0.01).place(z=0.4).paint(seat)]
    for k in range(3):
        angle = 2 * np.pi * k / 3
        way = np.array([np.cos(angle), np.sin(angle), 0.0])
        path = np.linspace(0.17 * way, 0.1 * way + [0, 0, 0.41], 16)
        parts.append(shapes.tube(path, 0.015, around=16).paint(wood))
    return join_meshes(parts)


def checker_ball(shop: Workshop) -> Mesh:
    """A large play ball with squares of two colours."""
    skin = shop.material(
        Pattern.CHECKER,
        shop.pick(0x2A9D8F, 0xE76F51, 0x3D5A80),
        srgb(0xF4F1DE),
        params=(0.125,),
        gloss=0.03,
        roughness=0.05,
    )
    ball = shapes.sphere(0.17, around=96)
    polar = np.arccos(np.clip(ball.normals[:, 2], -1, 1)) / np.pi
    # Eight squares around the ball, four from pole to pole (0.125 · 2 each).
    return ball.texture(np.stack([ball.coords[:, 0], polar, 0 * polar], -1)).paint(skin)


def lights(rng: np.random.Generator, lamp_to_world: np.ndarray, fineness: int) -> Lights:
    """Returns the lights: the sky in the window, the lamp's shade with its open ends, and a low sun.

    Args:
        fineness: Sets how many points represent the window and the lamp.
    """
    width, height, middle = WINDOW
    across, up = 2 * fineness, int(1.4 * fineness) + 1
    x = ((np.arange(across) + 0.5) / across - 0.5) * width
    z = middle + ((np.arange(up) + 0.5) / up - 0.5) * height
    grid = np.stack(np.meshgrid(x, [HALF - 0.11], z, indexing="ij"), axis=-1).reshape(-1, 3)
    sky = np.array(srgb(0xCFE0F2)) * 2.4 * _SKY
    points = [grid]
    normals = [np.tile([0.0, -1.0, 0.0], (len(grid), 1))]
    power = [np.tile(sky * width * height / len(grid), (len(grid), 1))]

    low, high, r_low, r_high = SHADE
    turns, levels = 3 * fineness // 2 + 3, max(2, fineness // 3)
    angle = 2 * np.pi * (np.arange(turns) + 0.5) / turns
    slope = (r_low - r_high) / (high - low)
    for level in (np.arange(levels) + 0.5) / levels:
        radius = r_low + (r_high - r_low) * level + 0.012
        circle = np.stack([radius * np.cos(angle), radius * np.sin(angle), 0 * angle + low + (high - low) * level], -1)
        normal = np.stack([np.cos(angle), np.sin(angle), 0 * angle + slope], -1) / np.hypot(1, slope)
        area = 2 * np.pi * radius * (high - low) * np.hypot(1, slope) / levels / turns
        points.append(circle)
        normals.append(normal)
        power.append(np.tile(_SHADE * 0.75 * area, (turns, 1)))
    for z_end, radius, way in ((low - 0.004, r_low, -1.0), (high + 0.004, r_high, 1.0)):
        number = 2 * fineness
        spiral = 2.39996 * np.arange(number)
        r = 0.95 * radius * np.sqrt((np.arange(number) + 0.5) / number)
        points.append(np.stack([r * np.cos(spiral), r * np.sin(spiral), np.full(number, z_end)], -1))
        normals.append(np.tile([0.0, 0.0, way], (number, 1)))
        power.append(np.tile(_SHADE * 2.0 * np.pi * radius**2 / number, (number, 1)))
    lamp_points = np.concatenate(points[1:]) @ lamp_to_world[:3, :3].T + lamp_to_world[:3, 3]
    lamp_normals = np.concatenate(normals[1:]) @ lamp_to_world[:3, :3].T

    direction = np.array([rng.uniform(-0.45, 0.45), 1.0, rng.uniform(0.40, 0.46)])
    sun = np.stack(
        [
            direction / np.linalg.norm(direction),
            np.array([2.0, 1.62, 1.16]),
            np.array([0.0, HALF - 0.03, middle]),
            np.array([width / 2, 0.0, 0.0]),
            np.array([0.0, 0.0, height / 2]),
        ]
    )
    return Lights(
        points=np.concatenate([points[0], lamp_points]),
        normals=np.concatenate([normals[0], lamp_normals]),
        power=np.concatenate(power),
        sun=sun,
    )
