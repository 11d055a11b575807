"""Doubles its processes, each in a session of its own, until it is stopped.

In a jail: fork fails at --pids, which the report counts, and all of them are
killed with the jail, cause "wall_clock".
Outside of one: DO NOT RUN IT. It takes the machine down.
"""

import os
import time

print("forkbomb: multiplying", flush=True)
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.01)  # no more processes to be had: wait for a free one
