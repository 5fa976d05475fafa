"""Tables of meshes: how near to the truth, refined, textured and asked."""

from markdown_table import Report, quality, table


def meshes(report: Report) -> str:
    """Meshes of each regularisation and extractor, then the runs, capture by capture."""
    tables = []
    for name, capture in report["captures"].items():
        rows = capture["rows"]
        head = [name, "extractor", "accuracy", "completeness", "chamfer"]
        head += [f"F at {score['threshold']:g}" for score in rows[0]["scores"]]
        body = [
            [
                row["run"],
                row["method"],
                *(f"{row[key]:.4f}" for key in ("accuracy", "completeness", "chamfer")),
                *(f"{score['f_score']:.3f}" for score in row["scores"]),
                "–" if row["normal_consistency"] is None else f"{row['normal_consistency']:.3f}",
                *(f"{row[key]:,.0f}" if key in row else "–" for key in ("seconds", "peak_mib")),
            ]
            for row in rows
        ]
        tables.append(table([*head, "normals", "s", "peak MiB"], body))
        runs = {row["run"]: row for row in rows if "psnr" in row}
        body = [
            [run, f"{row['psnr']:.2f}", f"{row['ssim']:.3f}", f"{row['gaussian_count']:,.0f}", f"{row['train_s']:.0f}"]
            for run, row in runs.items()
        ]
        if body:
            title = f"{name}, {capture['steps']:,} steps"
            tables.append(table([title, "PSNR", "SSIM", "Gaussians", "training s"], body))
    return "\n\n".join(tables)


def refinement(report: Report) -> str:
    """Runs and stages of each capture, then its textured meshes."""
    tables = []

    def cell(row: Report, digits: int, *names: str) -> str:
        return next((f"{row[name]:,.{digits}f}" for name in names if name in row), "–")

    for name, capture in report["captures"].items():
        textured = [row for row in capture["rows"] if "coverage" in row]
        stages = [row for row in capture["rows"] if "coverage" not in row]
        head = [f"{name}, {capture['steps']} steps", "PSNR", "SSIM", "Gaussians", "steps/s", "s", "peak MiB"]
        cells = (
            (2, "psnr"),
            (3, "ssim"),
            (0, "gaussian_count"),
            (1, "train_it_per_s"),
            (0, "seconds"),
            (0, "train_peak_memory_mib", "peak_mib"),
        )
        tables.append(
            table(head, [[row["run"], *(cell(row, digits, *names) for digits, *names in cells)] for row in stages])
        )
        if textured:
            head = [name, "PSNR", "PSNR where covered", "coverage", "texture", "unseen texels", "s", "peak MiB"]
            body = [
                [
                    row["run"],
                    cell(row, 2, "psnr"),
                    cell(row, 2, "psnr_covered"),
                    f"{row['coverage']:.1%}",
                    f"{row['texture_px']} px, {row['charts']:,} charts",
                    f"{row['unseen'] / row['places']:.1%}",
                    cell(row, 0, "seconds"),
                    cell(row, 0, "peak_mib"),
                ]
                for row in textured
            ]
            tables.append(table(head, body))
    return "\n\n".join(tables)


def mesh_queries(report: Report) -> str:
    """Direct-3D, rendered and 2D mean IoU of label features on meshes."""
    tables = []
    for capture, rows in report["captures"].items():
        head = [capture, "features on", "points in 3D", "rendered", "2D features", "all vertices"]
        body = [
            [
                row["mesh"],
                f"{row['vertices']:,} vertices" if row["features"] == "vertices" else "texels",
                *(f"{row[protocol]['miou']:.3f}" for protocol in ("direct-3d", "rendered", "image-features")),
                f"{row['surface']['miou']:.3f}" if "surface" in row else "–",
                f"{row['lift_s']:.0f}",
                f"{row['lift_peak_mib']:,}",
                f"{row['features_mib']:.1f}",
            ]
            for row in rows
        ]
        tables.append(table([*head, "lifting, s", "peak MiB", "file, MiB"], body))
    return "\n\n".join(tables)


def surfaces(report: Report) -> str:
    """Gaussians beside true surfaces, capture by capture."""
    return "\n\n".join(_surface(name, capture) for name, capture in report["captures"].items())


def _surface(name: str, report: Report) -> str:
    """Quality and distances, PSNR over seeds, and PSNR at other sizes, of one capture."""
    seeds = max(len(row["psnrs"]) for row in report["rows"])
    head = [name, "PSNR", "SSIM", "LPIPS", "Gaussians", "centres → surface", "median", "surface → centres", "sum"]
    rows = [
        [
            row["run"],
            *quality(row),
            f"{row['gaussian_count']:,.0f}",
            *(f"{row[key]:.4f}" for key in ("accuracy", "median", "completeness", "chamfer")),
        ]
        for row in report["rows"]
    ]
    tables = [table(head, rows)]
    if seeds > 1:
        several = [row for row in report["rows"] if len(row["psnrs"]) == seeds]
        means = [f"{sum(row['psnrs']) / seeds:.3f}" for row in several]
        found = [
            [row["run"], *(f"{psnr:.3f}" for psnr in row["psnrs"]), mean]
            for row, mean in zip(several, means, strict=True)
        ]
        tables.append(table(["PSNR by seed", *(str(seed) for seed in range(seeds)), "mean"], found))
    at = {row["run"]: row["scales"] for row in report["rows"] if "scales" in row}
    sizes = sorted({entry["scale"] for entries in at.values() for entry in entries})
    psnr = {name: {entry["scale"]: entry["psnr"] for entry in entries} for name, entries in at.items()}
    scaled = [[name, *(f"{psnr[name][size]:.2f}" if size in psnr[name] else "–" for size in sizes)] for name in psnr]
    if scaled:
        tables.append(table(["PSNR at × size", *(f"{size:g}" for size in sizes)], scaled))
    return "\n\n".join(tables)
