"""Other people's tools, met at the edge; import the module of the one you use."""
