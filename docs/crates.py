#!/usr/bin/env python3
"""Draws src/images/crates.svg, the picture of the architecture page, from `cargo metadata`.

    docs/crates.py

An arrow points from a crate to one that it uses. An arrow that follows from others (a uses b, b uses c) is left out. The
test `architecture` of crates/cli compares the picture with `cargo metadata`.
"""

import json
import pathlib
import subprocess

PREFIX = "trainyard-"
WIDTH, HEIGHT, GAP_X, GAP_Y = 124, 30, 18, 46
ROOT = pathlib.Path(__file__).resolve().parent.parent


def dependencies():
    """The crates of the workspace, each with those that it uses, and the names of those that link libtorch."""
    text = subprocess.check_output(["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT)
    packages = json.loads(text)["packages"]
    names = {package["name"] for package in packages}
    used = lambda package: {d["name"] for d in package["dependencies"] if d["kind"] != "dev"}
    graph = {package["name"]: used(package) & names for package in packages}
    direct = {package["name"] for package in packages if "tch" in used(package)}
    return graph, {name for name in graph if direct & ({name} | reachable(graph, name))}


def reachable(graph, start):
    found, todo = set(), [start]
    while todo:
        for name in graph[todo.pop()] - found:
            found.add(name)
            todo.append(name)
    return found


def reduced(graph):
    """The graph without the arrows that follow from others."""
    indirect = lambda name: set().union(*(reachable(graph, used) for used in graph[name]))
    return {name: graph[name] - indirect(name) for name in graph}


def layers(graph):
    """Crates by height: a crate lies above all that it uses, and as low as it can."""
    height = {}

    def of(name):
        if name not in height:
            height[name] = 1 + max((of(used) for used in graph[name]), default=-1)
        return height[name]

    rows = [[] for _ in range(1 + max(map(of, graph)))]
    for name in sorted(graph):
        rows[of(name)].append(name)
    return rows[::-1]


def routed(rows, arrows):
    """Adds to each row the arrows that pass through it, as `(from, to, row)`; gives the rows and the links between them."""
    row_of = {name: y for y, row in enumerate(rows) for name in row}
    rows, links = [list(row) for row in rows], []
    for name in sorted(arrows):
        for used in sorted(arrows[name]):
            passed = [(name, used, y) for y in range(row_of[name] + 1, row_of[used])]
            for point in passed:
                rows[point[2]].append(point)
            path = [name, *passed, used]
            links += zip(path, path[1:])
    return rows, links


def order(rows, links):
    """Sorts each row by where its neighbors are, a few times up and down, so that few arrows cross."""
    above, below = {}, {}
    for upper, lower in links:
        below.setdefault(upper, []).append(lower)
        above.setdefault(lower, []).append(upper)
    for sweep in range(60):
        near = above if sweep % 2 == 0 else below
        place = {item: (i + 0.5) / len(row) for row in rows for i, item in enumerate(row)}
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            mean = lambda item: sum(place[n] for n in near[item]) / len(near[item]) if item in near else place[item]
            row.sort(key=mean)
            place.update({item: (i + 0.5) / len(row) for i, item in enumerate(row)})


def positions(rows, width_of):
    """The left edge of everything, rows centered."""
    total = lambda row: sum(width_of(item) + GAP_X for item in row) - GAP_X
    width = max(map(total, rows)) + 2 * GAP_X
    at = {}
    for y, row in enumerate(rows):
        x = (width - total(row)) / 2
        for item in row:
            at[item] = (x, GAP_Y / 2 + y * (HEIGHT + GAP_Y))
            x += width_of(item) + GAP_X
    return at, width


def draw(graph, with_libtorch):
    arrows = reduced(graph)
    rows, links = routed(layers(graph), arrows)
    order(rows, links)
    width_of = lambda item: WIDTH if isinstance(item, str) else 0
    at, width = positions(rows, width_of)
    height = len(rows) * (HEIGHT + GAP_Y) + GAP_Y / 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
    ]
    for name in sorted(arrows):
        for used in sorted(arrows[name]):
            x, y = at[name][0] + WIDTH / 2, at[name][1] + HEIGHT
            path = f"M{x:.0f} {y:.0f}"
            passed = [item for row in rows for item in row if isinstance(item, tuple) and item[:2] == (name, used)]
            for item in [*passed, used]:
                nx, ny = at[item][0] + width_of(item) / 2, at[item][1]
                bend = (ny - y) / 2
                path += f"C{x:.0f} {y + bend:.0f} {nx:.0f} {ny - bend:.0f} {nx:.0f} {ny:.0f}"
                if item != used:
                    ny += HEIGHT
                    path += f"V{ny:.0f}"
                x, y = nx, ny
            out.append(
                f'<path class="arrow" data-from="{name}" data-to="{used}" d="{path}" fill="none" stroke="#99a" '
                'marker-end="url(#head)"/>'
            )
    for name in sorted(graph):
        x, y = at[name]
        fill = "#fde3cf" if name in with_libtorch else "#dbe9fb"
        out.append(
            f'<g class="crate" data-name="{name}"><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
            f'fill="{fill}" stroke="#556"/><text x="{x + WIDTH / 2:.0f}" y="{y + 20:.0f}" text-anchor="middle">'
            f"{name.removeprefix(PREFIX)}</text></g>"
        )
    note = f'<text x="{GAP_X}" y="{height - 8:.0f}" fill="#556">orange: links libtorch; blue: does not</text>'
    return "\n".join([*out, note, "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs/src/images/crates.svg").write_text(draw(*dependencies()))
