"""What measures the package, and checks and soaks it: one harness, and scripts on top of it.

The harness: ``engines.py`` (engines of a run, each in a process of its own, ``worker.py``), ``models.py``
(shapes without weights), ``records.py`` (what a result file must say) and ``plot.py``. Everything else is a
script, run as a file from any folder: ``python bench/e2e.py --help``. The package it measures is the one
that Python finds: the installed one, or another checkout on PYTHONPATH.
"""
