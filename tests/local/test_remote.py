"""The control plane, its ranks as threads of one process."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.runtime import remote, tensor_server
from pfeife_accelerate.runtime.remote import ControlPlane
from pfeife_accelerate.runtime.wire import local_address

pytestmark = [pytest.mark.local, pytest.mark.timeout(60)]

TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(2, dtype=torch.float64),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "float16": torch.randn(5).half(),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.arange(6).reshape(2, 3),
    "uint8": torch.arange(7, dtype=torch.uint8),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(3, 4).t(),
    "with gradient": torch.randn(3, requires_grad=True),
    "several pieces": torch.randn(700_000),
}


def start(num_ranks: int) -> list[ControlPlane]:
    store, prefix = dist.HashStore(), uuid.uuid4().hex
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor(num_ranks) as pool:
        starting = [pool.submit(ControlPlane.start, r, num_ranks, store, "127.0.0.1", prefix) for r in range(num_ranks)]
        return [future.result(timeout=20) for future in starting]


@pytest.fixture
def planes() -> Iterator[list[ControlPlane]]:
    planes = start(3)
    yield planes
    for plane in planes:
        plane.close()


def in_thread(function: Callable[[], object]) -> Callable[[], object]:
    """Start a function; calling the result joins it, and returns or raises what it did."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return lambda: future.result(timeout=20)


