"""Records the run that the playground plays before the first one: python tests/serve/record_example.py URL FILE."""

import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

ASKED = {"prompt": "One day, a little fox found a key in the snow.", "temperature": 0.7, "seed": 7, "max_tokens": 160}


def main(url: str, file: Path) -> None:
    """Ask a server once, and keep what the page needs of its answer."""
    body = json.dumps({**ASKED, "return_speculation": True}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        [choice] = json.load(answer)["choices"]
    kept = {name: choice[name] for name in ("text", "finish_reason", "stop_reason")}
    kept["speculation"] = {name: choice["speculation"][name] for name in ("tokens", "rounds")}
    file.write_text(json.dumps({**ASKED, "choice": kept}, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
