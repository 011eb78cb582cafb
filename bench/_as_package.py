"""Makes ``bench`` the folder of the script that runs, wherever it was started and whatever PYTHONPATH says.

Imported first by every script that runs as a file. The folder itself goes to the end of ``sys.path``, so
that its file names stand before no other module's, and stays there, because processes that
``multiprocessing`` spawns run the script once more.
"""

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def _register() -> None:
    sys.path[:] = [one for one in sys.path if not one or Path(one).resolve() != _FOLDER] + [str(_FOLDER)]
    spec = importlib.util.spec_from_file_location(
        "bench", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["bench"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_register()
