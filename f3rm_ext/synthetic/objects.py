"""The named things on and around the table. Each stands on z = 0 in its own frame; sizes are in metres."""

import colorsys
from collections.abc import Callable

import numpy as np

from f3rm_ext.synthetic import shapes
from f3rm_ext.synthetic.materials import Color, Material, Pattern, srgb
from f3rm_ext.synthetic.mesh import Mesh, Real, join_meshes

GREY: Color = (0.5, 0.5, 0.5)


class Workshop:
    """Provides the materials of objects and the random numbers that vary them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.materials: list[Material] = []

    def material(self, pattern: Pattern, *colors: Color, params: tuple[Real, ...] = (1.0,), **surface: Real) -> int:
        """Adds a material and returns its index. Missing colours repeat the last one given."""
        a, b, c = (*colors, *(colors[-1:] * 2))[:3]
        metal = bool(surface.pop("metal", 0))
        self.materials.append(Material(pattern, a, b, c, params, metal=metal, **surface))
        return len(self.materials) - 1

    def pick(self, *codes: int) -> Color:
        """Returns one of these sRGB colours, slightly varied in hue and brightness."""
        red, green, blue = srgb(int(self.rng.choice(codes)))
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        return colorsys.hsv_to_rgb(
            (hue + self.rng.uniform(-0.015, 0.015)) % 1.0, saturation, value * self.rng.uniform(0.9, 1.1)
        )


def table(shop: Workshop, radius: Real = 0.66, height: Real = 0.74) -> Mesh:
    """A round pedestal table of varnished wood."""
    wood = shop.material(
        Pattern.WOOD,
        shop.pick(0xBE8F62, 0xB58453, 0xA97E5C),
        srgb(0x94653E),
        params=(0.06,),
        gloss=0.03,
        roughness=0.006,
    )
    top = shapes.cylinder(radius, 0.035, spacing=0.014, bevel=0.012, around=176).place(z=height - 0.035)
    column = shapes.smooth_curve([(0.16, 0.0), (0.13, 0.04), (0.05, 0.12), (0.04, 0.4), (0.06, 0.6), (0.2, 0.705)], 40)
    foot = shapes.cylinder(0.26, 0.03, spacing=0.03)
    pedestal = shapes.revolve(column, around=48)
    pedestal = pedestal.texture(pedestal.vertices[:, [2, 0, 1]])
    return join_meshes([top.paint(wood), pedestal.place(z=0.03).paint(wood), foot.paint(wood)])


def rug(shop: Workshop, radius: Real = 1.35) -> Mesh:
    """A round woven rug."""
    colors = [(0xEFE3CB, 0xA63D40, 0x2F4858), (0xE8DCC8, 0x2A6478, 0xC5852F), (0xF0E6D2, 0x5B6C3A, 0xA9522C)]
    a, b, c = (srgb(code) for code in colors[int(shop.rng.integers(len(colors)))])
    woven = shop.material(Pattern.RUG, a, b, c, params=(radius,))
    return shapes.cylinder(radius, 0.012, spacing=0.036, bevel=0.005, around=160).paint(woven)


def mug(shop: Workshop) -> Mesh:
    """A glazed mug: a cylinder shell with a handle and a zigzag band."""
    glaze = shop.pick(0x2A9D8F, 0x3D7EA6, 0xD1495B)
    body = shop.material(Pattern.BANDS, glaze, srgb(0xF4F1DE), srgb(0xF4F1DE), params=(0.035, 0.085, 9.0), gloss=0.05)
    plain = shop.material(Pattern.PLAIN, glaze, gloss=0.05)
    inside = shop.material(Pattern.PLAIN, srgb(0xF4F1DE), gloss=0.05)
    outer = shapes.smooth_curve([(0.050, 0.006), (0.0535, 0.012), (0.055, 0.06), (0.055, 0.121)], 24)
    foot = np.array([(0.0, 0.0), (0.044, 0.0), (0.050, 0.006)])
    lip = np.array([(0.055 - 0.0025 * (1 - np.cos(a)), 0.121 + 0.0025 * np.sin(a)) for a in np.linspace(0, np.pi, 9)])
    inner = shapes.resample([(0.050, 0.121), (0.049, 0.018), (0.040, 0.010), (0.0, 0.009)], 0.008)
    angle = np.linspace(-0.5 * np.pi, 0.5 * np.pi, 28)
    path = np.stack([0.052 + 0.036 * np.cos(angle), 0 * angle, 0.064 + 0.036 * np.sin(angle)], axis=-1)
    return join_meshes(
        [
            shapes.revolve(foot).paint(plain),
            shapes.revolve(outer, 96).paint(body),
            shapes.revolve(lip).paint(inside),
            shapes.revolve(inner).paint(inside),
            shapes.tube(path, 0.0075, caps=False).paint(plain),
        ]
    )


def lamp(shop: Workshop) -> Mesh:
    """A table lamp: marble foot, brass stem, glowing shade (see :data:`SHADE`)."""
    marble = shop.material(Pattern.MARBLE, srgb(0xEDEAE4), srgb(0x55585E), srgb(0x9A8468), params=(0.09,), gloss=0.05)
    brass = shop.material(Pattern.PLAIN, srgb(0xD8B060), gloss=0.9, metal=1, roughness=0.04)
    shade = shop.material(Pattern.PLAIN, srgb(0xFFC987), emission=0.95, params=(0.03, 0.1))
    lining = shop.material(Pattern.PLAIN, srgb(0xFFD9A0), emission=1.7)
    low, high, r_low, r_high = SHADE
    outside = shapes.resample([(r_low, low), (r_high, high)], 0.02)
    inside = outside[::-1] - np.array([0.003, 0.0])
    stem = shapes.revolve(np.array([(0.008, z) for z in np.linspace(0.03, high - 0.03, 24)]), 24)
    return join_meshes(
        [
            shapes.cylinder(0.075, 0.035, spacing=0.01, bevel=0.008).paint(marble),
            stem.paint(brass),
            shapes.revolve(outside, 72).paint(shade),
            shapes.revolve(inside, 72).paint(lining),
        ]
    )


SHADE = (0.36, 0.53, 0.135, 0.085)
"""The lamp's shade: z of its lower and upper rim, then their radii."""


