"""How long tests wait for other processes."""

#: It ends a test that hangs, and judges no speed: a machine may be twenty times slower than an idle
#: one.
TIMEOUT_SECONDS = 1800.0
