"""Turnover by customer in euros, and which ordered articles run out.

A program of the kind that a language model writes when it is given the tools
of tools.yaml. Run it with:

    jail script --tools examples/shop/tools.yaml examples/shop/report.py
"""

import asyncio
from decimal import ROUND_HALF_EVEN, Decimal

LOW = 5  # units


async def main():
    early = host.prepare.rates()  # needed last, so it may start now

    customers = host.customers()
    print(f"{len(customers)} customers")

    per_customer = await asyncio.gather(
        *(host.aio.orders(customer_id=c["id"]) for c in customers))
    orders = [o for some in per_customer for o in some]
    print(f"{len(orders)} orders")

    skus = sorted({o["sku"] for o in orders})
    shelf = await asyncio.gather(*(host.aio.stock(sku=s) for s in skus))
    low = [{"sku": s["sku"], "name": s["name"], "units": s["units"]}
           for s in shelf if s["units"] < LOW]
    print(f"{len(low)} of {len(skus)} ordered articles run out")

    rates = {currency: Decimal(text) for currency, text in (await early).items()}

    def cents(some):
        total = sum((o["quantity"] * o["unit_cents"] / rates[o["currency"]] for o in some),
                    Decimal(0))
        return int(total.quantize(Decimal(1), ROUND_HALF_EVEN))

    turnover = [{"customer": c["name"], "orders": len(some), "euro_cents": cents(some)}
                for c, some in zip(customers, per_customer)]
    turnover.sort(key=lambda t: -t["euro_cents"])

    try:
        host.orders(customer_id=99)
    except host.ToolError as e:
        print(f"as expected, {e.tool} failed: {e.kind}")

    return {
        "turnover": turnover,
        "euro_cents": cents(orders),
        "run_out": low,
    }


result = asyncio.run(main())