def book_stack(shop: Workshop) -> Mesh:
    """Four hardbacks, each turned a little; cloth covers with a stripe, paper pages."""
    parts = []
    z = 0.0
    paper = shop.material(Pattern.STRIPES, srgb(0xEDE6D3), srgb(0xD9CFB8), params=(0.0016, 0.0, 0.0, 1.0))
    covers = shop.rng.permutation([0x1D3557, 0x9B2226, 0x588157, 0xBC6C25, 0x5E548E])
    for k, code in enumerate(covers[:4]):
        width, depth, height = 0.205 - 0.012 * k, 0.145 - 0.008 * k, float(shop.rng.uniform(0.026, 0.038))
        a = shop.pick(int(code))
        cloth = shop.material(Pattern.FABRIC, a, (0.8 * a[0], 0.8 * a[1], 0.8 * a[2]), params=(0.0035,))
        gilt = shop.material(Pattern.PLAIN, srgb(0xD9B44A), gloss=0.5, metal=1, roughness=0.1)
        board = shapes.box(width, depth, 0.003, 0.012).paint(cloth)
        pages = shapes.box(width - 0.012, depth - 0.01, height - 0.006, 0.012).place(0.0, 0.002, 0.003).paint(paper)
        half = (height - 0.003) / 2
        angle = np.linspace(-np.pi / 2, np.pi / 2, 13)
        arc = np.stack([-(depth / 2 + 0.006 * np.cos(angle)), half + 0.0015 + half * np.sin(angle)], axis=-1)
        x = np.linspace(-width / 2, width / 2, 16)
        sheet = np.stack(
            [np.broadcast_to(x[:, None], (16, 13)), *np.broadcast_to(arc.T[:, None], (2, 16, 13))], axis=-1
        )
        spine = shapes.thick_sheet(sheet, 0.002)
        spine = spine.texture(spine.vertices).paint(cloth)
        bands = []
        for share in (-0.36, 0.36):
            strip = sheet[:2] * [0, 1, 1] + [0, -0.0012, 0]
            strip[0, :, 0], strip[1, :, 0] = share * width - 0.003, share * width + 0.003
            bands.append(shapes.thick_sheet(strip, 0.001).paint(gilt))
        book = join_meshes([board, board.place(z=height - 0.003), pages, spine, *bands])
        parts.append(book.place(z=z, turn_deg=float(shop.rng.uniform(-14, 14))))
        z += height
    return join_meshes(parts)


