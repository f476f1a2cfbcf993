"""CUDA graphs: a sequence of launches recorded once, and replayed at the cost of one."""

from contextlib import contextmanager

from nbkernels.launch.launcher import check


class Stream:
    """A stream of our own, for work that is captured: the default stream cannot be. ``handle`` is what launches take.

    It waits for work on the legacy default stream and is waited for by it, as a blocking stream of CUDA.
    """

    def __init__(self):
        from cuda.bindings import driver

        self._owner = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_DEFAULT))[0]
        self.handle = int(self._owner)


class Graph:
    """Launches recorded by ``capture`` and repeated by ``replay``, with the addresses and numbers they were recorded with."""

    def __init__(self):
        self._executable = None

    @contextmanager
    def capture(self, stream):
        """Record what is launched inside on a stream handle, in place of running it. Nothing inside may wait or allocate."""
        from cuda.bindings import driver

        # thread-local: other threads may go on allocating while this one records
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(stream, mode))
        try:
            yield
        except BaseException:
            driver.cuStreamEndCapture(stream)
            raise
        graph = check(driver.cuStreamEndCapture(stream))[0]
        self._executable = check(driver.cuGraphInstantiate(graph, 0))[0]
        check(driver.cuGraphDestroy(graph))

    def replay(self, stream):
        """Launch everything that was recorded; returns at once."""
        from cuda.bindings import driver

        check(driver.cuGraphLaunch(self._executable, stream))
