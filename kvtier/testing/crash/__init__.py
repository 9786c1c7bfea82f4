"""Crashes, power losses and damage done to a real NVMe store, many thousand times."""
