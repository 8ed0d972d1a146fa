"""Tells services by the library apprise, in a process of its own: an alert is on standard input.

`python -m perdure.service.controller.apprising` reads `{"addresses", "title", "body"}`, and leaves
with 0 once all addresses were told; else one line on standard output says why not. No address is
ever repeated: there may be a secret in it.
"""

import json
import sys


def main() -> int:
    """Tell all addresses; return the exit code."""
    asked = json.load(sys.stdin)
    try:
        from apprise import Apprise, NotifyFormat
    except ModuleNotFoundError:
        print("apprise is not installed: pip install 'perdure[alerts]'")
        return 1
    told = Apprise()
    for number, address in enumerate(asked["addresses"], 1):
        if not told.add(address):
            print(f"alerts.apprise: address {number} is none that apprise knows")
            return 1
    title, body = asked["title"], asked["body"]
    if not told.notify(body=body, title=title, body_format=NotifyFormat.TEXT):
        print("not all addresses could be told")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
