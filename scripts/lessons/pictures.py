"""The lessons' drawings, as SVG text. Each draws what the emulator recorded of a kernel, never what it should have done.

What a picture claims stands in it as data- attributes, so that a test can hold it against the counters.
"""

from html import escape

import numpy as np

WARP, SECTOR, BANKS, WORD = 32, 32, 32, 4
CELL = 22
INK, PALE, RULE = "#1b1f24", "#eef1f4", "#b8c0c8"


def lane_colour(lane):
    """A colour of its own for each of 32 lanes, neighbours alike."""
    return f"hsl({int(lane) % WARP * 300 // WARP}, 70%, 72%)"


def order_colour(share):
    """From early (pale) to late (dark), share 0 to 1."""
    return f"hsl(210, 65%, {90 - 55 * share:.0f}%)"


class Drawing(str):
    """A picture's text, and the access it shows, if it shows one: a test counts that again."""

    access = None


class Canvas:
    """Shapes, and the size they need."""

    def __init__(self, title, **claims):
        self.title = title
        self.claims = claims
        self.parts = []
        self.width = self.height = 0

    def box(self, x, y, w, h, fill=PALE, kind="", **data):
        """A rectangle. kind: what it stands for (its class); data: what it claims."""
        told = "".join(f' data-{key}="{escape(str(value))}"' for key, value in data.items())
        named = f' class="{kind}"' if kind else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" stroke="{RULE}"{named}{told}/>'
        )
        self._reach(x + w, y + h)

    def text(self, x, y, words, size=11, anchor="middle"):
        """A text whose middle (or start, or end) is at x, its baseline at y."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(str(words))}</text>'
        )
        width = 0.58 * size * len(str(words))
        self._reach(x + {"start": width, "middle": width / 2, "end": 0}[anchor], y + 4)

    def line(self, x0, y0, x1, y1, colour=INK, width=1.2):
        """A straight line."""
        self.parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}" stroke-width="{width}"/>'
        )
        self._reach(max(x0, x1), max(y0, y1))

    def dot(self, x, y, colour=INK):
        """A small disc."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" stroke="{INK}"/>')
        self._reach(x + 4, y + 4)

    def _reach(self, x, y):
        self.width, self.height = max(self.width, x), max(self.height, y)

    def svg(self, access=None):
        """The whole picture."""
        told = "".join(f' data-{key}="{escape(str(value))}"' for key, value in self.claims.items())
        width, height = self.width + 12, self.height + 12
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" font-family="sans-serif" fill="{INK}"{told}>\n<title>{escape(self.title)}</title>\n'
            f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )
        drawing = Drawing(text)
        drawing.access = access
        return drawing


def first_warp(accesses):
    """The first access of the list, cut down to the first warp that made it."""
    access = accesses[0]
    mine = access.warps == access.warps[0]
    return access.threads[mine] % WARP, access.offsets[mine], access.size, access


