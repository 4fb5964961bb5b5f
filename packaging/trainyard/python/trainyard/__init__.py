"""Python modules that come with the program trainyard."""
