"""Runs the guest beside this file from guest.pyc, which spares its compilation.

If that is of another interpreter, or no such thing, guest.py is compiled.
"""

from _frozen_importlib_external import SourceFileLoader, SourcelessFileLoader

source = __file__.rpartition("/")[0] + "/guest.py"
try:
    code = SourcelessFileLoader("guest", source + "c").get_code("guest")
except Exception:  # another magic number, or whatever marshal says of rubbish
    code = SourceFileLoader("guest", source).get_code("guest")
guest = {"__name__": "guest"}
exec(code, guest)
raise SystemExit(guest["main"]())
