"""Interrupt: the first signal asks, the second acts, and whatever handlers were there before are there
again."""

import os
import signal
import threading

import pytest

from unfreeze.train.interrupt import AGAIN, SIGNALS, Interrupt


@pytest.fixture
def heard():
    """Own handlers for all of them while a test runs: what was installed before; -> the signals they were
    given."""
    signals: list[int] = []
    former = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in SIGNALS}
    yield signals
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_ctrl_c_goes_to_the_former_handler(heard, number):
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested and heard == []
        os.kill(os.getpid(), signal.SIGINT)
        assert heard == [signal.SIGINT]
    os.kill(os.getpid(), number)
    assert heard == [signal.SIGINT, number]


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("again", AGAIN)
def test_what_a_scheduler_sends_only_asks_however_often_it_comes(heard, first, again):
    # without a handler of ours the second would end this process
    signal.signal(again, signal.SIG_DFL)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), again)
        os.kill(os.getpid(), again)
        assert interrupt.requested and heard == []
    assert signal.getsignal(again) is signal.SIG_DFL


def test_a_second_ctrl_c_raises_keyboard_interrupt_as_python_does():
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt.requested
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, former)


def test_handlers_come_back_without_a_signal_and_after_an_error(heard):
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(ZeroDivisionError), Interrupt():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_in_another_thread_nothing_is_installed(heard):
    before, seen = [signal.getsignal(number) for number in SIGNALS], []

    def run():
        with Interrupt() as interrupt:
            seen.append(([signal.getsignal(number) for number in SIGNALS], interrupt.requested))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
