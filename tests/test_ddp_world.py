import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from events import LAST_RESORT, wait_until

from tinygpt.ddp import world as ddp_world
from tinygpt.ddp.world import (
    World,
    check_world,
    close_world,
    connect_store,
    init_world,
    longer_timeout,
    run_processes,
)
from tinygpt.support import UserError

ENV = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture(autouse=True)
def nobody_is_left(monkeypatch):
    for name in ENV:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not multiprocessing.active_children()


# in the processes ----------------------------------------------------------------------------------------


def limit():
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def seconds_that_a_collective_may_take(world):
    "As it was started; where one rank works for long; after that, and after that failed."
    close_world()
    init_world("cpu", timeout=1234, meeting=LAST_RESORT)
    limits = [limit()]
    for mistake in (None, UserError("there is no such text")):
        with contextlib.suppress(UserError), longer_timeout(then=567):
            limits.append(limit())
            if mistake:
                raise mistake
        limits.append(limit())
    return limits


def several_things(world, factor):
    "What a process sees, after a sum, a second init_world, and a second group."
    t = torch.tensor([world.rank + 1.0])
    dist.all_reduce(t)
    again = init_world()  # auto: the device that the group is for
    keys = [connect_store("test", 10) for _ in range(2)]
    keys[0].set("a", "first")
    keys[1].set("a", "second")
    close_world()
    once_more = init_world("cpu")
    dist.all_reduce(t)
    return {
        "world": world,
        "same": [again == world, once_more == world],
        "sum": factor * t,
        "threads": torch.get_num_threads(),
        "a": keys[0].get("a").decode(),
        "pid": os.getpid(),
    }


def rank_1_does(world, what, folder):
    note = Path(folder) / str(world.rank)
    note.with_suffix(".part").write_text(str(os.getpid()))
    note.with_suffix(".part").rename(note)  # is there when it is whole
    if world.rank == 1 and what == "raise":
        raise ValueError("the dog ate it")
    if world.rank == 1 and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and what == "hang":
        time.sleep(1000)
    if world.rank == 1 and what == "exit":
        os._exit(3)
    dist.all_reduce(torch.ones(1))  # waits for rank 1


def ended(folder):
    "Whether every process that wrote its pid is gone."
    pids = [int(p.read_text()) for p in Path(folder).glob("[01]")]
    return wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


# tests ---------------------------------------------------------------------------------------------------


def test_without_torchrun_a_process_is_alone_and_there_is_no_group():
    world = init_world("cpu")
    assert world == World(0, 0, 1, torch.device("cpu")) and world.is_main
    assert not World(1, 1, 2).is_main
    assert not dist.is_initialized()
    close_world()  # nothing to leave, no error


PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    "env, words",
    [
        (
            {"WORLD_SIZE": "2"},
            ["WORLD_SIZE = 2", "RANK", "LOCAL_RANK", "MASTER_ADDR", "not: start with torchrun"],
        ),
        ({"RANK": "0"}, ["RANK = 0", "WORLD_SIZE", "torchrun"]),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            ["MASTER_PORT, MASTER_ADDR not", "torchrun"],
        ),
        (PLACE | {"RANK": "two"}, ["RANK = 'two'", "not a number"]),
        (PLACE | {"RANK": "2"}, ["RANK = 2 is not below WORLD_SIZE = 2"]),
    ],
)
def test_a_half_set_environment_is_one_clear_sentence(monkeypatch, env, words):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        init_world("cpu")
    assert all(word in str(error.value) for word in words)


