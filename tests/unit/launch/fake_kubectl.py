#!/usr/bin/env -S python3 -S -E
"""A kubectl whose cluster is one JSON file, `$FAKE_CLUSTER`: objects, and what it refuses.

It answers the words that perdure's client says, in the forms that kubectl 1.32 prints, and writes
each call into the file's `calls`. It admits anything: what a server refuses is said beforehand.
"""

import json
import os
import sys
import time
from pathlib import Path

FILE = Path(os.environ["FAKE_CLUSTER"])
NOT_FOUND = 'Error from server (NotFound): {} "{}" not found'


def fail(text: str) -> None:
    print(text, file=sys.stderr)
    sys.exit(1)


def serve(cluster: dict) -> None:
    """Answer with a made-up roster, then with the content of each file that is asked for."""
    if any("@@perdure begin@@" in word for word in sys.argv):
        sys.stdin.read()
        print("@@perdure begin@@\n@@perdure-json " + json.dumps(cluster["roster"]))
        print("@@perdure rc=0 boot=x@@", file=sys.stderr)
        return
    for _, begin, end in json.load(sys.stdin):
        sys.stdout.write(cluster["content"][begin:end])


def main() -> None:
    cluster = json.loads(FILE.read_text())
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    stdin = sys.stdin.read() if words[-1] == "-" else ""
    cluster.setdefault("calls", []).append([sys.argv[1:], stdin])
    if words[0] == "create" and "--dry-run=server" not in sys.argv:
        cluster.setdefault("created", []).append(stdin)
    FILE.write_text(json.dumps(cluster))
    time.sleep(cluster.get("sleep_s", 0))
    if text := cluster.get("unreachable"):
        fail(text)
    match words:
        case ["version", *_]:
            print(json.dumps({"serverVersion": {"gitVersion": cluster["version"]}}))
        case ["create", *_] if "refuses" in cluster:
            fail(cluster["refuses"])
        case ["get", "secret", name, *_]:
            if name not in cluster.get("secrets", {}):
                fail(NOT_FOUND.format("secrets", name))
            print(" ".join(cluster["secrets"][name]))
        case ["get", "job", name, *_]:
            if cluster.get("job") is None:
                fail(NOT_FOUND.format("jobs.batch", name))
            print(json.dumps(cluster["job"]))
        case ["get", "jobset" | "trainjob" | "pytorchjob" as kind, name, *_]:
            if not cluster.get(kind):
                fail(NOT_FOUND.format(kind, name))
            print(json.dumps(cluster[kind]))
        case ["get", "pvc", *_]:
            if cluster.get("pvc") is None:
                fail(NOT_FOUND.format("persistentvolumeclaims", words[2]))
            print(json.dumps(cluster["pvc"]))
        case ["get", "pod", *_]:
            print(json.dumps(cluster["pod"]))
        case ["get", kind, *_]:
            print(json.dumps({"items": cluster.get(kind, [])}))
        case ["delete", "pod", *_] if "keeps" in cluster:
            fail(cluster["keeps"])
        case ["exec", *_] if "roster" in cluster:
            serve(cluster)
        case ["auth", "can-i", *_]:
            print(cluster.get("may", "yes"))
        case ["patch", *_] | ["delete", *_] if "may" in cluster:
            pass
        case ["exec", *_] if "says" in cluster:
            print("@@perdure begin@@\n" + cluster["says"])
            print("@@perdure rc=0 boot=x@@", file=sys.stderr)
        case ["exec" | "logs" | "port-forward", *_]:
            print(" ".join(words), flush=True)
            time.sleep(cluster.get("hangs_s", 0))
            sys.exit(cluster.get("code", 0))


main()
