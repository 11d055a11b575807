#!/usr/bin/python3
"""Writes shop.db from shop.sql, both beside this file."""

import pathlib
import sqlite3

here = pathlib.Path(__file__).resolve().parent
new = here / "shop.db.new"
new.unlink(missing_ok=True)
db = sqlite3.connect(new)
db.executescript((here / "shop.sql").read_text(encoding="utf-8"))
db.execute("VACUUM")
db.close()
new.replace(here / "shop.db")
