import os
import re
import subprocess
import sys
import threading
import time

import pytest
from events import LAST_RESORT, wait_until
from two_hosts import TwoHosts, why_not

import tinygpt.ddp.watchdog as module
from tinygpt.ddp.watchdog import Watchdog, _Heart
from tinygpt.ddp.world import World, run_processes

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from tinygpt.ddp.watchdog import Watchdog
from tinygpt.ddp.world import init_world

who, how, patience = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
world = init_world("cpu", timeout=1800)
with Watchdog(world, lambda: "last good checkpoint: runs/a/step_10", patience=patience) as dog:
    for step in range(10**9 if how == "hang" else 30):
        dist.all_reduce(torch.ones(10))
        time.sleep(0.05)
        if step == 5 and world.rank == who:
            print(f"pid {os.getpid()}", flush=True)
            if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise": raise ValueError("the dog ate it")
            if how == "hang": time.sleep(1000)
            if how == "exit": os._exit(0)
    if how == "early" and world.rank == who: sys.exit()  # is done, and leaves; the others work on
    looks = dog.looks
    while how == "early" and dog.looks < looks + 8: time.sleep(0.05)
    print(f"rank {world.rank} came to its end", flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "die.py"
    path.write_text(SCRIPT)
    return path


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(script, nproc, who, how, patience=20):
    "(return code, stdout, stderr) of the script under torchrun. Its collectives wait for 30 minutes."
    words = [*TORCHRUN, str(nproc), str(script), str(who), how, str(patience)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LAST_RESORT, env=ENV)
    return done.returncode, done.stdout, done.stderr


def the_line(text):
    "The watchdog's only line in a program's output, and whether torchrun's banner comes later."
    lines = re.findall(r"^rank \d+ \(.*\) (?:is gone|failed).*$", text, re.M)
    assert len(lines) == 1, text
    banner = text.find("ChildFailedError")
    return lines[0], banner == -1 or text.index(lines[0]) < banner


# of two survivors one speaks
@pytest.mark.parametrize("nproc, who", [(2, 0), (3, 1)])
def test_a_killed_rank_ends_all_and_a_survivor_names_it_before_torchrun_does(script, nproc, who):
    code, out, err = torchrun(script, nproc, who, "kill")
    line, before_banner = the_line(err)
    pid = re.search(r"pid (\d+)", out)[1]
    assert line.startswith(f"rank {who} (") and f"pid {pid}) is gone" in line
    assert line.endswith("last good checkpoint: runs/a/step_10")
    assert code != 0 and before_banner and "ChildFailedError" in err


def test_a_rank_that_raises_ends_all_and_its_message_is_in_the_line(script):
    code, out, err = torchrun(script, 2, 1, "raise")
    line, before_banner = the_line(err)
    assert line.startswith("rank 1 (") and "failed: ValueError: the dog ate it; last good checkpoint" in line
    assert code != 0 and before_banner


@pytest.mark.slow
def test_a_rank_that_ends_without_a_word_is_gone_but_one_that_is_done_is_not(script):
    code, out, err = torchrun(script, 2, 1, "exit")
    assert the_line(err)[0].startswith("rank 1 (") and code != 0
    code, out, err = torchrun(script, 2, 0, "early")
    assert code == 0 and "rank 1 came to its end" in out and "gone" not in err


@pytest.mark.slow
def test_a_run_that_is_told_to_end_ends_and_nobody_is_called_dead(script):
    words = [*TORCHRUN, "2", str(script), "1", "hang", "20"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)
    try:
        assert run.stdout.readline().startswith("pid ")
        run.terminate()  # torchrun passes it on
        out, err = run.communicate(timeout=LAST_RESORT)
    finally:
        run.kill()
    assert " is gone: " not in err and "failed: " not in err and "SignalException" in err


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"no two hosts: {why_not()}")
def test_a_cable_that_is_pulled_ends_the_ranks_on_both_sides_and_each_machine_says_why(script):
    dead = r"^rank 1 \(host1.* no sign of life.*$|^the machine of rank 0.*$"

    def told():
        return both[0].out.read_text() + both[1].out.read_text()

    def both_sides():
        lines = re.findall(dead, told(), re.M)
        return lines if len(lines) >= 2 else None

    with TwoHosts() as hosts:
        both = hosts.start_torchrun(str(script), 1, "hang", 4)
        wait_until(lambda: "pid" in told(), both[0], "the first steps")
        hosts.pull_the_cable()
        said = wait_until(both_sides, what="a line on each side")
    assert len(said) == 2 and all(line.endswith("last good checkpoint: runs/a/step_10") for line in said)


def patience_before_and_after_a_word(world):
    with Watchdog(world, patience=1800) as dog:
        before = dog.heart.patience
        dog.be_patient(7)
        return before, dog.heart.patience


def test_the_patience_of_a_watchdog_can_change_and_alone_it_has_none():
    assert run_processes(patience_before_and_after_a_word, 2, timeout=LAST_RESORT) == [(1800, 7), (1800, 7)]
    with Watchdog(World()) as dog:
        dog.be_patient(7)


