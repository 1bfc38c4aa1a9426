"""All ranks reach one decision: about a flag, a mistake, what rank 0 finds, facts that must be equal."""

import pytest
from events import LAST_RESORT, wait_until

from tinygpt.ddp.agree import any_rank, check_alike, on_all, on_first
from tinygpt.ddp.watchdog import Watchdog
from tinygpt.ddp.world import World, run_processes
from tinygpt.support import UserError


def one_mind(world):
    "Small questions to the helpers, on each rank."

    def only_on(rank, message):
        def fn():
            if world.rank == rank:
                raise UserError(message)
            return world.rank

        return fn

    found = [
        any_rank(world, world.rank == 1),
        any_rank(world, False),
        on_first(world, lambda: world.rank + 5),
        on_all(world, lambda: world.rank),
    ]
    for fn in (
        lambda: on_all(world, only_on(1, "no file here")),
        lambda: on_first(world, only_on(0, "the folder exists")),
        lambda: on_all(world, lambda: world.rank or open("not/there")),
        lambda: check_alike(world, {"rank": world.rank, "steps": 4, "size": 3 - world.rank}, "say the same"),
        lambda: check_alike(world, {"steps": 4}, "say the same"),
    ):
        try:
            fn()
            found.append("went on")
        except UserError as error:
            found.append(str(error))
    return found


def test_the_ranks_decide_together():
    first, second = run_processes(one_mind, 2)
    said = [
        "no file here",
        "the folder exists",
        "not/there: No such file or directory: check the path",
        "not the same on all ranks: rank = 1 on rank 1, 0 on rank 0; size = 2 on rank 1, 3 on rank 0: "
        "say the same",
        "went on",
    ]
    assert first == [True, False, 5, 0, *said]
    assert second == [True, False, 5, 1, *said]


def test_alone_nobody_is_asked():
    alone = World()
    assert any_rank(alone, True) and not any_rank(alone, False)
    assert on_all(alone, lambda: 4) == on_first(alone, lambda: 4) == 4
    check_alike(alone, {"steps": 4}, "say the same")


def refused_together(world):
    "What all ranks refuse; rank 1 is slow to leave, and its watchdog looks at rank 0 meanwhile."

    def refuse():
        if world.is_main:
            raise UserError("no room")

    dog = Watchdog(world, interval=0.05)
    with pytest.raises(UserError, match="no room"), dog:
        try:
            on_all(world, refuse)
        finally:
            if world.rank == 1:
                wait_until(lambda: dog.heart.state_of(0) != "running", what="rank 0 has left")
                looks = dog.looks
                wait_until(lambda: dog.looks > looks + 3, what="some looks")
    return dog.heart.state


def test_a_sentence_that_all_ranks_say_makes_no_rank_the_dead_one():
    assert run_processes(refused_together, 2, timeout=LAST_RESORT) == ["done", "done"]
