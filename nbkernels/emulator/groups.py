"""Sets of lanes that execute one instruction together.

A lane is one thread of the batch of blocks a machine holds; ``block * padded_threads + thread``, so that lanes 32·w to
32·w + 31 are warp w. How a set is stored decides how fast NumPy can work on it: everything, a run of lanes (a slice: views,
no copies), lanes spread thickly over a run (compute the whole run, write through a mask), or lanes spread thinly (gather,
compute, scatter).
"""

import numpy as np

FULL, RUN, THIN, THICK = range(4)

# above this share of a run, computing all of it and writing through a mask beats gathering (measured: a gather and a scatter
# cost about four times as much a lane as the operation itself)
THICK_SHARE = 0.2


class Group:
    """kind: FULL, RUN, THIN or THICK; sel: what indexes a register for these lanes (a slice, or sorted lane numbers).

    For THICK, ``span`` is the run that holds the lanes and ``span_mask`` their places in it. ``count``: how many lanes.
    """

    __slots__ = ("_mask", "_whole", "count", "kind", "sel", "span", "span_mask", "total")

    def __init__(self, kind, sel, count, total, span=None, span_mask=None, mask=None):
        self.kind = kind
        self.sel = sel
        self.count = count
        self.total = total
        self.span = span
        self.span_mask = span_mask
        self._mask = mask
        self._whole = None

    @property
    def mask(self):
        """A bool for each lane of the machine. Not to be written."""
        if self._mask is None:
            self._mask = np.zeros(self.total, bool)
            self._mask[self.sel] = True
        return self._mask

    @property
    def lanes(self):
        """The lane numbers, ascending."""
        if isinstance(self.sel, slice):
            return np.arange(*self.sel.indices(self.total))
        return self.sel

    def holds_whole_warps(self, live):
        """Whether each warp with a lane in the group has all its live lanes in it."""
        if self._whole is None:
            if self.kind == FULL or (self.kind == RUN and self.sel.start % 32 == 0 and self.sel.stop % 32 == 0):
                self._whole = True
            else:
                inside = self.mask.reshape(-1, 32)
                same = (inside == live.reshape(-1, 32)).all(axis=1)
                # a lane that exits later can only turn a False into True, and the slow path behind False is right as well
                self._whole = bool((same | ~inside.any(axis=1)).all())
        return self._whole


def full_group(total):
    """All lanes of the machine."""
    return Group(FULL, slice(0, total), total, total)


def group_of(mask):
    """The Group of a bool for each lane (taken over, not copied), or None where no lane is set."""
    total = mask.size
    count = int(np.count_nonzero(mask))
    if count == total:
        return Group(FULL, slice(0, total), total, total, mask=mask)
    if count == 0:
        return None
    start = int(mask.argmax())
    stop = total - int(mask[::-1].argmax())
    length = stop - start
    if length == count:
        return Group(RUN, slice(start, stop), count, total, mask=mask)
    if count >= THICK_SHARE * length:
        span = slice(start, stop)
        return Group(THICK, np.flatnonzero(mask), count, total, span, mask[span], mask)
    return Group(THIN, np.flatnonzero(mask), count, total, mask=mask)
