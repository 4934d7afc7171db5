"""fluke (https://github.com/makgyver/fluke): ``python run_fluke.py FOLDER RESULT``."""

import importlib.util
import json
import sys

if importlib.util.find_spec("fluke") is None:
    print(json.dumps({"skipped": f"{sys.executable} has no fluke; give an interpreter that has (--python-fluke)"}))
    raise SystemExit(0)
