"""A profile's progress, an error in the midst of it."""

from types import SimpleNamespace

from capture.cli.progress import clear_line, progress

show = progress(SimpleNamespace(quiet=False))
windows = [("layer windows", done) for done in range(3)]
for kind, done in (("optimizer updates", 0), *windows):
    show(kind, done, 2)
clear_line()
print("error: none")
