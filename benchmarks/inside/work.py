"""``work``: processor seconds of a fixed piece of Python, to tell an emulated processor from a real one."""

from __future__ import annotations

import hashlib
import time

ROUNDS = 200_000


def main() -> None:
    """Do it, and say how long it took."""
    began = time.process_time()
    found = {}
    for number in range(ROUNDS):
        found[str(number)] = number * number % 97
    hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
    print(time.process_time() - began)


if __name__ == "__main__":
    main()
