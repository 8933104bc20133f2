"""Jobs on the workers of a Dask scheduler: those of other machines, or of this one (``--cluster``).

Dask distributes the jobs, does those of a lost worker again on another one, and replaces workers of this
machine that are lost. It sends pickled objects: whoever reaches the ports of a scheduler or a worker can run
code there. The ports of a cluster of this machine take only the certificate that it makes for itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import operator
import os
import pickle
import pkgutil
import platform
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from landscape import _version
from landscape.core.errors import InputError, OperationError
from landscape.core.registry import isolated_imports, look_in, optional
from landscape.training.processes import children
from landscape.training.processes.children import Children, threads_each

# Seconds in which a scheduler must answer (ours; Dask waits for 30).
CONNECT = 5.0
# Dask's settings for processes of this machine. They show no pages over HTTP. A busy machine takes its time
# to start a new one: after 15 s Dask would give it up, and then wait for a worker for ever.
LOCAL = {
    "distributed.scheduler.http.routes": (),
    "distributed.worker.http.routes": (),
    "distributed.deploy.lost-worker-timeout": "1 day",
    "distributed.scheduler.no-workers-timeout": f"{children.TIMEOUT:g} s",
}
SILENT = logging.CRITICAL + 1
_EXTRA = "'sgd-landscape[cluster]'"


class Cluster:
    """Workers, here or on other machines, each of which does one job at a time.

    A context manager; at its end jobs that are not done are given up. Workers may come and go meanwhile. All
    need the same versions of Python, PyTorch, NumPy and Dask and the same code of this package.

    Args:
        address: that of a Dask scheduler, such as "tcp://10.0.0.5:8786" or, with the certificates of Dask's
            configuration, "tls://10.0.0.5:8786"; or "local:4", four processes of this machine that end with
            this object (a script that is not guarded by ``if __name__ == "__main__"`` cannot start them);
            "local": one a core, which is Dask's default for workers of one thread. They start with the first
            job.
        threads: shared by the processes of "local"; None: one each, Dask's default.

    Raises:
        InputError: an address of another form.
        OperationError: Dask is not installed, or no scheduler answers within 5 seconds.

    Example:
        >>> Cluster("local:0")
        Traceback (most recent call last):
        landscape.core.errors.InputError: cluster: 'local:0' is not allowed, it must be the address ...
    """

    def __init__(self, address: str = "local", threads: int | None = None) -> None:
        local, host = re.fullmatch(r"local(?::([1-9]\d{0,2}))?", address), r"(?!local:)[^\s/]*[^\s/:]"
        if not local and not re.fullmatch(rf"(?:(?:tcp|tls)://)?{host}:\d{{1,5}}", address):
            raise InputError(
                f"cluster: '{address}' is not allowed, it must be the address of a Dask scheduler, such as "
                "tcp://HOST:8786, or local or local:N for N processes of this machine"
            )
        with isolated_imports():
            self._distributed = optional("distributed", "cluster", _EXTRA)
            self._config = optional("dask.config", "cluster", _EXTRA)
        self._sent: tuple[Any, Any] | None = None  # a function, and the future of it on the workers
        self._end = contextlib.ExitStack()
        if local:
            optional("cryptography", "cluster", _EXTRA)
            workers = int(local[1] or optional("dask.system", "cluster", _EXTRA).CPU_COUNT)
            self._target: Any = functools.partial(self._start, workers, threads or workers)
        else:
            self._target = address
            _ = self._client  # a wrong address is reported before any work begins

    @functools.cached_property
    def _client(self) -> Any:
        """Dask's client; processes of this machine are started with it."""
        with contextlib.ExitStack() as stack:
            # Dask's own log lines and advice are not for a command's user; what fails is an error here.
            for handler in logging.getLogger("distributed").handlers:
                stack.callback(handler.setLevel, handler.level)
                handler.setLevel(SILENT)
            stack.enter_context(self._config.set({"distributed.admin.large-graph-warning-threshold": "1 PB"}))
            target = self._target if isinstance(self._target, str) else stack.enter_context(self._target())
            client = self._connect(target)
            stack.enter_context(contextlib.suppress(TimeoutError))  # when the scheduler has ended
            stack.callback(client.close, timeout=CONNECT)
            self._end = stack.pop_all()
        return client

    @contextlib.contextmanager
    def _start(self, workers: int, threads: int) -> Iterator[Any]:
        """A scheduler in this process, and ``workers`` processes; all listen on 127.0.0.1."""
        root = str(Path(_version.__file__).parents[1])
        if root not in sys.path:  # the processes get this path, and have to find this package
            sys.path.append(root)
        settings = {"PYTHONSAFEPATH": "1", **threads_each(workers, threads)}
        added = self._config.get("distributed.nanny.pre-spawn-environ")  # by Dask, in this process, too
        with _environment(settings, added), Children() as private, self._config.set(LOCAL):
            try:
                cluster = self._distributed.LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    security=True,  # certificates of its own
                    memory_limit=0,  # no limit, as without a cluster
                    local_directory=str(private.folder),  # it is on the workers' module path
                    preload=[__name__],
                    scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
                    silence_logs=SILENT,
                )
            except (OSError, RuntimeError) as error:
                words = " ".join(str(error).split())
                raise OperationError(f"cluster: {workers} local processes cannot start ({words})") from error
            with cluster:
                yield cluster

    def _connect(self, target: Any) -> Any:
        client = object.__new__(self._distributed.Client)
        try:
            with warnings.catch_warnings():  # of other versions, which each job compares
                warnings.simplefilter("ignore")
                client.__init__(target, timeout=CONNECT, set_as_default=False)
        except (OSError, RuntimeError, TypeError, ValueError) as error:  # two of them: of certificates
            client.close(timeout=CONNECT)  # Dask would do it at the end of this process, and take 10 s
            words = " ".join(str(error).split())
            raise OperationError(f"cluster: no Dask scheduler answers at {target} ({words})") from error
        return client

    @property
    def address(self) -> str:
        """The address of the scheduler."""
        return str(self._client.scheduler.address)

    @property
    def workers(self) -> int:
        """The number of workers now."""
        return len(self._client.nthreads())

    def run(
        self,
        function: str | Callable[..., Any],
        jobs: Sequence[Sequence[Any]],
        done: Callable[[int, Any], None],
    ) -> None:
        """Call ``function`` with the arguments of each job, in the workers.

        Args:
            function: MODULE:NAME, MODULE being of this package; or anything that can be called and pickled,
                which is sent to each worker once.
            jobs: the arguments of each.
            done: takes a job's number and its result, in the order in which the jobs end.

        Raises:
            OperationError: as soon as a job fails; the others are given up then. Or for a function that
                cannot be pickled.

        Example:
            >>> def roots(cluster):  # in a script: with Cluster("local:2") as cluster: roots(cluster)
            ...     cluster.run("math:sqrt", [[4.0], [9.0]], lambda number, root: print(number, root))
        """
        # Dask itself handles functions of the standard library and bytes: a scheduler needs nothing else, and
        # a worker without this package fails at its job; it would end at a message that it cannot read.
        shared, bodies = self._send(function), [pickle.dumps(job) for job in jobs]
        futures = self._client.map(operator.call, [shared] * len(jobs), bodies, key="landscape", pure=False)
        numbers = {future.key: number for number, future in enumerate(futures)}
        try:
            for future in self._distributed.as_completed(futures, loop=self._client.loop):
                number = numbers[future.key]
                done(number, self._result(future, number))
                future.release()
        finally:
            for future in futures:
                future.release()

    def _send(self, function: str | Callable[..., Any]) -> Any:
        """``function`` as a future that all jobs share. A worker that lost it gets it anew."""
        if self._sent is None or self._sent[0] is not function:
            try:
                payload = optional("cloudpickle", "cluster", _EXTRA).dumps(function)
            except Exception as error:  # whatever the objects of the user raise
                words = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise OperationError(
                    f"cluster: model, loss and data cannot be sent to workers ({words})"
                ) from error
            folder = None if isinstance(self._target, str) else os.getcwd()
            called = pickle.dumps(_Function(payload, _versions(), folder))
            self._sent = function, self._client.submit(pickle.loads, called, pure=False)
        return self._sent[1]

    def _result(self, future: Any, number: int) -> Any:
        """The result of a job that has ended; JobError if it failed."""
        try:
            return future.result()
        except self._distributed.scheduler.KilledWorker as error:
            died = f"{error.allowed_failures + 1} workers died at it, the last at {error.last_worker.address}"
            raise children.JobError(number, f"{died}; {children.GOES_ON}") from error
        except self._distributed.CancelledError as error:
            lost = f"the Dask scheduler at {self.address} was lost"
            raise children.JobError(number, f"{lost}; {children.GOES_ON}") from error
        except ImportError as error:
            words = f"cluster: {error} on a worker, which needs all packages and modules of this command"
            raise children.JobError(number, words, known=True) from error
        except Exception as error:
            words, known = children.reason(error)
            if not known:
                traceback.print_exception(error)
            raise children.JobError(number, words, known) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end.close()