def eventually(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true()


def test_messages_of_a_sender_arrive_in_order_and_by_topic(planes):
    for number in range(100):
        planes[0].post([1, 2], f"topic {number % 2}", {"number": number, "nested": [None, True, {"x": 1.5}]})
    for rank in (1, 2):
        odd = [planes[rank].receive("topic 1", timeout=10) for _ in range(50)]
        even = [planes[rank].receive("topic 0", timeout=10) for _ in range(50)]
        assert [body["number"] for body in even] == list(range(0, 100, 2))
        assert [body["number"] for body in odd] == list(range(1, 100, 2))
        assert odd[0]["nested"] == [None, True, {"x": 1.5}]
        assert planes[rank].poll("topic 0") is None


def test_a_message_to_oneself_is_there_at_once(planes):
    planes[0].post([0], "own", {"x": 1})
    assert planes[0].poll("own") == {"x": 1}


def test_waiting_for_a_message_ends_by_time_or_by_abandon(planes):
    with pytest.raises(PfeifeError, match=r"PF422 no message on 'nothing' came within 0.05 s"):
        planes[0].receive("nothing", timeout=0.05)

    def give_up() -> None:
        raise KeyError("enough")

    start_s = time.monotonic()
    with pytest.raises(KeyError, match="enough"):
        planes[0].receive("nothing", abandon=give_up)
    assert 0.3 < time.monotonic() - start_s < 5


def test_fetched_tensors_are_equal_whatever_their_dtype_shape_and_layout(planes):
    planes[1].serve("parameters", TENSORS.get)
    fetched = planes[0].fetch_many(1, "parameters", list(TENSORS))
    for (name, tensor), copy in zip(TENSORS.items(), fetched, strict=True):
        assert copy.dtype == tensor.dtype and copy.shape == tensor.shape, name
        assert not copy.requires_grad
        assert torch.equal(copy.resolve_conj().double() if name == "float8" else copy, _plain(tensor, name)), name
    assert torch.equal(planes[2].fetch(1, "parameters", "int64"), TENSORS["int64"])
    assert torch.equal(planes[1].fetch(1, "parameters", "int64"), TENSORS["int64"])


def _plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.double() if name == "float8" else tensor.detach()


def test_what_is_not_there_is_refused_with_its_name(planes):
    planes[1].serve("parameters", TENSORS.get)
    with pytest.raises(PfeifeError, match=r"PF410 rank 1 has no parameters 'layer.weight'"):
        planes[0].fetch_many(1, "parameters", ["scalar", "layer.weight"])
    assert planes[0].fetch(1, "parameters", "scalar") == 3.5


def test_the_answer_of_a_rank_that_has_stopped_waits_for_the_news_why(planes):
    planes[1].serve("parameters", TENSORS.get)
    planes[1]._server.stop()
    threading.Timer(0.2, lambda: planes[2].report_failure("ValueError: boom")).start()
    with pytest.raises(PfeifeError, match=r"PF420 stopped because rank 2 failed: ValueError: boom$"):
        planes[0].fetch(1, "parameters", "scalar", clock=9)


def test_a_kind_that_nobody_serves_is_refused_after_a_while(planes, monkeypatch):
    monkeypatch.setattr(tensor_server, "_SERVE_TIMEOUT_S", 0.05)
    with pytest.raises(PfeifeError, match="PF410 rank 1 serves no moods"):
        planes[0].fetch(1, "moods", "today")


def test_an_error_in_a_provider_reaches_the_rank_that_asked(planes):
    def broken(key: str) -> torch.Tensor:
        raise RuntimeError(f"no luck with {key}")

    planes[1].serve("gradients", broken)
    with pytest.raises(
        PfeifeError, match=r"(?s)PF410 rank 1 could not give gradients 'w'.*RuntimeError: no luck with w"
    ):
        planes[0].fetch(1, "gradients", "w")


def test_a_request_waits_for_its_provider(planes):
    answer = in_thread(lambda: planes[0].fetch(1, "late", "scalar"))
    time.sleep(0.1)
    planes[1].serve("late", TENSORS.get)
    assert answer() == 3.5


def test_a_request_waits_for_the_clock_without_blocking_others(planes):
    value = {"x": torch.tensor(0)}
    planes[1].serve("parameters", value.get)
    later = in_thread(lambda: planes[0].fetch(1, "parameters", "x", clock=2))
    assert planes[0].fetch(1, "parameters", "x") == 0
    planes[1].advance_clock()
    value["x"] = torch.tensor(1)
    assert planes[0].fetch(1, "parameters", "x", clock=1) == 1
    value["x"] = torch.tensor(2)
    planes[1].advance_clock()
    assert planes[1].clock == 2
    assert later() == 2


def test_what_is_of_one_moment_is_given_to_ranks_at_that_moment(planes):
    value = {"0/x": torch.tensor(0)}
    planes[1].serve("state", value.get, of_one_moment=True)

    def change(rank: int) -> None:
        with planes[rank].busy():
            planes[rank].count_change()
            if rank == 1:
                value["0/x"] = value["0/x"] + 1
        planes[rank].advance_clock()

    assert planes[0].fetch(1, "state", "0/x") == 0
    change(1)
    with pytest.raises(PfeifeError, match="PF414 'x' was asked for too late: rank 1 has changed it meanwhile"):
        planes[0].fetch(1, "state", "0/x")
    change(0)
    assert planes[0].fetch(1, "state", "0/x") == planes[1].fetch(1, "state", "0/x") == 1
    change(0)
    later = in_thread(lambda: planes[0].fetch(1, "state", "0/x"))
    change(1)
    assert later() == 2


def test_who_is_some_changes_behind_gets_the_value_before_them_where_it_is_known(planes):
    known = {("0/x", 1): torch.tensor(7)}
    planes[1].serve("state", {"0/x": torch.tensor(9)}.get, of_one_moment=True, past=lambda *asked: known.get(asked))
    with planes[1].busy():
        planes[1].count_change()
    assert planes[0].fetch(1, "state", "0/x") == 7
    with planes[1].busy():
        planes[1].count_change()
    with pytest.raises(PfeifeError, match="PF414 'x' was asked for too late"):
        planes[0].fetch(1, "state", "0/x")


def test_a_request_too_late_says_so_and_the_next_one_works(planes):
    planes[1].serve("parameters", TENSORS.get)
    with pytest.raises(PfeifeError, match=r"PF411 rank 1 did not give parameters as of tick 7 within 0.05 s"):
        planes[0].fetch(1, "parameters", "scalar", clock=7, timeout=0.05)
    assert planes[0].fetch(1, "parameters", "scalar") == 3.5


def test_asking_oneself_for_the_future_is_refused(planes):
    with pytest.raises(PfeifeError, match="PF412 rank 1 asks itself for tick 1 at tick 0"):
        planes[1].fetch(1, "parameters", "scalar", clock=1)


def test_a_request_never_sees_a_half_made_update(planes):
    pair = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    planes[1].serve("parameters", pair.get)
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            with planes[1].busy():
                pair["a"] += 1
                time.sleep(0.001)
                pair["b"] += 1
            time.sleep(0.001)

    training = in_thread(train)
    for _ in range(30):
        a, b = planes[0].fetch_many(1, "parameters", ["a", "b"])
        assert torch.equal(a, b)
    stop.set()
    training()
    assert pair["a"][0] > 0


def test_a_failure_wakes_all_who_wait_and_names_its_rank(planes):
    planes[1].serve("parameters", TENSORS.get)
    heard: list[remote.Failure] = []
    planes[0].on_failure = heard.append
    waiting = [
        in_thread(lambda: planes[0].receive("nothing")),
        in_thread(lambda: planes[0].fetch(1, "parameters", "scalar", clock=9)),
        in_thread(lambda: planes[1].receive("nothing")),
        in_thread(lambda: planes[2].receive("nothing")),
    ]
    time.sleep(0.2)
    start_s = time.monotonic()
    planes[2].report_failure("ValueError: boom\nsecond line")
    for join in waiting:
        with pytest.raises(PfeifeError, match=r"PF420 stopped because rank 2 failed: ValueError: boom$"):
            join()
    assert time.monotonic() - start_s < 2
    assert eventually(lambda: bool(heard))
    assert heard[0].rank == 2 and heard[0].text == "ValueError: boom\nsecond line"
    with pytest.raises(PfeifeError, match="PF420"):
        planes[1].post([0], "topic", {})
    with pytest.raises(PfeifeError, match="PF420"):
        planes[1].poll("topic")


def test_only_the_first_rank_to_fail_may_print(planes):
    assert [planes[rank].claim_failure() for rank in (1, 0, 2)] == [True, False, False]


def test_a_rank_that_vanishes_is_a_failure_and_one_that_says_goodbye_is_not(planes):
    planes[2].close()
    assert eventually(lambda: planes[0]._gone == {2} and planes[1]._gone == {2})
    assert planes[0].failure is None
    planes[0].post([1, 2], "topic", {"x": 1})
    assert planes[1].receive("topic", timeout=10) == {"x": 1}
    with pytest.raises(PfeifeError, match="PF412 rank 2 has ended and can no longer be asked"):
        planes[0].fetch(2, "parameters", "scalar")
    # What the kernel does for a process that is killed.
    for wire in planes[1]._wires():
        wire.shutdown()
    failure = planes[0].wait_for_failure(10)
    assert failure is not None and failure.text == "rank 1 ended without a word (killed?)"


def test_closing_waits_for_the_others_and_answers_them_meanwhile(planes):
    planes[1].serve("parameters", TENSORS.get)
    closing = [in_thread(lambda: planes[1].close(wait_for_others=True)), in_thread(lambda: planes[2].close(True))]
    assert eventually(lambda: planes[0]._ended == {1, 2})
    assert planes[0].fetch(1, "parameters", "scalar") == 3.5
    with pytest.raises(PfeifeError, match="PF412 rank 1 ended at tick 0, and parameters was asked for as of tick 1"):
        planes[0].fetch(1, "parameters", "scalar", clock=1)
    with pytest.raises(PfeifeError, match="PF412 rank 0 waits for a message, and the scripts of all other ranks"):
        planes[0].receive("topic")
    planes[0].close(wait_for_others=True)
    for join in closing:
        join()
    with pytest.raises(PfeifeError, match="PF421 rank 0 has closed its connections"):
        planes[0].receive("topic")


def test_strangers_are_turned_away_and_keep_nobody_out(planes):
    address = planes[1]._door.address
    silent = [socket.create_connection(address) for _ in range(3)]
    rude = socket.create_connection(address)
    rude.sendall(b"\0\0\0\4GET " * 100)
    planes[1].serve("parameters", TENSORS.get)
    assert planes[0].fetch(1, "parameters", "scalar", timeout=10) == 3.5
    assert planes[0].failure is None and planes[1].failure is None
    for connection in (*silent, rude):
        connection.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    monkeypatch.setattr(remote, "_START_TIMEOUT_S", 0.2)
    with pytest.raises(PfeifeError, match=r"PF413 ranks \[1\] did not connect to rank 0 in 0.2 s"):
        ControlPlane.start(0, 2, store, "127.0.0.1", "prefix")
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(PfeifeError, match=r"PF413 rank 1 could not connect to the other ranks"):
        ControlPlane.start(1, 2, store, "127.0.0.1", "another prefix")


def test_loopback_is_listened_on_for_a_local_master_only():
    assert local_address("127.0.0.1") == ("127.0.0.1", 0)
    assert local_address("localhost")[0] == "127.0.0.1"
    probe = local_address(socket.gethostname())
    assert probe[1] == 0 and probe[0]