def test_each_process_takes_the_gpu_of_its_local_rank_and_too_few_gpus_are_refused(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert ddp_world._pick_device("auto", 3, 4) == torch.device("cuda:3") == taken[-1]
    assert ddp_world._pick_device("cuda", 2, 4) == torch.device("cuda:2")
    assert ddp_world._pick_device("cuda:1", 0, None) == torch.device("cuda:1")  # alone: as asked
    with pytest.raises(UserError, match="torch sees 4 CUDA GPUs: use auto, or cuda:0 to cuda:3"):
        ddp_world._pick_device("cuda:4", 0, None)
    too_few = "8 processes on this machine want a GPU each, and it has 4: start with --nproc-per-node 4"
    with pytest.raises(UserError, match=too_few):
        ddp_world._pick_device("auto", 0, 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # also where there is MPS, which has no collectives
    assert ddp_world._pick_device("auto", 0, 2) == torch.device("cpu")


def test_mps_is_refused_where_there_are_others_and_not_to_one_process_of_torchrun(monkeypatch, port):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert ddp_world._pick_device("mps", 0, None) == torch.device("mps")
    for name, value in place_of(0, 2, port, LOCAL_WORLD_SIZE=1).items():  # the other is on another machine
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="mps.*one process only.*choose auto or cpu"):
        init_world("mps")
    monkeypatch.setenv("WORLD_SIZE", "1")
    try:
        assert init_world("mps").device == torch.device("mps")
    finally:
        close_world()


def test_two_calls_at_once_each_get_their_own_results_in_order_of_rank():
    results = {}

    def call_with(n):
        results[n] = run_processes(several_things, n, 10.0, timeout=LAST_RESORT)

    calls = [threading.Thread(target=call_with, args=(n,)) for n in (1, 3)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    pids = set()
    for n, total in ((1, 1.0), (3, 18.0)):
        for rank, found in enumerate(results[n]):
            assert found["world"] == World(rank, rank, n, torch.device("cpu"))
            # a second init_world finds the group; after close_world it makes a new one
            assert found["same"] == [True, True]
            assert found["sum"].item() == 10 * total and found["threads"] == 1
            assert found["a"] == "first"  # two connections do not see each other's keys
            pids.add(found["pid"])
    assert len(pids) == 4
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    "what, words",
    [
        ("exit", ["rank 1 ended by itself with exit code 3"]),
        ("raise", ["rank 1 failed", "the dog ate it", "rank_1_does"]),
        ("kill", ["rank 1 was ended by SIGKILL"]),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(what, words, tmp_path):
    with pytest.raises(RuntimeError) as error:
        run_processes(rank_1_does, 2, what, str(tmp_path), timeout=LAST_RESORT)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert ended(tmp_path)


@pytest.mark.slow
def test_ranks_that_hang_are_ended_at_the_timeout_and_it_is_told_where_they_stood(tmp_path):
    words = ["[0, 1]", "rank 1:", "rank_1_does"]
    for seconds in (15, 60, 240):  # until both have begun by then, and stand where they hang
        folder = tmp_path / str(seconds)
        folder.mkdir()
        with pytest.raises(RuntimeError, match=f"no end after {seconds} s") as error:
            run_processes(rank_1_does, 2, "hang", str(folder), timeout=seconds)
        assert ended(folder)
        if str(error.value).count("rank_1_does") >= 2:
            break
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_function_that_a_new_process_cannot_import_is_refused_before_any_starts():
    def inside(world):
        pass

    for fn in (inside, lambda world: 0):
        with pytest.raises(UserError, match="a new process cannot find it: put it in a module"):
            run_processes(fn, 1)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_processes_end_with_the_one_that_started_them(tmp_path):
    code = f"""
from test_ddp_world import *

if __name__ == "__main__":
    run_processes(rank_1_does, 2, "hang", {str(tmp_path)!r})
"""
    script = tmp_path.parent / "starts.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    starter = subprocess.Popen([sys.executable, str(script)], env=env)
    try:
        wait_until(lambda: len(list(tmp_path.glob("[01]"))) == 2, starter, "both ranks")
    finally:
        starter.kill()
        starter.wait()
    assert ended(tmp_path)


def test_the_check_of_the_world_tells_a_wrong_sum(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.mul_(2.5))
    with pytest.raises(RuntimeError, match="rank 1: the sum over all ranks is 5.0, it should be 3.0"):
        check_world(World(1, 1, 2), mib=0.01)


def test_the_time_of_the_check_is_that_of_the_sum_alone(monkeypatch):
    plain = torch.Tensor.any

    def slow(x):
        time.sleep(0.3)
        return plain(x)

    monkeypatch.setattr(torch.Tensor, "any", slow)
    assert check_world(World(), mib=0.01)["seconds"] < 0.2


def test_of_all_processes_on_all_machines_one_prints_and_writes():
    two_by_two = [World(rank=rank, local_rank=rank % 2, world_size=4) for rank in range(4)]
    assert [world.is_main for world in two_by_two] == [True, False, False, False]


# the meeting ---------------------------------------------------------------------------------------------


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def place_of(rank, size, port, **more):
    facts = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return {name: str(value) for name, value in (facts | more).items()}


def meet_nobody(monkeypatch, **settings):
    "What `connect_store` says to a rank that waits in vain."
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        connect_store("test", 30, limit=1.5, patience=0.2)
    return error.value


def test_the_first_of_the_ranks_that_are_there_says_who_is_missing_and_gives_up(monkeypatch, capsys, port):
    error = meet_nobody(monkeypatch, **place_of(0, 12, port))
    line = f"waiting for 11 of 12 processes at 127.0.0.1:{port}: rank 1, 2, 3, 4, 5, 6, 7, 8, ..."
    assert str(error).startswith(f"{line}, and 1.5 s are over: see whether they run") and error.speaks
    assert capsys.readouterr().err == f"{line}; giving up in 1 s\n"


@pytest.mark.parametrize("rank, others, speaks", [(1, [], True), (2, [1], False)])
def test_where_rank_0_is_missing_another_one_speaks(monkeypatch, capsys, rank, others, speaks):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for other in others:
        dist.PrefixStore("tinygpt/0/test/1", server).append("here", f"{other} ")
    place = place_of(rank, 3, server.port, TORCHELASTIC_USE_AGENT_STORE=True)
    error = meet_nobody(monkeypatch, **place)
    assert "rank 0" in str(error) and error.speaks is speaks
    assert bool(capsys.readouterr().err) is speaks


@pytest.mark.parametrize("local_rank, speaks", [(0, True), (1, True), (3, False)])
def test_where_nobody_has_opened_the_store_one_on_each_machine_speaks(
    monkeypatch, capsys, port, local_rank, speaks
):
    rank = 1 if local_rank == 1 else 4 + local_rank
    error = meet_nobody(monkeypatch, **place_of(rank, 8, port, LOCAL_RANK=local_rank))
    assert f"no answer from 127.0.0.1:{port}" in str(error) and "refused" in str(error)
    assert error.speaks is speaks and bool(capsys.readouterr().err) is speaks


def test_a_host_that_is_none_a_port_that_says_nothing_and_one_that_is_taken_are_told(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        error = meet_nobody(monkeypatch, **place_of(0, 2, 1234, MASTER_ADDR="nobody.invalid"))
        assert "no answer from nobody.invalid:1234" in str(error)
        error = meet_nobody(monkeypatch, **place_of(1, 2, taken))
        assert "it accepts connections and does not answer" in str(error)
        error = meet_nobody(monkeypatch, **place_of(0, 2, taken))
        assert "already in use" in str(error) and "whether MASTER_PORT is free" in str(error)


def test_how_long_the_meeting_may_take_is_a_setting(monkeypatch, port):
    for name, value in place_of(0, 2, port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TINYGPT_MEETING", "1")
    for run, remedy in ((None, "; to run alone, unset RANK and WORLD_SIZE"), ("1", "")):  # torchrun's
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run) if run else None
        with pytest.raises(
            UserError, match=f"and 1 s are over: .*; TINYGPT_MEETING=600 waits longer{remedy}$"
        ):
            init_world("cpu")
    for value in ("soon", "0", "nan", "1e9", ""):
        monkeypatch.setenv("TINYGPT_MEETING", value)
        with pytest.raises(UserError, match=f"TINYGPT_MEETING = {value!r} is not a number of seconds"):
            init_world("cpu")


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_a_late_one_is_waited_for(port):
    check = [sys.executable, "-m", "tinygpt.ddp", "--device", "cpu", "--mib", "0.1", "--timeout"]
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"

    def start(rank, command):
        env = os.environ | place_of(rank, 2, port, OMP_NUM_THREADS=1)
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    stopped = start(1, [sys.executable, "-c", stop])
    try:
        _, told = start(0, [*check, "12"]).communicate(timeout=LAST_RESORT)
    finally:
        stopped.kill()
        stopped.communicate()
    lines = told.splitlines()
    assert len(lines) == 2 and all("waiting for 1 of 2 processes" in line for line in lines), told
    assert lines[1].startswith("error: ") and "rank 1, and 12 s are over" in lines[1]

    first = start(0, [*check, str(LAST_RESORT)])
    assert "rank 1" in first.stderr.readline()
    second = start(1, [*check, str(LAST_RESORT)])
    out, _ = first.communicate(timeout=LAST_RESORT)
    second.communicate(timeout=LAST_RESORT)
    assert first.returncode == second.returncode == 0 and "the sum is right" in out


STOPS_AFTER_THE_MEETING = """
import os, signal
import torch.distributed as dist
from tinygpt.ddp.world import init_world
dist.init_process_group = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGSTOP)
init_world("cpu", 60)
"""


# the meeting may take its time, as the machine may be busy; what follows it is over in three seconds
WAITS_FOR_IT = """
import os
from tinygpt.ddp import world
meet = world.connect_store
def met(*args):
    store = meet(*args)
    os.environ["TINYGPT_MEETING"] = "3"
    return store
world.connect_store = met
world.init_world("cpu", 1800)
"""


@pytest.mark.slow
def test_a_rank_that_stops_after_the_meeting_does_not_hang_the_others(port):
    "Their wait is that of the meeting, not that of a collective, which is half an hour in training."

    def start(rank, script):
        env = os.environ | place_of(rank, 2, port, OMP_NUM_THREADS=1, TINYGPT_MEETING=LAST_RESORT)
        return subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True)

    stopped = start(1, STOPS_AFTER_THE_MEETING)
    try:
        waiting = start(0, WAITS_FOR_IT)
        _, told = waiting.communicate(timeout=LAST_RESORT)
    finally:
        stopped.kill()
        stopped.communicate()
    assert waiting.returncode == 1 and "UserError: all ranks had met, and then one did not" in told


def test_the_time_for_meeting_is_not_that_of_the_collectives():
    "Nor is that of long work the one afterwards, whether the work was done or failed."
    assert run_processes(seconds_that_a_collective_may_take, 2) == [[1234, 86400, 567, 86400, 567]] * 2


LEAVES = """
import sys
import weakref
import torch
import torch.distributed as dist
from tinygpt.ddp.world import close_world, init_world
from tinygpt.ddp.wrap import wrap_ddp, wrap_fsdp
from tinygpt.model import GPT, GPTConfig
world = init_world("cpu")

def step(wrap):
    model = wrap(GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32)), world)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(2, 16, dtype=torch.int64)
    model(x, x)[1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

step({"ddp": wrap_ddp, "fsdp": wrap_fsdp}[sys.argv[1]])
group = weakref.ref(dist.group.WORLD)
close_world()
print("held" if group() else "gone")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_nobody_holds_the_group_once_a_program_has_left_it(port, how):
    "Held, its threads run on while Python ends, and one that gives a tensor back then aborts the process."
    env = os.environ | place_of(0, 1, port, OMP_NUM_THREADS=1)
    done = subprocess.run([sys.executable, "-c", LEAVES, how], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "gone"), done.stderr
