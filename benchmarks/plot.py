"""``python -m benchmarks.plot RESULTS.json PICTURE.svg``: how near memory_bound's operations come to the copy, by row length.

A panel an operation; a line a library. Each point is the largest size of its row length, as a share of the speed of a large copy
in the same run.
"""

import json
import sys
from xml.sax.saxutils import escape

COLORS = {"nbkernels": "#2563eb", "torch": "#9ca3af", "torch.compile": "#f59e0b", "liger": "#10b981"}
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 210, 150, 40, 44, 26


def largest(results, dtype):
    """operation -> row length -> the case with most bytes, of one dtype."""
    found = {}
    for r in results:
        if r["dtype"] != dtype:
            continue
        columns = int(r["shape"].split("×")[1])
        kept = found.setdefault(r["operation"], {})
        if columns not in kept or r["bytes"] > kept[columns]["bytes"]:
            kept[columns] = r
    return found


def shares(case, copy_bytes_a_second):
    """library -> share of the copy's speed."""
    return {k: case["bytes"] / (us * 1e-6) / copy_bytes_a_second for k, us in case["microseconds"].items()}


def draw(measured, dtype="bfloat16"):
    """The picture of what a run of memory_bound wrote, as SVG text."""
    panels = largest(measured["results"], dtype)
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP)
    height = TOP + PANEL_HEIGHT + 58
    title = f"{measured['device']}, {dtype}: share of the speed of a copy, by row length"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>',
    ]
    for number, (operation, cases) in enumerate(panels.items()):
        x0 = LEFT + number * (PANEL_WIDTH + GAP)
        lengths = sorted(cases)

        def place(length, share, x0=x0, lengths=lengths):
            step = PANEL_WIDTH / max(1, len(lengths) - 1)
            return x0 + lengths.index(length) * step, TOP + PANEL_HEIGHT * (1 - min(share, 1.1) / 1.1)

        out.append(f'<text x="{x0}" y="{TOP - 8}" font-weight="bold">{escape(operation)}</text>')
        for tenth in (0, 25, 50, 75, 100):
            _, y = place(lengths[0], tenth / 100)
            out.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + PANEL_WIDTH}" y2="{y:.1f}" stroke="#e5e7eb"/>')
            if number == 0:
                out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth}%</text>')
        libraries = [k for k in COLORS if any(k in c["microseconds"] for c in cases.values())]
        for library in libraries:
            points = [
                place(n, shares(cases[n], measured["copy_bytes_a_second"])[library])
                for n in lengths
                if library in cases[n]["microseconds"]
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            out.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[library]}" stroke-width="2"/>')
            out.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLORS[library]}"/>' for x, y in points)
        for length in lengths:
            x, _ = place(length, 0)
            y = TOP + PANEL_HEIGHT + 10
            out.append(
                f'<text x="{x:.1f}" y="{y}" font-size="8" text-anchor="end" transform="rotate(-40 {x:.1f} {y})">{length}</text>'
            )
        if number == 0:
            for i, library in enumerate(libraries):
                y = height - 8
                out.append(f'<rect x="{LEFT + 110 * i}" y="{y - 9}" width="10" height="10" fill="{COLORS[library]}"/>')
                out.append(f'<text x="{LEFT + 110 * i + 14}" y="{y}">{library}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    """Read a run's JSON, write its picture."""
    if len(sys.argv) != 3:
        sys.exit("python -m benchmarks.plot RESULTS.json PICTURE.svg")
    with open(sys.argv[1]) as file:
        measured = json.load(file)
    with open(sys.argv[2], "w") as file:
        file.write(draw(measured))


if __name__ == "__main__":
    main()
