"""Two hosts on one machine: network namespaces joined by a virtual cable, each with a name of its own.

Linux, root, `ip` and `unshare` are needed.

with TwoHosts() as hosts:
    first, second = hosts.torchrun("tinygpt.ddp", "--mib", "1")
    assert first.returncode == second.returncode == 0
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PORT = 29500


def why_not() -> str | None:
    "The reason why two hosts cannot be made here, or None."
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            return f"making network namespaces needs the command {command} ({package})"
    name = f"tiny{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode == 0:  # a container may have root and still forbid the cable
        cable = ["ip", "-n", name, "link", "add", "cable", "type", "veth", "peer", "name", "cable2"]
        done = subprocess.run(cable, capture_output=True, text=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"this system refuses: {done.stderr.strip()}" if done.returncode else None


class TwoHosts:
    "host0 and host1, each with a network of its own; everything is ended and removed at the end."

    hosts = ("host0", "host1")
    addresses = ("10.213.7.1", "10.213.7.2")

    def __enter__(self):
        self.names = [f"tiny{os.getpid()}h{i}" for i in (0, 1)]
        self.running = []
        self.folder = Path(tempfile.mkdtemp(prefix="two-hosts-"))
        lines = [f"{address} {host}\n" for address, host in zip(self.addresses, self.hosts)]
        try:
            for name in self.names:
                self._ip("netns", "add", name)
                etc = Path("/etc/netns") / name  # `ip netns exec` lays these files over those in /etc
                etc.mkdir(parents=True)
                (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            one, other = self.names
            self._ip(*f"-n {one} link add cable type veth peer name cable netns {other}".split())
            for name, address in zip(self.names, self.addresses):
                self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    self._ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in self.running:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        for name in self.names:  # what escaped its process group
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in found.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ip(self, *args):
        done = subprocess.run(["ip", *args], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")

    def pull_the_cable(self):
        "Cut the connection: no packet arrives any more, and nobody is told."
        self._ip("-n", self.names[0], "link", "set", "cable", "down")

    def start(self, host: int, *command, env=None):
        """Start a command on a host, in a process group of its own.

        Its output (stdout and stderr) goes to a file, see `finish`.
        """
        out = self.folder / f"{len(self.running)}.txt"
        rename = f'echo {self.hosts[host]} > /proc/sys/kernel/hostname; exec "$@"'
        words = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", rename, "sh"]
        with open(out, "w") as file:
            process = subprocess.Popen(
                [*words, *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                start_new_session=True,
            )
        process.out = out
        self.running.append(process)
        return process

    def finish(self, processes, timeout: float) -> list[subprocess.CompletedProcess]:
        """Wait for started commands; past the timeout they are killed and have the return code of that.

        stdout holds all they said.
        """
        deadline = time.monotonic() + timeout
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [
            subprocess.CompletedProcess(p.args, p.returncode, p.out.read_text(errors="replace"))
            for p in processes
        ]

    def start_torchrun(self, module: str, *args, nproc: int = 1, env=None):
        "Start torchrun with a module (or the path of a script) on both hosts, as one would by hand."
        program = [module] if module.endswith(".py") else ["-m", module]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", nproc]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.hosts[0]}:{PORT}"]
        return [self.start(host, *torchrun, *meet, *program, *args, env=env) for host in (0, 1)]

    def torchrun(
        self, module: str, *args, nproc: int = 1, timeout: float = 600, env=None
    ) -> list[subprocess.CompletedProcess]:
        "Run a module on both hosts under torchrun: each one's returncode and stdout (with stderr in it)."
        return self.finish(self.start_torchrun(module, *args, nproc=nproc, env=env), timeout)
