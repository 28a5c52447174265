"""Row groups of files: formats, fields, selections, and a cache."""