def plant(shop: Workshop, scale: Real = 1.0, leaves: int = 26) -> Mesh:
    """A leafy plant in a terracotta pot."""
    clay = shop.material(Pattern.PLAIN, shop.pick(0xC1693C, 0xB55D3A), params=(0.02, 0.18))
    soil = shop.material(Pattern.SPOTS, srgb(0x3A2A1E), srgb(0x5A4634), params=(0.006,))
    stalk = shop.material(Pattern.PLAIN, srgb(0x55803A))
    wall = shapes.resample([(0.045, 0.0), (0.06, 0.085)], 0.01)
    rim = np.array([(0.067, 0.085), (0.069, 0.105)])
    pot = shapes.lathe(
        shapes.resample([(0.0, 0.0), (0.045, 0.0)], 0.015),
        wall,
        np.array([(0.06, 0.085), (0.067, 0.085)]),
        rim,
        np.array([(0.069, 0.105), (0.061, 0.105)]),
        np.array([(0.061, 0.105), (0.059, 0.092)]),
    )
    pot = pot.texture(pot.vertices)
    ground = shapes.revolve(shapes.resample([(0.0595, 0.092), (0.0, 0.096)], 0.01))
    parts = [pot.paint(clay), ground.texture(ground.vertices).paint(soil)]
    greens = [
        shop.material(Pattern.STRIPES, srgb(dark), srgb(light), params=(0.5, 0.0, 1.0), gloss=0.03, roughness=0.1)
        for dark, light in ((0x3F7D3A, 0x4F9148), (0x2F6B3A, 0x3A7D45), (0x6A994E, 0x7BAB5C))
    ]
    for k in range(leaves):
        turn = 2.39996 * k + float(shop.rng.uniform(-0.2, 0.2))
        rise = 0.35 + 0.62 * (k / leaves) ** 0.8
        length = float(shop.rng.uniform(0.17, 0.24)) * (1.15 - 0.4 * rise)
        s = np.linspace(0, 1, 12)
        # The midrib starts steeply and bends over.
        bend = rise * np.pi / 2 * (1 - s) + (rise - 0.75) * np.pi / 2 * s
        step = length / 11
        out = 0.008 + np.concatenate([[0], np.cumsum(np.cos(bend[:-1]) * step)])
        up = 0.09 + np.concatenate([[0], np.cumsum(np.sin(bend[:-1]) * step)]) + 0.11 * rise**2
        blade = np.clip((s - 0.25) / 0.75, 0, 1)
        half = 0.034 * np.sin(np.pi * blade**0.75) ** 0.9 + 0.0015
        side = np.linspace(-1, 1, 7)
        points = np.stack(
            [
                np.broadcast_to(out[:, None], (12, 7)),
                half[:, None] * side,
                up[:, None] + 0.35 * half[:, None] * np.abs(side),
            ],
            axis=-1,
        )
        leaf = shapes.thick_sheet(points, 0.0012)
        parts.append(leaf.place(turn_deg=float(np.rad2deg(turn))).paint(greens[k % len(greens)]))
    stem = np.stack([0.004 * np.sin(np.linspace(0, 4, 12)), 0 * np.ones(12), np.linspace(0.09, 0.24, 12)], axis=-1)
    parts.append(shapes.tube(stem, np.linspace(0.008, 0.003, 12), around=8).paint(stalk))
    mesh = join_meshes(parts)
    return mesh.move(np.diag([scale, scale, scale, 1.0]))


def vase(shop: Workshop) -> Mesh:
    """A slender glazed vase with a painted band: a surface of revolution."""
    base = shop.pick(0xF1EDE4, 0xE9D8A6)
    ink = shop.pick(0x1D4E89, 0x6D2E46)
    glaze = shop.material(Pattern.BANDS, base, ink, ink, params=(0.075, 0.155, 12.0), gloss=0.05)
    inside = shop.material(Pattern.PLAIN, ink, gloss=0.03)
    outline = [
        (0.040, 0.0),
        (0.052, 0.03),
        (0.068, 0.11),
        (0.055, 0.19),
        (0.027, 0.245),
        (0.026, 0.265),
        (0.038, 0.295),
    ]
    outer = shapes.smooth_curve(outline, 44)
    inner = outer[:16:-1] - np.array([0.004, 0.0])
    lip = np.array([outer[-1], (0.036, 0.2965), inner[0]])
    body = [shapes.revolve(np.array([(0.0, 0.0), (0.04, 0.0)])), shapes.revolve(outer, 80)]
    return join_meshes(
        [*[part.paint(glaze) for part in body], shapes.revolve(lip).paint(glaze), shapes.revolve(inner).paint(inside)]
    )


