"""One function over many items, on this machine's cores or on a Ray cluster.

What runs is the same either way: a function that can be pickled, of one item that can be pickled. Results come back to
the caller, who keeps them as they come, so that nothing is lost when one fails or Ctrl-C ends the rest.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

BACKENDS = ("local", "ray")
WORKER_DIED = (
    "a worker process was ended from outside, perhaps for want of memory; what was done is kept: run the same again "
    "with fewer workers"
)


INTERRUPTED = "interrupted: finishing the runs in progress (Ctrl-C again ends them)"


def map_over_workers(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    done: Callable[[int, Result], None],
    *,
    backend: str = "local",
    workers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Call a function with every item, in processes side by side.

    Args:
        function: of a module, so that a worker can import it.
        items: what it is called with, one at a time.
        done: called here with an item's index and its result, as they come.
        backend: ``local``: processes of this machine; ``ray``: the cluster that ``RAY_ADDRESS`` or a running ``ray
            start`` names, or else Ray on this machine.
        workers: items at a time; by default the cores of the machine, or of the cluster. With 1 and ``local`` all
            happens in this process.
        say: told when Ctrl-C is heeded.

    Raises:
        ValueError: an unknown backend.
        ChildProcessError: a worker died; with Ray, again and again on the same item.
        KeyboardInterrupt: after Ctrl-C. A second Ctrl-C ends the items in progress.

    Items in progress when anything is raised are finished first, and `done` is told.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "ray":
        _with_ray(function, items, done, workers, say)
    elif workers == 1 or len(items) <= 1:
        for index, item in enumerate(items):
            done(index, function(item))
    else:
        _with_processes(function, items, done, workers or os.cpu_count() or 1, say)


class _Worker:
    """A process that calls a function, at the end of a pipe of its own.

    The pipe ends with the process, in the middle of a result too. Where workers share a pipe, as those of
    `concurrent.futures` do, the rest of such a result is waited for without end.
    """

    # spawn: a fork would copy this process's threads (Numba, BLAS) in whatever state they are
    _context = multiprocessing.get_context("spawn")

    def __init__(self, function: Callable[[Item], Result]):
        self._connection, theirs = self._context.Pipe()
        self.process = self._context.Process(target=_answer, args=(theirs, function))
        self.process.start()
        theirs.close()

    def call(self, item: Any) -> Any:
        try:
            self._connection.send(item)
            succeeded, result = self._connection.recv()
        except (EOFError, OSError):
            raise ChildProcessError(WORKER_DIED) from None
        if not succeeded:
            raise result
        return result

    def end(self) -> None:
        self._connection.close()
        self.process.join()


def _answer(connection: Connection, function: Callable[[Item], Result]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connection, suppress(EOFError):
        while True:
            item = connection.recv()
            try:
                connection.send((True, function(item)))
            except Exception as error:
                error.add_note(f"in a worker process:\n{traceback.format_exc()}")
                connection.send((False, error))


def _with_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    done: Callable[[int, Result], None],
    workers: int,
    say: Callable[[str], None],
) -> None:
    idle: SimpleQueue[_Worker] = SimpleQueue()
    crew = [_Worker(function) for _ in range(min(workers, len(items)))]
    for worker in crew:
        idle.put(worker)

    def call(item: Item) -> Result:
        worker = idle.get()
        try:
            return worker.call(item)
        finally:
            idle.put(worker)

    # threads wait for the workers: Ctrl-C, which is for the main thread, cannot part a result from its beginning
    threads = ThreadPoolExecutor(len(crew))
    futures: dict[Future[Result], int] = {threads.submit(call, item): index for index, item in enumerate(items)}

    def keep(finished: Iterable[Future[Result]]) -> None:
        for future in finished:
            done(futures.pop(future), future.result())

    try:
        keep(as_completed(list(futures)))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            say(INTERRUPTED)
        try:
            threads.shutdown(cancel_futures=True)
        except KeyboardInterrupt:
            for worker in crew:
                worker.process.terminate()
            threads.shutdown()
        keep([future for future in futures if _succeeded(future)])
        raise
    finally:
        for worker in crew:
            worker.end()
    threads.shutdown()


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    return function(item)


def _with_ray(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    done: Callable[[int, Result], None],
    workers: int | None,
    say: Callable[[str], None],
) -> None:
    ray: Any = import_module("ray")  # typed the same whether it is installed or not
    ours = not ray.is_initialized()
    if ours:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    remote = ray.remote(_call)
    waiting = list(enumerate(items))[::-1]
    running: dict[Any, int] = {}

    def keep() -> None:
        (finished,), _ = ray.wait(list(running), num_returns=1)
        done(running[finished], ray.get(finished))
        del running[finished]

    try:
        while waiting or running:
            # a cluster may grow; more than its cores would only fill its memory with items
            while waiting and len(running) < (workers or max(1, int(ray.cluster_resources().get("CPU", 1)))):
                index, item = waiting.pop()
                running[remote.remote(function, item)] = index
            keep()
    except KeyboardInterrupt:
        say(INTERRUPTED)
        while running:
            keep()
        raise
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError):
        raise ChildProcessError(WORKER_DIED) from None
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if ours:
            ray.shutdown()
