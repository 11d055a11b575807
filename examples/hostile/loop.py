"""Never ends by itself, and does not mind being asked to.

In a jail: the whole jail is killed at --wall, cause "wall_clock", or at
--cpu-time, cause "cpu_time".
Outside of one: burns a processor until it is killed.
"""

import signal

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)
print("loop: going round", flush=True)
while True:
    pass
