"""A fork while another thread derives its first key leaves a child that can derive one, too."""

from __future__ import annotations

import os
import subprocess
import sys

TRY = """
import os, signal, sys, threading, time
from sordino.client.prg import uniform_mod_p
from sordino.shared.prg import derive
import sordino.client.vault
sys.setswitchinterval(1e-6)
go = threading.Event()

def first():
    go.set()
    derive(bytes(32), b"pool/chunk")

thread = threading.Thread(target=first)
thread.start()
go.wait()
until = time.perf_counter() + int(sys.argv[1]) * 20e-6
while time.perf_counter() < until:
    pass
if not (child := os.fork()):
    signal.alarm(5)
    derive(bytes(32), b"pool/chunk")
    os._exit(0)
_, status = os.waitpid(child, 0)
thread.join()
os._exit(7 if status else 0)
"""


def test_a_child_of_a_fork_derives_keys() -> None:
    """One process a try, since it is about its first use; without care a third of the tries hang."""
    tries = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", TRY, str(number % 20)], env=os.environ)
        for number in range(12)
    ]
    assert [process.wait(60) for process in tries] == [0] * len(tries)
