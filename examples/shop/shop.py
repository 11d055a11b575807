#!/usr/bin/python3
"""The shop's tools: shop.py NAME, arguments as JSON on standard input.

Runs on the host. Its arguments come from a program that nobody trusts: the
tools file's schemas have checked their types, and SQL gets them as parameters
only. What goes to standard error is shown to that program.
"""

import json
import pathlib
import sqlite3
import sys


def rows(sql, **parameters):
    # Read-only, and "immutable" takes no locks and writes no journal: the
    # database may lie in a folder that cannot be written.
    path = pathlib.Path(__file__).resolve().with_name("shop.db")
    db = sqlite3.connect(path.as_uri() + "?mode=ro&immutable=1", uri=True)
    db.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in db.execute(sql, parameters)]
    finally:
        db.close()


def customers():
    return rows("SELECT id, name, country FROM customers ORDER BY id")


def orders(customer_id, limit=100):
    if not rows("SELECT 1 FROM customers WHERE id = :id", id=customer_id):
        sys.exit("no customer %d" % customer_id)
    return rows("SELECT id, sku, quantity, unit_cents, currency, day FROM orders"
                " WHERE customer_id = :id ORDER BY id LIMIT :limit",
                id=customer_id, limit=limit)


def stock(sku):
    found = rows("SELECT sku, name, units FROM products WHERE sku = :sku", sku=sku)
    if not found:
        sys.exit("no article %r" % sku)
    return found[0]


def rates():
    return {row["currency"]: row["per_euro"]
            for row in rows("SELECT currency, per_euro FROM rates ORDER BY currency")}


TOOLS = {tool.__name__: tool for tool in (customers, orders, stock, rates)}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TOOLS:
        sys.exit("usage: shop.py " + "|".join(TOOLS))
    value = TOOLS[sys.argv[1]](**json.load(sys.stdin))
    json.dump(value, sys.stdout, ensure_ascii=False, separators=(",", ":"))
