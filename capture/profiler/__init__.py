"""Which stage configs to measure, and measuring them by compiling."""
