"""Takes memory until it is stopped.

In a jail: the whole jail is killed at --memory, cause "memory".
Outside of one: ends with MemoryError, or takes what the machine has.
"""

print("hog: taking memory", flush=True)
kept = []
while True:
    # Touched, not only reserved: bytes(n) alone may be pages of zeros that
    # nobody backs yet.
    kept.append(b"x" * (1 << 20))
