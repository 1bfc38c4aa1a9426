"""Kernels forked from one process, which has imported torch already: a page starts three seconds sooner.

`book.py run --jobs N` uses them on Linux. Each page still has a process of its own.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

# a kernel of Jupyter's: it asks the server below for a process, and lives as long as that one does
STAND_IN = """
import json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter sends it before it asks the kernel to end
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
server.sendall(json.dumps([os.getcwd(), sys.argv[2:]]).encode() + b"\\n")
server.recv(1)
"""


@contextmanager
def forked_kernels():
    "Inside the `with`, the name of such a kernel, which Jupyter then finds."
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "server")
        # the flag as in Jupyter's own kernels: without it the debugger warns
        start = [sys.executable, "-Xfrozen_modules=off", __file__, address]
        server = subprocess.Popen(start, stdout=subprocess.PIPE, start_new_session=True)
        python = [sys.executable, "-I", "-S", "-c", STAND_IN, address]
        argv = [*python, "-f", "{connection_file}", "--HistoryManager.hist_file=:memory:"]
        spec = Path(folder) / "kernels/forked/kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps(dict(argv=argv, display_name="forked", language="python")))
        try:
            if not server.stdout.readline():
                raise RuntimeError("the process from which kernels are forked has ended")
            with patch.dict(os.environ, JUPYTER_PATH=folder):
                yield "forked"
        finally:
            server.kill()
            server.wait()


def serve(address: str):
    "Import what most pages import, then fork a kernel for each that connects."
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel sets it
    import ipykernel.debugger  # noqa: F401  # each kernel imports it
    import matplotlib.pyplot  # noqa: F401
    import torch  # noqa: F401
    from ipykernel.kernelapp import IPKernelApp

    if find_spec("triton") is None:  # else it would come too, before a page says that it is to interpret
        importlib.import_module("torch._dynamo")  # as the first of torch's optimizers does

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    os.dup2(2, 1)  # nobody reads on
    sys.path.pop(0)  # the folder of this file
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a kernel but its stand-in
    gc.collect()
    gc.freeze()  # a kernel's collector need not look through what was imported here
    while True:
        stand_in, _ = listener.accept()
        if os.fork():
            stand_in.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder, arguments = json.loads(stand_in.makefile().readline())
        os.setsid()
        os.chdir(folder)
        threading.Thread(target=end_with, args=[stand_in], daemon=True).start()
        parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # a kernel ends when its parent has ended
        IPKernelApp.launch_instance([*arguments, parent])
        os._exit(0)


def end_with(stand_in: socket.socket):
    "End this process when its stand-in has ended."
    stand_in.recv(1)
    os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
