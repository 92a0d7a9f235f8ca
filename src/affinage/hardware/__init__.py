"""Hardware: what devices exist, or are only described, and what each kind of chip can do."""
