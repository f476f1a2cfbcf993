"""Long work on a model shows how far it is."""

import sys
from contextlib import contextmanager


@contextmanager
def progress_bar(what, progress=None):
    """The function to call with the share done, 0 to 1: the caller's own, or one that draws a bar where stderr is a terminal."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)
