"""Stacks pictures of `f3rm-ext eval texture --pictures`: the textured mesh beside the photo, one view below the other.

python docs/make_texture_picture.py OUT.jpg PICTURE PICTURE …
"""

import sys

from PIL import Image

WIDTH_PX = 960


def main() -> None:
    """Writes the picture."""
    out, *names = sys.argv[1:]
    rows = []
    for name in names:
        row = Image.open(name).convert("RGB")
        rows.append(row.resize((WIDTH_PX, round(row.height * WIDTH_PX / row.width)), Image.Resampling.LANCZOS))
    sheet = Image.new("RGB", (WIDTH_PX, sum(row.height for row in rows)))
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    sheet.save(out, quality=88)


if __name__ == "__main__":
    main()
