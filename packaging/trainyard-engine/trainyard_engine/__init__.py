"""The program `trainyard-engine`, which `trainyard` finds in this folder. There is no Python code."""
