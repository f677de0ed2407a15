"""Sequences that are decoded together where a decode step is measured (`rates.decoding`)."""

FEW, MANY = 8, 128