def sector_map(accesses, title):
    """One load or store of one warp: the 32-byte sectors it touches, eight words each, a touched word in its lane's colour."""
    lanes, offsets, size, access = first_warp(accesses)
    owner = {}
    for lane, offset in zip(lanes, offsets, strict=True):
        for word in range(offset // WORD, (offset + size - 1) // WORD + 1):
            owner.setdefault(int(word), int(lane))
    sectors = sorted({word * WORD // SECTOR for word in owner})
    canvas = Canvas(title, sectors=len(sectors), lanes=len(lanes))
    canvas.text(10, 18, title, 13, "start")
    words = SECTOR // WORD
    across = 4
    for number, sector in enumerate(sectors):
        x = 10 + number % across * (words * CELL + 26)
        y = 34 + number // across * (CELL + 24)
        canvas.text(x, y + 10, f"{access.array}, byte {sector * SECTOR}", 9, "start")
        for word in range(words):
            lane = owner.get(sector * words + word)
            if lane is None:
                canvas.box(x + word * CELL, y + 14, CELL, CELL)
            else:
                canvas.box(x + word * CELL, y + 14, CELL, CELL, lane_colour(lane), "touched", lane=lane)
                canvas.text(x + word * CELL + CELL / 2, y + 29, lane, 10)
        canvas.box(x, y + 14, words * CELL, CELL, "none", "sector")
    bottom = canvas.height + 20
    canvas.text(
        10, bottom, f"{len(sectors)} sectors for {len(set(owner))} words; numbers are lanes of the warp", 11, "start"
    )
    return canvas.svg((lanes, offsets, size))


def bank_map(accesses, title):
    """One shared-memory access of one warp: under each bank the different words it must give, one a pass."""
    lanes, offsets, size, _ = first_warp(accesses)
    together = WARP * WORD // max(size, WORD)
    stacks = {}
    for lane, offset in zip(lanes, offsets, strict=True):
        for word in range(offset // WORD, (offset + max(size, WORD) - 1) // WORD + 1):
            phase = int(lane) // together
            stacks.setdefault((phase, int(word) % BANKS), {}).setdefault(int(word), []).append(int(lane))
    passes = 0
    canvas = Canvas(title)
    canvas.text(10, 18, title, 13, "start")
    y = 40
    for bank in range(BANKS):
        canvas.text(10 + bank * CELL + CELL / 2, y, bank, 9)
    y += 6
    for phase in sorted({phase for phase, _ in stacks}):
        deep = max(len(words) for (p, _), words in stacks.items() if p == phase)
        for bank in range(BANKS):
            words = stacks.get((phase, bank), {})
            for row in range(deep):
                canvas.box(10 + bank * CELL, y + row * CELL, CELL, CELL)
            for row, (word, who) in enumerate(words.items()):
                x = 10 + bank * CELL
                canvas.box(x, y + row * CELL, CELL, CELL, lane_colour(who[0]), "word", bank=bank, word=word)
                canvas.text(x + CELL / 2, y + row * CELL + 15, who[0] if len(who) == 1 else f"{who[0]}…", 9)
        y += deep * CELL + 8
        passes += deep
    canvas.claims.update(passes=passes, lanes=len(lanes))
    note = (
        "no conflict"
        if passes == len({p for p, _ in stacks})
        else "words that stand below one another wait for each other"
    )
    canvas.text(10, y + 12, f"banks across, passes down: {passes}; {note}. Numbers are lanes.", 11, "start")
    return canvas.svg((lanes, offsets, size))


def _cells(accesses, shape, itemsize):
    """(row, column, thread, block, order) of each element that accesses touch of a matrix that lies row by row."""
    for access in accesses:
        first = access.offsets // itemsize
        for thread, block, start in zip(access.threads, access.blocks, first, strict=True):
            for element in range(int(start), int(start) + max(1, access.size // itemsize)):
                if element < shape[0] * shape[1]:
                    yield element // shape[1], element % shape[1], int(thread), int(block), access.order


def owner_map(accesses, shape, itemsize, title, cell=CELL, shown=None):
    """A matrix [rows, columns]; each element in the colour, and with the number, of the lane that first touched it.

    shown: how many of the columns are drawn, where not all are.
    """
    shown = shown or shape[1]
    owners = {}
    for row, column, thread, _, _ in _cells(accesses, shape, itemsize):
        if column < shown:
            owners.setdefault((row, column), thread)
    canvas = Canvas(title, elements=len(owners))
    canvas.text(10, 18, title, 13, "start")
    for column in range(shown):
        canvas.text(34 + column * cell + cell / 2, 38, column, 9)
    for row in range(shape[0]):
        y = 44 + row * cell
        canvas.text(28, y + cell * 0.68, row, 9, "end")
        for column in range(shown):
            thread = owners.get((row, column))
            x = 34 + column * cell
            if thread is None:
                canvas.box(x, y, cell, cell)
                continue
            canvas.box(x, y, cell, cell, lane_colour(thread), "owned", row=row, column=column, thread=thread)
            canvas.text(x + cell / 2, y + cell * 0.68, thread, 9 if thread < 100 else 8)
    return canvas.svg()


def walk_map(accesses, shape, itemsize, title, cell=None):
    """A matrix [rows, columns]; each element as dark as late it was first touched, grey where never."""
    first = np.full(shape, -1, np.int64)
    for row, column, _, _, order in _cells(accesses, shape, itemsize):
        if first[row, column] < 0:
            first[row, column] = order
    ranks = {order: n for n, order in enumerate(sorted(set(first[first >= 0].tolist())))}
    cell = cell or max(3, min(CELL, 640 // max(shape)))
    canvas = Canvas(title, touched=int((first >= 0).sum()), steps=len(ranks))
    canvas.text(10, 18, title, 13, "start")
    for row in range(shape[0]):
        column = 0
        while column < shape[1]:  # a run of one order is one box
            end = column
            while end < shape[1] and first[row, end] == first[row, column]:
                end += 1
            order = int(first[row, column])
            fill = PALE if order < 0 else order_colour(ranks[order] / max(1, len(ranks) - 1))
            kind = "" if order < 0 else "run"
            canvas.box(10 + column * cell, 30 + row * cell, (end - column) * cell, cell, fill, kind)
            column = end
    canvas.text(10, canvas.height + 18, f"{len(ranks)} accesses one after the other, pale to dark", 11, "start")
    return canvas.svg()


def timeline(rows, title):
    """Bars in the order of execution. rows: [(label, [(first, last, what)])]; first and last are numbers of accesses."""
    last = max(end for _, bars in rows for _, end, _ in bars) + 1
    width = 620
    fills = {"copy": "#9cc4f2", "use": "#f2b58a", "first walk": "#9cc4f2", "second walk": "#f2b58a"}
    canvas = Canvas(title)
    canvas.text(10, 18, title, 13, "start")
    kinds = []
    for number, (label, bars) in enumerate(rows):
        y = 32 + number * 26
        canvas.text(78, y + 15, label, 10, "end")
        for start, end, what in bars:
            x = 86 + start * width / last
            fill = fills.get(what, "#bfe3b4")
            canvas.box(x, y, max(2, (end + 1 - start) * width / last), 20, fill, what, start=start, end=end)
            if what not in kinds:
                kinds.append(what)
    y = canvas.height + 20
    for number, what in enumerate(kinds):
        canvas.box(86 + number * 120, y, 14, 14, fills.get(what, "#bfe3b4"))
        canvas.text(106 + number * 120, y + 11, what, 10, "start")
    canvas.text(86, y + 34, "left to right: in the order of execution", 10, "start")
    return canvas.svg()


def bars(named, title, unit=""):
    """Horizontal bars. named: [(label, number)]."""
    most = max(number for _, number in named) or 1
    canvas = Canvas(title)
    canvas.text(10, 18, title, 13, "start")
    for row, (label, number) in enumerate(named):
        y = 32 + row * 26
        canvas.text(250, y + 15, label, 11, "end")
        canvas.box(258, y, max(1, 360 * number / most), 20, "#9cc4f2", "bar", label=label, value=number)
        canvas.text(264 + 360 * number / most, y + 15, f"{number:,} {unit}".strip(), 10, "start")
    return canvas.svg()


def bit_map(masks, title, labels):
    """Which lanes' values each lane holds. masks [stages, 32] words: bit l of masks[s, i] says that lane i holds lane l's."""
    canvas = Canvas(title, bits=int(sum(int(m).bit_count() for m in masks.ravel())))
    canvas.text(10, 18, title, 13, "start")
    cell = 6
    for stage, row in enumerate(masks):
        x = 10 + stage * (WARP * cell + 18)
        canvas.text(x, 38, labels[stage], 10, "start")
        for lane, mask in enumerate(row):
            held = [bit for bit in range(WARP) if int(mask) >> bit & 1]
            for bit in held:
                canvas.box(x + bit * cell, 44 + lane * cell, cell, cell, lane_colour(lane))
        canvas.box(x, 44, WARP * cell, WARP * cell, "none")
    canvas.text(10, canvas.height + 18, "down: the lane; across: whose values its sum holds", 11, "start")
    return canvas.svg()


def roofline(points, title, peaks=None):
    """Steps by FLOPs a byte moved. points: [(label, FLOPs a byte, FLOP/s or None)]; peaks: (FLOP/s, bytes/s) of the GPU.

    Without a GPU only the places along the axis are known, and the roof has no height: the dots lie on the axis.
    """
    canvas = Canvas(title, points=len(points))
    canvas.text(10, 18, title, 13, "start")
    left, top, width, height = 70, 40, 520, 220
    low = min(min(p[1] for p in points) / 2, 0.25)
    high = max(max(p[1] for p in points) * 2, (2 * peaks[0] / peaks[1]) if peaks else 8)

    def across(intensity):
        return left + width * np.log(intensity / low) / np.log(high / low)

    canvas.line(left, top + height, left + width, top + height)
    canvas.line(left, top, left, top + height)
    canvas.text(left + width / 2, top + height + 34, "FLOPs for each byte moved (logarithmic)", 11)
    tick = 2.0 ** np.ceil(np.log2(low))
    while tick <= high:
        canvas.text(across(tick), top + height + 16, f"{tick:g}", 9)
        tick *= 4
    if peaks:
        bottom = low * peaks[1] / 1000

        def up(speed):
            return top + height - height * np.log(max(speed, bottom) / bottom) / np.log(peaks[0] / bottom)

        ridge = peaks[0] / peaks[1]
        canvas.line(across(low), up(low * peaks[1]), across(ridge), up(peaks[0]), "#c0392b", 2)
        canvas.line(across(ridge), up(peaks[0]), across(high), up(peaks[0]), "#c0392b", 2)
        canvas.text(left - 6, up(peaks[0]) + 4, f"{peaks[0] / 1e12:.1f} TFLOP/s", 9, "end")
    for number, (label, intensity, speed) in enumerate(points):
        x = across(intensity)
        y = up(speed) if peaks and speed else top + height
        canvas.dot(x, y, lane_colour(number * 7))
        canvas.line(x, y, x, y - 14 - 16 * (number % 5), RULE, 1)
        canvas.text(x, y - 18 - 16 * (number % 5), label, 10, "start" if x < left + width / 2 else "end")
    return canvas.svg()


def grid_map(values, title, cell=CELL):
    """Numbers [rows, columns] in boxes, equal numbers in equal colours."""
    canvas = Canvas(title)
    canvas.text(10, 18, title, 13, "start")
    most = int(np.max(values)) + 1
    for row, numbers in enumerate(values):
        for column, value in enumerate(numbers):
            x, y = 10 + column * cell, 30 + row * cell
            canvas.box(x, y, cell, cell, lane_colour(int(value) * WARP // most), "cell", value=int(value))
            canvas.text(x + cell / 2, y + cell * 0.68, int(value), 10)
    return canvas.svg()
