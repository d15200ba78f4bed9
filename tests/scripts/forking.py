"""A process that has imported what every script under test imports, and starts scripts by forking itself.

    forking.py

Models: a fresh Python process, but for the seconds that its imports take. A request is a line of JSON on standard
input, its answer one on standard output: a process number for a script, an exit code or null for `poll`. The package is
activated in the child, by torch's own search for back ends, once the child has the environment of the script. Ignores:
all that is read from the environment while torch, accelerate or the package are imported; a request must not need it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import pkgutil
import random
import sys
from types import CodeType, ModuleType
from typing import Any


def imported() -> None:
    """Import everything; no thread may have been started, since it would not live on in a child."""
    import torch
    import torch._dynamo
    import torch._functorch.aot_autograd

    import pfeife_accelerate

    importlib.import_module("accelerate")
    for module in pkgutil.walk_packages(pfeife_accelerate.__path__, "pfeife_accelerate."):
        if not module.name.startswith("pfeife_accelerate.tools"):
            importlib.import_module(module.name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"importing has started {len(threads) - 1} threads"
    assert not torch.cuda.is_initialized()
    gc.collect()
    gc.freeze()


def serve(requests: Any, answers: int) -> dict[str, Any] | None:
    """Answer requests until there are no more (None), or, in a child, give the request to run."""
    for line in requests:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            is_own, own = os.pipe()
            pid = os.fork()
            if not pid:
                os.setsid()
                os.close(own)
                os.close(is_own)
                return request
            os.close(own)
            os.read(is_own, 1)  # until the child leads a process group that can be killed
            os.close(is_own)
            answer = {"pid": pid}
        os.write(answers, json.dumps(answer).encode() + b"\n")
    return None


def become(request: dict[str, Any]) -> tuple[ModuleType, CodeType]:
    """Make this child what a fresh process would be: its files, environment, random numbers and main module."""
    import numpy
    import torch

    added = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = ((os.devnull, os.O_RDONLY), (request["stdout"], added), (request["stderr"], added))
    for number, (path, mode) in enumerate(files):
        file = os.open(path, mode)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    torch._import_device_backends()
    main = ModuleType("__main__")
    if request["arguments"][0] == "-m":
        main.__spec__ = importlib.util.find_spec(request["arguments"][1])
        assert main.__spec__ is not None and main.__spec__.origin is not None
        main.__file__ = main.__spec__.origin
        sys.argv[:] = [main.__file__, *request["arguments"][2:]]
        sys.path[0] = request["folder"]
    else:
        main.__file__ = request["arguments"][0]
        sys.argv[:] = request["arguments"]
        sys.path[0] = os.path.dirname(os.path.abspath(main.__file__))
    sys.modules["__main__"] = main
    with open(main.__file__, "rb") as file:
        return main, compile(file.read(), main.__file__, "exec")


imported()
_request = serve(open(0, closefd=False), 1)  # noqa: SIM115
if _request is not None:
    _main, _code = become(_request)
    exec(_code, vars(_main))
