"""A Profile as tables on the terminal, and as a roofline picture."""

from math import log10
from xml.sax.saxutils import escape


def print_profile(profile, console=None):
    """Print a Profile: the call, its time against each limit, its launches, the peers and what is not known."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console(highlight=False)
    card = profile.card
    origin = "measured" if card.measured else "published figures"
    console.print(f"[bold]{profile.name}[/bold]  {', '.join(profile.arguments)}")
    console.print(
        f"{card.name}, {card.sm_count} multiprocessors; {card.memory_bytes_a_second / 1e12:.2f} TB/s ({origin})"
    )
    if profile.cost is not None:
        intensity = f", {profile.intensity:.2f} FLOP a byte" if profile.intensity is not None else ""
        console.print(f"{profile.cost.bytes / 1e6:.3f} MB, {profile.cost.flops / 1e6:.3f} MFLOP{intensity}")
    if profile.cold is not None:
        for name, timed in (("cold", profile.cold), ("warm", profile.warm)):
            console.print(
                f"{name} L2: {timed.microseconds:.2f} µs (quartiles {timed.low:.2f} to {timed.high:.2f}, {timed.replays} replays)"
            )
    table = Table()
    table.add_column("limit")
    table.add_column("µs", justify="right")
    table.add_column("of it reached, cold", justify="right")
    for name, microseconds in sorted(profile.limits.items(), key=lambda item: -item[1]):
        share = profile.share(name)
        table.add_row(name, f"{microseconds:.2f}", "" if share is None else f"{share:.0%}")
    console.print(table)
    console.print(f"bound: [bold]{profile.bound}[/bold] ({profile.because})")
    console.print(_launch_table(profile.launches))
    for name, microseconds in profile.peers.items():
        ratio = f", {microseconds / profile.cold.microseconds:.2f} times ours" if profile.cold else ""
        console.print(f"{name}: {microseconds:.2f} µs{ratio}")
    for note in profile.notes:
        console.print(note, style="dim")


def _launch_table(launches):
    from rich.table import Table

    table = Table()
    table.add_column("launch")
    for launch in launches:
        table.add_column(launch.kernel)
    rows = {
        "grid": lambda launch: _extents(launch.grid),
        "block": lambda launch: _extents(launch.block),
        "shared memory a block": lambda launch: f"{launch.shared_bytes} bytes",
        "registers a thread": lambda launch: launch.registers,
        "spilled a thread": lambda launch: _with(launch.spill_bytes, "{} bytes"),
        "blocks a multiprocessor": lambda launch: _with(launch.blocks_a_multiprocessor, f"{{}} ({launch.limited_by})"),
        "occupancy": lambda launch: _with(launch.occupancy, "{:.0%}"),
        "waves": lambda launch: _with(launch.waves, "{:.2f}"),
        "tail": lambda launch: _with(launch.tail, "{:.0%}"),
        "warp instructions": lambda launch: launch.warp_instructions,
    }
    for heading, value in rows.items():
        table.add_row(heading, *(_with(value(launch), "{}") for launch in launches))
    return table


def _with(value, text):
    return "?" if value is None else text.format(value)


def _extents(extents):
    while len(extents) > 1 and extents[-1] == 1:
        extents = extents[:-1]
    return "×".join(map(str, extents))


# ---- the roofline --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 360, 70, 40, 20, 46


def roofline(profile):
    """SVG text: attainable FLOP/s over FLOPs a byte, both logarithmic, with the card's two roofs and the call as a point.

    ValueError where the call has no FLOPs or its cost is not known; without a time the point is where the limits would put it.
    """
    if profile.cost is None or not profile.cost.flops or not profile.cost.bytes:
        raise ValueError(
            f"plot: the FLOPs a byte of {profile.name} are not known or zero, so it has no place in a roofline"
        )
    card, intensity = profile.card, profile.intensity
    microseconds = profile.cold.microseconds if profile.cold else max(profile.limits.values())
    reached = profile.cost.flops / (microseconds * 1e-6)
    slope = card.memory_bytes_a_second
    roofs = dict(card.operations_a_second) or {"": 4 * max(reached, intensity * slope)}
    top = max(max(roofs.values()), reached) * 3
    ridge = max(roofs.values()) / slope
    low_x, high_x = min(intensity, 1) / 4, max(ridge, intensity) * 8
    low_y = min(reached, low_x * slope) / 3

    def x_of(value):
        return LEFT + (WIDTH - LEFT - RIGHT) * log10(value / low_x) / log10(high_x / low_x)

    def y_of(value):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * log10(value / low_y) / log10(top / low_y)

    title = f"{profile.name} on {card.name}: {profile.bound}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>',
    ]
    for power in range(int(log10(low_y)) + 1, int(log10(top)) + 1):
        y = y_of(10.0**power)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_flops(10.0**power)}</text>')
    for power in range(-3, 6):
        if low_x <= 10.0**power <= high_x:
            x = x_of(10.0**power)
            out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>')
            out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{10.0**power:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">FLOP a byte</text>')
    corner = max(roofs.values()) / slope
    out.append(_line(x_of(low_x), y_of(low_x * slope), x_of(corner), y_of(corner * slope), "#9ca3af"))
    out.append(
        f'<text x="{x_of(low_x) + 8:.1f}" y="{y_of(low_x * slope) - 14:.1f}" fill="#6b7280">{slope / 1e12:.2f} TB/s</text>'
    )
    by_rate = {}
    for name, rate in roofs.items():
        by_rate.setdefault(rate, []).append(name)
    for rate, names in by_rate.items():
        if not names[0]:
            continue
        y = y_of(rate)
        out.append(_line(x_of(rate / slope), y, WIDTH - RIGHT, y, "#9ca3af"))
        label = f"{', '.join(names)}: {_flops(rate)}FLOP/s"
        out.append(f'<text x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end" fill="#6b7280">{escape(label)}</text>')
    x, y = x_of(intensity), y_of(reached)
    said = f"{_flops(reached)}FLOP/s" + ("" if profile.cold else " at most")
    out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#2563eb"/>')
    anchor, shift = ("start", 9) if x < WIDTH / 2 else ("end", -9)
    out.append(f'<text x="{x + shift:.1f}" y="{y + 14:.1f}" text-anchor="{anchor}" fill="#2563eb">{said}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _line(x1, y1, x2, y2, color):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="2"/>'


def _flops(value):
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {letter}"
    return f"{value:.3g} "
