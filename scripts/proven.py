#!/usr/bin/python3
"""Prints the table of what was proven where: a row for each budget item, and
for each place that lacks something; a column for each log of tests; in a cell
the mechanism and the test that saw it hold. The logs have these lines:

    tested on: NAME             the column's head
    budget items: ITEM...       the rows that there have to be
    proven: ROW|MECHANISM|TEST

Usage: proven.py LOG...
Exit code: 1 if a cell is empty, but for "place: ..." on the left: there are
places that only the machine, on the right, has.
"""

import re
import sys

heads, items, cells, others = [], {}, {}, {}
for column, name in enumerate(sys.argv[1:]):
    heads.append("unknown")
    with open(name, errors="replace") as log:
        for line in log:
            m = re.search(r"(tested on|budget items|proven): (.*)", line)
            if not m:
                continue
            if m[1] == "tested on":
                heads[column] = m[2]
            elif m[1] == "budget items":
                items.update(dict.fromkeys(m[2].split()))
            else:
                row, mechanism, test = m[2].split("|")
                others.setdefault(row)
                proofs = cells.setdefault((row, column), (mechanism, {}))
                proofs[1].setdefault(test)

if not items:
    sys.exit("no budget items in " + " ".join(sys.argv[1:]))
missing = False
lines = [["proven", *heads]]
for row in {**items, **others}:
    first, second = [row], [""]
    for column in range(len(heads)):
        mechanism, tests = cells.get((row, column), ("NOT PROVEN", {}))
        if not tests and row.startswith("place: ") and column + 1 < len(heads):
            mechanism = "in the machine only"
        elif not tests:
            missing = True
        first.append(mechanism)
        second.append("".join("  " + t for t in list(tests)[:1]) + (" +%d" % (len(tests) - 1) if len(tests) > 1 else ""))
    lines.append(first)
    if any(second):
        lines.append(second)
widths = [max(map(len, column)) for column in zip(*lines)]
for line in lines:
    print(("  " + "  ".join(text.ljust(w) for text, w in zip(line, widths))).rstrip())
sys.exit(missing)
