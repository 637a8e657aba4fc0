"""Hardware profiles as data files, with units and sources."""
