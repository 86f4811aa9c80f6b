"""The native library: errors and timeouts, steps of trainers, signals, processes."""
