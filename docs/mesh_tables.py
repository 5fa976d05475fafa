"""Tables of meshes: how near to the truth, refined, textured and asked."""

from markdown_table import Report, table


def meshes(report: Report) -> str:
    """Meshes of each regularisation and extractor, then the splats that they come from; columns by capture."""

    def cost(rows: list[Report], name: str) -> str:
        largest = max((row[name] for row in rows if name in row), default=None)
        return "–" if largest is None else f"{largest:,.0f}"

    captures = report["captures"]
    scores, costs, runs = {}, {}, {}
    for name, capture in captures.items():
        for row in capture["rows"]:
            if row["method"] == "poisson-centres" and row["run"] != "planar":
                continue  # a baseline: one is enough
            key = row["run"], row["method"]
            scores[key, name] = [f"{row['chamfer']:.4f}", f"{row['scores'][0]['f_score']:.3f}"]
            costs.setdefault(key, []).append(row)
            if "psnr" in row:
                runs.setdefault(row["run"], {})[name] = [f"{row['psnr']:.2f}", f"{row['train_s']:,.0f}"]
    head = ["splats", "extractor"]
    for name, capture in captures.items():
        head += [f"{name}: chamfer", f"F at {capture['rows'][0]['scores'][0]['threshold']:g}"]
    body = [
        [
            *key,
            *(cell for name in captures for cell in scores.get((key, name), ["–", "–"])),
            *(cost(rows, name) for name in ("seconds", "peak_mib")),
        ]
        for key, rows in costs.items()
    ]
    trained = [
        [run, *(cell for name in captures for cell in cells.get(name, ["–", "–"]))] for run, cells in runs.items()
    ]
    head_of_runs = ["splats"]
    for name, capture in captures.items():
        head_of_runs += [f"{name}, {capture['steps']:,} steps: PSNR", "training s"]
    return f"{table([*head, 's, at most', 'peak MiB'], body)}\n\n{table(head_of_runs, trained)}"


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
    head = ["capture", "mesh", "vertices", "points in 3D", "rendered", "2D features", "all vertices"]
    body = [
        [
            capture,
            row["mesh"],
            f"{row['vertices']:,}" if row["features"] == "vertices" else "texels",
            *(f"{row[protocol]['miou']:.3f}" for protocol in ("direct-3d", "rendered", "image-features")),
            f"{row['surface']['miou']:.3f}" if "surface" in row else "–",
            f"{row['lift_s']:.0f}",
            f"{row['lift_peak_mib']:,}",
            f"{row['features_mib']:.1f}",
        ]
        for capture, rows in report["captures"].items()
        for row in rows
    ]
    return table([*head, "lifting, s", "peak MiB", "file, MiB"], body)
