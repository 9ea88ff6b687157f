"""Two ranks on hosts of a laboratory: rank 0 asks, rank 1 answers, over UDP, every 10 ms.

Rank 0 ends when 10 questions in a row got no answer after some had, rank 1 when none comes.
"""

import os
import socket
import time

PORT = 28000
SILENT_S = 3.0
EACH_S = 0.01
ANSWER_S = 0.2
GIVEN_UP = 10


def ask(here: socket.socket) -> None:
    here.settimeout(ANSWER_S)
    answers, silent = 0, 0
    while silent < GIVEN_UP:
        here.sendto(b"?", ("10.77.0.2", PORT))
        try:
            here.recv(10)
            answers, silent = answers + 1, 0
            time.sleep(EACH_S)
        except TimeoutError:
            silent += answers > 0
    print(f"silent after {answers} answers", flush=True)


def answer(here: socket.socket) -> None:
    here.bind(("", PORT))
    while True:
        _, asker = here.recvfrom(10)
        here.settimeout(SILENT_S)
        here.sendto(b"!", asker)


def main() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        if os.environ["RANK"] == "0":
            ask(here)
            return
        try:
            answer(here)
        except TimeoutError:
            return


if __name__ == "__main__":
    main()