def picture_frame(shop: Workshop) -> Mesh:
    """A gilt frame with a small landscape, leaning on a strut."""
    gilt = shop.material(Pattern.PLAIN, srgb(0xC9A24B), gloss=0.7, metal=1, roughness=0.06)
    board = shop.material(Pattern.PLAIN, srgb(0x3B2F2A), params=(0.01, 0.2))
    width, height, bar = 0.19, 0.235, 0.02
    upright = [
        shapes.rounded_box(bar, 0.018, height, 0.005, 0.015).place(x=sign * (width - bar) / 2).paint(gilt)
        for sign in (-1, 1)
    ]
    level = [shapes.rounded_box(width, 0.018, bar, 0.005, 0.015).place(z=z).paint(gilt) for z in (0.0, height - bar)]
    back = shapes.box(width - bar, 0.004, height - bar, 0.015).place(0.0, 0.002, bar / 2).paint(board)
    front = landscape(shop, width - 2 * bar, height - 2 * bar, gloss=0.03).place(0.0, -0.0015, height / 2)
    leaning = join_meshes([*upright, *level, back, front]).place(tilt_deg=-14)
    path = np.array([[0.0, 0.11, 0.003], [0.0, 0.08, 0.06], [0.0, 0.043, 0.15]])
    return join_meshes([leaning.place(y=-0.02, z=0.0025), shapes.tube(path, 0.004, around=8).paint(gilt)])


def landscape(shop: Workshop, width: Real, height: Real, gloss: Real = 0.0, spacing: Real = 0.02) -> Mesh:
    """A painted landscape in the x-z plane, facing -y, centred on the origin."""
    paint = shop.material(Pattern.PAINTING, GREY, params=(float(shop.rng.uniform(0, 50)),), gloss=gloss)
    sheet = shapes.rectangle(width, height, spacing)
    sheet = sheet.texture(sheet.vertices / [width, height, 1.0] + [0.5, 0.5, 0.0])
    return sheet.place(tilt_deg=90).paint(paint)


def metal_ball(shop: Workshop) -> Mesh:
    """A polished steel ball."""
    steel = shop.material(Pattern.PLAIN, srgb(0xE6E8EA), gloss=0.9, metal=1)
    return shapes.sphere(0.062, around=96).paint(steel)


def doughnut(shop: Workshop) -> Mesh:
    """An iced doughnut with sprinkles on a small plate."""
    icing = shop.pick(0xF48FB1, 0xEE7BA6, 0xE98AC4)
    dough = shop.material(Pattern.DOUGHNUT, srgb(0xC68642), icing, gloss=0.02, roughness=0.15)
    china = shop.material(Pattern.PLAIN, srgb(0xF3F4F6), gloss=0.05)
    top = shapes.smooth_curve([(0.0, 0.006), (0.06, 0.006), (0.075, 0.010), (0.09, 0.016)][::-1], 40)
    under = shapes.smooth_curve([(0.0, 0.0), (0.055, 0.0), (0.072, 0.005), (0.0905, 0.0145)], 24)
    plate = join_meshes([shapes.revolve(under), shapes.revolve(top)])
    return join_meshes([plate.paint(china), shapes.torus(0.045, 0.026, around=128).place(z=0.0055).paint(dough)])


def party_hat(shop: Workshop) -> Mesh:
    """A cone with spiral stripes and a pompom."""
    paper = shop.material(Pattern.STRIPES, shop.pick(0xE63946, 0x7B2CBF), srgb(0xFFF3D6), params=(0.5, 4.0, 9.0))
    fluff = shop.material(Pattern.PLAIN, shop.pick(0xF6BD3B, 0xFFD166), params=(0.004, 0.5))
    cone = shapes.revolve(shapes.resample([(0.062, 0.0), (0.004, 0.175)], 0.006), 96)
    return join_meshes([cone.paint(paper), shapes.sphere(0.016, 32).place(z=0.168).paint(fluff)])