# The processes of this machine.


def dask_setup(worker: Any) -> None:
    """Called by Dask in each process of this machine, before its first job."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to the command, too, which decides
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # as in a pool; stderr is the command's
    atexit.register(os._exit, 0)  # nothing is left to do, and PyTorch's own end takes seconds


@contextlib.contextmanager
def _environment(settings: Mapping[str, str], added: Iterable[str]) -> Iterator[None]:
    """The environment with ``settings``; these and what is ``added`` are restored at the end."""
    names = {*settings, *added}
    before = {name: os.environ[name] for name in names & os.environ.keys()}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


# In the workers.


# Whether the result of this thread's job is still wanted: Dask does not end a job that has begun.
_wanted: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)


def end_if_unwanted() -> None:
    """Called in long jobs now and then: OperationError where nobody waits for the result any more.

    Example:
        >>> end_if_unwanted()  # this is no job of a cluster
    """
    if not _wanted.get()():
        raise OperationError("the command that started this job has ended")


@dataclass
class _Function:
    """The function that the jobs of a run call, pickled as ``payload``, and the versions of the command.

    ``folder``: that of the user's modules, if the worker is one of this machine. It is pickled without the
    function that comes out of the payload.
    """

    payload: bytes
    versions: dict[str, str]
    folder: str | None

    def __reduce__(self) -> tuple[type[_Function], tuple[bytes, dict[str, str], str | None]]:
        return _Function, (self.payload, self.versions, self.folder)

    @functools.cached_property
    def _function(self) -> Any:
        with isolated_imports():
            importlib.import_module("landscape.problem.problem")
        if self.folder:
            look_in(self.folder)
        function: Any = optional("cloudpickle", "cluster", _EXTRA).loads(self.payload)
        return pkgutil.resolve_name(function) if isinstance(function, str) else function

    def __call__(self, job: bytes) -> Any:
        """The result of a job, its arguments being pickled."""
        worker = optional("distributed", "cluster", _EXTRA).get_worker()
        self._check(worker)
        key = worker.get_current_task()

        def wanted() -> bool:
            task = worker.state.tasks.get(key)
            return task is not None and task.state != "cancelled"

        _wanted.set(wanted)
        return self._function(*pickle.loads(job))

    def _check(self, worker: Any) -> None:
        """OperationError if ``worker``, this one, is not as the command needs it."""
        if worker.state.nthreads > 1:
            raise OperationError(
                f"cluster: worker {worker.address} does {worker.state.nthreads} jobs at once, 1 is "
                "allowed; start it with --nthreads 1 (and several with --nworkers)"
            )
        for name, here in _versions().items():
            if here != self.versions.get(name):
                raise OperationError(
                    f"cluster: worker {worker.address} has {name} {here}, this command "
                    f"{self.versions.get(name)}; they must be the same"
                )


@functools.cache
def _versions() -> dict[str, str]:
    """The versions that decide about a result, and about whether objects can be exchanged."""
    # Not at the top: commands that use no cluster import this module.
    import numpy

    from landscape.training.processes.process_group import versions

    dask = optional("distributed", "cluster", _EXTRA).__version__
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, **versions(), "numpy": numpy.__version__, "Dask": dask}
