"""Messages between ranks and the driver: lines, progress, failures, and their display."""
