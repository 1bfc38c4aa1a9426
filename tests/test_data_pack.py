from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.data.pack import LANES, BosLane, ConcatLane, pack_best_fit

EOT = 0


def documents_of(sizes):
    """Documents of given lengths.

    Every token but the eot says where it is, so that each pair of neighbors is at home in one place only.
    """
    ids = iter(range(1, 10**6))
    return [np.array([EOT, *(next(ids) for _ in range(n - 1))], dtype=np.int64) for n in sizes]


def events_of(documents, chunk_rows, epochs):
    "What a lane gets: documents in chunks that are counted on over the epochs, and the end of each epoch."
    events, chunk = [], 0
    for _ in range(epochs):
        for start in range(0, len(documents), chunk_rows):
            events += [(chunk, i, tokens) for i, tokens in enumerate(documents[start : start + chunk_rows])]
            chunk += 1
        events.append((chunk, 0, None))
    return events


def run(kind, events, length, cursor=(0, 0, 0), greedy=True):
    "(rows, cursor after each, tokens dropped): rows taken as soon as they are ready, or when all is pushed."
    lane, rows, cursors = kind(cursor, length), [], []
    for chunk, document, tokens in events:
        if tokens is None or lane.wants(chunk, document):
            lane.push(chunk, document, tokens)
        while greedy and lane.ready():
            rows.append(lane.take())
            cursors.append(lane.cursor)
    while lane.ready():
        rows.append(lane.take())
        cursors.append(lane.cursor)
    return rows, cursors, lane.dropped


sizes_ = st.lists(st.integers(1, 25), min_size=1, max_size=20)
kinds = st.sampled_from([ConcatLane, BosLane])


@settings(max_examples=150, deadline=None)
@given(sizes_, st.integers(2, 12), st.integers(1, 6))
def test_in_every_epoch_of_a_stream_each_pair_of_neighbors_is_trained_on_exactly_once(
    sizes, length, chunk_rows
):
    documents = documents_of(sizes)
    stream = np.concatenate(documents).tolist()
    rows, _, dropped = run(ConcatLane, events_of(documents, chunk_rows, 3), length)
    pairs = Counter((a, b) for row in rows for a, b in zip(row.tolist(), row[1:].tolist()) if b >= 0)
    wanted = Counter(zip(stream, stream[1:]))
    assert pairs == Counter({pair: 3 * n for pair, n in wanted.items()})
    assert dropped == 0
    padded = sum(int((row < 0).sum()) for row in rows)
    assert padded <= 3 * (length - 2)  # at the end of an epoch only


@settings(max_examples=60, deadline=None)
@given(sizes_, st.integers(2, 12), st.integers(1, 6), kinds)
def test_a_lane_resumed_at_any_row_of_two_epochs_gives_the_rows_that_follow(sizes, length, chunk_rows, kind):
    events = events_of(documents_of(sizes), chunk_rows, 3)
    rows, cursors, _ = run(kind, events, length)
    for i, cursor in enumerate(cursors):
        rest = [e for e in events if e[0] >= cursor[0]]  # reading begins at the cursor's chunk
        again, cursors_again, _ = run(kind, rest, length, cursor)
        assert [r.tolist() for r in again] == [r.tolist() for r in rows[i + 1 :]]
        assert cursors_again == cursors[i + 1 :]


@settings(max_examples=100, deadline=None)
@given(sizes_, st.integers(2, 12), st.integers(1, 6), kinds)
def test_rows_and_cursors_do_not_depend_on_how_far_ahead_was_read(sizes, length, chunk_rows, kind):
    events = events_of(documents_of(sizes), chunk_rows, 2)
    one = run(kind, events, length, greedy=True)
    other = run(kind, events, length, greedy=False)
    assert [r.tolist() for r in one[0]] == [r.tolist() for r in other[0]] and one[1:] == other[1:]