def gift_box(shop: Workshop) -> Mesh:
    """A wrapped box with a ribbon and a bow."""
    ribbon = shop.pick(0xF2CC4D, 0xF7E1A0)
    wrap = shop.material(Pattern.RIBBON, shop.pick(0x6A4C93, 0x1B7F79, 0xB23A48), ribbon, srgb(0xFFFFFF), gloss=0.02)
    satin = shop.material(Pattern.PLAIN, ribbon, gloss=0.04, roughness=0.1)
    parts = [shapes.rounded_box(0.125, 0.105, 0.085, 0.004, 0.007).paint(wrap)]
    s = np.linspace(0, 2 * np.pi, 26)
    for turn in (35.0, 125.0, 215.0, 305.0):
        loop = np.stack([0.026 * (1 - np.cos(s)), 0 * s, 0.016 * np.sin(s) + 0.010 * (1 - np.cos(s))], axis=-1)
        width = 0.010 * (0.35 + np.sin(s / 2))
        across = np.linspace(-1, 1, 4)
        points = loop[:, None] + (width[:, None] * across)[..., None] * np.array([0.0, 1.0, 0.0])
        parts.append(shapes.thick_sheet(points, 0.0012).place(z=0.087, turn_deg=turn).paint(satin))
    return join_meshes(parts)


def puzzle_cube(shop: Workshop) -> Mesh:
    """A cube of coloured stickers: a rounded box."""
    plastic = shop.material(Pattern.CUBE, GREY, params=(float(shop.rng.integers(1, 1000)),), gloss=0.04)
    return shapes.rounded_box(0.1, 0.1, 0.1, 0.007, 0.006).paint(plastic)


def candle(shop: Workshop) -> Mesh:
    """A marbled pillar candle with a flame."""
    wax = shop.material(Pattern.MARBLE, shop.pick(0xE9C9A8, 0xCFE0D8), srgb(0xA4553F), srgb(0xFFFFFF), params=(0.06,))
    wick = shop.material(Pattern.PLAIN, srgb(0x2B2B2B))
    flame = shop.material(Pattern.PLAIN, srgb(0xFFC56B), emission=4.0)
    fire = shapes.smooth_curve([(0.0, 0.0), (0.0065, 0.008), (0.005, 0.018), (0.0, 0.036)], 24)
    fire[[0, -1], 0] = 0.0
    return join_meshes(
        [
            shapes.cylinder(0.038, 0.125, spacing=0.008, bevel=0.006).paint(wax),
            shapes.tube(np.array([[0, 0, 0.124], [0.0005, 0, 0.131], [0.001, 0, 0.139]]), 0.0012, 8).paint(wick),
            shapes.revolve(np.abs(fire), 24).place(z=0.133).paint(flame),
        ]
    )


def apple(shop: Workshop) -> Mesh:
    """A red and green apple with a stalk."""
    skin = shop.material(
        Pattern.FRUIT, shop.pick(0x9AA83A, 0xB5B04A), shop.pick(0xB3202A, 0xA61B2B), params=(0.03, 0.0025), gloss=0.04
    )
    wood = shop.material(Pattern.PLAIN, srgb(0x4A3524))
    angle = np.linspace(-np.pi / 2, np.pi / 2, 40)
    radius = 0.047 * np.cos(angle) ** 0.82 * (1 + 0.09 * np.sin(angle))
    height = 0.041 * np.sin(angle) - 0.016 * np.exp(-((radius / 0.013) ** 2)) * np.sign(angle)
    radius[[0, -1]] = 0.0
    body = shapes.revolve(np.stack([radius, height], axis=-1), 72)
    body = body.texture(body.vertices).place(z=-float(height.min()))
    top = float(body.vertices[:, 2].max())
    s = np.linspace(0, 1, 8)
    stalk = np.stack([0.008 * s**2, 0 * s, top - 0.016 + 0.034 * s], axis=-1)
    return join_meshes([body.paint(skin), shapes.tube(stalk, 0.0016 + 0.0008 * s, 8).paint(wood)])


