"""Functions run in several processes at once, which form a group on 127.0.0.1; one thread each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from landscape.training.processes import process_group
from landscape.training.processes.process_group import Group

# The server imports these once, and every process is a fork of it: starting one takes no time. Test modules
# import the last ones, and torch.optim imports torch._dynamo in its first step.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = "tests.groups landscape.training.run.launch torch._dynamo hypothesis matplotlib.figure pytest"
CONTEXT.set_forkserver_preload(PRELOADED.split())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def together(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    environment: dict[int, dict[str, str]] | None = None,
    timeout: float = 30.0,
    deadline: float = 300.0,
    lost: tuple[int, ...] = (),
) -> list[Any]:
    """``function(group, *args)`` in ``size`` processes: what each returned or raised.

    ``environment`` changes variables of a rank; a process that is not done by the ``deadline`` is killed, and
    ranks that are ``lost`` on purpose are when the others are done: None. One that ends without a result is a
    ChildProcessError.
    """
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    pipes, started = [], []
    for rank in range(size):
        mine = variables | {"RANK": str(rank)} | (environment or {}).get(rank, {})
        receive, send = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_run, args=(send, mine, timeout, function, args), daemon=True)
        process.start()
        send.close()
        pipes.append(receive)
        started.append(process)
    found: dict[int, Any] = {}
    for rank in sorted(range(size), key=lambda r: r in lost):
        receive, process = pipes[rank], started[rank]
        try:
            done = receive.poll(0 if rank in lost else deadline)
            found[rank] = pickle.loads(receive.recv_bytes()) if done else TimeoutError("not done")
        except EOFError:
            found[rank] = ChildProcessError("it ended without a result")
        process.join(0 if rank in lost else 10.0)  # it ends by itself, and has its coverage to write
        process.kill()
        process.join()
        receive.close()
    return [None if r in lost else found[r] for r in range(size)]


def _run(send: Any, variables: dict[str, str], timeout: float, function: Any, args: Any) -> None:
    os.environ.update(variables, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    group = None
    try:
        group = Group.join(torch.device("cpu"), timeout)
        result = function(group, *args)
        group.close()
    except BaseException as error:  # pytest.fail is none of Exception
        result = AssertionError(str(error)) if isinstance(error, pytest.fail.Exception) else error
        if group:
            process_group.BEAT = 0.5  # rank 0 waits four of them for the others to hear of it
            group.report(str(error))
    send.send_bytes(
        pickle.dumps(result)
    )  # not send(): torch would pass tensors by shared memory, which goes with us
    send.close()
    os._exit(0)  # an orderly exit would wait for exchanges with a rank that is gone