@settings(max_examples=100, deadline=None)
@given(sizes_, st.integers(2, 12), st.integers(1, 6))
def test_rows_of_the_bos_lane_begin_with_documents_and_all_tokens_are_kept_or_counted_as_dropped(
    sizes, length, chunk_rows
):
    documents = documents_of(sizes)
    rows, _, dropped = run(BosLane, events_of(documents, chunk_rows, 2), length)
    assert all(row[0] == EOT for row in rows)
    assert sum(int((row >= 0).sum()) for row in rows) + dropped == 2 * sum(sizes)
    begun = sum(int((row == EOT).sum()) for row in rows)
    assert begun == 2 * len(sizes)  # of every document at least the beginning


@settings(max_examples=60, deadline=None)
@given(sizes_, st.integers(2, 12), st.integers(1, 6), kinds)
def test_what_is_dropped_before_a_stop_and_after_it_adds_up_to_what_the_whole_drops(
    sizes, length, chunk_rows, kind
):
    events = events_of(documents_of(sizes), chunk_rows, 2)
    lane, stops = kind((0, 0, 0), length), []
    for event in events:
        lane.push(*event)
        while lane.ready():
            lane.take()
            stops.append((lane.cursor, lane.dropped))
    for cursor, before in stops:
        rest = [e for e in events if e[0] >= cursor[0]]
        after = run(kind, rest, length, cursor)[2]
        assert before + after == lane.dropped


@pytest.mark.parametrize("kind", LANES.values())
def test_an_epoch_without_a_document_for_the_lane_is_passed_over(kind):
    lane = kind((0, 0, 0), 4)
    for chunk in (1, 2, 3):
        lane.push(chunk, 0, None)
    assert not lane.ready() and lane.cursor == (3, 0, 0)
    lane.push(3, 5, np.array([EOT, 1, 2, 3]))
    lane.push(4, 0, None)
    assert lane.ready() and lane.take().tolist() == [EOT, 1, 2, 3]


def test_an_end_of_an_epoch_that_was_over_when_the_state_was_saved_is_not_counted_again():
    lane = ConcatLane((4, 0, 0), 4)
    lane.push(4, 0, None)  # told again, for reading begins in an earlier chunk that another row still needs
    assert lane.ends == 0 and not lane.wants(3, 9) and lane.wants(4, 0)


def test_windows_by_hand_share_one_token():
    rows, cursors, _ = run(
        ConcatLane,
        events_of([np.array([9, 1, 2, 3]), np.array([9, 4, 5, 6, 7, 8, 0]), np.array([9, 5])], 3, 1),
        6,
    )
    assert [r.tolist() for r in rows] == [[9, 1, 2, 3, 9, 4], [4, 5, 6, 7, 8, 0], [0, 9, 5, -100, -100, -100]]
    assert cursors[:2] == [(0, 1, 1), (0, 1, 6)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 20))
def test_best_fit_begins_each_row_with_a_document_and_counts_what_it_drops(sizes, length):
    documents = documents_of(sizes)
    rows, dropped = pack_best_fit(documents, length)
    assert all(row[0] == EOT for row in rows)
    kept = sum(int((row >= 0).sum()) for row in rows)
    assert kept + dropped == sum(sizes)
    begun = sum(int((row == EOT).sum()) for row in rows)
    assert begun == len(sizes)  # every document is there, at least its beginning
    assert all((row >= 0).all() for row in rows[:-1])  # only the last is padded


def test_best_fit_by_hand():
    # rows of 6: the 6 alone, then 5 (room for 1: none fits, the 2 is cropped to 1), then 4 (nothing is left)
    rows, dropped = pack_best_fit([np.arange(n) + 10 * n for n in (5, 2, 6, 4)], 6)
    assert [r.tolist() for r in rows] == [
        [60, 61, 62, 63, 64, 65],
        [50, 51, 52, 53, 54, 20],
        [40, 41, 42, 43, -100, -100],
    ] and dropped == 1


def test_best_fit_drops_less_than_taking_documents_as_they_come():
    sizes = np.exp(np.random.default_rng(0).normal(4, 1, size=2000)).astype(int) + 2
    for length in (257, 1025):
        room, lost = length, 0
        for n in sizes:
            lost += max(0, n - room)
            room = room - n if n < room else length
        assert pack_best_fit([np.zeros(n, int) for n in sizes], length)[1] < lost / 2
