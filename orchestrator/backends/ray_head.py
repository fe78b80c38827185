"""Questions to the head of a Ray cluster that may have gone away.

Ray's client waits for a head that is gone, in the thread that asked, and ends the whole process after 60 s
(`RAY_gcs_rpc_server_reconnect_timeout_s`). So each question is asked in a thread of its own and given up in time; the
driver can then say what has happened, or go on when the head is back.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

ANSWER_DEADLINE_S = 5.0
"""A head that is well answers in milliseconds, under load in a second."""


class HeadAwayError(Exception):
    """The head does not answer now; it may come back."""


class _Asker:
    """Remembers the question that is still unanswered: until it is, no other one is worth asking."""

    unanswered: Future[object] | None = None


def asks_head(question: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Make `question` raise HeadAwayError where it would block. One thread, the driver's, asks."""

    @wraps(question)
    def ask(*arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        if _Asker.unanswered is not None and not _Asker.unanswered.done():
            raise HeadAwayError
        answer: Future[Answer] = Future()
        threading.Thread(target=_answer, args=(answer, lambda: question(*arguments, **options)), daemon=True).start()
        try:
            return answer.result(ANSWER_DEADLINE_S)
        except TimeoutError as error:
            _Asker.unanswered = answer  # type: ignore[assignment]  # only whether it is done is asked
            raise HeadAwayError from error

    return ask


def _answer(answer: Future[Answer], question: Callable[[], Answer]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:  # noqa: BLE001 (raised again in the thread that asked)
        answer.set_exception(error)