def rubber_duck(shop: Workshop) -> Mesh:
    """A bath duck: a smooth union of blobs, with separate beak and eyes."""
    yellow = shop.material(Pattern.PLAIN, shop.pick(0xF7C625, 0xFFCF33), gloss=0.04, roughness=0.05)
    orange = shop.material(Pattern.PLAIN, srgb(0xE8651A), gloss=0.04, roughness=0.05)
    black = shop.material(Pattern.PLAIN, srgb(0x141414), gloss=0.06)

    def blob(p: np.ndarray, centre: tuple[Real, Real, Real], radii: tuple[Real, Real, Real]) -> np.ndarray:
        q = (p - np.array(centre)) / np.array(radii)
        return (np.linalg.norm(q, axis=-1) - 1.0) * min(radii)

    def blend(a: np.ndarray, b: np.ndarray, k: Real) -> np.ndarray:
        h = np.clip(0.5 + 0.5 * (b - a) / k, 0, 1)
        return b + (a - b) * h - k * h * (1 - h)

    def body(p: np.ndarray) -> np.ndarray:
        d = blend(
            blob(p, (0, 0, 0.038), (0.068, 0.052, 0.040)), blob(p, (0.030, 0, 0.100), (0.036, 0.036, 0.036)), 0.022
        )
        d = blend(d, blob(p, (-0.068, 0, 0.066), (0.020, 0.022, 0.014)), 0.03)
        for side in (-1, 1):
            d = blend(d, blob(p, (-0.012, 0.047 * side, 0.046), (0.036, 0.012, 0.020)), 0.008)
        return np.maximum(d, 0.001 - p[..., 2])

    def beak(p: np.ndarray) -> np.ndarray:
        return blend(
            blob(p, (0.070, 0, 0.099), (0.020, 0.019, 0.006)), blob(p, (0.066, 0, 0.092), (0.015, 0.015, 0.005)), 0.004
        )

    eyes = [shapes.sphere(0.0055, 20).place(0.0565, 0.0165 * side, 0.1075).paint(black) for side in (-1, 1)]
    return join_meshes(
        [
            shapes.isosurface(body, (-0.1, -0.07, -0.01), (0.08, 0.07, 0.145), 0.0035).paint(yellow),
            shapes.isosurface(beak, (0.04, -0.03, 0.07), (0.1, 0.03, 0.115), 0.0022).paint(orange),
            *eyes,
        ]
    )


def fruit_bowl(shop: Workshop) -> Mesh:
    """A terrazzo bowl with oranges."""
    stone = shop.material(Pattern.TERRAZZO, srgb(0xE8E4DC), srgb(0xC0593B), srgb(0x2E7D80), params=(0.014,), gloss=0.03)
    peel = shop.material(
        Pattern.FRUIT, srgb(0xE8780E), srgb(0xF08A1A), params=(0.03, 0.0022), gloss=0.03, roughness=0.15
    )
    outer = shapes.smooth_curve([(0.042, 0.0), (0.062, 0.018), (0.088, 0.055), (0.094, 0.072)], 36)
    inner = (outer - np.array([0.006, 0.0]))[:8:-1]
    floor = np.concatenate([inner, [(0.02, 0.012), (0.0, 0.012)]])
    bowl = join_meshes(
        [
            shapes.revolve(np.array([(0.0, 0.0), (0.042, 0.0)])),
            shapes.revolve(outer, 72),
            shapes.revolve(np.array([outer[-1], inner[0]]), 72),
            shapes.revolve(floor, 72),
        ]
    )
    bowl = bowl.texture(bowl.vertices).paint(stone)
    oranges = []
    for k in range(4):
        angle = np.deg2rad(120 * k + 20)
        reach, z = (0.041, 0.022) if k < 3 else (0.0, 0.078)
        oranges.append(shapes.sphere(0.0345, 32).place(reach * np.cos(angle), reach * np.sin(angle), z).paint(peel))
    return join_meshes([bowl, *oranges])


TALL: dict[str, Callable[[Workshop], Mesh]] = {
    "plant": plant,
    "vase": vase,
    "book stack": book_stack,
    "picture frame": picture_frame,
}
"""Things around the lamp in the middle of the table."""

SMALL: dict[str, Callable[[Workshop], Mesh]] = {
    "mug": mug,
    "metal ball": metal_ball,
    "doughnut": doughnut,
    "party hat": party_hat,
    "gift box": gift_box,
    "puzzle cube": puzzle_cube,
    "candle": candle,
    "apple": apple,
    "rubber duck": rubber_duck,
    "fruit bowl": fruit_bowl,
}
"""Things along the rim of the table."""
