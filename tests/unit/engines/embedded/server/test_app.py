from __future__ import annotations

import socket

from lachesis.engines.embedded.server.app import _listen
from lachesis.engines.options import ServeOptions


def test_the_body_of_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    with _listen(ServeOptions(model="m", port=0)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
