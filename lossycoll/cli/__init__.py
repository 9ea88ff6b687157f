"""The command ``lossycoll``."""
