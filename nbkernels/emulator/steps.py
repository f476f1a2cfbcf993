"""Steps that compute: operations on register arrays, for whatever kind of group."""

import numpy as np

from nbkernels.emulator.groups import FULL, RUN, THIN


def step_of(operation, target, sources, into):
    """A function of a group: target = operation(*sources) for its lanes. into: the operation takes ``out`` of target's dtype."""
    if len(sources) == 1:
        return _apply_one(operation, target, sources[0], into)
    if len(sources) == 2:
        return _apply_two(operation, target, *sources, into)
    return _apply_many(operation, target, sources)


def _apply_one(operation, target, a, into):
    def step(group):
        kind = group.kind
        if kind == FULL:
            if into:
                operation(a, out=target)
            else:
                target[:] = operation(a)
        elif kind == RUN:
            sel = group.sel
            if into:
                operation(a[sel], out=target[sel])
            else:
                target[sel] = operation(a[sel])
        elif kind == THIN:
            sel = group.sel
            target[sel] = operation(a[sel])
        else:
            span = group.span
            np.copyto(target[span], operation(a[span]), where=group.span_mask, casting="unsafe")

    return step


def _apply_two(operation, target, a, b, into):
    def step(group):
        kind = group.kind
        if kind == FULL:
            if into:
                operation(a, b, out=target)
            else:
                target[:] = operation(a, b)
        elif kind == RUN:
            sel = group.sel
            if into:
                operation(a[sel], b[sel], out=target[sel])
            else:
                target[sel] = operation(a[sel], b[sel])
        elif kind == THIN:
            sel = group.sel
            target[sel] = operation(a[sel], b[sel])
        else:
            span = group.span
            np.copyto(target[span], operation(a[span], b[span]), where=group.span_mask, casting="unsafe")

    return step


def _apply_many(operation, target, sources):
    def step(group):
        kind = group.kind
        if kind == FULL:
            target[:] = operation(*sources)
        elif kind in (RUN, THIN):
            sel = group.sel
            target[sel] = operation(*[s[sel] for s in sources])
        else:
            span = group.span
            np.copyto(target[span], operation(*[s[span] for s in sources]), where=group.span_mask, casting="unsafe")

    return step
