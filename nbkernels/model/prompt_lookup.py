"""Drafts of the next tokens from the text itself: what followed where its last tokens stood before (Saxena 2023).

… the | old | harbour | of … near the | old | →  drafted: harbour, of, …
"""

LONGEST, SHORTEST = 4, 2  # tokens of a match, the longest first: a match of one token says little


class PromptLookup:
    """Where each n-gram of a text last stood. ``push`` tokens as they come, ``draft`` what may follow."""

    def __init__(self, ids):
        self.ids = []
        # n-gram -> the place behind it where it stood last; it is entered once something stands there
        self._behind = {n: {} for n in range(SHORTEST, LONGEST + 1)}
        for token in ids:
            self.push(token)

    def push(self, token):
        """The text has one more token."""
        place = len(self.ids)
        for n, behind in self._behind.items():
            if place >= n:
                behind[tuple(self.ids[place - n :])] = place
        self.ids.append(token)

    def draft(self, count):
        """At most ``count`` tokens that followed the last occurrence of the text's end; none where it never stood before."""
        for n in range(LONGEST, SHORTEST - 1, -1):
            place = self._behind[n].get(tuple(self.ids[-n:]))
            if place is not None:
                return self.ids[place : place + count]
        return []
