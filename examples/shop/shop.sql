-- The shop's data. make_db.py writes it to shop.db.
-- Amounts are whole cents of the order's currency, so that no sum rounds.
PRAGMA page_size = 1024;

CREATE TABLE customers (
  id      INTEGER PRIMARY KEY,
  name    TEXT NOT NULL,
  country TEXT NOT NULL
);
CREATE TABLE products (
  sku   TEXT PRIMARY KEY,
  name  TEXT NOT NULL,
  units INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE orders (
  id          INTEGER PRIMARY KEY,
  customer_id INTEGER NOT NULL REFERENCES customers (id),
  sku         TEXT NOT NULL REFERENCES products (sku),
  quantity    INTEGER NOT NULL,
  unit_cents  INTEGER NOT NULL,
  currency    TEXT NOT NULL,
  day         TEXT NOT NULL
);
-- How many units of a currency one euro buys, as the bank's decimal text.
CREATE TABLE rates (
  currency TEXT PRIMARY KEY,
  per_euro TEXT NOT NULL
) WITHOUT ROWID;

INSERT INTO customers VALUES
  (1, 'Ada Byron',      'GB'),
  (2, 'Grace Murray',   'US'),
  (3, 'Emmy Noether',   'DE'),
  (4, 'Sofia Krukovskaya', 'SE'),
  (5, 'Hedy Kiesler',   'AT'),
  (6, 'Rosa Péter',     'HU');

INSERT INTO products VALUES
  ('KB-61',  'Keyboard, 61 keys',     14),
  ('KB-104', 'Keyboard, 104 keys',     3),
  ('MS-2',   'Mouse, two buttons',    40),
  ('MS-5',   'Mouse, five buttons',    0),
  ('SC-24',  'Screen, 24 inches',      7),
  ('SC-32',  'Screen, 32 inches',      2),
  ('LP-1',   'Lamp with a clamp',     25),
  ('CB-2M',  'Cable, two metres',    310);

INSERT INTO orders (id, customer_id, sku, quantity, unit_cents, currency, day) VALUES
  (1001, 1, 'KB-61',  1,  5900, 'GBP', '2026-03-02'),
  (1002, 1, 'CB-2M',  4,   650, 'GBP', '2026-03-02'),
  (1003, 2, 'SC-32',  1, 42900, 'USD', '2026-03-05'),
  (1004, 2, 'KB-104', 2,  8400, 'USD', '2026-03-05'),
  (1005, 3, 'MS-5',   1,  3450, 'EUR', '2026-03-09'),
  (1006, 4, 'SC-24',  2, 219900, 'SEK', '2026-03-11'),
  (1007, 1, 'MS-2',   1,  1500, 'GBP', '2026-03-15'),
  (1008, 5, 'LP-1',   3,  2790, 'EUR', '2026-03-17'),
  (1009, 3, 'SC-32',  1, 38900, 'EUR', '2026-03-21'),
  (1010, 2, 'CB-2M', 10,   790, 'USD', '2026-03-24'),
  (1011, 4, 'KB-104', 1, 89900, 'SEK', '2026-03-28'),
  (1012, 5, 'MS-2',   2,  1690, 'EUR', '2026-03-30'),
  (1013, 3, 'CB-2M',  6,   710, 'EUR', '2026-04-01'),
  (1014, 1, 'SC-24',  1, 18900, 'GBP', '2026-04-04'),
  (1015, 2, 'MS-5',   1,  3900, 'USD', '2026-04-07'),
  (1016, 5, 'KB-61',  1,  6450, 'EUR', '2026-04-10'),
  (1017, 4, 'LP-1',   1, 29900, 'SEK', '2026-04-13'),
  (1018, 3, 'KB-104', 1,  7990, 'EUR', '2026-04-19');

INSERT INTO rates VALUES
  ('EUR', '1'),
  ('GBP', '0.8641'),
  ('SEK', '11.0725'),
  ('USD', '1.0832');
