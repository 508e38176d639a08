"""Only the tests are collected here: cases are registered once, by the module that asks."""

collect_ignore_glob = ["*cases.py", "bench.py", "access.py", "record.py", "files"]
