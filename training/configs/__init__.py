"""Configurations of training runs, one TOML file each."""