def end_while_the_listener_reads(world):
    "How many threads of the watchdog live on after `done`, which comes while a reading is under way."
    dog = Watchdog(world, interval=0.05)
    reading = threading.Event()
    look = dog.heart.look

    def slow_look():
        reading.set()
        time.sleep(1)
        return look()

    dog.heart.look = slow_look
    assert reading.wait(LAST_RESORT)
    dog.done()
    return sum(thread.is_alive() for thread in dog.threads)


def test_no_thread_is_left_in_the_store_when_the_process_ends():
    assert run_processes(end_while_the_listener_reads, 2, timeout=LAST_RESORT) == [0, 0]


def test_alone_a_watchdog_is_nothing():
    with Watchdog(World()) as dog:
        dog.explain()
    with pytest.raises(ZeroDivisionError), Watchdog(World()):
        1 / 0


class FakeStore(dict):
    "A store with what the ranks said."

    def multi_get(self, keys):
        return [self[key].encode() for key in keys]


def heart(size=3, patience=2.0):
    h = _Heart.__new__(_Heart)
    h.rank, h.size, h.machine = 0, size, "0"
    h.patience, h.interval = patience, 0.5
    h.seen, h.silent = [""] * size, [0] * size
    h.store = FakeStore({f"beat/{r}": "1 running" for r in range(size)})
    h.who = [[str(r), f"host{r}", "1"] for r in range(size)]  # each on a machine of its own
    return h


def test_a_rank_is_silent_when_its_count_stands_still_for_the_patience_and_a_sign_of_life_starts_anew():
    h = heart(2)
    assert [h.look() for _ in range(4)] == [None] * 4
    h.store["beat/1"] = "2 running"
    assert [h.look() for _ in range(4)] == [None] * 4
    assert h.look() == "rank 1 (host1, pid 1) is gone: no sign of life for 2 s"


def test_a_rank_that_is_done_may_be_silent_and_a_failed_one_is_named_at_once():
    h = heart(3)
    h.store["beat/1"] = "7 done"
    h.store["beat/0"] = "1 failed: my own"  # its own state is not looked at
    looks = []
    for i in range(9):
        h.store["beat/2"] = f"{i} running"
        looks.append(h.look())
    assert looks == [None] * 9
    h.store["beat/2"] = "9 failed: KeyError: 3"
    assert h.look() == "rank 2 (host2, pid 1) failed: KeyError: 3"


def test_a_last_word_that_comes_between_the_look_at_the_process_and_the_reading_counts(monkeypatch):
    h = heart(2)
    h.who[1][0] = "0"  # on this machine

    def kill(pid, number):
        h.store["beat/1"] = "5 done"  # it said so, and ended, just before we asked
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    assert h.look() is None


@pytest.mark.skipif(os.name != "posix", reason="elsewhere no process is asked")
def test_a_process_number_means_something_on_its_own_machine_only():
    h = heart(2)
    h.who[1][2] = str(2**31 - 2)  # nobody has this number here
    assert h.look() is None
    h.who[1][0] = h.machine
    end = "is gone: its process ended without a word (killed, or out of memory?)"
    assert h.look() == f"rank 1 (host1, pid {2**31 - 2}) {end}"


def test_machines_that_nobody_numbered_are_told_apart_by_their_names(monkeypatch):
    "srun sets no GROUP_RANK: a process number of another host must not be looked for here."

    class Store(FakeStore):
        set = dict.__setitem__

    others = "0 host1|host1|" + str(2**31 - 2)  # what the rank on the other host wrote
    store = Store({"who/1": others, "beat/1": "1 running"})
    monkeypatch.setattr(module, "connect_store", lambda name, timeout: store)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "host0")
    monkeypatch.delenv("GROUP_RANK", raising=False)
    h = _Heart(World(0, 0, 2), patience=2.0, interval=0.5)
    assert h.look() is None
    monkeypatch.setattr(module.socket, "gethostname", lambda: "host1")
    assert "is gone" in _Heart(World(0, 0, 2), patience=2.0, interval=0.5).look()


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_survivor_ends_also_where_nobody_reads_what_it_says(monkeypatch, closed):
    def broken(*args):
        raise BrokenPipeError

    ended = []
    dog = Watchdog(World())
    with monkeypatch.context() as patch:
        patch.setattr(*(os, "write") if closed == "stderr" else (sys.stdout, "flush"), broken)
        patch.setattr(os, "_exit", ended.append)
        with pytest.raises(BrokenPipeError):  # a true os._exit does not return
            dog._speak("rank 1 is gone", ask=False)
    assert ended == [1]


@pytest.mark.parametrize("code, told", [(None, "done"), (0, "done"), (1, "failed"), ("no data", "failed")])
def test_a_rank_that_exits_with_a_code_is_told_as_failed(monkeypatch, code, told):
    ends = []
    dog = Watchdog(World())
    monkeypatch.setattr(dog, "_end", ends.append)
    with pytest.raises(SystemExit), dog:
        sys.exit(code)
    assert ends[0].startswith(told) and str(code if told == "failed" else "") in ends[0]
