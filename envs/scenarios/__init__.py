"""Named situations to train and measure on, one short file each."""
